"""Tensors that no even cut fits: few rows, none, no dimension, odd dtypes, tied, frozen, turned."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost.testing.ranks import run_ranks

BUILD = """
    import random
    import milepost as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    DTYPES = [
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64,
        torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
    ]
    COUNT = 60

    def shape_and_dtype(number):
        rng = random.Random(number)
        shape = [rng.choice([1, 1, 2, 2, 3, 4, 5, 7, 0][: 8 + (number % 10 == 0)])
                 for _ in range(rng.randrange(4))]
        return shape, DTYPES[number % len(DTYPES)]

    def value_of(number):
        shape, dtype = shape_and_dtype(number)
        count = torch.Size(shape).numel() * dtype.itemsize
        generator = torch.Generator().manual_seed(number)
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)

    def placement_of(number, salt):
        shape, _ = shape_and_dtype(number)
        rng = random.Random(number * 1000 + salt)
        choices = [Replicate(), None, *(Shard(dim) for dim in range(len(shape)))]
        return rng.choice(choices)

    def local_of(whole, placement, rank, world_size):
        if not isinstance(placement, Shard):
            return whole.clone()
        pieces = torch.chunk(whole, world_size, placement.dim)
        if rank < len(pieces):
            return pieces[rank].contiguous()
        return whole.narrow(placement.dim, 0, 0).contiguous()

    class Odd(nn.Module):
        def __init__(self, salt, rank, world_size, mesh, *, is_blank):
            super().__init__()
            self.expected = {}
            for number in range(COUNT):
                whole = value_of(number)
                placement = placement_of(number, salt) if mesh is not None else None
                local = local_of(whole, placement, rank, world_size)
                self.expected[f"t{number}"] = local
                tensor = torch.zeros_like(local) if is_blank else local.clone()
                if placement is not None:
                    stride = torch.empty(whole.shape).stride()
                    tensor = DTensor.from_local(
                        tensor, mesh, [placement], run_check=False, shape=whole.shape, stride=stride
                    )
                if number % 3 and (tensor.is_floating_point() or tensor.is_complex()):
                    trains = number % 2 == 0 and tensor.dtype in (torch.float32, torch.bfloat16)
                    setattr(self, f"t{number}", nn.Parameter(tensor, requires_grad=trains))
                else:
                    self.register_buffer(f"t{number}", tensor)
            self.tied = self.t1
            self.register_buffer("shared", self.t0)
            turned = torch.arange(12.0).reshape(3, 4).t()
            self.register_buffer("turned", torch.zeros_like(turned) if is_blank else turned)
            self.expected |= {
                "tied": self.expected["t1"], "shared": self.expected["t0"], "turned": turned
            }

    def parts(salt, rank, world_size, mesh, *, is_blank):
        model = Odd(salt, rank, world_size, mesh, is_blank=is_blank)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        if not is_blank:
            for p in trained:
                optimizer.state[p] = {
                    "step": torch.tensor(3.0), "exp_avg": p.detach().clone(),
                    "exp_avg_sq": p.detach().to(torch.float32),
                }
        return model, optimizer

    def raw(tensor):
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()

    def wrong(model, optimizer):
        found = [
            name for name, value in model.state_dict().items()
            if raw(value) != raw(model.expected[name])
            or (isinstance(value, DTensor) and value.to_local().shape != model.expected[name].shape)
        ]
        names = {p: name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                expected, state = model.expected[names[p]], optimizer.state.get(p, {})
                if not state or raw(state["exp_avg"]) != raw(expected):
                    found.append(names[p] + "/exp_avg")
                elif raw(state["exp_avg_sq"]) != raw(expected.to(torch.float32)):
                    found.append(names[p] + "/exp_avg_sq")
        return found

    def small():
        torch.manual_seed(0)
        model = nn.ModuleDict({
            "row": nn.Linear(8, 1), "rows": nn.Linear(3, 2), "low": nn.Linear(2, 4).bfloat16(),
            "norm": nn.BatchNorm1d(2), "frozen": nn.Linear(5, 1),
        })
        for p in model["frozen"].parameters():
            p.requires_grad_(False)
        return model

    def shard(model):
        for child in model.values():
            fully_shard(child)
        return model
"""


def test_any_shape_and_dtype_goes_on_in_any_cut(tmp_path: Path) -> None:
    """Three ranks, one, and two with other cuts, against slices made by hand (H19)."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    body = f"""
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = parts(3, rank, world_size, mesh, is_blank=False)
    with mp.Checkpointer({a!r}, model=model, optimizer=optimizer) as run:
        run.save("odd", wait=True)
    with mp.Checkpointer({b!r}, model=shard(small())) as run:
        run.save("small", wait=True)
    """
    run_ranks(BUILD + body, 3)

    space: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(BUILD), space)
    model, optimizer = space["parts"](0, 0, 1, None, is_blank=True)
    with mp.Checkpointer(str(tmp_path / "one"), model=model, optimizer=optimizer) as run:
        report = run.restore(a + "/odd")
        assert report.is_exact
        assert space["wrong"](model, optimizer) == []
        assert model.tied is model.t1
        assert model.shared is model.t0
        assert model.turned.stride() == (1, 4)
        run.save("one", wait=True)
    plain = space["small"]()
    loaded = mp.open_run(b).get("small").load(["model"])["state"]["model"]
    assert {name: space["raw"](value) for name, value in loaded.items()} == {
        name: space["raw"](value) for name, value in plain.state_dict().items()
    }

    body = f"""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {{}}
    for place in ({a!r} + "/odd", {str(tmp_path / "one")!r} + "/one"):
        model, optimizer = parts(2, rank, world_size, mesh, is_blank=True)
        with mp.Checkpointer({a!r} + "-" + place[-3:], model=model, optimizer=optimizer) as run:
            run.restore(place)
            found[place] = wrong(model, optimizer)
    model = shard(small())
    for p in model.parameters():
        p.to_local().detach().zero_()
    with mp.Checkpointer({b!r} + "-two", model=model) as run:
        run.restore({b!r} + "/small")
    expected = small().state_dict()
    found["small"] = [
        name for name, value in model.state_dict().items()
        if raw(value) != raw(
            local_of(expected[name], value.placements[0], rank, world_size)
            if isinstance(value, DTensor) else expected[name]
        )
    ]
    give(found=found)
    """
    for one in run_ranks(BUILD + body, 2):
        assert [wrong for wrong in one["found"].values() if wrong] == []
        assert len(one["found"]) == 3
