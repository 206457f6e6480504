"""What saves take of a training's time when the interval is found out, on two places.

One place is the disk, the other the same disk made ten times slower. Blocks of steps without saves
and with them take turns; what the latter take longer is the overhead, whatever it comes from. How
long the calls held the loop up is told beside it: the rest is slower steps.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import limits
from figures import Figures
from training import Loop

from milepost import Checkpointer, KeepLast
from milepost.stores import LocalStore

__all__ = ["BUDGET", "PLACES", "overhead_of_intervals"]

BUDGET = 0.05
"""Large enough to be seen in a few seconds of a loop whose steps vary by some percent."""

PLACES = ("disk", "a tenth of it")
_WIDTH = 1024
_NUM_SAVES = 10
_MOST_S = 10.0


class _SlowWriter:
    """Writes no faster than at a rate, however many threads write."""

    def __init__(self, writer: Any, store: SlowStore) -> None:
        self._writer = writer
        self._store = store
        self.abort = writer.abort
        self.close = writer.close

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._store.lock:
            started_s = time.perf_counter()
            self._writer.write_at(offset, data)
            took_s = time.perf_counter() - started_s
            time.sleep(max(0.0, len(data) / self._store.bytes_per_s - took_s))


class SlowStore:
    """A store whose disk is slower.

    Args:
        store: Where the bytes go.
        bytes_per_s: How fast, at most.
    """

    def __init__(self, store: Any, bytes_per_s: float) -> None:
        self._store = store
        self.bytes_per_s = bytes_per_s
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_writer(self, key: str, size_bytes: int) -> _SlowWriter:
        return _SlowWriter(self._store.create_writer(key, size_bytes), self)


def overhead_of_intervals(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure the share of the time that saves take.

    Returns:
        For each place the overhead as a multiple of the budget, from the time that the steps took
        (``overhead``) and from the calls alone (``calls``); the seconds from one save to the next
        (``interval``), and the number of saves.
    """
    loop = Loop(width=_WIDTH)
    for _ in range(3):
        loop.step(nullcontext())
    rate = limits.write_rate(folder, 2**28)
    places = {"disk": rate, "a tenth of it": rate / 10}
    figures = Figures()
    for number, (name, bytes_per_s) in enumerate(places.items()):
        local = LocalStore(folder / f"run{number}")
        store: Any = local if name == "disk" else SlowStore(local, bytes_per_s)
        run = Checkpointer(
            store,
            every="auto",
            overhead_budget=BUDGET,
            keep=KeepLast(1),
            handle_signals=False,
            model=loop.model,
            optimizer=loop.optimizer,
        )
        with run:
            _train(run, loop, num_saves=4)  # until the interval is known
            for _ in range(rounds):
                for what, value in _block_pair(run, loop).items():
                    figures.add(f"{name} {what}", value)
    return figures, sum(tensor.nbytes for tensor in loop.state.values())


def _train(run: Checkpointer, loop: Loop, *, num_saves: int) -> tuple[int, float, list[Any]]:
    """Train until so many saves were made, or for a while; return steps, seconds and saves."""
    saves, num_steps, started_s = [], 0, time.perf_counter()
    while len(saves) < num_saves and time.perf_counter() - started_s < _MOST_S:
        loop.step(nullcontext())
        num_steps += 1
        before = run.last_save
        run.step()
        if run.last_save is not before:
            saves.append(run.last_save)
    return num_steps, time.perf_counter() - started_s, saves


def _block_pair(run: Checkpointer, loop: Loop) -> dict[str, float]:
    num_steps, with_s, saves = _train(run, loop, num_saves=_NUM_SAVES)
    run.wait()
    run.timer.stop()  # or a save would be due as soon as the next block begins
    started_s = time.perf_counter()
    for _ in range(num_steps):
        loop.step(nullcontext())
    without_s = time.perf_counter() - started_s
    run.timer.start()
    held_up_s = sum(save.stats["blocking_s"] for save in saves)
    return {
        "overhead": (with_s - without_s) / with_s / BUDGET,
        "calls": held_up_s / with_s / BUDGET,
        "interval": with_s / max(1, len(saves)),
        "saves": float(len(saves)),
    }
