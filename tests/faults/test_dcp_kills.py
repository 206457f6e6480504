"""Kills in the middle of what torch.distributed.checkpoint writes through us, and of an import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import milepost as mp
from milepost.integrations.dcp import StorageReader, StorageWriter

SCRIPT = """
import os, signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from milepost import importing, publisher
from milepost.integrations.dcp import StorageWriter, writer

warnings.simplefilter("ignore")
run, plain = sys.argv[1:]
torch.set_num_threads(1)
state = {"model": {"w": torch.ones(3_000_000)}, "step": 2}

def die_after(module, name):
    kept = getattr(module, name)
    def call(*arguments, **options):
        kept(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(module, name, call)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)  # it was to be killed
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status

for phase, (module, name) in {
    "claim": (publisher, "claim"),
    "parts": (writer, "write_boxes"),
    "index": (writer, "write_index"),
    "commit": (publisher, "publish"),
}.items():
    def save():
        die_after(module, name)
        dcp.save(state, checkpoint_id=phase, storage_writer=StorageWriter(run))
    in_child(save)

for phase in ("claim", "write_boxes", "write_index"):
    def bring():
        die_after(publisher if phase == "claim" else importing, phase)
        importing.import_checkpoint(plain, run + "-imported", name=phase)
    in_child(bring)
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_kill_in_any_phase_leaves_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    """What was there before is intact, and the next save goes on and clears up."""
    state = {"model": {"w": torch.zeros(5)}, "step": 1}
    run, plain = tmp_path / "run", tmp_path / "plain"
    dcp.save(state, checkpoint_id="first", storage_writer=StorageWriter(run))
    dcp.save(state, checkpoint_id=plain)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run), str(plain)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Killed after the commit: it counts, though nobody was told.
    assert [one.name for one in mp.open_run(run).checkpoints()] == ["first", "commit"]
    assert all(one.verify().is_good for one in mp.open_run(run).checkpoints())
    dcp.save(state, checkpoint_id="last", storage_writer=StorageWriter(run))
    assert [one.name for one in mp.open_run(run).checkpoints()] == ["first", "commit", "last"]
    kept = {one.name for one in run.iterdir() if one.is_dir() and not one.is_symlink()}
    assert kept == {"first", "commit", "last", "sessions"}
    target = {"model": {"w": torch.ones(5)}, "step": 0}
    dcp.load(target, storage_reader=StorageReader(run))
    assert target["step"] == 1
    imported = tmp_path / "run-imported"
    assert mp.open_run(imported).checkpoints() == []
    assert mp.import_checkpoint(plain, imported).name == "plain"
    assert [one.name for one in mp.open_run(imported).checkpoints(all=True)] == ["plain"]
