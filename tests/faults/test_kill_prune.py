"""``milepost prune`` is killed in a bucket: what is left is whole, or on its way out.

A reader looks after each kill. The next start finishes what was begun, and nothing is left beside
what counts.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import torch

import milepost as mp
from milepost.runs import Level, State

from ..places import Place, open_uploads, strays

NAMES = [f"ba{number}" for number in range(1, 9)]


@pytest.mark.cloud
@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("place", ["moto", "juicefs"], indirect=True)
def test_a_prune_that_is_killed_leaves_whole_checkpoints(place: Place, seed: int) -> None:
    """The newest stays whatever happens, bit for bit; each kill comes at another deletion."""
    chance, run = random.Random(seed), place.run("run")
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    with mp.Checkpointer(run, model=model) as kept:
        for _ in NAMES:
            with torch.no_grad():
                model.weight.add_(1.0)
            kept.step()
            kept.save(wait=True)
    command = [sys.executable, "-m", "milepost.cli.app", "prune", run, "--keep-last", "2", "-y"]
    seen: list[int] = []
    for _ in range(3):
        process = subprocess.Popen(
            command, env={**os.environ, **place.environment}, stdout=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + 60
        # It has begun when something is gone.
        before = len(names_of(run))
        while process.poll() is None and len(names_of(run)) == before:
            assert time.monotonic() < deadline_s
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.wait(20)
        names = names_of(run)
        seen.append(len(names))
        assert names == NAMES[-len(names) :], names  # the oldest go first
        assert len(names) >= 2
        for name in names:
            assert mp.open_run(run).get(name).verify(Level.FULL).is_good
        found = torch.nn.Linear(4, 4)
        mp.open_run(run).latest().load_weights(found)
        assert found.weight.equal(model.weight)
    assert len(NAMES) > seen[0]
    with mp.Checkpointer(run, keep=mp.KeepLast(2), model=torch.nn.Linear(4, 4)) as kept:
        assert kept.resumed_from == NAMES[-1]
        kept.step()
        kept.save(wait=True)
    view = mp.open_run(run).view
    assert [one.name for one in view.found] == [NAMES[-1], "ba9"]
    assert {one.state for one in view.found} == {State.COMMITTED}
    assert strays(run) == []
    assert open_uploads(place) == []


def names_of(run: str) -> list[str]:
    return [one.name for one in mp.open_run(run).checkpoints()]
