"""What a save costs a real training loop: blocks of steps with a save and without one, in turns.

The one honest figure is the time a loop takes longer: it holds the copy, waiting before the
optimizer changes what is being copied, steps that are slower because something writes, and whatever
holds the interpreter. A block without a save comes right before each block with one, and both have
the same number of steps, enough for everything to be durable before the block ends.

Whatever is done for a save in the background takes processor time. A loop that computes on all
cores pays for it in full; one that leaves a core idle, as most do that compute on an accelerator,
only for what it waits for. So both are measured, and beside the seconds those of the processor,
which tell the two apart and vary less from block to block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import limits
import numpy as np
import peers
import torch
from figures import Figures
from torch import Tensor, nn

from milepost import Checkpointer

__all__ = ["OURS", "cost_of_saves"]

NUM_LAYERS, WIDTH, NUM_SAMPLES = 10, 2048, 256
"""42 million weights and two moments of each: 0.5 GB; a step takes many times their copy."""

NUM_STEPS = 4
OUR_PAIRS = 3
"""Pairs of blocks in a round of ours: what is to be seen is less than the blocks differ by."""

OURS: Mapping[str, Mapping[str, Any]] = {
    "milepost": {"staging": "overlap"},
    "milepost, eager": {"staging": "eager"},
}
"""Settings of Milepost by variant."""


class Loop:
    """A perceptron that learns noise.

    Args:
        width: Of its layers.
        num_samples: Of a batch.
    """

    def __init__(self, *, width: int = WIDTH, num_samples: int = NUM_SAMPLES) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(NUM_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(num_samples, width)
        self.targets = torch.randn(num_samples, width)

    def step(self, change: AbstractContextManager[Any]) -> float:
        """Train one batch, changing the weights within ``change``; return the seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.inputs), self.targets).backward()
        with change:
            self.optimizer.step()
        return time.perf_counter() - start

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the live tensors: weights and moments."""
        found: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[f"model.{name}"] = weight.data
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{name}.{moment}"] = self.optimizer.state[weight][moment]
        return found


class _Milepost:
    """Milepost, as one of those that save in the background."""

    def __init__(self, folder: Path, loop: Loop, options: Mapping[str, Any]) -> None:
        self._run = Checkpointer(
            folder, model=loop.model, optimizer=loop.optimizer, handle_signals=False, **options
        )
        self._run.__enter__()
        self._count = 0
        self._pending: Any = None

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:  # noqa: ARG002 - as theirs
        self._count += 1
        self._pending = self._run.save(f"save{self._count}")

    def step(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def close(self) -> None:
        self._run.__exit__(None, None, None)


@contextmanager
def _savers(folder: Path, loop: Loop) -> Iterator[dict[str, peers.InBackground]]:
    found: dict[str, peers.InBackground] = {}
    try:
        for number, (name, options) in enumerate(OURS.items()):
            found[name] = _Milepost(folder / f"run{number}", loop, options)
        for name, make in peers.IN_BACKGROUND.items():
            found[name] = make()
        yield found
    finally:
        for saver in found.values():
            saver.close()


def cost_of_saves(folder: Path, *, rounds: int, num_idle_cores: int = 0) -> tuple[Figures, int]:
    """Measure every way to save while training.

    Args:
        folder: Where to.
        rounds: How often everything takes its turn.
        num_idle_cores: How many cores the training leaves idle.

    Returns:
        For each variant the seconds a block takes longer (``added``), those of the processor in
        this process (``added cpu``), that ``save`` itself takes (``blocking``), until all was
        durable while training went on (``durable``) and without training (``alone``), and how much
        slower steps were: the first (``first step``), and those during which it was written
        (``steps``), as ratios to steps without a save. Beside them a step (``step``), and one while
        a thread does nothing but copy (``step beside copies``): what a save costs at the least.
    """
    num_threads = torch.get_num_threads()
    num_busy = max(1, num_threads - num_idle_cores)
    torch.set_num_threads(num_busy)
    try:
        loop = Loop(num_samples=NUM_SAMPLES * num_busy // num_threads)
        return _cost_of_saves(folder, loop, rounds=rounds)
    finally:
        torch.set_num_threads(num_threads)


def _cost_of_saves(folder: Path, loop: Loop, *, rounds: int) -> tuple[Figures, int]:
    for _ in range(3):
        loop.step(nullcontext())
    tensors = list(loop.state.values())
    size = sum(tensor.nbytes for tensor in tensors)
    pool = limits.warm_pool(tensors)
    figures = Figures()
    with _savers(folder, loop) as savers:
        for index in range(rounds + 1):
            row = {"copy": limits.copy_seconds(tensors, pool)}
            found = Figures()
            for name, saver in savers.items():
                for _ in range(OUR_PAIRS if name in OURS else 1):
                    for what, value in _block_pair(loop, saver, folder).items():
                        found.add(f"{name} {what}", value)
                found.add(f"{name} alone", _until_durable(saver, loop, folder, lambda: None)[1])
                peers.clear(folder)
            row["step"] = loop.step(nullcontext())
            with _copying(tensors, pool):
                row["step beside copies"] = loop.step(nullcontext())
            if index:  # the first round warms every variant
                figures.add_round(row)
                for name, values in found.rounds.items():
                    for value in values:
                        figures.add(name, value)
    return figures, size


@contextmanager
def _copying(tensors: Sequence[Tensor], pool: Sequence[Tensor]) -> Iterator[None]:
    """Copy again and again meanwhile, in one thread: what a copy costs whoever computes beside."""
    is_over = threading.Event()

    def copy() -> None:
        while not is_over.is_set():
            for source, destination in zip(tensors, pool, strict=True):
                np.copyto(destination.numpy(), source.detach().numpy())

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _block_pair(loop: Loop, saver: peers.InBackground, folder: Path) -> dict[str, float]:
    cpu_before = time.process_time()
    plain = [loop.step(nullcontext()) for _ in range(NUM_STEPS)]
    usual = sorted(plain)[NUM_STEPS // 2]
    steps: list[tuple[float, float]] = []

    def train() -> None:
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            steps.append((began, loop.step(saver.step())))

    start, cpu_between = time.perf_counter(), time.process_time()
    blocking, durable, ended = _until_durable(saver, loop, folder, train)
    cpu_after = time.process_time()
    peers.clear(folder)
    meanwhile = [seconds for began, seconds in steps if began < start + durable]
    return {
        "added": ended - start - sum(plain),
        "added cpu": cpu_after - cpu_between - (cpu_between - cpu_before),
        "blocking": blocking,
        "durable": durable,
        "first step": steps[0][1] / usual,
        "steps": sum(meanwhile) / len(meanwhile) / usual,
    }


def _until_durable(
    saver: peers.InBackground, loop: Loop, folder: Path, meanwhile: Callable[[], None]
) -> tuple[float, float, float]:
    """Save, and do something meanwhile.

    Returns:
        The seconds that ``save`` took, those until all was durable, and when the something ended.
    """
    durable: list[float] = []
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            saver.wait()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that measures
            failed.append(error)
        durable.append(time.perf_counter())

    start = time.perf_counter()
    saver.save(loop.state, folder)
    blocking = time.perf_counter() - start
    watcher = threading.Thread(target=watch)
    watcher.start()
    meanwhile()
    ended = time.perf_counter()
    watcher.join()
    if failed:
        raise failed[0]
    return blocking, durable[0] - start, ended
