"""The timer: one object counts, over the whole run and within the epoch."""

from __future__ import annotations

import pytest

from milepost.errors import UsageError
from milepost.progress.time import Time
from milepost.progress.timer import Timer


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_batches_samples_and_tokens_add_up_and_epochs_start_anew():
    """The counters of the whole run never go back; those of the epoch do, at its end."""
    timer = Timer()
    for _ in range(3):
        timer.on_batch_complete(num_samples=32, num_tokens=100)
    timer.on_epoch_complete()
    timer.on_batch_complete(num_samples=8)
    assert (timer.epoch, timer.batch, timer.sample, timer.token) == (1, 4, 104, 300)
    in_epoch = (timer.batch_in_epoch, timer.sample_in_epoch, timer.token_in_epoch)
    assert in_epoch == (1, 8, 0)


def test_seconds_are_those_of_training_over_all_processes():
    """Time between two processes does not count, nor does time before the start."""
    clock = Clock()
    timer = Timer(clock=clock)
    clock.now_s += 50
    assert timer.wall_s == 0.0
    timer.start()
    clock.now_s += 5
    timer.start()  # again: nothing changes
    clock.now_s += 5
    assert timer.wall_s == 10.0
    timer.stop()
    clock.now_s += 1000
    assert timer.wall_s == 10.0
    later = Clock()
    resumed = Timer(clock=later)
    resumed.load_state_dict(timer.state_dict())
    assert resumed.wall_s == 10.0
    resumed.start()
    later.now_s += 3
    assert resumed.wall_s == 13.0
    resumed.load_state_dict(timer.state_dict())  # while it runs
    assert resumed.wall_s == 10.0


def test_a_restored_timer_equals_the_one_that_was_saved():
    """Every counter, as the kind of number that it was."""
    timer = Timer(clock=Clock())
    timer.on_batch_complete(4, 9)
    timer.on_epoch_complete()
    timer.on_batch_complete(2, 1)
    fresh = Timer(clock=Clock())
    fresh.load_state_dict(timer.state_dict())
    assert fresh.snapshot() == timer.snapshot()
    assert all(type(value) is int for name, value in fresh.snapshot().items() if name != "wall_s")


def test_a_snapshot_does_not_follow():
    """It is what a save in the background describes."""
    timer = Timer()
    snapshot = timer.snapshot()
    timer.on_batch_complete(1)
    assert snapshot["batch"] == 0


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [("3ep", 2, 3), ("5ba", 4, 5), ("7sp", 6, 7), ("9tok", 8, 9), ("2sec", 1, 2)],
)
def test_it_compares_with_any_unit(text, before, after):
    """Durations are written in any of them."""
    clock = Clock()
    timer = Timer(clock=clock)
    unit = Time.of(text).unit.value

    def move_to(value):
        timer.epoch = timer.batch = timer.sample = timer.token = value
        timer.stop()
        timer._earlier_s = float(value)

    move_to(before)
    assert timer < text
    assert timer <= text
    assert not timer >= text
    move_to(after)
    assert timer >= text
    assert timer <= text
    assert not timer < text
    assert not timer > text
    assert timer.get(unit) == Time.of(text)
    move_to(after + 1)
    assert timer > text


def test_a_fraction_of_the_whole_needs_to_know_the_whole():
    """A timer alone does not."""
    with pytest.raises(UsageError, match="fraction"):
        Timer().get("dur")
    with pytest.raises(UsageError):
        bool(Timer() < "0.5dur")


@pytest.mark.parametrize("state", [{}, {"epoch": "x"}, {"epoch": 1, "batch": None}])
def test_a_malformed_state_is_an_error(state):
    """Counters that are made up would name checkpoints wrongly."""
    with pytest.raises((KeyError, ValueError, TypeError)):
        Timer().load_state_dict(state)
