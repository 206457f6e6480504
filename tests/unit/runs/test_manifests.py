"""What is remembered of the commits of a run, and when it is not trusted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from milepost.errors import DamagedError
from milepost.runs import (
    KeepLast,
    Origin,
    State,
    decide,
    delete_checkpoint,
    open_session,
    prune,
    read_run,
    record_origin,
    scan,
)
from milepost.runs.manifests import ManifestCache
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import FaultStore


class Clock:
    """Stands still until it is told."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["listed", "by folder"])
def store(request, clock) -> MemoryStore:
    store = MemoryStore("run", clock=clock)
    store.traits = replace(store.traits, is_local=request.param == "by folder")
    return store


def losses(view) -> dict[str, float]:
    return {found.name: found.manifest.metrics["loss"] for found in view.lineage()}


def reads(store: FaultStore) -> list[str]:
    return [operation[4:] for operation in store.operations if operation.startswith("get ep")]


def replace_commit(store, session, save, name: str, *, attempt: int, loss: float) -> None:
    delete_checkpoint(store, name)
    assert save(store, session, name, attempt, metrics={"loss": loss}) == name


def copy_of(store: MemoryStore, clock: Clock) -> MemoryStore:
    copy = MemoryStore(clock=clock)
    copy.traits = store.traits
    for entry in store.list():
        copy.put_new(entry.key, store.get(entry.key))
    return copy


def test_a_commit_is_read_once(store, begin, save):
    """However often the run is looked at, and only the new one is read after a save."""
    session, cache = begin(store), ManifestCache()
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, session, name, attempt)
    counting = FaultStore(store)
    first = scan(counting, cache)
    assert reads(counting) == ["ep1/manifest.json", "ep2/manifest.json"]
    assert scan(counting, cache) == first == scan(store)
    save(store, session, "ep3", 3)
    assert scan(counting, cache) == scan(store)
    assert reads(counting) == ["ep1/manifest.json", "ep2/manifest.json", "ep3/manifest.json"]


def test_a_look_without_a_memory_reads_everything(store, begin, save):
    """Nothing is remembered behind the back of the caller."""
    save(store, begin(store), "ep1", 1)
    counting = FaultStore(store)
    scan(counting)
    scan(counting)
    assert reads(counting) == ["ep1/manifest.json"] * 2


def test_a_session_is_read_once_it_has_settled(store, begin, save):
    """A training that was started a hundred times reads one record more, not two hundred."""
    cache = ManifestCache()
    for number in range(1, 6):
        session = begin(store, pid=number)
        save(store, session, f"ep{number}", 1)
    view = scan(store, cache)
    later = open_session(store, read_run(store))
    counting = FaultStore(store)
    assert scan(counting, cache).sessions[:5] == view.sessions
    own = [one for one in counting.operations if one.startswith("get sessions/")]
    assert own == ["get sessions/00000006.json"]
    record_origin(store, later, Origin("ep5", 5, 1))
    assert scan(store, cache) == scan(store)
    store.put("sessions/00000003.from.json", b"torn")
    with pytest.raises(DamagedError, match="torn or altered"):
        scan(store, cache)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_the_calls_of_a_look_do_not_grow_with_the_run(tmp_path, clock, begin, save, is_on_disk):
    """Of a save every minute for a month, each would cost more than the one before."""
    place = LocalStore(tmp_path / "run") if is_on_disk else MemoryStore("run", clock=clock)
    session, cache, counts = begin(place), ManifestCache(), []
    scan(place, cache)
    for number in range(1, 31):
        clock.now_s += 60
        save(place, session, f"ep{number}", number)
        counting = FaultStore(place)
        scan(counting, cache)
        counts.append(Counter(operation.split()[0] for operation in counting.operations))
    if is_on_disk:
        # Its folders are looked at without being opened for reading.
        assert [count.pop("head") for count in counts] == [2 * n for n in range(1, 31)]
    assert counts == [counts[0]] * 30
    assert counts[0]["get"] == 2  # run.json and the new commit


