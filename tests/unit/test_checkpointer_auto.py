"""``every="auto"``: saves come as often as their cost allows, and what was learned goes on."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader

import milepost as mp
from milepost.stores import MemoryStore


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Slow:
    """A state that takes a while to collect."""

    def __init__(self, clock, takes_s):
        self.clock, self.takes_s = clock, takes_s

    def state_dict(self):
        self.clock.now_s += self.takes_s
        return {}

    def load_state_dict(self, state):
        assert state == {}


def train(store, clock, *, epochs, takes_s=5.0, batch_s=1.0, stop_at=None, **options):
    """Train on 100 batches an epoch; return the weights, if it was not stopped."""
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(torch.arange(200.0).reshape(100, 2) / 200, batch_size=1, shuffle=True)
    options = {"every": "auto", **options}
    items = {"model": model, "optimizer": optimizer, "slow": Slow(clock, takes_s)}
    # Each save is over before the next batch, so that only the test's own clock matters.
    run = mp.Checkpointer(store, async_save=False, **items, **options)
    run.timer._clock = clock
    with run:
        for _ in run.epochs(epochs):
            for batch in run.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.dropout(model(batch)).sum().backward()
                optimizer.step()
                clock.now_s += batch_s
                if run.timer.batch == stop_at:
                    return None
    return [one.detach().clone() for one in model.parameters()]


def batches(store):
    return [one.time["batch"] for one in mp.open_run(store).checkpoints()]


def test_saves_take_the_share_of_the_time_that_was_said(caplog):
    """By a clock that saves advance too, from the outside."""
    store, clock = MemoryStore(), Clock()
    with caplog.at_level(logging.INFO, logger="milepost"):
        train(store, clock, epochs=10, overhead_budget=0.05)
    found = batches(store)
    # After 10 batches, then after a tenth of 5 s / 0.05; from then on every 100 s, saves included.
    assert found[:4] == [10, 15, 110, 205]
    assert found[-1] == 1000
    told = [one for one in caplog.messages if one.startswith("Saving every")]
    assert told == ["Saving every 1.67 min: a save costs 5 s, and saves may take 5 % of the time."]
    assert len([one for one in caplog.messages if one.startswith("Saved ")]) == len(found)


def test_a_mean_time_between_failures_asks_for_what_loses_least():
    """Two times 5 s times 2.5 h is the square of 300 s."""
    store, clock = MemoryStore(), Clock()
    train(store, clock, epochs=10, mean_time_between_failures="2h30m")
    assert batches(store)[2:4] == [330, 625]
    last = mp.open_run(store).latest().manifest.interval
    assert last["interval_s"] == pytest.approx(300)
    assert last["mean_time_between_failures_s"] == 9000
    assert last["overhead_budget"] is None
    assert last["why"].startswith("every 5 min: a save costs 5 s, and a failure is expected")


def test_a_resume_goes_on_with_what_was_learned_and_trains_the_same():
    """When something is saved never changes what is trained; early saves are made once only."""
    straight = train(MemoryStore(), Clock(), epochs=4, every="1ep")
    store, clock = MemoryStore(), Clock()
    assert train(store, clock, epochs=4, overhead_budget=0.05, stop_at=222) is None
    before = batches(store)
    assert before == [10, 15, 110, 205]
    weights = train(store, Clock(), epochs=4, overhead_budget=0.05)
    # It goes on from 205, and 100 s later saves again, not after 10 batches.
    assert batches(store)[4:] == [305, 400]
    for found, expected in zip(weights, straight, strict=True):
        assert torch.equal(found, expected)


def test_other_intervals_may_stand_beside_it():
    """What they save need not be saved again soon."""
    store = MemoryStore()
    train(store, Clock(), epochs=3, every=["auto", "1ep"], overhead_budget=0.05, takes_s=2.0)
    # Every 40 s, counted from the last save of any kind.
    assert batches(store)[:7] == [10, 12, 50, 88, 100, 138, 176]


def test_a_checkpoint_of_a_given_interval_says_nothing_about_it():
    """Nothing was found out there."""
    store = MemoryStore()
    train(store, Clock(), epochs=1, every="50ba")
    assert mp.open_run(store).latest().manifest.interval == {}


def test_a_rollback_begins_to_count_anew():
    """The clock goes back with it."""
    store, clock = MemoryStore(), Clock()
    options = {"every": "auto", "overhead_budget": 0.1, "async_save": False}
    run = mp.Checkpointer(store, slow=Slow(clock, 1.0), **options)
    run.timer._clock = clock
    with run:
        for _ in range(40):
            clock.now_s += 1.0
            run.step()
        run.wait()
        assert batches(store) == [10, 11, 19, 28, 37]
        run.restore("ba19")
        assert run.timer.batch == 19
        for _ in range(25):
            clock.now_s += 1.0
            run.step()
        run.wait()
        assert batches(store)[-2:] == [29, 38]


def test_options_that_make_no_sense_are_refused_before_anything_is_opened(tmp_path):
    """A typing error must not save at other times than was meant."""
    for options in (
        {"every": "1ep", "overhead_budget": 0.1},
        {"mean_time_between_failures": "6h"},
        {"every": "auto", "overhead_budget": 2},
        {"every": "auto", "mean_time_between_failures": "6ep"},
        {"every": "automatic"},
    ):
        with pytest.raises(mp.UsageError):
            mp.Checkpointer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
