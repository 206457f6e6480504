"""Laws of retention, for runs of any shape."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import CheckpointError, StorageError
from milepost.runs import (
    Identity,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepWithin,
    Level,
    Origin,
    Record,
    Session,
    decide,
    ensure_run,
    keep_any,
    open_session,
    pin,
    prune,
    record_origin,
    scan,
    verify,
)
from milepost.stores import LocalStore, MemoryStore, Store
from milepost.testing import save_files

NAN = float("nan")
ME = Identity("host", 1, "boot", "1@ns")

scores = st.one_of(st.none(), st.just(NAN), st.floats(-5, 5).map(lambda x: round(x, 1)))
policies = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 4)),
        st.builds(KeepBest, st.integers(1, 3), st.just("loss"), st.sampled_from(["min", "max"])),
        st.builds(KeepEvery, st.sampled_from(["2ba", "3ba", "10ba"])),
        st.builds(KeepWithin, st.sampled_from(["10s", "25s"])),
    ),
    max_size=3,
)


def begin(store: Store) -> Session:
    session = open_session(store, ensure_run(store), identity=ME)
    latest = scan(store).latest()
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    return record_origin(store, session, origin)


def save(store: Store, session: Session, number: int, score: float | None = None) -> str:
    return save_files(
        store,
        session,
        name=f"ba{number}",
        attempt=number,
        files={"part": b"%d" % number},
        metrics={} if score is None else {"loss": score},
        time={"batch": number},
        created_s=10.0 * number,
    ).name


def names(store: Store) -> list[str]:
    return [found.name for found in scan(store).lineage()]


@given(st.lists(scores, min_size=1, max_size=8), policies, st.sets(st.integers(1, 8), max_size=2))
def test_prune_spares_the_newest_the_pinned_and_the_best(values, chosen, pinned):
    """Whatever the policies say together, these stay, and what stays is whole."""
    store = MemoryStore()
    session = begin(store)
    for number, value in enumerate(values, 1):
        save(store, session, number, value)
    pinned = {f"ba{number}" for number in pinned if number <= len(values)}
    for name in pinned:
        pin(store, name)
    report = prune(store, decide(scan(store), chosen), session=session)
    left = set(names(store))
    assert not report.errors
    assert {f"ba{len(values)}"} | pinned <= left
    assert set(report.deleted) | left == {f"ba{n}" for n in range(1, len(values) + 1)}
    for policy in chosen:
        if isinstance(policy, KeepBest):
            assert set(best_of(values, policy.count, policy.mode)) <= left
    for name in left:
        assert verify(store, name, Level.FULL).is_good
    if not chosen:
        assert len(left) == len(values)


@given(st.lists(scores, max_size=8), policies, st.randoms())
def test_policies_do_not_depend_on_the_order_given(values, chosen, random):
    """A listing comes in the order of the store, not of training."""
    records = make_records(values)
    mixed = list(records)
    random.shuffle(mixed)
    assert keep_any(chosen, mixed) == keep_any(chosen, records)


@given(st.lists(scores, min_size=1, max_size=8), policies)
def test_retention_is_stable(values, chosen):
    """A second look at what is left gives nothing more up: what is kept stays kept."""
    records = make_records(values)
    kept = keep_any(chosen, records)
    left = [record for record in records if record.name in kept]
    assert set(keep_any(chosen, left)) == set(kept)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True), st.integers(1, 9))
def test_keep_every_takes_the_first_of_each_stretch(batches, interval):
    """Saves need not fall on the multiples: the first one after each counts for it."""
    batches.sort()
    records = [Record(f"ba{b}", order, time={"batch": b}) for order, b in enumerate(batches)]
    expected = [
        batch
        for at, batch in enumerate(batches)
        if batch // interval > (batches[at - 1] // interval if at else 0)
    ]
    assert list(KeepEvery(f"{interval}ba").keep(records)) == [f"ba{b}" for b in expected]


@pytest.mark.parametrize(("mode", "kept"), [("max", {0.9, 0.5}), ("min", {0.3, 0.5})])
def test_a_nan_never_displaces_a_score(mode, kept):
    """NaN compares false with everything: in all 120 orders the same scores must be kept."""
    for order in itertools.permutations([NAN, 0.3, 0.9, NAN, 0.5]):
        records = [Record(f"ba{at}", at, metrics={"loss": value}) for at, value in enumerate(order)]
        names_kept = KeepBest(2, "loss", mode).keep(records)
        assert {order[int(name[2:])] for name in names_kept} == kept


@pytest.mark.parametrize("mode", ["max", "min"])
def test_when_all_scores_are_nan_the_newest_stays(mode):
    """Nothing is best then; the run must still have something to go on from."""
    store = MemoryStore()
    session = begin(store)
    for number in (1, 2, 3):
        save(store, session, number, NAN)
    prune(store, decide(scan(store), [KeepBest(2, "loss", mode)]), session=session)
    assert names(store) == ["ba3"]
    assert scan(store).best("loss", mode) is None


def test_of_equal_scores_the_newer_is_kept():
    """It has learned more, and a run of equal scores does not keep its oldest for ever."""
    records = [Record(f"ba{at}", at, metrics={"loss": 1.0}) for at in range(4)]
    assert set(KeepBest(2, "loss").keep(records)) == {"ba2", "ba3"}


def test_a_failed_save_costs_no_checkpoint():
    """Keep one: the old one goes when the new one is there, and not before."""
    store = MemoryStore()
    session = begin(store)
    save(store, session, 1)

    class Breaks(MemoryStoreProxy):
        def create_writer(self, key, size_bytes):
            raise StorageError("The disk is gone.")

    with pytest.raises(StorageError):
        save(Breaks(store), session, 2)
    prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert names(store) == ["ba1"]
    save(store, session, 3)
    prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert names(store) == ["ba3"]
    assert store.folders() == ["ba3", "sessions"]


@pytest.mark.parametrize("trouble", ["none", "a clock that jumped", "foreign things"])
def test_rotation_goes_by_the_lineage(tmp_path: Path, trouble):
    """Names as text put 10000 before 9000, and modification times are moved by copies."""
    store = LocalStore(tmp_path)
    session = begin(store)
    for number in (8_000, 9_000, 10_000):
        save(store, session, number)
    if trouble == "a clock that jumped":
        for file in (tmp_path / "ba8000").iterdir():
            os.utime(file, (4e9, 4e9))
    if trouble == "foreign things":
        (tmp_path / "checkpoint-old").mkdir()
        (tmp_path / "checkpoint-old" / "weights.bin").write_bytes(b"1")
        (tmp_path / "checkpoint-12x").write_bytes(b"2")
        (tmp_path / "a name with spaces").mkdir()
    save(store, session, 11_000)
    assert not prune(store, decide(scan(store), [KeepLast(3)]), session=session).errors
    assert names(store) == ["ba9000", "ba10000", "ba11000"]
    if trouble == "foreign things":
        assert (tmp_path / "checkpoint-old" / "weights.bin").read_bytes() == b"1"
        assert (tmp_path / "checkpoint-12x").read_bytes() == b"2"
        assert (tmp_path / "a name with spaces").is_dir()


def test_retention_remembers_across_a_resume():
    """Scores and order stand in the store: a new process keeps what the old one would have."""
    values = {1: 0.9, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7}
    keep = [KeepLast(2), KeepBest(1, "loss", "max")]

    def train(store: Store, numbers) -> None:
        session = begin(store)
        for number in numbers:
            save(store, session, number, values[number])
            prune(store, decide(scan(store), keep), session=session)

    straight, resumed = MemoryStore(), MemoryStore()
    train(straight, [1, 2, 3, 4, 5])
    train(resumed, [1, 2, 3])
    train(resumed, [4, 5])
    for store in (straight, resumed):
        assert sorted(names(store)) == ["ba1", "ba4", "ba5"]
        assert scan(store).best("loss", "max").name == "ba1"


def test_deleting_leaves_the_neighbours():
    """``ba1`` is no prefix of ``ba10``, nor of ``ba1-best``."""
    store = MemoryStore()
    session = begin(store)
    for number in (1, 10, 11):
        save(store, session, number)
    save_files(store, session, name="ba1-best", attempt=12, files={"part": b"1"})
    decisions = [d for d in decide(scan(store), [KeepLast(3)]) if not d.keep]
    assert [d.name for d in decisions] == ["ba1"]
    assert prune(store, decisions, session=session).deleted == ("ba1",)
    assert names(store) == ["ba10", "ba11", "ba1-best"]


def make_records(values) -> list[Record]:
    return [
        Record(
            f"ba{number}",
            number,
            created_s=10.0 * number,
            time={"batch": number},
            metrics={} if value is None else {"loss": value},
        )
        for number, value in enumerate(values, 1)
    ]


def best_of(values, count: int, mode: str) -> list[str]:
    """The oracle: sort the numbers, of equal ones the later first."""
    sign = 1 if mode == "min" else -1
    numbers = [
        (sign * value, -number)
        for number, value in enumerate(values, 1)
        if value is not None and not math.isnan(value)
    ]
    return [f"ba{-number}" for _, number in sorted(numbers)[:count]]


class MemoryStoreProxy:
    """Passes everything on to a store."""

    def __init__(self, store: Store) -> None:
        self._below = store
        self.url, self.traits = store.url, store.traits

    def __getattr__(self, name: str):
        return getattr(self._below, name)


def test_all_can_be_kept():
    """Retention is off unless asked for."""
    records = make_records([1.0, None])
    assert set(KeepAll().keep(records)) == {"ba1", "ba2"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(True),
        lambda: KeepLast(1.5),
        lambda: KeepBest(0, "loss"),
        lambda: KeepBest(1, ""),
        lambda: KeepBest(1, "loss", "lower"),
        lambda: KeepEvery("0ba"),
        lambda: KeepEvery("0.1dur"),
        lambda: KeepEvery("often"),
        lambda: KeepWithin("3ep"),
        lambda: KeepWithin("0s"),
    ],
)
def test_bad_arguments_are_refused_at_once(make):
    """A typing error must show at the start and not at the first prune."""
    with pytest.raises(CheckpointError) as caught:
        make()
    assert caught.value.kind == "usage"
