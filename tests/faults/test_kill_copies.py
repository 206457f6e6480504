"""Copies that are killed: what is at the target is a run, and the next try ends it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.checkpoint import open_run
from milepost.runs import (
    ensure_run,
    open_session,
    record_origin,
    scan,
    verify,
)
from milepost.stores import LocalStore
from milepost.testing import save_files

MIB = 1024 * 1024
NUM_KILLS = 12

COPY = "import sys; from milepost.cli.app import app; app(sys.argv[1:])"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four checkpoints of 40 MiB each."""
    store = LocalStore(tmp_path / "run")
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    for number in range(1, 5):
        files = {f"{n}.bin": os.urandom(20 * MIB) for n in "ab"}
        save_files(store, session, name=f"ep{number}", attempt=number, files=files)
    return tmp_path / "run"


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COPY, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.campaign
def test_a_killed_sync_leaves_a_run_and_goes_on(source: Path, tmp_path: Path) -> None:
    """Killed at random moments; each time a reader sees whole checkpoints, the newest first."""
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    target = tmp_path / "copy"
    names = [one.name for one in open_run(source).checkpoints()]
    num_killed = 0
    while num_killed < NUM_KILLS:
        process = start("sync", source, target)
        try:
            process.wait(0.2 + chance.random() * 1.2)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            num_killed += 1
        if (target / "run.json").exists():
            found = [one.name for one in scan(LocalStore(target)).lineage()]
            assert found == names[len(names) - len(found) :]
            for name in found:
                assert verify(LocalStore(target), name, "full").is_good
            if found == names:
                shutil.rmtree(target)
    assert start("sync", source, target, "--verify").wait(60) == 0
    for path in source.rglob("*.bin"):
        assert (target / path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.mark.campaign
def test_two_syncs_at_once_make_one_copy(source: Path, tmp_path: Path) -> None:
    """One of them may be refused; whatever is committed is whole."""
    target = tmp_path / "copy"
    both = [start("sync", source, target) for _ in range(2)]
    codes = sorted(one.wait(60) for one in both)
    assert codes[0] in (0, 2)
    view = scan(LocalStore(target))
    assert all(verify(LocalStore(target), one.name, "full").is_good for one in view.lineage())
    assert start("sync", source, target).wait(60) == 0
    assert len(scan(LocalStore(target)).lineage()) == 4
