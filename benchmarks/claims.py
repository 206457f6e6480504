"""The claims of the README about speed, one function each.

A claim takes rounds in which all variants run one after the other, in turns, and returns medians.
All variants are warmed once, end durable (file and folder synced), and load from a cold cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import limits
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from milepost import Checkpointer

State = dict[str, Tensor]


@dataclass(slots=True)
class Figures:
    """Seconds or rates by variant, one entry a round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add the figure of one round."""
        self.rounds.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.rounds[name])

    def spread(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest figure."""
        return min(self.rounds[name]), max(self.rounds[name])


def large_state() -> State:
    """Return 1 GiB: 32 large tensors and 400 small ones, of trained-like numbers."""
    generator = torch.Generator().manual_seed(0)
    large = {f"large.{i}": torch.randn(2896, 2896, generator=generator) * 0.02 for i in range(32)}
    small = {f"small.{i}": torch.randn(1024, generator=generator) * 0.02 for i in range(400)}
    return {**large, **small}


def many_small_state() -> State:
    """Return 10,000 tensors of 16 KiB."""
    flat = torch.randn(10_000, 4096, generator=torch.Generator().manual_seed(1)) * 0.02
    return {f"tensor.{i}": row.clone() for i, row in enumerate(flat)}


def num_bytes(state: State) -> int:
    """Return the bytes of a state."""
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


@contextmanager
def milepost_run(folder: Path, state: State, *, resume: str = "auto") -> Iterator[Checkpointer]:
    """Open a run that saves a state."""

    class Weights(torch.nn.Module):
        """A module whose state is the given tensors, under their own names."""

        def __init__(self) -> None:
            super().__init__()
            for name, tensor in state.items():
                self.register_buffer(name.replace(".", "_"), tensor)

    with Checkpointer(
        folder,
        model=Weights(),
        handle_signals=False,
        resume=resume,  # type: ignore[arg-type]
    ) as run:
        yield run


def blocking_and_durable(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure saves of the large state: blocking, and until durable; peers beside."""
    state = large_state()
    size = num_bytes(state)
    tensors = list(state.values())
    pool = limits.warm_pool(tensors)
    figures = Figures()
    with milepost_run(folder / "run", state) as run:
        run.save("warm", wait=True)
        for index in range(rounds + 1):
            row: dict[str, float] = {"copy": limits.copy_seconds(tensors, pool)}
            row["write limit"] = size / limits.write_rate(folder, size)
            start = time.perf_counter()
            pending = run.save(f"round{index}")
            row["milepost blocking"] = time.perf_counter() - start
            pending.wait()
            row["milepost"] = time.perf_counter() - start
            shutil.rmtree(folder / "run" / pending.name)
            row["torch.save"] = _timed(lambda: _torch_save(state, folder / "peer.pt"))
            row["safetensors"] = _timed(lambda: _safetensors_save(state, folder / "peer.st"))
            row["dcp.save"] = _timed(lambda: _dcp_save(state, folder / "peer-dcp"))
            _clear(folder)
            if index:  # the first round warms every variant
                for name, seconds in row.items():
                    figures.add(name, seconds)
    return figures, size


def cold_load(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure verified loads of the large state into live tensors, from a cold cache."""
    state = large_state()
    size = num_bytes(state)
    with milepost_run(folder / "run", state) as run:
        pending = run.save("large")
        name = pending.wait().name
        _torch_save(state, folder / "peer.pt")
        _safetensors_save(state, folder / "peer.st")
        _dcp_save(state, folder / "peer-dcp")
        limits.write_rate(folder, size)
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        figures = Figures()
        for index in range(rounds + 1):
            row: dict[str, float] = {"read limit": size / limits.read_rate(folder, size)}
            variants: Mapping[str, Callable[[], Any]] = {
                "milepost": lambda: run.restore(name, items=["model"]),
                "torch.load": lambda: _torch_load(target, folder / "peer.pt"),
                "safetensors": lambda: _safetensors_load(target, folder / "peer.st"),
                "dcp.load": lambda: _dcp_load(target, folder / "peer-dcp"),
            }
            for variant, load in variants.items():
                limits.drop_cache(folder)
                row[variant] = _timed(load)
            if index:
                for variant, seconds in row.items():
                    figures.add(variant, seconds)
    return figures, size


def many_small(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure 10,000 tensors of 16 KiB: save until durable, and load, next to DCP."""
    state = many_small_state()
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    figures = Figures()
    with milepost_run(folder / "run", state) as run:
        for index in range(rounds + 1):
            row: dict[str, float] = {}
            start = time.perf_counter()
            name = run.save(f"round{index}").wait().name
            row["milepost save"] = time.perf_counter() - start
            row["dcp.save"] = _timed(lambda: _dcp_save(state, folder / "peer-dcp"))
            limits.drop_cache(folder)
            row["milepost load"] = _timed(partial(run.restore, name, items=["model"]))
            row["dcp.load"] = _timed(lambda: _dcp_load(target, folder / "peer-dcp"))
            shutil.rmtree(folder / "run" / name)
            _clear(folder)
            if index:
                for variant, seconds in row.items():
                    figures.add(variant, seconds)
    return figures, num_bytes(state)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _torch_save(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _torch_load(target: State, path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    for key, tensor in target.items():
        tensor.copy_(loaded[key])


def _safetensors_save(state: State, path: Path) -> None:
    save_file(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def _safetensors_load(target: State, path: Path) -> None:
    with safe_open(path, "pt") as file:
        for key, tensor in target.items():
            tensor.copy_(file.get_tensor(key))


def _dcp_save(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
    _sync_folder(path)


def _dcp_load(target: State, path: Path) -> None:
    dcp.load(target, storage_reader=FileSystemReader(path), no_dist=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith("peer"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
