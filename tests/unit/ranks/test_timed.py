"""What one rank decides, all do at one step: saves by the clock, and the end of a training."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import milepost as mp
from milepost.progress.schedule import Schedule
from milepost.ranks import steps
from milepost.ranks.server import Server
from milepost.ranks.solo import Solo, Team
from milepost.ranks.steps import StepTogether
from milepost.ranks.team import StoreTeam
from milepost.ranks.timed import TimedTogether


def on_ranks(num_ranks: int, body: Callable[[Team], Any]) -> list[Any]:
    """Run a body as ranks in threads; return what it returned or raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        server = Server("127.0.0.1", store.port, store if rank == 0 else None)
        try:
            ended[rank] = body(StoreTeam(server, rank, num_ranks, "team"))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ended


@pytest.mark.parametrize("seed", range(6))
def test_every_rank_acts_at_the_same_step_whoever_decides_and_whenever_others_look(
    seed: int,
) -> None:
    """One collective in each step is all that keeps them together; some look late and rarely."""
    num_ranks = 3
    collective = threading.Barrier(num_ranks)
    chance = random.Random(seed)
    decides, at = chance.randrange(num_ranks), chance.randrange(1, 20)
    ticks = [chance.choice([0.01, 0.05, 0.3]) for _ in range(num_ranks)]

    def body(team: Team) -> list[Any]:
        now_s, own = [0.0], random.Random(f"{seed}-{team.rank}")
        together = StepTogether(team, "x", clock=lambda: now_s[0])
        acted: list[Any] = []
        for step in range(1, 80):
            if own.random() < 0.1:
                time.sleep(0.002)
            collective.wait(20)
            now_s[0] += ticks[team.rank]
            if (team.rank, step) == (decides, at):
                together.decide("now")
            found = together.look(step)
            if found is not None:
                acted.append((step, found))
                break
        else:
            collective.abort()
        return acted

    found = on_ranks(num_ranks, body)
    assert found[0] == found[1] == found[2]
    ((step, decision),) = found[0]
    assert decision == "now"
    assert step > at


def test_two_that_decide_at_once_act_at_one_step() -> None:
    """Schedulers like to send a signal to every process."""
    collective = threading.Barrier(2)

    def body(team: Team) -> int:
        together = StepTogether(team, "x")
        for step in range(1, 20):
            collective.wait(20)
            if step == 5:
                together.decide("now")
            if together.look(step) is not None:
                return step
        raise AssertionError

    first, second = on_ranks(2, body)
    assert first == second == 6


def test_alone_a_save_is_due_as_soon_as_the_clock_says() -> None:
    """Without another rank there is nobody to agree with."""
    timed = TimedTogether(Solo(), Schedule("10sec"))
    timed.start({"wall_s": 5.0})
    seen = [timed.look({"wall_s": float(now), "batch": now}) for now in range(6, 35)]
    assert [name for name in seen if name] == ["sec10", "sec20", "sec30"]


def test_a_checkpointer_on_several_ranks_saves_by_the_clock_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the others may say anything; intervals of other kinds go on beside it.

    A resume goes on counting where the clock stood.
    """
    monkeypatch.setattr(steps, "_LOOK_EVERY_S", 0.0)
    ranks = range(2)
    collective = threading.Barrier(len(ranks))

    def train(team: Team, *, num_batches: int) -> list[str]:
        seconds = iter(range(0, 10**9, 1 if team.rank == 0 else 977))
        run = mp.Checkpointer(
            tmp_path, every=["10sec", "25ba"], handle_signals=False, save_name_format="b{batch}"
        )
        run.timer._clock = lambda: next(seconds) / 2  # called several times in a batch
        run.open(team=team)
        saved = []
        try:
            for _ in range(num_batches):
                collective.wait(20)
                before = run.last_save
                run.step()
                if run.last_save is not before and run.last_save is not None:
                    saved.append(run.last_save.wait(20).name)
        finally:
            run.close(20)
        return saved

    first, second = on_ranks(2, lambda team: train(team, num_batches=60))
    assert first == second
    batches = [int(name[1:]) for name in first]
    assert 25 in batches
    assert 50 in batches
    assert len(batches) >= 4
    again, too = on_ranks(2, lambda team: train(team, num_batches=30))
    assert again == too
    assert 75 in [int(name[1:]) for name in again]
