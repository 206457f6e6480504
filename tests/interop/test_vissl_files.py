"""Weights from files of VISSL, by its own layout."""

from __future__ import annotations

import torch

from milepost.convert.torch_file import torch_file_source
from milepost.state.model import load_weights


class Model(torch.nn.Module):
    """A trunk and a list of heads, named as in that library."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 2)])


def write(path, model):
    content = {
        "phase_idx": 4,
        "iteration": 100,
        "train_phase_idx": 2,
        "loss": 0.25,
        "iteration_num": 10,
        "type": "consolidated",
        "classy_state_dict": {
            "train": True,
            "base_model": {
                "model": {
                    "trunk": model.trunk.state_dict(),
                    "heads": model.heads.state_dict(),
                },
                "meta": {"trunk": {}, "heads": {}},
            },
            "optimizer": {"optim": {"state": {}, "param_groups": []}},
            "num_updates": 100,
        },
    }
    torch.save(content, path)


def test_weights_load_into_a_model(tmp_path):
    """Every weight, and nothing else: the other fields belong to the other library."""
    torch.manual_seed(1)
    model, fresh = Model(), Model()
    write(tmp_path / "model_phase4.torch", model)
    source = torch_file_source(tmp_path / "model_phase4.torch")
    assert list(source.trees) == ["model"]
    report = load_weights(source, "model", fresh, strict=True)
    assert report.is_exact
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
