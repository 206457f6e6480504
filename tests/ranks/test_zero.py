"""Optimizers whose state is partitioned among the ranks: each saves what it has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.testing.ranks import run_ranks

BUILD = """
    import hashlib
    import milepost as mp
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def build(views=False):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 1))
        plain[3].weight.requires_grad_(False)
        model = DistributedDataParallel(plain)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "lr": 0.1}, {"params": trained[3:], "lr": 0.05}]
        optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, parameters_as_bucket_view=views, weight_decay=0.2
        )
        return plain, model, optimizer

    def step(model, optimizer, scheduler, seed):
        torch.manual_seed(seed)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def digest(tensor):
        return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()

    def state_of(plain, optimizer):
        names = {p: name for name, p in plain.named_parameters()}
        found = {name: digest(p) for name, p in plain.named_parameters()}
        for p, state in optimizer.optim.state.items():
            found.update({f"{names[p]}/{key}": digest(v) for key, v in state.items()})
        return found

    def train(folder, first, last, views=False, **options):
        plain, model, optimizer = build(views)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with mp.Checkpointer(folder, **objects, **options) as run:
            before = state_of(plain, optimizer)
            for number in range(first, last):
                step(model, optimizer, scheduler, number)
                run.step(num_samples=4)
            if last > first:
                run.save(wait=True)
            rates = [group["lr"] for group in optimizer.param_groups]
            inner = [group["lr"] for group in optimizer.optim.param_groups]
            assert rates == inner or last > first
            return {"before": before, "after": state_of(plain, optimizer), "rates": rates}
"""


def alone() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 1)
    )
    model[3].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:]}]
    return model, torch.optim.AdamW(groups, lr=9.0)


def bytes_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def test_zero_goes_on_on_any_number_of_ranks_and_as_a_plain_optimizer(tmp_path: Path) -> None:
    """The state is that of the moment of the save, without a consolidation on one rank (H13)."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    body = f"""
    straight = train({a!r}, 0, 4)
    first = train({b!r}, 0, 2)
    second = train({b!r}, 2, 4, resume="must", views=True)
    train({b!r} + "-whole", 0, 2, sharding="consolidated")
    give(straight=straight, first=first, second=second)
    """
    two = run_ranks(BUILD + body, 2)
    assert two[0]["first"]["after"] != two[0]["straight"]["after"]
    assert set(two[0]["first"]["after"]) != set(two[1]["first"]["after"])
    for one in two:
        assert one["second"]["before"] == one["first"]["after"]
        assert one["second"]["after"] == one["straight"]["after"]
        assert one["second"]["rates"] == one["straight"]["rates"] == [0.025, 0.0125]
    saved = two[0]["first"]["after"] | two[1]["first"]["after"]

    whole = mp.open_run(b + "-whole").get("ba2").load(["optimizer"])
    assert_equal_states(whole, mp.open_run(b).get("ba2").load(["optimizer"]))

    # A plain AdamW in one process: the same bits, each with its parameter.
    model, optimizer = alone()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    checkpoint = mp.open_run(b).get("ba2")
    assert checkpoint.verify(level="full").is_good
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with mp.Checkpointer(c, **objects) as run:
        run.restore(checkpoint)
        names = {p: name for name, p in model.named_parameters()}
        found = {name: bytes_of(p) for name, p in model.named_parameters()}
        for p, state in optimizer.state.items():
            found.update({f"{names[p]}/{key}": bytes_of(v) for key, v in state.items()})
        assert found == saved
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025]
        run.save("plain", wait=True)

    # On three ranks: from two ranks' partition, and from the plain optimizer.
    body = f"""
    give(
        zero=train({b!r}, 0, 0, resume="must"),
        plain=train({c!r}, 0, 0, resume="must"),
    )
    """
    newest = two[0]["second"]["after"] | two[1]["second"]["after"]
    three = run_ranks(BUILD + body, 3)
    for kind, expected in (("zero", newest), ("plain", saved)):
        together: dict[str, str] = {}
        for one in three:
            together |= one[kind]["before"]
        assert together == expected
        weights = {name for name in expected if "/" not in name}
        assert all(weights <= set(one[kind]["before"]) for one in three)
        assert all(set(one[kind]["before"]) < set(expected) for one in three)
