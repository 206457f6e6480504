"""When a save is due, and what it is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepost.progress.schedule import Schedule, parse_intervals
from milepost.progress.time import Time
from milepost.progress.timer import Timer


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def names(spec, *, epochs=2, batches=4, samples=3, tokens=5, batch_s=10.0, begin=None, **options):
    """Names of the saves of a training, with the moments they were asked at."""
    clock = Clock()
    timer = Timer(clock=clock)
    timer.start()
    schedule = Schedule(spec, **options)
    if begin is not None:
        timer.load_state_dict(begin)
    schedule.start(timer.snapshot())
    found = []
    while timer.epoch < epochs:
        while timer.batch_in_epoch < batches:
            clock.now_s += batch_s
            timer.on_batch_complete(samples, tokens)
            due = schedule.due("batch", timer.snapshot(), timer, "batch")
            if due is not None:
                found.append(due.name)
        timer.on_epoch_complete()
        due = schedule.due("epoch", timer.snapshot(), timer, "epoch")
        if due is not None:
            found.append(due.name)
    return found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, []),
        ("1ep", ["ep1", "ep2"]),
        (1, ["ep1", "ep2"]),
        ("2ep", ["ep2"]),
        ("3ba", ["ba3", "ba6"]),
        (Time.of("4ba"), ["ba4", "ba8"]),
        ("100ba", []),
        ("7sp", ["sp9", "sp15", "sp21"]),
        ("20tok", ["tok20", "tok40"]),
        ("35s", ["sec40", "sec70"]),
        (["3ba", "1ep"], ["ba3", "ep1", "ba6", "ep2"]),
        (["2ba", "3ba"], ["ba2", "ba3", "ba4", "ba6", "ba8"]),
        ([], []),
    ],
)
def test_multiples_that_were_passed_are_due(spec, expected):
    """A multiple that falls between two questions is due at the second one, once."""
    assert names(spec) == expected


def test_several_intervals_at_once_make_one_save_with_the_epoch_for_a_name():
    """Two files of one state would be a waste."""
    assert names(["1ep", "12sp"], batches=4) == ["sp12", "ep1", "sp24", "ep2"]
    schedule = Schedule(["1ep", "5sec"])
    schedule.start({"epoch": 0, "wall_s": 0.0})
    due = schedule.due("epoch", {"epoch": 1, "batch": 4, "wall_s": 6.0})
    assert (due.name, due.interval) == ("ep1", "1ep")


@pytest.mark.parametrize(
    ("spec", "whole", "options", "expected"),
    [
        ("0.25dur", "8ba", {}, ["ba2", "ba4", "ba6", "ba8"]),
        ("0.5dur", "2ep", {}, ["ep1", "ep2"]),
        ("0.25dur", "2ep", {"steps_per_epoch": 4}, ["ba2", "ba4", "ba6", "ba8"]),
        ("0.1dur", "8ba", {}, [f"ba{n}" for n in range(1, 9)]),
        ("1dur", "24sp", {}, ["ba8"]),
        ("0.5dur", "80sec", {}, ["ba4", "ba8"]),
    ],
)
def test_fractions_of_the_whole_are_due_in_the_middle_of_epochs_too(spec, whole, options, expected):
    """Where the length of an epoch is known, a fraction of epochs counts batches."""
    assert names(spec, max_duration=Time.of(whole), **options) == expected


def test_tenths_are_not_lost_to_floating_point():
    """0.3 / 0.1 is 2.9999999999999996."""
    found = names("0.1dur", epochs=1, batches=10, max_duration=Time.of("10ba"))
    assert found == [f"ba{n}" for n in range(1, 11)]


def test_a_fraction_needs_to_know_the_whole():
    """And it must not be more than that."""
    with pytest.raises(UsageError, match="how long the whole"):
        Schedule("0.1dur")
    with pytest.raises(UsageError, match="longer than the whole"):
        Schedule("2dur", max_duration=Time.of("1ep"))


@pytest.mark.parametrize("spec", ["0ba", "-1ep", 0, "soon", "", 1.5, True, ["1ep", "0ba"]])
def test_what_is_no_interval_is_refused(spec):
    """At once, with what was given."""
    with pytest.raises(UsageError):
        parse_intervals(spec)


def test_a_resume_does_not_make_up_for_what_was_due_before():
    """The interval counts from the whole run and not from the process."""
    begin = {**Timer().snapshot(), "epoch": 0, "batch": 2, "batch_in_epoch": 2}
    assert names("3ba", begin=begin) == ["ba3", "ba6"]
    begin = {**begin, "batch": 3, "batch_in_epoch": 3}
    assert names("3ba", begin=begin) == ["ba6"]


def test_a_callable_is_asked_at_both_moments():
    """With the state and the moment; the name is that of the progress."""
    asked = []

    def every_second_epoch(timer, moment):
        asked.append(moment)
        return moment == "epoch" and timer.epoch % 2 == 0

    assert names(every_second_epoch) == ["ep2"]
    assert asked.count("batch") == 8
    assert asked.count("epoch") == 2
    assert names(lambda timer, _: timer.batch == 3) == ["ba3"]


def test_asking_ahead_changes_nothing():
    """The last batch of an epoch asks whether the end of the epoch will be saved anyway."""
    schedule = Schedule(["2ep", "3ba"])
    schedule.start({"epoch": 1, "batch": 7})
    after = {"epoch": 2, "batch": 8, "batch_in_epoch": 0}
    assert schedule.epoch_would_be_due(after)
    assert schedule.epoch_would_be_due(after)
    assert not schedule.epoch_would_be_due({**after, "epoch": 1})
    assert schedule.due("epoch", after).name == "ep2"
    assert not schedule.epoch_would_be_due(after)


def test_only_intervals_in_epochs_never_fall_between_epochs():
    """A loop may then leave out asking after every batch."""
    assert not Schedule("1ep").counts_batches
    assert Schedule(["1ep", "1ba"]).counts_batches
    assert Schedule(lambda *_: True).counts_batches


@given(
    st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(0, 20)
)
def test_every_multiple_is_due_exactly_once(step, jumps, start):
    """However the counter jumps: as often as a multiple was passed, at most once a question."""
    schedule = Schedule(f"{step}sp")
    counters = {"epoch": 0, "batch": 0, "sample": start}
    schedule.start(counters)
    for jump in jumps:
        before = counters["sample"]
        counters = {**counters, "sample": before + jump}
        multiples = [n for n in range(before + 1, before + jump + 1) if n % step == 0]
        assert (schedule.due("batch", counters) is not None) == bool(multiples)
