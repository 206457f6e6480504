"""What is kept of reported checkpoints, for any scores in any order, with pins and restarts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

import milepost as mp
from milepost.reporting.config import KeepReported
from milepost.runs import Record, pin
from milepost.stores import MemoryStore

scores = st.one_of(
    st.none(),
    st.just(math.nan),
    st.sampled_from([math.inf, -math.inf]),
    st.integers(-3, 3).map(float),
)
steps = st.lists(st.tuples(scores, st.sampled_from(["", "", "", "pin", "restart"])), max_size=7)


def is_score(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def best_of(alive: list[str], score: dict[str, float | None], count: int, order: str) -> set[str]:
    """Take the best one after another: a plain reading of the rule, oldest first in ``alive``."""
    left, taken = list(alive), set()
    while left and len(taken) < count:
        pick = left[0]
        for name in left[1:]:
            new, old = score[name], score[pick]
            if not is_score(new):
                is_better = not is_score(old)
            elif not is_score(old):
                is_better = True
            else:
                is_better = new >= old if order == "max" else new <= old
            pick = name if is_better else pick
        taken.add(pick)
        left.remove(pick)
    return taken


@given(
    steps=steps,
    count=st.integers(1, 3),
    attribute=st.sampled_from([None, "loss"]),
    order=st.sampled_from(["min", "max"]),
)
def test_the_best_the_newest_and_the_pinned_stay_and_nothing_else(steps, count, attribute, order):
    """After every report, whatever came before it, and after every restart."""
    store = MemoryStore()
    config = mp.CheckpointConfig(
        num_to_keep=count, checkpoint_score_attribute=attribute, checkpoint_score_order=order
    )
    place = MemoryStore()
    place.put("a", b"1")
    alive: list[str] = []
    score: dict[str, float | None] = {}
    pinned: set[str] = set()
    reports = mp.Reports(store, checkpoint_config=config).open()
    try:
        for value, then in steps:
            handle = reports.report(
                {} if value is None else {"loss": value},
                mp.Checkpoint(place, ""),
                checkpoint_upload_fn=lambda _, name: write(store, name),
            )
            alive.append(handle.name)
            score[handle.name] = value
            has_metric = any(score[name] is not None for name in alive)
            if attribute is None:
                stay = set(alive[-count:])
            elif not has_metric:
                stay = set(alive)
            else:
                stay = best_of(alive, score, count, order)
            alive = [name for name in alive if name in stay | pinned | {alive[-1]}]
            assert [one.name for one in mp.open_run(store).checkpoints()] == alive
            if then == "pin":
                pin(store, alive[0])
                pinned.add(alive[0])
            elif then == "restart":
                reports.close(is_well=False)
                reports = mp.Reports(store, checkpoint_config=config).open()
                assert reports.get_checkpoint().name == alive[-1]
    finally:
        reports.close(is_well=False)


def write(store: MemoryStore, name: str) -> mp.Checkpoint:
    store.put(f"{name}/a", b"1")
    return mp.Checkpoint(store, name)


@given(
    values=st.lists(st.tuples(scores, st.booleans()), max_size=8),
    count=st.integers(1, 3),
    mode=st.sampled_from(["min", "max"]),
)
def test_what_waits_for_its_validation_takes_no_place(values, count, mode):
    """It is neither the best nor in the way of the best; the others are ranked without it."""
    records = [
        Record(
            f"c{n}",
            n,
            metrics={} if value is None else {"loss": value},
            is_pending_validation=is_pending,
        )
        for n, (value, is_pending) in enumerate(values)
    ]
    kept = set(KeepReported(count, "loss", mode).keep(records))
    if not any("loss" in record.metrics for record in records):
        assert kept == {record.name for record in records}
        return
    alive = [record.name for record in records if not record.is_pending_validation]
    score = {record.name: record.metrics.get("loss") for record in records}
    assert kept == best_of(alive, score, count, mode)
