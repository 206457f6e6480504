"""What is removed from the folders of a run, and what is not ours to remove."""

from __future__ import annotations

from contextlib import suppress

import pytest

from milepost.errors import FencedError
from milepost.format.canonical import dump_record
from milepost.runs import (
    Identity,
    KeepLast,
    Level,
    State,
    abandon,
    claim,
    decide,
    delete_checkpoint,
    pin,
    prune,
    scan,
    sweep,
    verify,
)
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Crash, Fault, FaultStore, save_files

DAY_S = 24 * 3600.0
UNKNOWN = Identity("elsewhere", 3, "boot-3", "3@ns", "another machine")


def machine(pid: int) -> Identity:
    """Return a process of the machine that the sessions of ``begin`` ran on."""
    return Identity("host", pid, f"boot-{pid}", f"{pid}@ns", "machine")


def keys(store, folder: str) -> set[str]:
    return {entry.key[len(folder) + 1 :] for entry in store.list(folder)}


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for entry in store.list():
        copy.put_new(entry.key, store.get(entry.key))
    return copy


@pytest.mark.parametrize("make", ["memory", "files"])
def test_what_milepost_did_not_make_outlives_the_checkpoint(tmp_path, begin, save, make):
    """People keep the results of their evaluations beside the weights."""
    store = MemoryStore() if make == "memory" else LocalStore(tmp_path)
    session = begin(store)
    files = {"model.safetensors": b"1", "sub/dir/b": b"2", "index.json": b"{}"}
    save(store, session, "ep1", 1, files=files)
    for theirs in ("my_eval.json", "sub/mine", "model.safetensors.bak", "sub/index.json"):
        store.put_new(f"ep1/{theirs}", b"mine")
    for ours in ("metadata.json", "index-r00003.json"):
        store.put_new(f"ep1/{ours}", b"ours")
    save(store, session, "ep2", 2)
    report = prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert report.deleted == ("ep1",)
    assert report.errors == {}
    left = {"my_eval.json", "sub/mine", "model.safetensors.bak", "sub/index.json"}
    assert keys(store, "ep1") == left
    assert all(store.get(f"ep1/{theirs}") == b"mine" for theirs in left)
    assert [found.name for found in scan(store).found] == ["ep2"]
    delete_checkpoint(store, "ep1")
    assert sweep(store, session) == []
    assert save(store, session, "ep1", 3) == "ep1-s1"
    assert keys(store, "ep1") == left


def test_a_deletion_by_an_unreadable_record_takes_parts_and_records_only(store, begin):
    """It does not say any more what it was, so what it may have been has to do."""
    ours = {"deleted.json", "attempt.json", "index.json", "model.safetensors"}
    ours |= {"model.safetensors.index.json", "model-r00001.safetensors", "index-r00001.json"}
    for file in (*ours, "notes.txt", "sub/model.safetensors"):
        store.put_new(f"ep1/{file}", b"torn")
    assert sweep(store, begin(store)) == ["ep1"]
    assert keys(store, "ep1") == {"notes.txt", "sub/model.safetensors"}


def test_a_damaged_checkpoint_can_be_deleted_by_its_name(store, begin, save):
    """Nobody else will."""
    session = begin(store)
    save(store, session, "ep1", 1, files={"model.safetensors": b"1"})
    store.put("ep1/manifest.json", b"torn")
    delete_checkpoint(store, "ep1")
    assert keys(store, "ep1") == set()


def test_a_deletion_that_a_newer_version_began_is_finished(store, begin):
    """The list of files is where it was, whatever else there is."""
    fields = {"format": 99, "write_id": "x", "files": [{"path": "a"}, {"path": 1}, "b"]}
    store.put_new("ep1/deleted.json", dump_record(fields))
    for file in ("a", "b"):
        store.put_new(f"ep1/{file}", b"1")
    assert sweep(store, begin(store)) == ["ep1"]
    assert keys(store, "ep1") == {"b"}


@pytest.mark.parametrize("is_after", [False, True])
def test_a_stop_while_giving_up_is_seen_and_swept(store, begin, is_after):
    """Every line of the table in publish.py is a place where the power may go."""
    session = begin(store)
    held = claim(store, session, "ep1", 1)
    for file in ("a", "b"):
        store.put_new(f"ep1/{file}", b"1")
    counting = FaultStore(copy_of(store))
    assert abandon(counting, held) == []
    for at in range(1, len(counting.operations) + 1):
        place = copy_of(store)
        with pytest.raises(Crash):
            abandon(FaultStore(place, [Fault(at, is_after)]), held)
        left = keys(place, "ep1")
        assert not left or left & {"attempt.json", "deleted.json"}
        assert {f.state for f in scan(place).found} <= {State.INCOMPLETE, State.DELETING}
        sweep(place, session)
        assert keys(place, "ep1") == set()


