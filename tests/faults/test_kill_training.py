"""A training process killed at random moments loses nothing that was acknowledged.

Each life of the process is killed after a random while; a reader looks at the run; the next life
goes on. At the end the weights and the losses are those of a training that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.runs import Level, State, this_process
from milepost.testing.asserts import assert_equal_states

SCRIPT = Path(__file__).with_name("kill_script.py")
LIFE_S = 60.0


def start(folder: Path, acknowledged: Path, result: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), str(folder), str(acknowledged), str(result)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def read(acknowledged: Path) -> list[str]:
    return acknowledged.read_text().split() if acknowledged.exists() else []


def check_run(folder: Path, acknowledged: Path) -> None:
    """Require that every acknowledged checkpoint counts and is whole, and nothing torn does."""
    if not (folder / "run.json").exists():
        assert read(acknowledged) == []
        return
    run = mp.open_run(folder)
    counted = {found.name for found in run.view.lineage()}
    assert set(read(acknowledged)) <= counted
    for checkpoint in run.checkpoints():
        report = checkpoint.verify(Level.FULL)
        assert report.is_good, report
    latest = run.latest()
    if latest is not None:
        acked = [run.get(name).time["batch"] for name in read(acknowledged)]
        assert latest.time["batch"] >= max(acked, default=0)


def run_with_kills(tmp_path: Path, *, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    straight = tmp_path / "straight.pt"
    assert start(tmp_path / "straight", tmp_path / "acked0", straight).wait(LIFE_S) == 0
    folder, acknowledged, result = tmp_path / "run", tmp_path / "acked", tmp_path / "result.pt"
    kills = 0
    while kills < num_kills:
        process = start(folder, acknowledged, result)
        before = len(read(acknowledged))
        deadline = rng.random() * 0.25
        try:
            # Die some moments after the first new checkpoint of this life, or before it.
            while process.poll() is None and len(read(acknowledged)) == before:
                try:
                    process.wait(0.002)
                except subprocess.TimeoutExpired:
                    continue
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(LIFE_S)
            kills += 1
        check_run(folder, acknowledged)
        if process.returncode == 0:
            break
    assert kills > 0
    assert start(folder, acknowledged, result).wait(LIFE_S) == 0
    check_run(folder, acknowledged)
    view = mp.open_run(folder).view
    left = [f.name for f in view.found if f.state in (State.INCOMPLETE, State.DELETING)]
    # A machine that does not know itself cannot tell that the killed process has ended.
    assert not left or not this_process().machine_id
    one = torch.load(straight, weights_only=True)
    other = torch.load(result, weights_only=True)
    assert len(one["losses"]) == 100
    assert_equal_states(one, other)


def test_killed_training_goes_on_exactly(tmp_path: Path) -> None:
    """Three kills at seeded moments: nothing acknowledged is lost, and the end is bit-equal."""
    run_with_kills(tmp_path, num_kills=3, seed=20)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_killed_training_goes_on_exactly_many_times(tmp_path: Path, seed: int) -> None:
    """Up to 50 kills in ten trainings, each at other moments."""
    run_with_kills(tmp_path, num_kills=5, seed=seed)
