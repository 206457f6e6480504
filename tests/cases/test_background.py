"""Saving in the background: what is saved, when it fails, and when the process ends."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import milepost as mp
from milepost.stores import LocalStore

SLOW_STORE = """
import sys, time, threading
import torch
import milepost as mp
from milepost.stores import LocalStore

class Box:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

def break_save(number, *, delay_s=0.0):
    "Make the given save of the process fail, after a while."
    original, count = LocalStore.create_writer, [0]
    def create_writer(self, key, size_bytes):
        if key.endswith("box.safetensors"):
            count[0] += 1
            time.sleep(delay_s)
            if count[0] == number:
                raise mp.StorageError("boom")
        return original(self, key, size_bytes)
    LocalStore.create_writer = create_writer
"""


class Box:
    """State of any kind."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


@pytest.fixture
def slow_writer(monkeypatch):
    """Let the writer begin only when the test says so."""
    import threading

    go = threading.Event()
    original = LocalStore.create_writer

    def create_writer(self, key, size_bytes):
        assert go.wait(30)
        return original(self, key, size_bytes)

    monkeypatch.setattr(LocalStore, "create_writer", create_writer)
    yield go
    go.set()


@pytest.mark.parametrize("is_shared", [False, True])
def test_h32_a_background_save_holds_the_values_of_the_call(tmp_path, slow_writer, is_shared):
    """Whatever changes after the call, tensors, numbers or containers, is not in the checkpoint."""
    big, step, words, nested = torch.ones(1000, 1000), torch.tensor(1.0), [1], {"a": {"b": 1}}
    state = {"big": big, "step": step, "words": words, "nested": nested}
    if is_shared:
        state["again"] = big
    with mp.Checkpointer(tmp_path, box=Box(state)) as run:
        pending = run.save("a")
        big.fill_(2)
        step += 1
        words.append(2)
        nested["a"]["b"] = 2
        nested["a"]["c"] = 3
        assert not pending.done()
        slow_writer.set()
        stored = pending.wait().load()["state"]["box"]
    assert torch.equal(stored["big"], torch.ones(1000, 1000))
    assert stored["step"].item() == 1.0
    assert stored["words"] == [1]
    assert stored["nested"] == {"a": {"b": 1}}
    if is_shared:
        assert stored["again"] is stored["big"]


def fail_once(monkeypatch, number):
    """Make the writing of one save fail."""
    original, count = LocalStore.create_writer, [0]

    def create_writer(self, key, size_bytes):
        if key.endswith("box.safetensors"):
            count[0] += 1
            if count[0] == number:
                raise mp.StorageError("boom")
        return original(self, key, size_bytes)

    monkeypatch.setattr(LocalStore, "create_writer", create_writer)


def test_h33_a_failure_in_the_background_reaches_the_next_save(tmp_path, monkeypatch):
    """A save that was thought to be there and is not is worse than an error."""
    fail_once(monkeypatch, 2)
    box = Box({"value": torch.zeros(4)})
    with mp.Checkpointer(tmp_path, keep=[mp.KeepLast(2)], box=box) as run:
        run.save("a").wait()
        run.save("b")
        run.last_save.check_done(30)
        with pytest.raises(OSError, match="boom"):
            run.save("c")
        run.save("d").wait()
    names = [one.name for one in mp.open_run(tmp_path).checkpoints()]
    assert names == ["a", "d"]
    for one in mp.open_run(tmp_path).checkpoints():
        assert torch.equal(one.load()["state"]["box"]["value"], torch.zeros(4))


@pytest.mark.parametrize("told_at", ["wait", "close"])
def test_h33_a_failure_of_the_last_save_reaches_the_end(tmp_path, monkeypatch, told_at):
    """There is no next save to tell it."""
    fail_once(monkeypatch, 3)
    run = mp.Checkpointer(tmp_path, box=Box({"value": torch.zeros(4)})).open()
    for name in "abc":
        run.save(name)
    with pytest.raises(OSError, match="boom"):
        run.wait() if told_at == "wait" else run.close()
    run.close()
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["a", "b"]
    assert mp.open_run(tmp_path).latest().verify().is_good


ENDINGS = {
    "with": "with mp.Checkpointer('runs', box=box) as run:\n    save(run)\n",
    "no with": "run = mp.Checkpointer('runs', box=box).open()\nsave(run)\n",
    "in a function": "def main():\n    save(mp.Checkpointer('runs', box=box).open())\nmain()\n"
    "import gc; gc.collect()\n",
    "exit": "with mp.Checkpointer('runs', box=box) as run:\n    save(run)\n    sys.exit(0)\n",
    "exit without with": "run = mp.Checkpointer('runs', box=box).open()\nsave(run)\nsys.exit(0)\n",
}


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_h33_the_process_does_not_end_well_when_its_last_save_failed(run_script, ending):
    """However it ends: nobody looks at a job that has ended with 0."""
    script = SLOW_STORE + (
        "break_save(2, delay_s=0.2)\n"
        "box = Box(torch.zeros(4))\n"
        "def save(run):\n    run.save('a').wait()\n    run.save('b')\n"
    )
    code, out, err = run_script(script + ENDINGS[ending])
    assert code != 0, (out, err)
    assert "boom" in err


