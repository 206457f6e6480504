"""Any history of a run: saves, crashes, errors, rollbacks, pins, retention, sweeps.

The oracle keeps a list of names: a save that was acknowledged appends one, going on from an older
checkpoint cuts the list behind it, retention takes names out by its own count.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milepost.errors import CheckpointError, ExistsError, StorageError
from milepost.runs import (
    Identity,
    KeepLast,
    Level,
    Origin,
    Session,
    State,
    decide,
    ensure_run,
    newest_good,
    open_session,
    pin,
    prune,
    record_origin,
    scan,
    sweep,
    unpin,
    verify,
)
from milepost.runs.manifests import ManifestCache
from milepost.stores import MemoryStore, Store
from milepost.testing import Crash, Fault, FaultStore, save_files

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
CALLS = st.integers(1, 30)


class RunMachine(RuleBasedStateMachine):
    """One job at a time, many lives."""

    @initialize(is_local=st.booleans())
    def begin(self, is_local):
        self.store = MemoryStore()
        # A look asks for folders where that is cheap, and lists the whole run elsewhere.
        self.store.traits = replace(self.store.traits, is_local=is_local)
        self.remembered = ManifestCache()
        self.line: list[str] = []
        self.pins: set[str] = set()
        self.pid = 0
        self.attempt = 0
        self.live_on(None)

    def live_on(self, name: str | None) -> None:
        """Begin a new life that goes on from a checkpoint of the lineage."""
        self.pid += 1
        self.me = Identity("host", self.pid, f"boot-{self.pid}", f"{self.pid}@ns", "m")
        session = open_session(self.store, ensure_run(self.store), identity=self.me)
        found = scan(self.store).get(name) if name else None
        origin = Origin(found.name, found.session, found.attempt) if found else None
        self.session = record_origin(self.store, session, origin)
        self.line = self.line[: self.line.index(name) + 1] if name else []

    def save_into(self, store: Store, name: str) -> str:
        self.attempt += 1
        session: Session = self.session
        files = {"part": name.encode() * 20, "index.json": b"{}"}
        return save_files(store, session, name=name, attempt=self.attempt, files=files).name

    def is_there(self, folder: str) -> bool:
        keys = {entry.key for entry in self.store.list(folder)}
        return f"{folder}/manifest.json" in keys

    @rule(name=NAMES)
    def save(self, name):
        # All the folders of this name may hold something already; there is no other reason.
        with suppress(ExistsError):
            self.line.append(self.save_into(self.store, name))

    @rule(name=NAMES, at=CALLS, is_after=st.booleans())
    def crash_while_saving(self, name, at, is_after):
        before = self.commits()
        try:
            folder = self.save_into(FaultStore(self.store, [Fault(at, is_after)]), name)
        except (Crash, CheckpointError):
            self.take_in_doubt(before)
            latest = scan(self.store).latest()
            self.live_on(latest.name if latest else None)
        else:
            self.line.append(folder)

    @rule(name=NAMES, at=CALLS, is_after=st.booleans(), is_sync=st.booleans())
    def fail_while_saving(self, name, at, is_after, is_sync):
        before = self.commits()
        error = StorageError("broken", operation="fsync" if is_sync else "send")
        try:
            folder = self.save_into(FaultStore(self.store, [Fault(at, is_after, error)]), name)
        except CheckpointError:
            self.take_in_doubt(before)
        else:
            self.line.append(folder)

    def commits(self) -> set[str]:
        keys = {entry.key for entry in self.store.list()}
        return {key.split("/")[0] for key in keys if key.endswith("/manifest.json")}

    def take_in_doubt(self, before: set[str]) -> None:
        """A save that was not acknowledged is there wholly, or not at all."""
        new = self.commits() - before
        assert len(new) <= 1
        self.line += new

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def go_on_from(self, data):
        self.live_on(data.draw(st.sampled_from(self.line)))

    @rule()
    def go_on_from_the_newest(self):
        latest = scan(self.store).latest()
        self.live_on(latest.name if latest else None)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def pin(self, data):
        name = data.draw(st.sampled_from(self.line))
        pin(self.store, name)
        self.pins.add(name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.pins)))
        unpin(self.store, name)
        self.pins.discard(name)

    @rule(count=st.integers(1, 3))
    def prune(self, count):
        self.prune_in(self.store, count)
        kept = set(self.line[-count:]) | self.pins
        self.line = [name for name in self.line if name in kept]

    def prune_in(self, store: Store, count: int) -> None:
        prune(store, decide(scan(store), [KeepLast(count)]), session=self.session)

    @rule(count=st.integers(1, 3), at=CALLS, is_after=st.booleans())
    def crash_while_pruning(self, count, at, is_after):
        kept = set(self.line[-count:]) | self.pins.intersection(self.line)
        try:
            self.prune_in(FaultStore(self.store, [Fault(at, is_after)]), count)
        except Crash:
            there = self.commits()
            assert kept <= there
            self.line = [name for name in self.line if name in there]
            latest = scan(self.store).latest()
            self.live_on(latest.name if latest else None)
        else:
            self.line = [name for name in self.line if name in kept]

    @rule()
    def sweep(self):
        sweep(self.store, self.session, identity=self.me)
        bad = (State.INCOMPLETE, State.DELETING)
        assert not [found for found in scan(self.store).found if found.state in bad]

    @invariant()
    def the_lineage_is_what_was_acknowledged(self):
        view = scan(self.store)
        assert scan(self.store, self.remembered) == view
        assert [found.name for found in view.lineage()] == self.line
        latest = view.latest()
        assert (latest.name if latest else None) == (self.line[-1] if self.line else None)
        found, reports = newest_good(self.store, view)
        assert found == latest
        assert reports == []

    @invariant()
    def what_is_committed_is_whole(self):
        for found in scan(self.store).found:
            assert found.state is not State.DAMAGED
            if found.state in (State.COMMITTED, State.ORPHANED):
                assert verify(self.store, found.name, Level.FULL).is_good
                assert found.is_pinned == (found.name in self.pins)


TestRun = RunMachine.TestCase
TestRun.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
