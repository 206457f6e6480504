"""Files in the spellings that Composer used over the years, restored into live objects."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from milepost.checkpoint import open_source
from milepost.checkpointer import Checkpointer
from milepost.convert.torch_file import torch_file_source
from milepost.state.rng import apply_rng
from milepost.state.source import load_item


def train():
    """Return a model and an optimizer after a few steps."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def rng_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.random.get_rng_state(),
    }


def write_oldest(path, model, optimizer):
    """v0.3: underscores, a flag for wrapped models, one RNG for each rank, the seed apart."""
    content = {
        "state": {
            "model": {f"module.{name}": value for name, value in model.state_dict().items()},
            "_is_model_ddp_wrapped": True,
            "_optimizers": {"AdamW": optimizer.state_dict()},
            "_schedulers": {"CosineAnnealingLR": {"last_epoch": 3}},
            "timer": {"TimerState": {}},
        },
        "rng": [{**rng_state(), "cuda": None}],
        "seed": 17,
    }
    torch.save(content, path)


def write_later(path, model, optimizer):
    """v0.5: no underscores, ``is_model_ddp``."""
    content = {
        "state": {
            "model": model.state_dict(),
            "is_model_ddp": False,
            "optimizers": {"AdamW": optimizer.state_dict()},
            "rank_zero_seed": 17,
        },
        "rng": [rng_state()],
    }
    torch.save(content, path)


@pytest.mark.parametrize("write", [write_oldest, write_later])
def test_model_optimizer_and_rng_come_back(tmp_path, write):
    """Weights, moments by name, the seed, and the random numbers that follow."""
    model, optimizer = train()
    write(tmp_path / "ep3.pt", model, optimizer)
    expected = (random.random(), np.random.rand(), torch.rand(3))

    torch.manual_seed(99)
    fresh = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2, bias=False)
    )
    live = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    restore_into(tmp_path, model=fresh, optimizers={"AdamW": live})

    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    before, after = optimizer.state_dict(), live.state_dict()
    assert after["param_groups"][0]["lr"] == 0.01
    for index, kept in before["state"].items():
        for key, value in kept.items():
            assert torch.equal(after["state"][index][key], value), (index, key)

    source = torch_file_source(tmp_path / "ep3.pt")
    assert load_item(source, "rank_zero_seed") == 17
    apply_rng(load_item(source, "rng")[0])
    found = (random.random(), np.random.rand(), torch.rand(3))
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])


def restore_into(tmp_path, **objects):
    """Restore tracked objects from the file, as a run that goes on from it does."""
    with Checkpointer(tmp_path / "new", handle_signals=False, **objects) as run:
        run.restore(str(tmp_path / "ep3.pt"), items=list(objects))


def test_an_optimizer_that_cannot_be_named_is_refused(tmp_path):
    """Two groups in an unknown order: the restore says so and changes nothing."""
    model, _ = train()
    groups = [{"params": [model[2].weight]}, {"params": list(model[:2].parameters()), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    write_later(tmp_path / "ep3.pt", model, optimizer)
    source = open_source(tmp_path / "ep3.pt")
    state = load_item(source, "optimizers")["AdamW"]
    assert list(state["state"]) == [0, 1, 2, 3, 4]
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="optimizers"):
        restore_into(tmp_path, model=model, optimizers={"AdamW": optimizer})
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
