"""Groups: dicts of objects that are tracked under one name, and may change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import milepost as mp


def test_a_group_is_saved_with_the_members_that_it_has(tmp_path: Path) -> None:
    """One that was replaced, added or taken out since it was tracked, too."""
    nets = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)}
    with mp.Checkpointer(tmp_path, nets=nets) as run:
        run.save("first", wait=True)
        nets["b"] = nn.Linear(3, 3)
        nets["d"] = nn.Linear(4, 4)
        del nets["a"]
        saved = run.save("second").wait()
    found = saved.load()["state"]["nets"]
    assert set(found) == {"b", "c", "d"}
    for name, net in nets.items():
        assert torch.equal(found[name]["weight"], net.weight)
    live = {name: nn.Linear(*net.weight.shape) for name, net in nets.items()}
    with mp.Checkpointer(tmp_path, nets=live):
        pass
    assert all(torch.equal(live[name].weight, nets[name].weight) for name in nets)


def test_gradients_of_an_optimizer_that_joined_a_group_are_saved(tmp_path: Path) -> None:
    """It is watched from the first save on that sees it."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = {"first": torch.optim.SGD(first.parameters(), lr=0.1)}
    with mp.Checkpointer(
        tmp_path, nets={"first": first, "second": second}, optimizers=optimizers
    ) as run:
        optimizers["second"] = torch.optim.SGD(second.parameters(), lr=0.1)
        run.save("seen", wait=True)
        for count, batch in enumerate(run.batches(DataLoader(torch.ones(3, 2)))):
            second(batch).sum().backward()
            if count == 1:
                break
        saved = run.save("b").wait()
    assert set(saved.load()["state"]["gradients"]) == {"nets/second/weight", "nets/second/bias"}


def test_a_group_within_a_group_is_refused(tmp_path: Path) -> None:
    """Its gradients and modes would be left out."""
    with pytest.raises(mp.UsageError, match="is a group within a group"):
        mp.Checkpointer(tmp_path, everything={"nets": {"a": nn.Linear(2, 2)}})


def test_two_loaders_at_once_are_refused(tmp_path: Path) -> None:
    """A step would count as two batches, and a resume would lose one."""
    loaders = [DataLoader(torch.ones(4, 2)) for _ in range(2)]
    with mp.Checkpointer(tmp_path, model=nn.Linear(2, 2), a=loaders[0], b=loaders[1]) as run:
        with pytest.raises(mp.UsageError, match="would count as"):
            for _ in zip(*map(run.batches, loaders), strict=True):
                pass
        for loader in loaders:
            for _ in run.batches(loader):
                break
        assert run.timer.batch == 0
