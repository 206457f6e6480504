"""The claims of the README about speed, one function each.

A claim takes rounds in which all variants run one after the other, in turns, and returns medians.
All variants are warmed once, end durable (file and folder synced), and load from a cold cache.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import limits
import peers
import torch
from bare import Bare
from figures import Figures
from torch import Tensor

from milepost import Checkpointer
from milepost.stores import Store

State = dict[str, Tensor]


def large_state() -> State:
    """Return 1 GiB: 32 large tensors and 400 small ones, of trained-like numbers."""
    generator = torch.Generator().manual_seed(0)
    large = {f"large.{i}": torch.randn(2896, 2896, generator=generator) * 0.02 for i in range(32)}
    small = {f"small.{i}": torch.randn(1024, generator=generator) * 0.02 for i in range(400)}
    return {**large, **small}


def many_small_state(num_tensors: int, num_elements: int) -> State:
    """Return many small tensors of float32."""
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(num_tensors, num_elements, generator=generator) * 0.02
    return {f"tensor.{i}": row.clone() for i, row in enumerate(flat)}


def num_bytes(state: State) -> int:
    """Return the bytes of a state."""
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


@contextmanager
def milepost_run(
    folder: Path | Store, state: State, *, resume: str = "auto"
) -> Iterator[Checkpointer]:
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
    figures, bare = Figures(), Bare(tensors, folder)
    with milepost_run(folder / "run", state) as run:
        run.save("warm", wait=True)
        for index in range(rounds + 1):
            row: dict[str, float] = {"write limit": size / limits.write_rate(folder, size)}
            row["bare save"] = bare.save()
            # How long a copy takes depends on what ran before: so one before, and one after.
            copy_s = limits.copy_seconds(tensors, pool)
            start = time.perf_counter()
            pending = run.save(f"round{index}")
            row["milepost blocking"] = time.perf_counter() - start
            pending.wait()
            row["copy"] = (copy_s + limits.copy_seconds(tensors, pool)) / 2
            shutil.rmtree(folder / "run" / pending.name)
            row["milepost"] = _timed(partial(run.save, f"waited{index}", wait=True))
            shutil.rmtree(folder / "run" / f"waited{index}")
            for name, save in peers.SAVES.items():
                row[name] = _timed(partial(save, state, folder))
                peers.clear(folder)
            if index:  # the first round warms every variant
                figures.add_round(row)
    return figures, size


def cold_load(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure verified loads of the large state into live tensors, from a cold cache."""
    state = large_state()
    size = num_bytes(state)
    with milepost_run(folder / "run", state) as run:
        pending = run.save("large")
        name = pending.wait().name
        for save in peers.SAVES.values():
            save(state, folder)
        limits.write_rate(folder, size)
        bare = Bare(list(state.values()), folder)
        bare.save()
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        figures = Figures()
        for index in range(rounds + 1):
            row: dict[str, float] = {"read limit": size / limits.read_rate(folder, size)}
            limits.drop_cache(folder)
            row["bare load"] = bare.load()
            ours = partial(run.restore, name, items=["model"])
            variants: dict[str, Callable[[], Any]] = {
                "milepost": ours,
                **peers.timed_loads(target, folder),
            }
            for variant, load in variants.items():
                limits.drop_cache(folder)
                row[variant] = _timed(load)
            if index:
                figures.add_round(row)
    return figures, size


def warm_load(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure verified loads of the large state into live tensors, from the page cache."""
    state = large_state()
    size = num_bytes(state)
    tensors = list(state.values())
    pool = limits.warm_pool(tensors)
    with milepost_run(folder / "run", state) as run:
        name = run.save("large").wait().name
        for save in peers.SAVES.values():
            save(state, folder)
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        variants: dict[str, Callable[[], Any]] = {
            "milepost": partial(run.restore, name, items=["model"]),
            **peers.timed_loads(target, folder),
        }
        figures = Figures()
        for index in range(rounds + 1):
            row: dict[str, float] = {"copy": limits.copy_seconds(tensors, pool)}
            for variant, load in variants.items():
                limits.fill_cache(folder)
                row[variant] = _timed(load)
            if index:
                figures.add_round(row)
    return figures, size


def many_small(
    folder: Path, *, rounds: int, num_tensors: int = 10_000, num_elements: int = 4096
) -> tuple[Figures, int]:
    """Measure many small tensors: save until durable, and load, next to DCP."""
    state = many_small_state(num_tensors, num_elements)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    figures = Figures()
    with milepost_run(folder / "run", state) as run:
        for index in range(rounds + 1):
            row: dict[str, float] = {}
            start = time.perf_counter()
            name = run.save(f"round{index}").wait().name
            row["milepost save"] = time.perf_counter() - start
            row["dcp.save"] = _timed(partial(peers.SAVES["dcp.save"], state, folder))
            limits.drop_cache(folder)
            row["milepost load"] = _timed(partial(run.restore, name, items=["model"]))
            row["dcp.load"] = _timed(partial(peers.LOADS["dcp.load"], target, folder))
            shutil.rmtree(folder / "run" / name)
            peers.clear(folder)
            if index:
                figures.add_round(row)
    return figures, num_bytes(state)


def planning(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure what a save does before it copies, again and again for one structure.

    The seconds are those of 1,000 tensors: 2,000 layers of two tensors each, and AdamW, which keeps
    three for each of them.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2_000)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    num_tensors = 4 * len(list(model.parameters()))
    figures = Figures()
    with Checkpointer(
        folder / "run", model=model, optimizer=optimizer, handle_signals=False
    ) as run:
        for index in range(rounds + 2):
            optimizer.step()  # as in a loop: what gradients are left over is no part of the state
            pending = run.save(f"round{index}", wait=True)
            stats = pending.stats
            found_s = stats["capture_s"] + stats["plan_s"]
            figures.add("first save" if not index else "later saves", found_s / num_tensors * 1000)
    return figures, num_tensors


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
