"""Checkpoints of several ranks that one rank writes: the same state, in files for any tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import milepost as mp
from milepost.testing.ranks import Ranks, run_ranks

BUILD = """
    import os
    import milepost as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    def build(layout):
        torch.manual_seed(0)
        plain = model = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 1)
        )
        plain[0].to(torch.bfloat16)
        plain[3].requires_grad_(False)
        if layout == "fsdp":
            for layer in (plain[0], plain[2]):
                fully_shard(layer)
            fully_shard(plain)
        elif layout == "tp":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(plain, init_device_mesh("cpu", (world_size,)), plan)
        elif layout == "ddp":
            model = DistributedDataParallel(plain)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        torch.manual_seed(1)
        for parameter in trained:  # the same gradients in every layout
            gradient = torch.randn(parameter.shape).to(parameter.dtype)
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(70 + rank)
        return plain, optimizer

    def opened(folder, plain, optimizer, own, **options):
        return mp.Checkpointer(
            folder, model=plain, optimizer=optimizer, own=mp.PerRank(own), **options
        )

    def own_of(rank):
        value = {"rank": rank, "x": torch.full((3,), float(rank))}
        return mp.Value(lambda: value, value.update), value
"""

LEAVE = """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
"""

WAYS = {
    "auto": {},
    "whole": {"sharding": "consolidated"},
    "torch": {"save_format": "torch"},
}
LAYOUTS = ("fsdp", "tp", "ddp")


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return what is in a nested value, by path; tensors as dtype, shape and bytes."""
    if isinstance(value, Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: (str(value.dtype), tuple(value.shape), raw)}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        return {path: repr(value)}
    found = {f"{path}:": type(value).__name__}
    for key, member in pairs:
        found.update(flat(member, f"{path}/{key}"))
    return found


def test_one_state_is_the_same_in_every_layout_and_every_kind_of_file(tmp_path: Path) -> None:
    """Sharded, replicated, uneven, bf16, frozen, optimizer, and each rank's own; bit for bit."""
    body = f"""
    came = {{}}
    for layout in {LAYOUTS!r}:
        plain, optimizer = build(layout)
        for way, options in {WAYS!r}.items():
            folder = {str(tmp_path)!r} + f"/{{layout}}-{{way}}"
            value, held = own_of(rank)
            with opened(folder, plain, optimizer, value, **options) as run:
                run.save("first", wait=True)
                torch.manual_seed(70 + rank)
                run.save("a", wait=True)
                drawn = torch.rand(3)
            held.update(rank=-1, x=torch.zeros(3))
            with opened(folder, plain, optimizer, value, **options) as run:
                came[folder] = [
                    run.resumed_from, held["rank"], held["x"].tolist(),
                    torch.equal(torch.rand(3), drawn),
                ]
    give(came=came)
    """
    given = run_ranks(BUILD + body + LEAVE, 2)
    for rank, one in enumerate(given):
        assert list(one["came"].values()) == [["a", rank, [float(rank)] * 3, True]] * 9
    states = {}
    for layout in LAYOUTS:
        for way in WAYS:
            checkpoint = mp.open_run(tmp_path / f"{layout}-{way}").get("a")
            assert checkpoint.verify().is_good
            state = checkpoint.load()
            assert len(state["rng"]) == 2
            del state["state"]["timer"]["wall_s"]
            states[layout, way] = flat(state)
    first = states["fsdp", "auto"]
    assert first["/state/model/0.weight"][:2] == ("torch.bfloat16", (7, 5))
    assert first["/state/optimizer/state/2.weight/exp_avg"][1] == (3, 7)
    for key, state in states.items():
        assert {path: state[path] for path in state if state[path] != first.get(path)} == {}, key
        assert set(state) == set(first), key
    check_plain_files(tmp_path, first)


def check_plain_files(tmp_path: Path, state: Mapping[str, Any]) -> None:
    """Plain safetensors opens what has whole tensors, under plain names; alone or by the map."""
    weights = {key[13:]: one for key, one in state.items() if key.startswith("/state/model/")}
    for layout in LAYOUTS:
        folder = tmp_path / f"{layout}-whole" / "a"
        files = {path.name for path in folder.iterdir()}
        assert {"model.safetensors", "model-frozen.safetensors", "optimizer.safetensors"} <= files
        assert not any(name.startswith(("model-r", "optimizer-r")) for name in files)
        frozen = "model-frozen.safetensors"
        assert (folder / frozen).samefile(folder.parent / "first" / frozen)
        assert opened_by_map(folder, "model") == weights
    assert opened_by_map(tmp_path / "ddp-auto" / "a", "model") == weights
    moments = opened_by_map(tmp_path / "ddp-auto" / "a", "optimizer")
    assert moments["state/2.weight/exp_avg"] == state["/state/optimizer/state/2.weight/exp_avg"]
    for layout in ("fsdp", "tp"):
        files = {path.name for path in (tmp_path / f"{layout}-auto" / "a").iterdir()}
        assert not any(name.endswith(".safetensors.index.json") for name in files)


def opened_by_map(folder: Path, item: str) -> dict[str, Any]:
    """Return the tensors that the map of an item leads to, read with nothing but safetensors."""
    table = json.loads((folder / f"{item}.safetensors.index.json").read_text())
    found: dict[str, Any] = {}
    for name, file in table["weight_map"].items():
        with safe_open(folder / file, "pt") as part:
            found.update(flat(part.get_tensor(name), name))
    sizes = {"torch.bfloat16": 2, "torch.float32": 4, "torch.int64": 8}
    numel = [(sizes[dtype], len(raw)) for dtype, _, raw in found.values()]
    assert table["metadata"]["total_size"] == sum(raw for _, raw in numel)
    return found