def test_a_commit_that_another_writer_replaced_is_noticed(store, clock, begin, save):
    """The name and the size are the same, the checkpoint is not."""
    session, cache = begin(store), ManifestCache()
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, session, name, attempt, metrics={"loss": 0.5})
    assert losses(scan(store, cache)) == {"ep1": 0.5, "ep2": 0.5}
    size_bytes = store.head("ep1/manifest.json").size_bytes
    clock.now_s += 1
    replace_commit(store, begin(store, pid=2), save, "ep1", attempt=1, loss=0.7)
    assert store.head("ep1/manifest.json").size_bytes == size_bytes
    view = scan(store, cache)
    assert losses(view) == {"ep2": 0.5, "ep1": 0.7}
    assert view == scan(store)


def test_a_commit_of_another_size_in_the_same_moment_is_noticed(store, begin, save):
    """A clock that stands still is not the only sign."""
    session, cache = begin(store), ManifestCache()
    save(store, session, "ep1", 1, metrics={"loss": 0.5})
    scan(store, cache)
    replace_commit(store, session, save, "ep1", attempt=2, loss=0.625)
    assert losses(scan(store, cache)) == {"ep1": 0.625}


def test_a_commit_of_our_own_in_the_same_moment_is_forgotten_by_hand(store, begin, save):
    """Nothing that the store shows tells the two apart: the writer must say so."""
    session, cache = begin(store), ManifestCache()
    save(store, session, "ep1", 1, metrics={"loss": 0.5})
    scan(store, cache)
    replace_commit(store, session, save, "ep1", attempt=2, loss=0.7)
    cache.forget("ep1")
    cache.forget("never heard of")
    assert losses(scan(store, cache)) == {"ep1": 0.7}


def test_a_stale_memory_deletes_nothing(store, begin, save):
    """Not even if all the signs deceive: a deletion goes by what is in the folder."""
    session, cache = begin(store), ManifestCache()
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, session, name, attempt, metrics={"loss": 0.5})
    scan(store, cache)
    replace_commit(store, session, save, "ep1", attempt=3, loss=0.7)
    view = scan(store, cache)
    assert losses(view) == {"ep1": 0.5, "ep2": 0.5}
    report = prune(store, decide(view, [KeepLast(1)]), session=session, view=view)
    assert report.deleted == ()
    assert losses(scan(store)) == {"ep2": 0.5, "ep1": 0.7}


def test_what_is_remembered_is_never_older_than_its_entry(store, clock, begin, save):
    """A commit that is replaced during the look must not be taken for the one after it."""
    first = begin(store)
    save(store, first, "ep1", 1, metrics={"loss": 0.5})
    counting = FaultStore(store)
    scan(counting)
    for at in range(1, len(counting.operations) + 1):
        place, cache = copy_of(store, clock), ManifestCache()

        def swap(number: int, _operation: str, at=at, place=place) -> None:
            if number == at:
                clock.now_s += 1
                replace_commit(place, first, save, "ep1", attempt=2, loss=0.7)

        assert losses(scan(FaultStore(place, before=swap), cache)) in (
            {"ep1": 0.5},
            {"ep1": 0.7},
        )
        assert losses(scan(place, cache)) == {"ep1": 0.7}
        clock.now_s += 1
        replace_commit(place, first, save, "ep1", attempt=3, loss=0.9)
        assert losses(scan(place, cache)) == {"ep1": 0.9}


DELETIONS = {
    "marked": lambda store: store.rename("ep1/manifest.json", "ep1/deleted.json"),
    "half": lambda store: store.link("ep1/manifest.json", "ep1/deleted.json"),
    "deleted": lambda store: delete_checkpoint(store, "ep1"),
}


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("how", DELETIONS)
def test_a_deletion_is_seen_whenever_it_begins(store, clock, begin, save, how, has_memory):
    """At each step of a look that remembers: the checkpoint is there, being deleted, or gone."""
    session = begin(store)
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, session, name, attempt)
    before = {"ep1": State.COMMITTED, "ep2": State.COMMITTED}
    after = {"ep2": State.COMMITTED} | ({} if how == "deleted" else {"ep1": State.DELETING})
    num_steps = 0
    for at in range(1, 20):
        place, cache = copy_of(store, clock), ManifestCache()
        if has_memory:
            scan(place, cache)

        def act(number: int, _operation: str, at=at, place=place) -> None:
            if number == at:
                DELETIONS[how](place)

        acting = FaultStore(place, before=act)
        states = {found.name: found.state for found in scan(acting, cache).found}
        if at > len(acting.operations):
            break
        num_steps = at
        assert states in (before, after)
        assert {found.name: found.state for found in scan(place, cache).found} == after
    assert 5 <= num_steps < 19


