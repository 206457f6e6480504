"""A training on several workers, killed, comes back without a hand and ends the same."""

from __future__ import annotations

import os
import random
import textwrap
import time
from pathlib import Path

import pytest

from milepost.launch import Ending, FailureConfig, RunConfig, ScalingConfig, launch


def test_killed_at_any_moment_it_comes_back_and_ends_the_same(trainings, killers, straight_ends):
    """One worker or all of them, at the start or in a batch or in a save; nobody helps."""
    killed = trainings("killed", num_epochs=2, pause_s=0.03)  # two kills come before its end
    with killers(killed, 2, seed=11, train_s=0.5) as killer:
        result = killed.run()
    assert [one.ending for one in result.attempts[:-1]] == [Ending.FAILED] * 2, killer.told
    assert result.attempts[-1].ending is Ending.DONE
    killed.check_resumes(len(result.attempts))
    assert killed.ends() == straight_ends


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_fifty_kills_and_never_a_step_lost_that_was_safe(trainings, killers, tmp_path):
    """On 2, 3 and 4 workers; MILEPOST_SEED repeats a campaign."""
    seed = int(os.environ.get("MILEPOST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"MILEPOST_SEED={seed}")
    num_moments = num_restarts = number = 0
    began_s = time.monotonic()
    straight = {}
    while num_moments < 50:
        num_ranks = (2, 4, 3)[number % 3]
        if num_ranks not in straight:
            straight[num_ranks] = trainings(f"straight-{num_ranks}", num_ranks=num_ranks)
            straight[num_ranks].run()
        killed = trainings(f"killed-{number}", num_ranks=num_ranks, pause_s=0.02)
        with killers(killed, 8, seed=seed + number) as killer:
            result = killed.run()
        told = f"MILEPOST_SEED={seed}, training {number}: {killer.told}"
        assert result.attempts[-1].ending is Ending.DONE, told
        assert {one.ending for one in result.attempts[:-1]} <= {Ending.FAILED}, told
        begun = killed.check_resumes(len(result.attempts))
        assert killed.ends() == straight[num_ranks].ends(), told
        num_moments += len(killer.told)
        num_restarts += len(result.attempts) - 1
        number += 1
        print(f"{num_ranks} ranks: {len(killer.told)} kills, went on from {begun}")
    spent_s = time.monotonic() - began_s
    print(f"{num_moments} moments, {num_restarts} restarts, {number} trainings, {spent_s:.0f} s")


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_twenty_restarts_in_a_row_meet_each_time(tmp_path):
    """Ranks of an attempt never meet those of an earlier one, nor wait for them."""
    job = tmp_path / "meet.py"
    job.write_text(
        textwrap.dedent(
            """
            import os, signal
            import torch, torch.distributed as dist
            from milepost import liveness
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            rank, attempt = dist.get_rank(), int(os.environ["MILEPOST_ATTEMPT"])
            for batch in range(3):
                value = torch.tensor(float(attempt))
                dist.all_reduce(value)
                assert value.item() == attempt * dist.get_world_size()
                liveness.beat(batch)
            if attempt <= 20:
                if rank == attempt % dist.get_world_size():
                    liveness.note_commit(f"ba{attempt}", attempt)
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(value)  # never to return
            dist.destroy_process_group()
            """
        )
    )
    policy = FailureConfig(max_failures=1, backoff_s=0.0, start_timeout_s=60, hang_timeout_s=60)
    result = launch(
        str(job),
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage_path=tmp_path, name="a", failure_config=policy),
    )
    assert [one.ending for one in result.attempts] == [Ending.FAILED] * 20 + [Ending.DONE]
    longest_s = max(one.duration_s for one in result.attempts)
    print(f"20 restarts, the longest attempt {longest_s:.1f} s")
    assert Path(result.folder, "attempt-21").is_dir()
