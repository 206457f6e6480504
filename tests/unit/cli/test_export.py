"""``export``, and the other verbs on checkpoints that the engine wrote."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from milepost.checkpointer import Checkpointer


@pytest.fixture(params=["milepost", "torch"])
def trained(request, tmp_path):
    """A run of two checkpoints in each format, and the weights at its end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    folder = tmp_path / "trained"
    run = Checkpointer(
        folder, save_format=request.param, handle_signals=False, model=model, optimizer=optimizer
    )
    with run:
        for name in ("ep1", "ep2"):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            run.save(name, metrics={"loss": 1.0}).wait()
    return folder, model.state_dict()


def test_export_safetensors(milepost, trained, tmp_path):
    """Plain safetensors reads the weights."""
    folder, weights = trained
    said = milepost.json("export", folder, tmp_path / "w.safetensors", "--to", "safetensors")
    found = load_file(said["path"])
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert said["items"] == ["model"]


def test_export_torch(milepost, trained, tmp_path):
    """Plain torch reads the state, optimizers by the names of their parameters."""
    folder, weights = trained
    milepost("export", folder / "ep2", tmp_path / "all.pt", "--to", "torch")
    state = torch.load(tmp_path / "all.pt", weights_only=True)["state"]
    assert torch.equal(state["model"]["weight"], weights["weight"])
    assert list(state["optimizer"]["state"]) == ["weight", "bias"]
    milepost("export", folder, tmp_path / "all.pt", "--to", "torch", code=2)
    only = ("--only", "model", "--overwrite")
    milepost("export", folder, tmp_path / "all.pt", "--to", "torch", *only)
    assert list(torch.load(tmp_path / "all.pt")["state"]) == ["model"]


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_in_a_folder_the_file_is_called_after_the_checkpoint(milepost, trained, tmp_path, to):
    """Two exports into one folder must not meet."""
    folder, _ = trained
    ending = {"torch": "pt", "safetensors": "safetensors"}[to]
    target = tmp_path / "exports"
    target.mkdir()
    for place in (folder, folder / "ep1", folder / "ep2"):
        code = 2 if place.name == "ep2" else 0  # the newest of the run is there already
        milepost("export", place, target, "--to", to, code=code)
    assert sorted(path.name for path in target.iterdir()) == [f"ep1.{ending}", f"ep2.{ending}"]


def test_the_export_of_a_file_in_a_folder_is_called_after_it(milepost, tmp_path):
    """Whatever the ending of its compression."""
    (tmp_path / "exports").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "foreign.pt")
    milepost("export", tmp_path / "foreign.pt", tmp_path / "exports", "--to", "safetensors")
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["foreign.safetensors"]


def test_export_of_a_foreign_file(milepost, tmp_path):
    """Any ``.pt`` file in a known layout; one with code is refused."""
    torch.save({"module.w": torch.ones(2)}, tmp_path / "foreign.pt")
    target = tmp_path / "w.safetensors"
    milepost("export", tmp_path / "foreign.pt", target, "--to", "safetensors")
    assert torch.equal(load_file(target)["w"], torch.ones(2))
    torch.save(torch.nn.Linear(1, 1), tmp_path / "code.pt")
    result = milepost("export", tmp_path / "code.pt", tmp_path, "--to", "safetensors", code=2)
    assert "trust" in result.stderr


def test_export_refuses_damage(milepost, trained, tmp_path):
    """A damaged checkpoint must not live on under another name."""
    folder, _ = trained
    part = next(
        path
        for path in folder.rglob("*")
        if path.parent.name == "ep2" and path.name in ("ep2.pt", "model.safetensors")
    )
    data = bytearray(part.read_bytes())
    data[-40] ^= 1
    part.write_bytes(data)
    milepost("export", folder, tmp_path / "w", "--to", "safetensors", code=1)
    assert not (tmp_path / "w").exists()


def test_show_and_diff_work_on_both_formats(milepost, trained):
    """Single files have no headers; what is shown is the same."""
    folder, weights = trained
    tensors = milepost.json("show", folder, "--tensors")["tensors"]
    shown = {t["name"]: (t["dtype"], t["shape"]) for t in tensors if t["item"] == "model"}
    assert shown == {name: ("float32", list(w.shape)) for name, w in weights.items()}
    milepost("diff", folder / "ep1", folder / "ep1")
    found = milepost.json("diff", "--values", folder / "ep1", folder / "ep2", code=1)
    changes = {change["tensor"]: change for change in found["tensors"]}
    # The gradient adds up to 2 and momentum adds 0.9 of the first step: 0.1 * 2.9.
    assert changes["model/weight"]["max_abs"] == pytest.approx(0.29, abs=1e-5)
    assert "model/bias" in changes