def test_h33_the_caller_may_choose_to_be_only_warned(run_script):
    """Then the training goes on without this checkpoint, and says so."""
    script = SLOW_STORE + (
        "import logging; logging.basicConfig()\n"
        "break_save(2)\n"
        "run = mp.Checkpointer('runs', on_save_error='warn', box=Box(torch.zeros(4))).open()\n"
        "for name in 'abc':\n    run.save(name)\n"
        "run.wait()\n"
        "print([c.name for c in run.run.checkpoints()])\n"
        "run.save('d')\n"
    )
    code, out, err = run_script(script)
    assert code == 0, err
    assert "boom" in err
    assert "['a', 'c']" in out


@pytest.mark.parametrize("ending", ["main", "exit", "raise"])
@pytest.mark.parametrize("is_with", [True, False])
def test_h34_the_process_waits_for_the_save_in_flight(run_script, tmp_path, ending, is_with):
    """A process that ended well has its checkpoint; one that did not has it whole or not at all."""
    script = SLOW_STORE + "break_save(0, delay_s=1.0)\nbox = Box(torch.arange(5.0))\n"
    how = {"main": "pass", "exit": "sys.exit(0)", "raise": "raise RuntimeError('own')"}[ending]
    if is_with:
        script += f"with mp.Checkpointer('runs', box=box) as run:\n    run.save('a')\n    {how}\n"
    else:
        script += (
            f"def main():\n    mp.Checkpointer('runs', box=box).open().save('a')\nmain()\n{how}\n"
        )
    code, _, err = run_script(script)
    assert (code == 0) == (ending != "raise")
    assert ("own" in err) == (ending == "raise")
    stored = mp.open_run(tmp_path / "runs").get("a")
    assert stored.verify().is_good
    assert torch.equal(stored.load()["state"]["box"]["value"], torch.arange(5.0))
    assert "No such file" not in err


TRAIN = """
import os, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import milepost as mp
from milepost.stores import LocalStore

mode, folder = sys.argv[1], sys.argv[2]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=1, shuffle=True)

def handler(number, frame):
    print("own handler", number, flush=True)
signal.signal(signal.SIGTERM, handler)

class Killer(nn.Module):
    def forward(self, x):
        return x

def kill():
    os.kill(os.getpid(), signal.SIGTERM)

if mode == "save":
    original = LocalStore.create_writer
    def create_writer(self, key, size_bytes):
        if key.startswith("slow") and key.endswith("model.safetensors"):
            kill()
            time.sleep(1.0)
        return original(self, key, size_bytes)
    LocalStore.create_writer = create_writer

with mp.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader) as run:
    print("from", run.resumed_from, run.timer.batch, flush=True)
    for epoch in run.epochs(2):
        for (x,) in run.batches(loader):
            number = run.timer.batch
            optimizer.zero_grad()
            loss = model(x.unsqueeze(1)).square().mean()
            if mode in ("forward", "twice") and number == 4:
                kill()
                if mode == "twice":
                    kill()
            loss.backward()
            optimizer.step()
            if mode == "save" and number == 4:
                run.save("slow", wait=True)
        if mode == "evaluation" and epoch == 0:
            threading.Timer(0.3, kill).start()
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                model.eval()(torch.zeros(1, 1))
            model.train()
    torch.save(model.state_dict(), folder + ".pt")
print("done", signal.getsignal(signal.SIGTERM) is handler)
"""


@pytest.fixture(scope="module")
def straight_weights(tmp_path_factory, start_in):
    """The weights at the end of the same training, never asked to end."""
    folder = tmp_path_factory.mktemp("straight")
    code, _, err = start_in(folder, TRAIN, "never", "a").end()
    assert code == 0, err
    return torch.load(folder / "a.pt")


@pytest.mark.parametrize(
    ("mode", "saved_as"),
    [("forward", "ba5"), ("evaluation", "ep1"), ("save", "slow"), ("twice", "ba5")],
)
def test_h35_asked_to_end_the_process_saves_the_last_step_and_ends(
    run_script, tmp_path, straight_weights, mode, saved_as
):
    """Between two steps, once, with the documented exit code; the user's own handler is called."""
    began = time.monotonic()
    code, out, err = run_script(TRAIN, mode, "a")
    assert code == 128 + signal.SIGTERM, err
    assert out.count("own handler 15") == (2 if mode == "twice" else 1)
    assert time.monotonic() - began < 30
    run = mp.open_run(tmp_path / "a")
    assert [one.name for one in run.checkpoints()] == [saved_as]
    assert run.latest().verify().is_good
    batch = 12 if mode == "evaluation" else 5
    assert run.latest().time["batch"] == batch
    code, out, err = run_script(TRAIN, "never", "a")
    assert code == 0, err
    assert f"from {saved_as} {batch}" in out
    assert "done True" in out
    weights = torch.load(tmp_path / "a.pt")
    assert all(torch.equal(weights[name], straight_weights[name]) for name in weights)
