"""What a worker tells its launcher, and that it costs nothing without one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from milepost import liveness
from milepost.liveness import beat, flush_beat, note_commit, read_batch, read_commit


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MILEPOST_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setenv("MILEPOST_ATTEMPT", "2")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(liveness, "_pulse", liveness._Pulse())
    found = tmp_path / "attempt-2"
    found.mkdir()
    return found


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    """A training that nobody launched must leave no files about."""
    monkeypatch.delenv("MILEPOST_LAUNCH_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(liveness, "_pulse", liveness._Pulse())
    beat(1)
    flush_beat()
    note_commit("ep1", 1)
    assert list(tmp_path.iterdir()) == []


def test_beat_is_written_at_most_every_tenth_of_a_second(folder, monkeypatch):
    """A loop of 10,000 batches a second must not write as many files."""
    now_s = 50.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now_s)
    path = folder / "rank-3.beat"
    seen = []
    for number in range(10):
        beat(number)
        seen.append(read_batch(path))
        now_s += 0.04
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_last_beat_can_be_written_at_the_end(folder):
    """So that the number of lost batches is exact after an exception."""
    for number in range(5):
        beat(number)
    flush_beat()
    assert read_batch(folder / "rank-3.beat") == 4


def test_beat_without_a_number_is_a_beat(folder):
    """A loop may not count."""
    beat()
    assert (folder / "rank-3.beat").exists()
    assert read_batch(folder / "rank-3.beat") is None


def test_newest_commit_comes_back(folder):
    """And only that one."""
    path = folder / "rank-3.commit"
    assert read_commit(path) is None
    note_commit("ba10", 10)
    note_commit("mine")
    found = read_commit(path)
    assert (found.name, found.batch) == ("mine", None)
    assert [one.name for one in folder.iterdir()] == [path.name]


def test_folder_that_is_gone_ends_no_training(folder, caplog):
    """It is logged once; the launcher is there to help, not to be in the way."""
    folder.rmdir()
    note_commit("ba10", 10)
    note_commit("ba20", 20)
    assert len(caplog.records) == 1


def test_it_is_light():
    """Loaded by every loop; by a launcher that has no torch."""
    program = (
        "import json, sys, milepost.liveness, milepost.launch, milepost.launch.worker\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'rich', 'typer'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == []
