"""Kills, full disks and rotation: what is there afterwards, and what resume picks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import milepost as mp
from milepost.stores import LocalStore

WRITER = """
import sys, threading, time
import torch
import milepost as mp
from milepost.stores import LocalStore, blocks

class Box:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

folder, where = sys.argv[1:]
box = Box(torch.full((16_000_000,), 10.0))  # 64 MB
run = mp.Checkpointer(folder, box=box, handle_signals=False).open()
for _ in range(10):
    run.step()
run.save(wait=True)

def stop():
    open("now", "w").close()
    time.sleep(100)

count = [0]
def stop_before(cls, name, matches):
    original = getattr(cls, name)
    def method(self, *arguments):
        if matches(*arguments):
            stop()
        return original(self, *arguments)
    setattr(cls, name, method)

def is_nth(*_):
    count[0] += 1
    return count[0] == int(where)

if where.isdecimal():
    stop_before(blocks.LocalWriter, "write_at", is_nth)
elif where == "close":
    stop_before(blocks.LocalWriter, "close", lambda: True)
elif where == "commit":
    stop_before(LocalStore, "put_new", lambda key, _: key.endswith("manifest.json"))
else:
    stop_before(LocalStore, "create_writer", lambda key, _: key.endswith("index.json"))
for _ in range(10):
    run.step()
box.value.fill_(20.0)
print("saving", flush=True)
run.save(wait=True)
print("saved", flush=True)
"""


class Box:
    """One value that is saved."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def wait_until(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("where", ["1", "3", "8", "create", "close", "commit"])
def test_h20_a_kill_in_the_middle_of_a_save_costs_that_save_only(start_script, tmp_path, where):
    """The one before is whole and is gone on from; the rest of the killed one is removed."""
    folder = tmp_path / "run"
    process = start_script(WRITER, str(folder), where)
    wait_until((tmp_path / "now").exists)
    os.kill(process.pid, signal.SIGKILL)
    code, out, _ = process.end()
    assert code == -signal.SIGKILL
    assert "saved" not in out
    assert (folder / "ba20").exists()
    box = Box(torch.zeros(16_000_000))
    with mp.Checkpointer(folder, box=box) as run:
        assert run.resumed_from == "ba10"
        assert torch.equal(box.value, torch.full((16_000_000,), 10.0))
        assert [found.name for found in run.run.view.found] == ["ba10"]
        for _ in range(10):
            run.step()
        box.value.fill_(20.0)
        assert run.save().wait().name == "ba20"
    assert mp.open_run(folder).latest().verify().is_good
    assert mp.open_run(folder).latest().load()["state"]["box"]["value"][0] == 20.0
    parts = [path for path in folder.rglob("*.safetensors") if "timer" not in path.name]
    folders = {path.relative_to(folder).parts[0] for path in parts}
    assert folders == {"ba10", "ba20"}
    assert not list(folder.rglob(".mp*"))


def test_h21_a_full_disk_fails_the_save_and_nothing_else(run_script, tmp_path):
    """The error names the target; the earlier one stays, no half file does; then it goes on.

    The limit on the size of a file stands in for a full disk: the system refuses the write.
    """
    code, out, err = run_script(
        """
import resource
import torch
import milepost as mp

class Box:
    value = torch.ones(750_000)  # 3 MB
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

box = Box()
with mp.Checkpointer("run", keep=[mp.KeepLast(1)], box=box) as run:
    run.save("one", wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
    box.value = torch.ones(1_250_000)  # 5 MB
    try:
        run.save("two", wait=True)
    except mp.NoSpaceError as error:
        print("refused", isinstance(error, OSError), error)
    latest = mp.open_run("run").latest()
    print("latest", latest.name, latest.verify().is_good)
    import os
    print("left", sorted(os.listdir("run")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.save("three", wait=True)
print("names", [c.name for c in mp.open_run("run").checkpoints()])
"""
    )
    assert code == 0, err
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["refused"].startswith("True")
    assert str(tmp_path / "run/two") in lines["refused"]
    assert lines["latest"] == "one True"
    assert "two" not in lines["left"]
    assert lines["names"] == "['three']"


