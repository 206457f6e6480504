"""``milepost consolidate``."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import milepost as mp
from milepost.cli.sizes import parse_size


@pytest.fixture
def trained(tmp_path):
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(tmp_path / "run", model=model) as run:
        run.save("a", wait=True)
    return tmp_path / "run", {name: one.clone() for name, one in model.state_dict().items()}


def test_it_makes_a_run_that_other_verbs_take(milepost, trained, tmp_path):
    """And prints where it is."""
    folder, weights = trained
    done = milepost("consolidate", folder, "--to", tmp_path / "new", "--memory", "128MiB")
    assert done.stdout.startswith(f"{tmp_path}/new/a (")
    milepost("verify", tmp_path / "new")
    milepost("diff", folder, tmp_path / "new")
    found = load_file(tmp_path / "new" / "a" / "model.safetensors")
    assert torch.equal(found["weight"], weights["weight"])


def test_it_writes_weights_and_says_so_as_json(milepost, trained, tmp_path):
    """Into a folder: called after the checkpoint."""
    folder, weights = trained
    found = milepost.json("consolidate", folder / "a", "--to", tmp_path, "--format", "safetensors")
    path = tmp_path / "a.safetensors"
    assert found == {"path": str(path), "bytes": path.stat().st_size, "format": "safetensors"}
    assert torch.equal(load_file(path)["bias"], weights["bias"])


def test_by_default_it_is_in_the_working_folder(milepost, trained, tmp_path, monkeypatch):
    """Under a name that says what it is."""
    folder, _ = trained
    monkeypatch.chdir(tmp_path)
    milepost("consolidate", folder)
    assert (tmp_path / "a-consolidated" / "a" / "manifest.json").is_file()
    milepost("consolidate", folder, code=2)
    milepost("consolidate", folder, "--format", "safetensors", "--name", "b")
    assert (tmp_path / "b.safetensors").is_file()


def test_sizes_are_understood_as_people_write_them(milepost, trained):
    """Powers of 1024, as memory is counted."""
    sizes = {"64MiB": 2**26, "64M": 2**26, "1.5G": 3 * 2**29, "2gb": 2**31, "100": 100}
    assert {text: parse_size(text) for text in sizes} == sizes
    milepost("consolidate", trained[0], "--memory", "much", code=2)
