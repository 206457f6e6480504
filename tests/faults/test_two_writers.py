"""Two processes on one run, each paused at every point while the other goes on.

The real functions run in two threads, and a store that waits lets one of them do so many calls,
then the other so many, then the first to its end, then the second.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from milepost.errors import CheckpointError, FencedError, MissingError
from milepost.runs import (
    Identity,
    KeepLast,
    Level,
    Origin,
    Session,
    State,
    check_not_fenced,
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
from milepost.testing import FaultStore, save_files

FILES = {"part": b"12345", "index.json": b"{}"}
WAIT_S = 30


def live(store: Store, pid: int, acked: list[str]) -> None:
    """One life of a job that goes on from the newest and saves twice."""
    me = Identity("host", pid, "boot", f"{pid}@ns")
    session = open_session(store, ensure_run(store), identity=me)
    latest = scan(store).latest()
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    session = record_origin(store, session, origin)
    for number in (1, 2):
        manifest = save_files(store, session, name=f"p{pid}n{number}", attempt=number, files=FILES)
        acked.append(manifest.name)


class Turns:
    """Two threads; each waits after so many calls until it is its turn again."""

    def __init__(self, below: Store, pauses: tuple[int, int]) -> None:
        self.acked: list[list[str]] = [[], []]
        self.errors: list[BaseException] = []
        self._is_over = [False, False]
        self._go = [threading.Event(), threading.Event()]
        self._back = [threading.Event(), threading.Event()]
        threads = [
            threading.Thread(target=self._run, args=(who, below, pauses[who])) for who in (0, 1)
        ]
        for who in (0, 1, 0, 1):
            if self._is_over[who]:
                continue
            self._back[who].clear()
            if threads[who].ident is None:
                threads[who].start()
            else:
                self._go[who].set()
            assert self._back[who].wait(WAIT_S), "a writer hangs"
        for thread in threads:
            thread.join(WAIT_S)

    def _run(self, who: int, below: Store, pause: int) -> None:
        def before(number: int, _operation: str) -> None:
            if number == pause:
                self._back[who].set()
                assert self._go[who].wait(WAIT_S)

        try:
            live(FaultStore(below, before=before), who + 1, self.acked[who])
        except FencedError:
            return
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self._is_over[who] = True
            self._back[who].set()


def count_calls() -> int:
    store = FaultStore(MemoryStore())
    live(store, 1, [])
    return len(store.operations)


def check(store: Store, acked: list[list[str]]) -> None:
    """Whoever was told "saved" finds it on the lineage."""
    view = scan(store)
    names = [found.name for found in view.lineage()]
    assert {name for mine in acked for name in mine} <= set(names)
    for name in names:
        assert verify(store, name, Level.FULL).is_good
    assert all(found.state is not State.DAMAGED for found in view.found)


def test_two_writers_paused_at_every_third_point():
    """The zombie that wakes up is the case that locks do not solve."""
    calls = count_calls()
    for pauses in itertools.product(range(1, calls + 1, 3), repeat=2):
        below = MemoryStore()
        turns = Turns(below, pauses)
        assert not turns.errors, turns.errors
        check(below, turns.acked)


def test_a_takeover_at_every_point():
    """A whole second life within every pause of the first, on every call."""
    for pause in range(1, count_calls() + 1):
        below = MemoryStore()
        turns = Turns(below, (pause, 10**6))
        assert not turns.errors, turns.errors
        check(below, turns.acked)
        assert len(turns.acked[1]) == 2


def test_without_the_second_look_a_writer_is_told_a_lie(monkeypatch):
    """The test has teeth: with one look less, it finds the lost checkpoint."""
    # The package gives the function the name of its module.
    module = sys.modules["milepost.runs.publish"]
    looks = threading.local()

    def look_once(store: Store, session: Session) -> None:
        looks.count = getattr(looks, "count", 0) + 1
        if looks.count % 2:
            check_not_fenced(store, session)

    monkeypatch.setattr(module, "check_not_fenced", look_once)
    lost = 0
    for pause in range(1, count_calls() + 1):
        below = MemoryStore()
        turns = Turns(below, (pause, 10**6))
        try:
            check(below, turns.acked)
        except AssertionError:
            lost += 1
    assert lost


@pytest.mark.parametrize("make", ["memory", "files"])
def test_readers_writers_and_pruners_at_once(tmp_path, make):
    """A reader sees a whole newest checkpoint, or that it was deleted meanwhile: no mixture."""
    store: Store = MemoryStore() if make == "memory" else LocalStore(tmp_path / "run")
    me = Identity("host", 1, "boot", "1@ns")
    session = record_origin(store, open_session(store, ensure_run(store), identity=me), None)
    save_files(store, session, name="ba0", attempt=1, files=FILES)
    done = threading.Event()

    def until_done(action: Callable[[random.Random], None]) -> int:
        rng, turns = random.Random(1), 0
        while not done.is_set() or not turns:
            action(rng)
            turns += 1
        return turns

    def read(_rng: random.Random) -> None:
        latest = scan(store).latest()
        assert latest is not None
        with suppress(MissingError):
            report = verify(store, latest.name, Level.FULL)
            assert report.is_good, report

    def clean(_rng: random.Random) -> None:
        report = prune(store, decide(scan(store), [KeepLast(2)]), session=session)
        assert not any(not isinstance(e, CheckpointError) for e in report.errors.values())

    def finish(_rng: random.Random) -> None:
        names = [f"ba{number}" for number in range(100)]
        sweep(store, session, own_attempts=names, identity=me)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(until_done, action) for action in (read, clean, clean, finish)]
        try:
            for number in range(1, 40):
                save_files(store, session, name=f"ba{number}", attempt=number + 1, files=FILES)
        finally:
            done.set()
        assert all(job.result(WAIT_S) for job in jobs)
    clean(random.Random())
    assert [found.name for found in scan(store).lineage()] == ["ba38", "ba39"]
    assert set(store.folders()) == {"ba38", "ba39", "sessions"}