class Zombie:
    """Carries out an action that is stopped before one of its calls while others go on.

    Every call but a deletion itself: a stop between the last look and the deletion is the one that
    nothing can be done about.
    """

    def __init__(self, store: MemoryStore, action, meanwhile) -> None:
        counting = FaultStore(copy_of(store))
        action(counting)
        self.num_stops = 0
        for at, operation in enumerate(counting.operations, 1):
            if operation.startswith("delete"):
                continue
            self.num_stops += 1
            place = copy_of(store)

            def stop(number: int, _operation: str, at=at, place=place) -> None:
                if number == at:
                    meanwhile(place)

            action(FaultStore(place, before=stop))
            self.check(place)

    def check(self, place: MemoryStore) -> None:
        for found in scan(place).lineage():
            report = verify(place, found.name, Level.FULL)
            assert report.is_good, report
        assert scan(place).get("ep1").state is State.COMMITTED
        assert place.get("ep1/part") == b"of the newer"


def test_a_late_clean_up_leaves_the_newer_attempt_alone(store, begin):
    """The folder was swept meanwhile, claimed anew, and perhaps acknowledged."""
    held = claim(store, begin(store, pid=1), "ep1", 1)
    store.put_new("ep1/part", b"of the older")

    def take_over(place) -> None:
        session = begin(place, pid=2)
        sweep(place, session, identity=machine(2))
        files = {"part": b"of the newer"}
        assert save_files(place, session, name="ep1", attempt=1, files=files).name == "ep1"

    assert Zombie(store, lambda place: abandon(place, held), take_over).num_stops > 5


def test_a_late_sweep_leaves_the_newer_attempt_alone(store, begin):
    """It found an attempt of a dead session, and by now there is another one."""
    claim(store, begin(store, pid=1), "ep1", 1)
    store.put_new("ep1/part", b"of the older")
    old = begin(store, pid=2)

    def late(place) -> None:
        with suppress(FencedError):
            sweep(place, old, identity=machine(2))

    def take_over(place) -> None:
        session = begin(place, pid=3)
        sweep(place, session, identity=machine(3))
        files = {"part": b"of the newer"}
        assert save_files(place, session, name="ep1", attempt=1, files=files).name == "ep1"

    assert Zombie(store, late, take_over).num_stops > 10


@pytest.mark.parametrize("has_begun", [False, True])
def test_late_retention_leaves_the_newer_checkpoint_alone(store, begin, save, has_begun):
    """The run went back meanwhile, deleted what was to be deleted, and came to the same name."""
    old = begin(store, pid=1)
    for number in range(3):
        save(store, old, f"ep{number}", number + 1)
    if has_begun:
        store.rename("ep1/manifest.json", "ep1/deleted.json")
    decisions = decide(scan(store), [KeepLast(1)], protect=["ep0"])
    assert [d.name for d in decisions if not d.keep or d.has_begun] == ["ep1"]

    def late(place) -> None:
        with suppress(FencedError):
            assert not prune(place, decisions, session=old).errors

    def take_over(place) -> None:
        session = begin(place, pid=2, origin="ep0")
        delete_checkpoint(place, "ep1")
        files = {"part": b"of the newer"}
        assert save_files(place, session, name="ep1", attempt=1, files=files).name == "ep1"

    assert Zombie(store, late, take_over).num_stops > 10


@pytest.mark.parametrize("is_readable", [True, False])
def test_an_attempt_of_an_unknown_process_goes_after_a_day(begin, is_readable):
    """By the clock of the store: those of the writers may be wrong, and the newest file counts."""
    now_s = 1e6
    store = MemoryStore(clock=lambda: now_s)
    held = claim(store, begin(store, pid=1), "ep1", 1, clock=lambda: 9e9)
    part = "model.safetensors"
    if not is_readable:
        store.put("ep1/attempt.json", b"torn")
    now_s += DAY_S
    store.put_new(f"ep1/{part}", b"1")
    now_s += DAY_S - 1
    assert sweep(store, begin(store, pid=2), identity=UNKNOWN) == []
    assert keys(store, held.folder) == {"attempt.json", part}
    now_s += 1
    # The session that sweeps tells the time with its own record.
    session = begin(store, pid=3)
    assert sweep(store, session, own_attempts=["ep1"], identity=UNKNOWN) == []
    assert sweep(store, session, identity=UNKNOWN) == ["ep1"]
    assert keys(store, "ep1") == set()


def test_retention_finishes_the_deletions_that_it_meets(store, begin, save):
    """Also when there is nothing else to delete, and when someone pinned what is no checkpoint."""
    session = begin(store)
    for number in range(1, 5):
        save(store, session, f"ep{number}", number)
    pin(store, "ep1")
    for name in ("ep1", "ep2"):
        store.rename(f"{name}/manifest.json", f"{name}/deleted.json")
    store.delete("ep1/part")
    decisions = decide(scan(store), [KeepLast(2)])
    assert [(d.name, d.keep, d.has_begun) for d in decisions[:2]] == [
        ("ep1", True, True),
        ("ep2", True, True),
    ]
    report = prune(store, decisions, session=session)
    assert report.deleted == ("ep1", "ep2")
    assert report.errors == {}
    assert store.folders() == ["ep3", "ep4", "pins", "sessions"]
    counting = FaultStore(store)
    assert prune(counting, decide(scan(store), [KeepLast(2)]), session=session).deleted == ()
    assert counting.operations == []
