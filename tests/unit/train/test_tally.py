"""What ranks tell each other in a batch, and what a rank alone makes of it."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
import torch

from milepost.progress.timer import Timer
from milepost.train.tally import Sums, Tally


class Ranks:
    """A group of some ranks, of which one is here."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.is_alone = world_size == 1


def add(rank: int, others: list[float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sums:
    """Return the sums on a rank whose fellows together send some numbers."""

    class Work:
        def wait(self) -> None:
            pass

    def all_reduce(tensor: torch.Tensor, *, async_op: bool) -> Work:
        assert async_op
        tensor += torch.tensor(others, dtype=torch.float64)
        return Work()

    monkeypatch.setattr("milepost.train.tally.dist.all_reduce", all_reduce)
    number = options.pop("signal_number", None)
    tally = Tally(Ranks(rank, 2), signal_number=lambda: number, **options)  # type: ignore[arg-type]
    tally.send(torch.tensor(3.0), num_samples=4, num_tokens=40, wall_s=7.5)
    return tally.read()


def test_alone_nothing_changes() -> None:
    """Not one bit of the loss, and the clock and signals are the process's own."""
    tally = Tally(Ranks(0, 1), signal_number=lambda: 15)  # type: ignore[arg-type]
    loss = torch.tensor(0.1)
    tally.send(loss, num_samples=4, num_tokens=40, wall_s=7.5)
    sums = tally.read()
    assert sums.loss is loss
    assert (sums.num_samples, sums.num_tokens) == (4, 40)
    assert (sums.wall_s, sums.signal_number, sums.is_save_due) == (None, None, None)


def test_sums_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is a mean, samples and tokens are sums, and the clock is rank 0's."""
    sums = add(1, [5.0, 3, 33, 9.25, 0, 0, 0], monkeypatch)
    assert (float(sums.loss), sums.num_samples, sums.num_tokens) == (4.0, 7, 73)
    assert sums.loss.dtype is torch.float32
    assert sums.wall_s == 9.25
    assert add(0, [5.0, 3, 33, 0.0, 0, 0, 0], monkeypatch).wall_s == 7.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_shows_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    """Also where this rank's own is one."""
    assert not add(0, [loss, 3, 33, 0.0, 0, 0, 0], monkeypatch).loss.isfinite()


def test_a_signal_to_any_rank_shows_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own or another's; SIGTERM before SIGUSR1, alike everywhere."""
    assert add(0, [1.0, 1, 1, 0, 0, 0, 0], monkeypatch).signal_number is None
    assert add(0, [1.0, 1, 1, 0, 0, 0, 1], monkeypatch).signal_number == signal.SIGUSR1
    number = signal.SIGUSR1
    assert (
        add(0, [1.0, 1, 1, 0, 0, 0, 0], monkeypatch, signal_number=number).signal_number == number
    )
    assert add(0, [1, 1, 1, 0, 0, 1, 0], monkeypatch, signal_number=number).signal_number == 15


def test_ranks_save_when_the_leader_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds out how often by a clock of its own; what others than the leader think is moot."""
    assert add(1, [1.0, 1, 1, 0, 1, 0, 0], monkeypatch).is_save_due is True
    none = [1.0, 1, 1, 0, 0, 0, 0]
    assert add(0, none, monkeypatch).is_save_due is False
    assert add(0, none, monkeypatch, is_save_due=lambda: True).is_save_due is True
    assert add(1, none, monkeypatch, is_save_due=lambda: True).is_save_due is False


def test_samples_that_several_ranks_train_on_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tensor parallelism for example."""
    sums = add(0, [3.0, 4, 40, 0, 0, 0, 0], monkeypatch, num_alike=2)
    assert (sums.num_samples, sums.num_tokens) == (4, 40)


def test_seconds_that_are_held_do_not_pass() -> None:
    """Until the next batch says how many there are; a checkpoint and a new fit go on from them."""
    now = [10.0]
    timer = Timer(clock=lambda: now[0])
    timer.hold(0.0)
    timer.start()
    now[0] = 14.0
    assert (timer.wall_s, timer.clock_s) == (0.0, 4.0)
    timer.hold(3.5)
    assert timer.state_dict()["wall_s"] == 3.5
    timer.stop()
    now[0] = 20.0
    timer.start()
    now[0] = 21.0
    assert (timer.wall_s, timer.clock_s) == (3.5, 4.5)
    timer.load_state_dict({**timer.state_dict(), "wall_s": 60.0})
    now[0] = 23.0
    assert (timer.wall_s, timer.clock_s) == (60.0, 62.0)
    timer.hold(None)
    assert timer.wall_s == 62.0