def test_h21_a_full_file_system_too(tmp_path):
    """The room is reserved when a file is made, so that the end of the room is noticed at once."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=8m tmpfs {mount} 2>/dev/null") != 0:
        pytest.skip("no small file system can be mounted here")
    try:
        box = Box(torch.full((1_250_000,), 1.0))  # 5 MB
        with mp.Checkpointer(mount / "run", keep=[mp.KeepLast(1)], box=box) as run:
            run.save("one", wait=True)
            box.value.fill_(2)
            with pytest.raises(mp.NoSpaceError, match="two"):
                run.save("two", wait=True)
            assert not list(mount.glob("run/two*"))
            assert mp.open_run(mount / "run").latest().verify().is_good
            box.value = torch.full((500_000,), 3.0)  # room for this one beside the first
            run.save("three", wait=True)
        names = [one.name for one in mp.open_run(mount / "run").checkpoints()]
        assert names == ["three"]
    finally:
        assert os.system(f"umount {mount}") == 0


class Breaking:
    """State whose capture fails once, after the tensor of the item before it."""

    def __init__(self):
        self.is_broken = False

    def state_dict(self):
        if self.is_broken:
            raise RuntimeError("cannot tell")
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("how", ["capture", "write"])
def test_h22_rotation_never_comes_before_the_new_one(tmp_path, monkeypatch, how):
    """With one kept and a save that fails, the one there was is still there."""
    box, breaking = Box(torch.arange(4.0)), Breaking()
    with mp.Checkpointer(tmp_path, keep=[mp.KeepLast(1)], box=box, breaking=breaking) as run:
        run.save("one", wait=True)
        if how == "capture":
            breaking.is_broken = True
            with pytest.raises(RuntimeError, match="cannot tell"):
                run.save("two", wait=True)
            breaking.is_broken = False
        else:
            with monkeypatch.context() as patch:
                patch.setattr(LocalStore, "sync_folder", refuse)
                with pytest.raises(mp.StorageError, match="boom"):
                    run.save("two", wait=True)
        found = mp.open_run(tmp_path)
        assert [one.name for one in found.checkpoints()] == ["one"]
        assert torch.equal(found.latest().load()["state"]["box"]["value"], torch.arange(4.0))
        run.save("three", wait=True)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["three"]
    assert not list(tmp_path.glob("one*"))


def refuse(self, folder):
    raise mp.StorageError("boom")


@pytest.mark.parametrize("trouble", ["nothing", "clock", "neighbours"])
def test_h23_rotation_goes_by_order_and_not_by_names_or_clocks(tmp_path, trouble):
    """10000 sorts before 9000 as text, and a copy or an upload moves every time stamp."""
    if trouble == "neighbours":
        (tmp_path / "checkpoint-old").mkdir()
        (tmp_path / "checkpoint-old" / "x").write_text("mine")
        (tmp_path / "checkpoint-12x").write_text("mine")
    with mp.Checkpointer(tmp_path, keep=[mp.KeepLast(3)], box=Box(torch.ones(1))) as run:
        for step in (8000, 9000, 10000, 11000):
            if step == 11000 and trouble == "clock":
                later = time.time() + 3600
                for path in (tmp_path / "8000").iterdir():
                    os.utime(path, (later, later))
            run.save(str(step), wait=True)
    names = [one.name for one in mp.open_run(tmp_path).checkpoints()]
    assert names == ["9000", "10000", "11000"]
    assert not (tmp_path / "8000").exists()
    if trouble == "neighbours":
        assert (tmp_path / "checkpoint-old" / "x").read_text() == "mine"
        assert (tmp_path / "checkpoint-12x").read_text() == "mine"


def crash_at_step_7(folder, *, first_attempt):
    """Count to 10 in steps of a batch, saving every 2; the first attempt breaks at step 7."""
    weight = torch.zeros(1)
    scores = {2: 5.0, 4: 4.0, 6: 3.0, 8: 2.0, 10: 1.0}
    box = Box(weight)
    keep = [mp.KeepBest(2, "score", "max"), mp.KeepLast(1)]
    with mp.Checkpointer(folder, every="2ba", keep=keep, box=box) as run:
        begun_at = (run.resumed_from, box.value.item())
        while run.timer.batch < 10:
            if first_attempt and run.timer.batch == 6:
                raise RuntimeError("step 7")
            box.value += 1
            run.log(score=scores.get(run.timer.batch + 1, 0.0))
            run.step()
    return begun_at, box.value.item()


@pytest.mark.parametrize("newest_is_damaged", [False, True])
def test_h36_recovery_goes_on_from_the_newest_and_not_from_the_best(
    tmp_path, caplog, newest_is_damaged
):
    """From the best, or from the pretrained weights, a job that crashes would never get on."""
    with pytest.raises(RuntimeError, match="step 7"):
        crash_at_step_7(tmp_path, first_attempt=True)
    if newest_is_damaged:
        (tmp_path / "ba6" / "box.safetensors").unlink()
    (name, value), last = crash_at_step_7(tmp_path, first_attempt=False)
    assert (name, value) == (("ba4", 4.0) if newest_is_damaged else ("ba6", 6.0))
    assert last == 10.0
    assert len(mp.open_run(tmp_path).view.sessions) == 2
    assert ("ba6" in caplog.text) == newest_is_damaged