def test_damage_is_seen_and_never_remembered(store, clock, begin, save):
    """A file that was torn and mended counts again, and one that is torn no longer does."""
    session, cache = begin(store), ManifestCache()
    save(store, session, "ep1", 1)
    data = store.get("ep1/manifest.json")
    assert scan(store, cache).latest().name == "ep1"
    clock.now_s += 1
    store.put("ep1/manifest.json", data[:-1] + b" ")
    for _ in range(2):
        torn = scan(store, cache).get("ep1")
        assert torn.state is State.DAMAGED
        assert isinstance(torn.error, DamagedError)
    store.put("ep1/manifest.json", data)
    assert scan(store, cache).latest().name == "ep1"


@pytest.mark.parametrize("num_fit", [0, 1, 2, 3])
def test_what_does_not_fit_is_read_every_time(store, clock, begin, save, num_fit):
    """A run of thousands of large checkpoints must not fill the memory of the training."""
    session, names = begin(store), ["ep1", "ep2", "ep3"]
    for attempt, name in enumerate(names, 1):
        save(store, session, name, attempt, metrics={"loss": 0.5})
    size_bytes = store.head("ep1/manifest.json").size_bytes
    cache = ManifestCache(max_bytes=num_fit * size_bytes)
    assert scan(store, cache) == scan(store)
    assert num_read(store, cache) == 3 - num_fit
    clock.now_s += 1
    replace_commit(store, session, save, "ep1", attempt=4, loss=0.7)
    scan(store, cache)
    assert num_read(store, cache) == 3 - num_fit
    for num_left, name in ((2, "ep1"), (1, "ep2")):
        delete_checkpoint(store, name)
        assert scan(store, cache) == scan(store)
        # The room of what is gone is free again; it is taken by the next look.
        scan(store, cache)
        assert num_read(store, cache) == max(0, num_left - num_fit)


def num_read(store: MemoryStore, cache: ManifestCache) -> int:
    counting = FaultStore(store)
    scan(counting, cache)
    return len(reads(counting))


@pytest.mark.parametrize("store", ["listed"], indirect=True)
def test_what_was_noted_counts_only_if_it_must_be_the_same(store, clock, begin, save):
    """An object with a time from before the look was that one in it; any other is read again."""
    session = begin(store)
    for number, name in enumerate(("ep1", "ep2", "ep3", "ep4"), start=1):
        save(store, session, name, number, metrics={"loss": float(number)})
        clock.now_s += 10
    looked_s = clock.now_s
    cache = ManifestCache()
    assert losses(scan(store, notes=cache)) == {"ep1": 1.0, "ep2": 2.0, "ep3": 3.0, "ep4": 4.0}
    clock.now_s += 1
    replace_commit(store, session, save, "ep2", attempt=5, loss=5.0)
    delete_checkpoint(store, "ep3")
    cache.trust_noted(looked_s)
    counted = FaultStore(store)
    expected = {"ep1": 1.0, "ep2": 5.0, "ep4": 4.0}
    assert losses(scan(counted, cache)) == expected
    assert reads(counted) == ["ep2/manifest.json"]
    # What was noted is given out once; from then on it is remembered like everything else.
    clock.now_s = looked_s - 15
    replace_commit(store, session, save, "ep1", attempt=6, loss=6.0)
    assert losses(scan(counted, cache)) == {**expected, "ep1": 6.0}


@pytest.mark.parametrize("store", ["listed"], indirect=True)
@pytest.mark.parametrize("from_s", [None, 1000.0, 0.0])
def test_a_time_that_says_nothing_is_not_trusted(store, clock, begin, save, from_s):
    """Of the very moment of the look, of a place that knows no times, or without a time to ask."""
    save(store, begin(store), "ep1", 1)
    cache = ManifestCache()
    scan(store, notes=cache)
    if from_s is not None:
        cache.trust_noted(from_s)
    counted = FaultStore(store)
    scan(counted, cache)
    assert reads(counted) == ["ep1/manifest.json"]
