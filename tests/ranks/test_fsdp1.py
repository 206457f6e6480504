"""Modules that flatten their parameters: what each rank has of them, by name, in any layout."""

from __future__ import annotations

import hashlib
import textwrap
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost.testing.ranks import run_ranks

BUILD = """
    import hashlib
    import milepost as mp
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 7)
            self.norm = nn.BatchNorm1d(7)
            self.block = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7, bias=False))
            self.head = nn.Linear(7, 2)
            self.tied = nn.Linear(7, 2, bias=False)
            self.tied.weight = self.head.weight

        def forward(self, x):
            x = self.norm(self.first(x))
            return self.head(x + self.block(x)) * self.tied(x)

    def build(layout):
        net = model = Net()
        kind, _, option = layout.partition("-")
        if kind == "fsdp1":
            strategy = {
                "flat": ShardingStrategy.FULL_SHARD,
                "orig": ShardingStrategy.FULL_SHARD,
                "grad": ShardingStrategy.SHARD_GRAD_OP,
                "none": ShardingStrategy.NO_SHARD,
            }[option]
            model = FSDP(
                net,
                use_orig_params=option != "flat",
                sharding_strategy=strategy,
                auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
                device_id=torch.device("cpu"),
            )
        elif kind == "ddp":
            model = DistributedDataParallel(net)
        elif kind == "fsdp2":
            fully_shard(net.block)
            fully_shard(net)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(folder, layout, first, last, resume="auto"):
        model, optimizer = build(layout)
        with mp.Checkpointer(folder, model=model, optimizer=optimizer, resume=resume) as run:
            for number in range(first, last):
                step(model, optimizer, number)
                run.step(num_samples=4)
            run.save(f"{layout}-{last}", wait=True)
"""

LEAVE = """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
"""


def contents(folder: str, name: str) -> dict[str, str]:
    """Return a digest of everything in a checkpoint, read as a plain state."""
    state = mp.open_run(folder).get(name).load(["model", "optimizer"])["state"]
    found = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[path] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
        elif isinstance(value, dict):
            for key, one in value.items():
                walk(f"{path}/{key}", one)
        elif isinstance(value, list):
            # A flat parameter stands for several, which then come together.
            value = sorted(value) if path.endswith("/params") else value
            for index, one in enumerate(value):
                walk(f"{path}/{index}", one)
        else:
            found[path] = repr(value)

    walk("", state)
    return found


def test_fsdp1_goes_on_as_anything_and_anything_as_fsdp1(tmp_path: Path) -> None:
    """Nothing is gathered, names are those of the plain model, and no bit is lost."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    body = f"""
    for kind in ("flat", "orig"):
        train({a!r} + kind, f"fsdp1-{{kind}}", 0, 4)
        train({b!r} + kind, f"fsdp1-{{kind}}", 0, 2)
        train({b!r} + kind, f"fsdp1-{{kind}}", 2, 4)
    # From flat to each original parameter, and on.
    train({b!r} + "flat", "fsdp1-orig", 4, 4)
    train({b!r} + "flat", "fsdp2", 4, 4)
    train({b!r} + "flat", "fsdp1-grad", 4, 4)
    # One rank writes it whole.
    model, optimizer = build("fsdp1-flat")
    objects = {{"model": model, "optimizer": optimizer, "sharding": "consolidated"}}
    with mp.Checkpointer({c!r} + "whole", **objects) as run:
        run.restore({b!r} + "flat/fsdp1-flat-4")
        run.save("whole", wait=True)
    # Gathered weights that are older than a restore must not be used any more.
    model, optimizer = build("fsdp1-grad")
    model.eval()
    with mp.Checkpointer({c!r}, model=model, optimizer=optimizer) as run:
        with torch.no_grad():
            before = model(torch.ones(3, 6))
            run.restore({b!r} + "flat/fsdp1-flat-4")
            model.eval()  # it was saved while it trained
            after = model(torch.ones(3, 6))
            give(before=before.tolist(), after=after.tolist())
    """
    two = run_ranks(BUILD + body + LEAVE, 2)
    for kind in ("flat", "orig"):
        straight = contents(a + kind, f"fsdp1-{kind}-4")
        assert contents(b + kind, f"fsdp1-{kind}-4") == straight
        assert mp.open_run(b + kind).get(f"fsdp1-{kind}-4").verify(level="full").is_good
    expected = contents(b + "flat", "fsdp1-flat-4")
    for name in ("fsdp1-orig-4", "fsdp2-4", "fsdp1-grad-4"):
        assert contents(b + "flat", name) == expected, name

    assert contents(c + "whole", "whole") == expected

    # One process, a plain model.
    space: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(BUILD), space)
    model, optimizer = space["build"]("solo")
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    loaded = mp.open_run(b + "flat").get("fsdp1-flat-4").load(["model"])["state"]["model"]
    assert {name: value.shape for name, value in loaded.items()} == shapes
    with mp.Checkpointer(c, model=model, optimizer=optimizer) as run:
        run.restore(b + "flat/fsdp1-grad-4")
        run.save("solo", wait=True)
        model.eval()
        expected_output = model(torch.ones(3, 6))
        for one in two:
            assert one["before"] != one["after"]
            torch.testing.assert_close(torch.tensor(one["after"]), expected_output)
    assert contents(c, "solo") == expected

    body = f"""
    for layout in ("fsdp1-flat", "fsdp1-orig", "fsdp1-none", "ddp"):
        train({c!r}, layout, 4, 4, resume="must")
    """
    run_ranks(BUILD + body + LEAVE, 3)
    for name in ("fsdp1-flat-4", "fsdp1-orig-4", "fsdp1-none-4", "ddp-4"):
        assert contents(c, name) == expected, name
