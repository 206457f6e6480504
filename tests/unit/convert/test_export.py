"""Exported files, read by the programs they are made for."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from milepost.convert.export import export_checkpoint
from milepost.errors import ExistsError, MissingError, UnsupportedStateError, UsageError


def names(folder):
    return [path.name for path in folder.iterdir()]


def state(**items):
    return {"state": {"model": {"w": torch.arange(6.0).reshape(2, 3)}, **items}, "rng": []}


def test_torch_file_opens_without_running_code(tmp_path):
    """``weights_only`` is the test that a stranger would apply."""
    optimizers = {"SGD": {"state": {"w": {"m": torch.ones(2, 3)}}, "param_groups": []}}
    path = export_checkpoint(state(optimizers=optimizers), tmp_path / "a.pt", to="torch")
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["state"]["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(read["state"]["optimizers"]["SGD"]["state"]["w"]["m"], torch.ones(2, 3))
    assert read["rng"] == []


def test_safetensors_holds_plain_names_and_equal_bytes(tmp_path):
    """Every dtype the container has, scalars, empty and transposed tensors."""
    weights = {
        "f": torch.tensor([1.5, float("nan"), -0.0]),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "n": torch.tensor(7),
        "b": torch.tensor([True, False, True]),
        "e": torch.empty(0, 4),
        "t": torch.arange(6.0).reshape(2, 3).t(),
    }
    path = export_checkpoint({"state": {"model": weights}, "rng": []}, tmp_path, to="safetensors")
    assert path == tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(weights)
        for name, tensor in weights.items():
            read = file.get_tensor(name)
            assert read.dtype is tensor.dtype
            assert read.shape == tensor.shape
            raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (read, tensor)]
            assert torch.equal(*raw)


def test_safetensors_stores_tied_weights_once(tmp_path):
    """The metadata tells the second name, as other writers of this format do."""
    shared = torch.ones(2, 2)
    weights = {"embed": shared, "head": shared}
    path = export_checkpoint({"state": {"model": weights}}, tmp_path, to="safetensors")
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["embed"]
        assert file.metadata() == {"format": "pt", "head": "embed"}


def test_items_can_be_chosen(tmp_path):
    """Optimizers are often twice the size of the weights."""
    path = export_checkpoint(
        state(timer={"epoch": 1}), tmp_path / "a.pt", to="torch", items=["timer"]
    )
    assert torch.load(path)["state"] == {"timer": {"epoch": 1}}
    ema = {"w": torch.ones(1)}
    path = export_checkpoint(state(ema=ema), tmp_path, to="safetensors", items=["ema"])
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), ema["w"])


def test_nothing_is_overwritten_unasked(tmp_path):
    """A slip of the pen must not cost a file."""
    target = tmp_path / "a.pt"
    target.write_bytes(b"precious")
    with pytest.raises(ExistsError):
        export_checkpoint(state(), target, to="torch")
    assert target.read_bytes() == b"precious"
    export_checkpoint(state(), target, to="torch", overwrite=True)
    assert torch.load(target)["state"]["model"]["w"].shape == (2, 3)
    assert names(tmp_path) == ["a.pt"]


def test_only_a_plain_file_is_replaced(tmp_path):
    """Replacing a device or what a link leads by would break something else than a file."""
    (tmp_path / "real.pt").write_bytes(b"keep")
    (tmp_path / "link.pt").symlink_to("real.pt")
    (tmp_path / "dangling.pt").symlink_to("nowhere.pt")
    os.mkfifo(tmp_path / "fifo.pt")
    for name in ("link.pt", "dangling.pt", "fifo.pt"):
        with pytest.raises(ExistsError, match=f"{name} is "):
            export_checkpoint(state(), tmp_path / name, to="torch", overwrite=True)
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "real.pt").read_bytes() == b"keep"
    assert sorted(names(tmp_path)) == ["dangling.pt", "fifo.pt", "link.pt", "real.pt"]


@pytest.mark.parametrize("record", ["manifest.json", "attempt.json"])
@pytest.mark.parametrize("name", ["manifest.json", "attempt.json", "new.pt"])
def test_nothing_is_written_into_the_folder_of_a_checkpoint(tmp_path, record, name):
    """One that has lost its manifest counts no more."""
    (tmp_path / record).write_bytes(b"sealed")
    with pytest.raises(UsageError, match="folder of a checkpoint"):
        export_checkpoint(state(), tmp_path / name, to="torch", overwrite=True)
    assert names(tmp_path) == [record]
    assert (tmp_path / record).read_bytes() == b"sealed"


@pytest.mark.parametrize(
    ("items", "to", "error"),
    [
        (["nothing"], "torch", MissingError),
        (["model", "timer"], "safetensors", UsageError),
        (["timer"], "safetensors", UnsupportedStateError),
        (None, "onnx", UsageError),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, items, to, error):
    """Before a byte is written."""
    with pytest.raises(error):
        export_checkpoint(state(timer={"epoch": 1}), tmp_path, to=to, items=items)
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [object(), {1: {2: range(3)}}])
def test_torch_file_takes_plain_values_only(tmp_path, value):
    """What ``torch.load`` would refuse is refused when it is written."""
    with pytest.raises(UnsupportedStateError):
        export_checkpoint(state(extra=value), tmp_path / "a.pt", to="torch")
    assert names(tmp_path) == []


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """A full disk must not leave half a file under the name."""

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("milepost.convert.export.os.fsync", fail)
    with pytest.raises(OSError, match="ENOSPC"):
        export_checkpoint(state(), tmp_path / "a.pt", to="torch")
    assert names(tmp_path) == []


def test_folders_that_cannot_link_still_never_replace(tmp_path, monkeypatch):
    """Some mounts refuse hard links; the file gets its name all the same."""

    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("milepost.convert.export.posix.link_new", refuse)
    path = export_checkpoint(state(), tmp_path / "a.pt", to="torch")
    assert torch.load(path)["rng"] == []
    assert names(tmp_path) == ["a.pt"]
