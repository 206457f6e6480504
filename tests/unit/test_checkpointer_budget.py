"""A run with a budget for the memory of its saves."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.runs import State, scan
from milepost.stores import LocalStore

BUDGET = 32 * 1024 * 1024


def test_a_run_with_a_budget_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Nothing is copied late then, also where that was asked for, and the record says why."""
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 2048)).square().mean().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state[model.weight]["exp_avg"].clone()
    with mp.Checkpointer(
        tmp_path,
        staging="overlap",
        staging_budget_bytes=BUDGET,
        model=model,
        optimizer=optimizer,
        handle_signals=False,
    ) as run:
        pending = run.save("a")
        optimizer.step()
        checkpoint = pending.wait()
        assert checkpoint.stats["streamed_bytes"] == checkpoint.stats["state_bytes"] > BUDGET
        assert checkpoint.stats["late_bytes"] == 0
        assert "staging_budget_bytes" in checkpoint.stats["eager_reason"]
    assert checkpoint.verify().is_good
    other = nn.Linear(2048, 2048)
    adam = torch.optim.Adam(other.parameters())
    with mp.Checkpointer(
        tmp_path, resume="must", model=other, optimizer=adam, handle_signals=False
    ):
        for name, value in other.state_dict().items():
            assert torch.equal(value, expected[name])
        assert torch.equal(adam.state[other.weight]["exp_avg"], moments)


_PROGRAM = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    from torch import nn
    import milepost as mp
    from milepost.stores import blocks

    count, original = 0, blocks.LocalWriter.write_at
    def write_at(self, offset, data):
        global count
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, offset, data)

    model = nn.Linear(2048, 3000)
    run = mp.Checkpointer(sys.argv[1], staging_budget_bytes=1 << 25, model=model, buffer=dict(
        value=mp.Value(lambda: torch.ones(1 << 22), lambda value: None)))
    run.open()
    run.save("a", wait=True)
    blocks.LocalWriter.write_at = write_at
    with torch.no_grad():
        model.weight.add_(1)
    run.save("b", wait=True)
    """
)


def check_kill(folder: Path, at: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(at)], timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    states = {one.name: one.state for one in scan(LocalStore(folder)).found}
    assert states.pop("a") is State.COMMITTED
    assert set(states.values()) <= {State.INCOMPLETE}
    assert mp.open_run(folder).latest().verify().is_good


def test_a_process_killed_in_a_stream_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Half a stream is no checkpoint."""
    check_kill(tmp_path, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("at", [1, 2, 4, 5, 6, 7])
def test_a_process_killed_at_any_block_leaves_the_checkpoint_before(
    tmp_path: Path, at: int
) -> None:
    """The first, the last, and each between."""
    check_kill(tmp_path, at)
