"""One file per checkpoint: what people see, what torch.load reads, and what is repaired."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.stores import LocalStore
from milepost.testing.asserts import assert_equal_states

SUFFIXES = {None: ".pt", "gzip": ".pt.gz", "bzip2": ".pt.bz2", "lzma": ".pt.xz"}
OPENERS = {None: open, "gzip": gzip.open, "bzip2": bz2.open, "lzma": lzma.open}


class Box:
    """State of any kind."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def train(folder, *, epochs, seed=1, **options):
    """Train a little on numbers; the model has a member called module, tied weights, dropout."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = [torch.full((3, 2), float(n)) for n in range(4)]
    with mp.Checkpointer(
        folder,
        every="1ep",
        save_format="torch",
        model=model,
        optimizer=optimizer,
        loader=loader,
        **options,
    ) as run:
        for _ in run.epochs(epochs):
            for batch in run.batches(loader):
                optimizer.zero_grad()
                model["module"](batch).square().sum().backward()
                optimizer.step()
                run.log(loss=1.0)
    return dict(model.state_dict()), optimizer.state_dict(), run


@pytest.mark.parametrize("compression", list(SUFFIXES))
def test_people_see_one_file_for_each_checkpoint(tmp_path, compression):
    """Everything else is hidden; nothing is called latest."""
    train(tmp_path, epochs=2, save_compression=compression)
    suffix = SUFFIXES[compression]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".milepost", f"ep1{suffix}", f"ep2{suffix}"]
    assert not (tmp_path / ".milepost" / "latest").exists()
    with OPENERS[compression](tmp_path / f"ep2{suffix}", "rb") as file:
        value = torch.load(file, weights_only=True)
    assert set(value) == {"state", "rng"}
    assert {"model", "optimizer", "timer", "loader"} <= set(value["state"])
    assert list(value["state"]["model"]) == ["module.0.weight", "module.0.bias"]
    assert value["state"]["timer"]["epoch"] == 2
    assert len(value["rng"]) == 1
    assert set(value["rng"][0]) == {"python", "numpy", "torch", "accelerator"}


@pytest.mark.parametrize("compression", list(SUFFIXES))
def test_a_run_of_single_files_resumes_exactly(tmp_path, compression):
    """The same bytes as without the stop, and as in the other format."""
    straight = train(tmp_path / "straight", epochs=4, save_compression=compression)
    train(tmp_path / "a", epochs=2, save_compression=compression)
    resumed = train(tmp_path / "a", epochs=4, seed=9, save_compression=compression)
    assert resumed[2].resumed_from == "ep2"
    assert_equal_states(resumed[0], straight[0])
    assert_equal_states(resumed[1], straight[1])


def test_state_comes_back_as_it_was_whatever_it_is_called(tmp_path):
    """Names that mean something in foreign files are plain names in ours."""
    tied = torch.arange(4.0)
    boxes = {
        "_private": Box({"x": 1}),
        "is_model_ddp": Box({"flag": (True, None)}),
        "seed": Box({"s": 1.5}),
        "box": Box({"a": tied, "b": tied, "t": (1, [2]), 3: {"k": {4, 5}}, "c": 1 + 2j}),
        "model": nn.ModuleDict({"module": nn.Linear(1, 1)}),
    }
    with mp.Checkpointer(tmp_path, save_format="torch", **boxes) as run:
        run.save("a", wait=True)
    fresh = {name: Box() for name in boxes if name != "model"}
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    with mp.Checkpointer(tmp_path, save_format="torch", model=model, **fresh) as run:
        assert run.load_report.is_exact
    for name, box in fresh.items():
        assert_equal_states(box.value, boxes[name].value)
    assert fresh["box"].value["a"] is fresh["box"].value["b"]
    assert torch.equal(model["module"].weight, boxes["model"]["module"].weight)


def test_retention_removes_both_names(tmp_path):
    """A hidden twin would keep the room of a checkpoint that nobody sees any more."""
    train(tmp_path, epochs=4, keep=[mp.KeepLast(2)])
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["ep3.pt", "ep4.pt"]
    hidden = {path.name for path in (tmp_path / ".milepost").iterdir()}
    assert hidden == {"run.json", "sessions", "ep3", "ep4"}
    assert (tmp_path / "ep4.pt").stat().st_nlink == 2


def test_a_file_of_somebody_else_is_never_replaced_and_never_removed(tmp_path):
    """A name that was taken before is left alone, by saving and by retention."""
    (tmp_path / "ep1.pt").write_text("mine")
    (tmp_path / "ep2.pt.gz").write_text("mine too")
    train(tmp_path, epochs=3, keep=[mp.KeepLast(1)])
    assert (tmp_path / "ep1.pt").read_text() == "mine"
    assert (tmp_path / "ep2.pt.gz").read_text() == "mine too"
    assert not (tmp_path / "ep2.pt").exists()
    assert (tmp_path / "ep3.pt").exists()


def test_a_missing_visible_name_is_made_up_for(tmp_path, monkeypatch):
    """The checkpoint counts from the commit on; the next session gives it its name."""

    def stop(self, key, new_key):
        raise mp.StorageError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "link", stop)
        train(tmp_path, epochs=1)
    assert not (tmp_path / "ep1.pt").exists()
    train(tmp_path, epochs=1, seed=3)
    assert torch.load(tmp_path / "ep1.pt", weights_only=True)["state"]["timer"]["epoch"] == 1


def test_the_visible_name_is_a_way_to_the_checkpoint(tmp_path):
    """What people see is what they pass on."""
    model, _, _ = train(tmp_path, epochs=2)
    run = mp.open_run(tmp_path)
    assert [one.name for one in run.checkpoints()] == ["ep1", "ep2"]
    assert run.latest().metrics == {"loss": 1.0}
    assert run.latest().verify().is_good
    fresh = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))})
    optimizer = torch.optim.Adam(fresh.parameters(), lr=0.1)
    with mp.Checkpointer(tmp_path / "other", model=fresh, optimizer=optimizer) as other:
        other.restore(tmp_path / "ep2.pt", items=["model", "optimizer"])
    assert_equal_states(dict(fresh.state_dict()), model)


def test_what_torch_would_have_to_run_code_for_is_refused(tmp_path):
    """The error names the path; the other format takes it."""
    from collections import deque

    box = Box({"deep": [deque([1])]})
    with mp.Checkpointer(tmp_path / "torch", save_format="torch", box=box) as run:
        pending = run.save("a")
        with pytest.raises(mp.UnsupportedStateError, match="deque") as caught:
            pending.wait()
        assert "['deep'][0]" in str(caught.value)
    with mp.Checkpointer(tmp_path / "own", box=box) as run:
        assert run.save("a").wait().load()["state"]["box"]["deep"][0] == deque([1])


@pytest.mark.parametrize(("bits", "is_stored"), [(2039, True), (2040, False), (20_000, False)])
def test_an_int_that_torch_would_not_read_is_refused(tmp_path, bits, is_stored):
    """A checkpoint that is committed can be loaded, with torch alone."""
    box = Box({"deep": [(1 << bits) - 1]})
    with mp.Checkpointer(tmp_path, save_format="torch", box=box) as run:
        pending = run.save("a")
        if is_stored:
            state = pending.wait().load()["state"]
            assert state["box"]["deep"] == [(1 << bits) - 1]
            assert torch.load(tmp_path / "a.pt", weights_only=True)["state"]["box"] == state["box"]
        else:
            with pytest.raises(mp.UnsupportedStateError, match=r"\['deep'\]\[0\].*bits"):
                pending.wait()


@pytest.mark.parametrize("damage", ["flip", "cut", "code"])
def test_a_damaged_single_file_is_passed_over(tmp_path, caplog, damage):
    """And one with code in it is not even looked at: its checksum does not match."""
    train(tmp_path, epochs=2)
    path = tmp_path / ".milepost" / "ep2" / "ep2.pt"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[-1:]
    else:
        data = bytearray(pickle.dumps(Touch(str(tmp_path / "canary"))))
    path.unlink()
    path.write_bytes(data)
    _, _, run = train(tmp_path, epochs=1, seed=4)
    assert run.resumed_from == "ep1"
    assert "ep2" in caplog.text
    assert not (tmp_path / "canary").exists()


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_the_two_formats_do_not_mix_in_one_run(tmp_path):
    """A reader would find half of the checkpoints."""
    train(tmp_path / "torch", epochs=1)
    with pytest.raises(mp.UsageError, match="save_format='torch'"):
        mp.Checkpointer(tmp_path / "torch", box=Box(1)).open()
    with mp.Checkpointer(tmp_path / "own", box=Box(1)) as run:
        run.save("a", wait=True)
    with pytest.raises(mp.UsageError, match="save_format='milepost'"):
        mp.Checkpointer(tmp_path / "own", save_format="torch", box=Box(1)).open()
    with pytest.raises(mp.UsageError, match="does not work with"):
        mp.Checkpointer(tmp_path / "own", save_compression="gzip")
    with pytest.raises(mp.UsageError, match="zip"):
        mp.Checkpointer(tmp_path / "own", save_format="torch", save_compression="zip")


def test_a_checkpoint_that_is_being_read_keeps_its_visible_name(tmp_path):
    """Retention spares it, and whoever looks at the folder must not believe that it is gone."""
    model = nn.Linear(2, 2)
    with mp.Checkpointer(tmp_path, save_format="torch", keep=mp.KeepLast(1), model=model) as run:
        run.save("a", wait=True)
        with mp.open_run(tmp_path).get("a").as_directory():
            run.save("b", wait=True)
            assert sorted(one.name for one in tmp_path.glob("*.pt")) == ["a.pt", "b.pt"]
        run.save("c", wait=True)
        assert sorted(one.name for one in tmp_path.glob("*.pt")) == ["c.pt"]
