"""A job that stops, or fails, at any one of its store calls loses nothing that was acknowledged."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from milepost.errors import CheckpointError, MissingError, StorageError
from milepost.runs import (
    Identity,
    KeepLast,
    Level,
    Origin,
    Session,
    decide,
    ensure_run,
    open_session,
    prune,
    record_origin,
    scan,
    sweep,
    verify,
)
from milepost.stores import LocalStore, MemoryStore, Store
from milepost.testing import Crash, Fault, FaultStore, save_files

OLD = Identity("host", 100, "boot-1", "1@ns", "machine")
NEW = Identity("host", 100, "boot-2", "2@ns", "machine")
FILES = {"model.bin": b"m" * 5_000, "optimizers.bin": b"o" * 70, "index.json": b"{}"}
RECORDS = ("attempt.json", "manifest.json")


def start(store: Store, identity: Identity) -> Session:
    run = ensure_run(store)
    session = open_session(store, run, identity=identity)
    latest = scan(store).latest()
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    session = record_origin(store, session, origin)
    sweep(store, session, identity=identity)
    return session


def save_and_prune(store: Store, session: Session, name: str, attempt: int) -> str:
    manifest = save_files(store, session, name=name, attempt=attempt, files=FILES)
    return manifest.name


def live(store: Store, acked: list[str]) -> None:
    """Save three checkpoints, keeping one."""
    session = start(store, OLD)
    for number in (1, 2, 3):
        acked.append(save_and_prune(store, session, f"ep{number}", number))
        prune(store, decide(scan(store), [KeepLast(1)]), session=session)


def live_on(store: Store, acked: list[str]) -> None:
    """The same, going on after errors as a training does."""
    sessions: list[Session] = []

    def save(number: int) -> None:
        if not sessions:
            sessions.append(start(store, OLD))
        acked.append(save_and_prune(store, sessions[0], f"ep{number}", number))
        prune(store, decide(scan(store), [KeepLast(1)]), session=sessions[0])

    for number in (1, 2, 3):
        with suppress(CheckpointError):
            save(number)


def committed_in(store: Store) -> dict[str, dict]:
    """Return the manifests by folder, read with nothing but JSON."""
    keys = {entry.key for entry in store.list()}
    return {
        key.split("/")[0]: json.loads(store.get(key))
        for key in keys
        if key.endswith("/manifest.json") and key.split("/")[0] + "/deleted.json" not in keys
    }


def check_reader(store: Store, acked: list[str]) -> None:
    """A fresh reader sees whole checkpoints only, and the last acknowledged one or a newer one."""
    committed = committed_in(store)
    try:
        view = scan(store)
    except MissingError:
        assert not acked
        assert not committed
        return
    order = sorted(committed, key=lambda n: (committed[n]["session"], committed[n]["attempt"]))
    assert [found.name for found in view.lineage()] == order
    for name in order:
        report = verify(store, name, Level.FULL)
        assert report.is_good, report
    if acked:
        assert acked[-1] in order
        assert order.index(view.latest().name) >= order.index(acked[-1])


def check_next_session(store: Store, acked: list[str]) -> None:
    """A new session goes on, saves under the name of the interrupted try, and leaves nothing."""
    session = start(store, NEW)
    committed = committed_in(store)
    wanted = next(f"ep{n}" for n in (1, 2, 3, 4) if f"ep{n}" not in {*acked, *committed})
    assert not {entry.key for entry in store.list(wanted)}
    assert save_and_prune(store, session, wanted, 1) == wanted
    report = prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert not report.errors
    assert scan(store).latest().name == wanted
    left = {e.key for e in store.list() if e.key.split("/")[0] not in ("run.json", "sessions")}
    assert left - {"latest"} == {f"{wanted}/{file}" for file in (*FILES, *RECORDS)}


def operations() -> list[str]:
    store = FaultStore(MemoryStore())
    live(store, [])
    return store.operations


OPERATIONS = operations()


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[[], Store]:
    count = iter(range(10_000))
    return lambda: LocalStore(tmp_path / str(next(count)))


def test_the_program_has_all_the_kinds_of_calls():
    """Otherwise the tests below stop at less than they claim."""
    verbs = {operation.split()[0] for operation in OPERATIONS}
    assert {
        "put_new",
        "create_writer",
        "write_at",
        "close",
        "sync_folder",
        "rename",
        "delete",
        "point",
    } <= verbs
    assert len(OPERATIONS) > 100


@pytest.mark.parametrize("is_after", [False, True])
def test_a_stop_at_any_call_loses_nothing(is_after):
    """Every line of the tables in publish.py and prune.py is a place where the power may go."""
    for at in range(1, len(OPERATIONS) + 1):
        below, acked = MemoryStore(), []
        with pytest.raises(Crash):
            live(FaultStore(below, [Fault(at, is_after)]), acked)
        check_reader(below, acked)
        check_next_session(below, acked)


@pytest.mark.parametrize("is_after", [False, True])
def test_a_stop_with_files_loses_nothing(is_after, make_store):
    """The same on a file system; every ninth call, the campaign of system calls does the rest."""
    for at in range(1 + 2 * is_after, len(OPERATIONS) + 1, 9):
        below, acked = make_store(), []
        with pytest.raises(Crash):
            live(FaultStore(below, [Fault(at, is_after)]), acked)
        check_reader(below, acked)
        check_next_session(below, acked)


@pytest.mark.parametrize("is_after", [False, True])
def test_an_error_at_any_call_loses_nothing(is_after):
    """The job catches the error and goes on; with ``is_after`` only the answer was lost."""
    for at in range(1, len(OPERATIONS) + 1):
        below, acked = MemoryStore(), []
        fault = Fault(at, is_after, StorageError("broken", operation="send"))
        live_on(FaultStore(below, [fault]), acked)
        check_reader(below, acked)
        assert len(acked) >= 2, OPERATIONS[at - 1]
        check_next_session(below, acked)


def test_a_lost_answer_to_the_commit_is_a_success():
    """The manifest is there and ours: training must not be told that the save failed."""
    places = [n for n, text in enumerate(OPERATIONS, 1) if text == "put_new ep2/manifest.json"]
    below, acked = MemoryStore(), []
    fault = Fault(places[0], is_after=True, error=StorageError("reset", operation="send"))
    live(FaultStore(below, [fault]), acked)
    assert acked == ["ep1", "ep2", "ep3"]


def test_a_failed_sync_of_the_commit_is_no_success():
    """Seeing the manifest does not mean that it survives a power cut."""
    places = [n for n, text in enumerate(OPERATIONS, 1) if text == "put_new ep2/manifest.json"]
    below, acked = MemoryStore(), []
    fault = Fault(places[0], is_after=True, error=StorageError("bad", operation="fsync"))
    with pytest.raises(StorageError, match="bad"):
        live(FaultStore(below, [fault]), acked)
    assert acked == ["ep1"]
    check_reader(below, acked)


def test_losing_the_order_of_the_commit_is_noticed():
    """The checks have teeth: a manifest that comes before its files breaks them."""

    def live_wrongly(store: Store, acked: list[str]) -> None:
        session = start(store, OLD)
        manifest = save_files(MemoryTwin(store), session, name="ep1", attempt=1, files=FILES)
        acked.append(manifest.name)

    class MemoryTwin:
        """Shows the files that were not written yet."""

        def __init__(self, store: Store) -> None:
            self.store = store
            self.url, self.traits = store.url, store.traits

        def __getattr__(self, name: str):
            return getattr(self.store, name)

        def put_new(self, key: str, data: bytes) -> None:
            self.store.put_new(key, data)
            if key.endswith("attempt.json"):
                self.held = self.store
                self.store = MemoryStore()
                for entry in self.held.list():
                    self.store.put_new(entry.key, self.held.get(entry.key))
            if key.endswith("manifest.json"):
                self.held.put_new(key, data)

    below, acked = MemoryStore(), []
    live_wrongly(below, acked)
    with pytest.raises(AssertionError):
        check_reader(below, acked)
