"""``import``, and what it brought in taken out again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import milepost as mp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 4}


@pytest.fixture
def folder(tmp_path):
    """A folder of torch's own."""
    dcp.save(STATE, checkpoint_id=tmp_path / "step-4")
    return tmp_path / "step-4"


def test_import_makes_a_run(milepost, folder, tmp_path):
    """Of one checkpoint, which is called after the folder."""
    said = milepost.json("import", folder, tmp_path / "run")
    assert said["items"] == ["model", "step"]
    assert said["url"].endswith("/run/step-4")
    assert mp.open_run(tmp_path / "run").get("step-4").load()["state"]["step"] == 4
    milepost("verify", tmp_path / "run", code=0)


def test_import_chooses_items_and_a_name(milepost, folder, tmp_path):
    """As export does."""
    milepost("import", folder, tmp_path / "run", "--name", "x", "--only", "model")
    assert mp.open_run(tmp_path / "run").get("x").manifest.items == ("model",)
    milepost("import", folder, tmp_path / "run", code=2)  # the run has a checkpoint
    milepost("import", tmp_path / "nothing", tmp_path / "other", code=3)


def test_export_to_a_folder_for_dcp(milepost, folder, tmp_path):
    """Torch loads it, and nothing that is there is replaced."""
    milepost("import", folder, tmp_path / "run")
    said = milepost.json("export", tmp_path / "run", tmp_path / "out", "--to", "dcp")
    assert said["path"] == str(tmp_path / "out")
    target = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "out")
    assert target["model"]["w"].equal(STATE["model"]["w"])
    assert target["step"] == 4
    milepost("export", tmp_path / "run", tmp_path / "out", "--to", "dcp", code=2)
    milepost("export", tmp_path / "run", tmp_path / "o", "--to", "dcp", "--overwrite", code=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "run", "step-4"]


def test_export_takes_a_folder_of_dcp_as_it_is(milepost, folder, tmp_path):
    """To plain safetensors in one step."""
    milepost("export", folder, tmp_path / "w.safetensors", "--to", "safetensors")
    assert load_file(tmp_path / "w.safetensors")["w"].equal(STATE["model"]["w"])