FAULTS = """
    from milepost.engine import commits as saving
    from milepost.errors import CheckpointError

    plain, optimizer = build("fsdp")
    value, held = own_of(rank)
    said = {}
    kept = {name: getattr(saving, name) for name in ("describe", "serve", "write_files", "call")}

    def attempt(name, **wrong):
        def broken(*arguments, **options):
            raise ZeroDivisionError("by hand")
        for target, where in wrong.items():
            if where == rank:
                setattr(saving, target, broken)
        try:
            run.save(name, wait=True)
        except CheckpointError as error:
            said[name] = [type(error).__name__, str(error)]
        except ZeroDivisionError as error:
            said[name] = ["ZeroDivisionError", str(error)]
        else:
            said[name] = "ok"
        for target, function in kept.items():
            setattr(saving, target, function)
"""


def test_an_error_in_any_step_of_it_is_told_to_all(tmp_path: Path) -> None:
    """Nothing is committed, nobody hangs, and the next save works."""
    body = f"""
    with opened(
        {str(tmp_path)!r}, plain, optimizer, value, sharding="consolidated", rank_timeout_s=3.0
    ) as run:
        attempt("a")
        attempt("tell", describe=1)
        attempt("serve", serve=1)
        attempt("lead", describe=0)
        attempt("b")
        attempt("write", write_files=0)
        attempt("own", write_files=1)
        attempt("call", call=1)
        attempt("c")
    give(said=said)
    """
    given = run_ranks(BUILD + FAULTS + body + LEAVE, 2)
    for one in given:
        ended = {name: said == "ok" for name, said in one["said"].items()}
        assert {name for name, is_ok in ended.items() if is_ok} == {"a", "b", "c"}
    zero, one = (given[rank]["said"] for rank in range(2))
    for name in ("tell", "serve", "own", "call"):
        assert "by hand" in one[name][1], name
    for name in ("tell", "serve", "own"):
        assert "ank 1" in zero[name][1], name
        assert "by hand" in zero[name][1], name
    assert "Rank 1 did not call" in zero["call"][1]
    for name in ("lead", "write"):
        assert "ank 0" in one[name][1], name
        assert "by hand" in one[name][1], name
    assert [found.name for found in mp.open_run(tmp_path).checkpoints()] == ["a", "b", "c"]
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"a", "b", "c", "latest", "sessions"}


def test_a_rank_that_dies_while_it_hands_over_is_noticed_at_once(tmp_path: Path) -> None:
    """Its line breaks; nobody waits for the deadline of half an hour."""
    body = f"""
    run = opened({str(tmp_path)!r}, plain, optimizer, value, sharding="consolidated").open()
    attempt("a")
    if rank == 1:
        saving.serve = lambda *arguments, **options: os._exit(9)
    attempt("b")
    give(said=said)
    os._exit(0)
    """
    ended = Ranks(BUILD + FAULTS + body, 2).wait(100)
    assert [one.code for one in ended] == [0, 9]
    said = ended[0].given["said"]
    assert said["a"] == "ok"
    assert "Rank 1 cannot be reached any more" in said["b"][1]
    assert [found.name for found in mp.open_run(tmp_path).checkpoints()] == ["a"]


TRAINER = """
    import milepost as mp
    from milepost.train import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    def made(folder, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
        data = TensorDataset(torch.arange(48.0).reshape(12, 4), torch.zeros(12, 3))
        return Trainer(
            model=model,
            train_dataloader=DataLoader(data, 2),
            loss_fn=torch.nn.functional.mse_loss,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            save_folder=folder,
            save_interval="2ba",
            resume="auto",
            seed=3,
            progress_bar=False,
            **options,
        )
"""


def test_the_trainer_writes_one_file_for_all_ranks(tmp_path: Path) -> None:
    """Whole tensors, or one ``.pt``; and it goes on from either as it would have."""
    body = f"""
    ends = {{}}
    ways = {{"whole": dict(sharding="consolidated"), "torch": dict(save_format="torch")}}
    for way, options in ways.items():
        for name, stops in (("once", ["6ba"]), ("twice", ["2ba", "6ba"])):
            for stop in stops:
                trainer = made(
                    {str(tmp_path)!r} + f"/{{way}}-{{name}}", max_duration=stop, **options
                )
                trainer.fit()
                trainer.close()
            model = trainer.state.bare_model
            ends[way + name] = [p.tolist() for p in model.parameters()]
    give(ends=ends)
    """
    given = run_ranks(TRAINER + body + LEAVE, 2)
    for one in given:
        assert one["ends"]["wholeonce"] == one["ends"]["wholetwice"]
        assert one["ends"]["torchonce"] == one["ends"]["torchtwice"] == one["ends"]["wholeonce"]
    assert given[0] == given[1]
    with safe_open(tmp_path / "whole-twice" / "ep2" / "model.safetensors", "pt") as part:
        whole = {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118 - no mapping
    single = torch.load(tmp_path / "torch-twice" / "ep2.pt", weights_only=True)
    assert flat(single["state"]["model"]) == flat(whole) | {":": "dict"}
    assert len(single["rng"]) == 2
