"""What one rank of the benchmarks of several ranks does; see ``ranks.py``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import limits
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from milepost import Checkpointer
from milepost.integrations.dcp import StorageReader, StorageWriter

NUM_LAYERS, WIDTH = 11, 2048
"""46 million weights, and two moments of each: 0.55 GB."""

Rows = list[dict[str, float]]


def build(*, by_columns: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under FSDP2 and an optimizer with moments."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    how: dict[str, Any] = {}
    if by_columns:
        how["shard_placement_fn"] = lambda p: Shard(p.dim() - 1)
    for layer in model:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as DCP saves and loads it; nothing is copied."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what this rank holds of the weights and moments."""
    kept = list(model.parameters())
    kept += [v for p in model.parameters() for k, v in optimizer.state[p].items() if k != "step"]
    return [value.detach().to_local() for value in kept]


def num_bytes(pieces: list[Tensor]) -> int:
    """Return their bytes."""
    return sum(piece.numel() * piece.itemsize for piece in pieces)


def save_and_load(folder: Path, *, rounds: int) -> Rows:
    """Measure rounds of saves and loads, all variants in turns; seconds by name."""
    model, optimizer = build()
    state, pieces = state_of(model, optimizer), pieces_of(model, optimizer)
    size = num_bytes(pieces) * dist.get_world_size()
    pool = limits.warm_pool(pieces)
    found: Rows = []
    # Its memory is used again, which is right as long as each save is waited for.
    kept = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    through = StorageWriter(folder / "through")
    options: dict[str, Any] = {"handle_signals": False}
    writer = partial(FileSystemWriter, folder / "peer")
    with Checkpointer(folder / "run", model=model, optimizer=optimizer, **options) as run:
        for index in range(rounds + 1):
            row = {"copy": limits.copy_seconds(pieces, pool)}
            row["write limit"] = _alone(lambda: size / limits.write_rate(folder, size))
            name = f"round{index}"
            row["milepost blocking"], row["milepost"] = _both(
                lambda name=name: run.save(name), lambda pending: pending.wait()
            )
            row["dcp.async_save blocking"], row["dcp.async_save"] = _both(
                lambda: dcp.async_save(state, storage_writer=writer()),
                lambda future: _synced(future.result, folder / "peer"),
            )
            _remove(folder / "peer")
            row["dcp.async_save, memory kept blocking"], row["dcp.async_save, memory kept"] = _both(
                lambda: dcp.async_save(state, storage_writer=writer(), async_stager=kept),
                lambda future: _synced(future.result, folder / "peer"),
            )
            _remove(folder / "peer")
            row["dcp.save"] = _timed(
                lambda: _synced(lambda: dcp.save(state, storage_writer=writer()), folder / "peer")
            )
            row["dcp.save into milepost"] = _timed(
                lambda name=name: dcp.save(state, checkpoint_id=name, storage_writer=through)
            )
            row["read limit"] = _alone(lambda: size / limits.read_rate(folder, size))
            loads: Mapping[str, Callable[[], Any]] = {
                "milepost load": lambda name=name: run.restore(name, items=["model", "optimizer"]),
                "dcp.load": lambda: dcp.load(
                    state, storage_reader=FileSystemReader(folder / "peer")
                ),
                "dcp.load from milepost": lambda name=name: dcp.load(
                    state, storage_reader=StorageReader(folder / "through" / name)
                ),
            }
            for variant, load in loads.items():
                _drop(folder)
                row[variant] = _timed(load)
            if index < rounds:
                for path in (folder / "peer", folder / "run" / name, folder / "through" / name):
                    _remove(path)
            if index:  # the first round warms every variant
                found.append(row)
    return found


def reshard(folder: Path, *, rounds: int, name: str, by_columns: bool) -> dict[str, Any]:
    """Measure loads of what another number of ranks saved: seconds, and bytes that were read."""
    model, optimizer = build(by_columns=by_columns)
    state = state_of(model, optimizer)
    needed = num_bytes(pieces_of(model, optimizer))
    rows: Rows = []
    options: dict[str, Any] = {"handle_signals": False}
    with Checkpointer(folder / f"new-{by_columns}", model=model, optimizer=optimizer, **options
                      ) as run:  # fmt: skip
        loads: Mapping[str, Callable[[], Any]] = {
            "milepost load": lambda: run.restore(
                folder / "run" / name, items=["model", "optimizer"]
            ),
            "dcp.load": lambda: dcp.load(state, storage_reader=FileSystemReader(folder / "peer")),
            "dcp.load from milepost": lambda: dcp.load(
                state, storage_reader=StorageReader(folder / "through" / name)
            ),
        }
        for index in range(rounds + 1):
            row: dict[str, float] = {}
            for variant, load in loads.items():
                _drop(folder)
                before = _read_bytes()
                row[variant] = _timed(load)
                row[f"{variant} bytes"] = _read_bytes() - before
            if index:
                rows.append(row)
    return {"rows": rows, "needed": needed}


def _timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, begun by all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _both(begin: Callable[[], Any], end: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the seconds until a save lets go of the caller, and until it is durable."""
    dist.barrier()
    start = time.perf_counter()
    pending = begin()
    blocked_s = time.perf_counter() - start
    end(pending)
    return blocked_s, time.perf_counter() - start


def _alone(measure: Callable[[], float]) -> float:
    """Measure on rank 0 while the others wait."""
    dist.barrier()
    value = [measure() if dist.get_rank() == 0 else 0.0]
    dist.broadcast_object_list(value)
    return value[0]


def _synced(call: Callable[[], Any], folder: Path) -> None:
    """Save, and make the names of the files durable too."""
    call()
    if dist.get_rank() == 0:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _drop(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        limits.drop_cache(folder)
    dist.barrier()


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def _read_bytes() -> int:
    """Return how many bytes this process has asked files for."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("rchar:")[1].split()[0])
