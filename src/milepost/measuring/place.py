"""Measure a place: what it does at best, and what real saves and loads take there.

Everything happens below one hidden name, which is removed afterwards. The saves are those of a
``Checkpointer``, from the call to the acknowledgement, so that whatever a training pays is in them.
Rounds measure the limit and Milepost in turns, for a machine is not equally fast at all times.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import Checkpoint
from ..checkpointer import Checkpointer
from ..errors import UsageError, storage_error
from ..format.digest import BLOCK_BYTES
from ..runs.prune import delete_checkpoint
from ..stores.base import Store
from ..stores.local import LocalStore
from ..stores.posix import expanded
from ..stores.url import is_address, open_store, trimmed
from .figures import Limits, PlaceFigures, StateFigures
from .limits import Clock, FolderLimits, PlaceLimits, StoreLimits, copy_s

__all__ = ["PROBE_BYTES", "measure_place"]

PROBE_BYTES = 256 * 1024 * 1024

_SMALL_BYTES = 64 * 1024
_MIN_BYTES = 2 * BLOCK_BYTES
_MAX_ROUNDS = 7
_STEPS_OF_A_ROUND = 6
"""A round writes and reads the large state about so often."""


def measure_place(
    place: str | os.PathLike[str],
    *,
    probe_bytes: int = PROBE_BYTES,
    seconds: float = 30.0,
    clock: Clock = time.perf_counter,
    progress: Callable[[float], None] | None = None,
) -> PlaceFigures:
    """Measure a place.

    Args:
        place: A folder, which is created if it is not there, or an address.
        probe_bytes: Size of the large state; at a slow place it is made smaller.
        seconds: How long to go on. At least one round is made.
        clock: Returns seconds.
        progress: Called with the share of the time that is over.

    Raises:
        UsageError: The probe is too small to say anything.
        StorageError: The place does not do what it should.
    """
    if probe_bytes < _MIN_BYTES or seconds <= 0:
        raise UsageError(
            f"The probe must have at least {_MIN_BYTES // 1024**2} MiB, and take some time."
        )
    started_s = clock()
    note = progress or (lambda _: None)
    with _scratch(place) as scratch:
        probe_bytes = _fitting(scratch.limits, probe_bytes, seconds, clock)
        with ExitStack() as stack:
            small = stack.enter_context(_saver(scratch, "small", _SMALL_BYTES))
            large = stack.enter_context(_saver(scratch, "large", probe_bytes))
            memory = torch.empty(probe_bytes // 4)
            source = torch.empty(probe_bytes // 4).uniform_()
            copy_s(source, memory, clock)
            rows: list[dict[str, float]] = []
            for saver in (small, large):
                saver.warm(clock)
            while not rows or (clock() - started_s < seconds and len(rows) < _MAX_ROUNDS):
                row = {"copy_s": copy_s(source, memory, clock)}
                row["write_s"] = scratch.limits.write_s(probe_bytes, clock)
                large.save(clock)
                row["read_s"] = scratch.limits.read_s(probe_bytes, clock)
                large.load(clock)
                small.save(clock)
                small.load(clock)
                rows.append({**row, **scratch.limits.small_s(clock)})
                note(min(1.0, (clock() - started_s) / seconds))
            found = {
                name: statistics.median(row[name] for row in rows if name in row)
                for name in {name for row in rows for name in row}
            }
            states = small.figures(), large.figures()
    limits = Limits(
        copy_bytes_s=probe_bytes / found["copy_s"],
        write_bytes_s=probe_bytes / found["write_s"],
        read_bytes_s=probe_bytes / found["read_s"],
        **{name: found.get(name) for name in ("sync_s", "link_s", "put_s", "get_s")},
    )
    return PlaceFigures(scratch.url, len(rows), clock() - started_s, limits, *states)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A hidden place of our own.

    Attributes:
        url: The place that is measured.
        target: Where to save to.
        store: What removes it all.
        limits: What measures it plainly.
    """

    url: str
    target: str
    store: Store
    limits: PlaceLimits


@contextmanager
def _scratch(place: str | os.PathLike[str]) -> Iterator[_Scratch]:
    text, name = os.fspath(place), f".milepost-bench-{secrets.token_hex(8)}"
    if is_address(text):
        target = f"{trimmed(text)}/{name}"
        store = open_store(target)
        found = _Scratch(text, target, store, StoreLimits(open_store(f"{target}/limits")))
        made: list[Path] = []
    else:
        path = expanded(text).absolute()
        made = [path / name, *(one for one in (path, *path.parents) if not one.exists())]
        folder = path / name / "limits"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise storage_error(error, operation="create", path=str(folder)) from error
        store = LocalStore(path / name)
        found = _Scratch(str(path), str(path / name), store, FolderLimits(folder))
    try:
        yield found
    finally:
        for entry in () if made else list(store.list()):
            store.delete(entry.key)
        _remove(made)


def _remove(made: list[Path]) -> None:
    """Remove the folders that were made, the innermost first."""
    if made and made[0].is_dir():
        shutil.rmtree(made[0])
    for path in made[1:]:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _fitting(limits: PlaceLimits, probe_bytes: int, seconds: float, clock: Clock) -> int:
    """Return the size that leaves time for a few rounds, in whole blocks."""
    took_s = limits.write_s(_MIN_BYTES, clock)
    rate = _MIN_BYTES / max(took_s, 1e-9)
    fitting = int(rate * seconds / _STEPS_OF_A_ROUND / 2)
    return max(_MIN_BYTES, min(probe_bytes, fitting) // BLOCK_BYTES * BLOCK_BYTES)


class _Weights(nn.Module):
    """Parameters of a size, each of a block."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        for start in range(0, size_bytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, size_bytes - start) // 4
            self.register_parameter(
                f"block{start // BLOCK_BYTES}", nn.Parameter(torch.empty(count).uniform_())
            )


@dataclass(slots=True)
class _Saver:
    """A run with one model, saved and loaded again and again."""

    run: Checkpointer
    store: Store
    target: nn.Module
    size_bytes: int
    first_blocking_s: float = 0.0
    blocking: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    num_saves: int = 0

    def warm(self, clock: Clock) -> None:
        """Save for the first time."""
        self.save(clock)
        self.first_blocking_s = self.blocking.pop()
        self.durable.clear()

    def save(self, clock: Clock) -> None:
        """Save, and delete the one before."""
        before = f"probe{self.num_saves}"
        self.num_saves += 1
        started_s = clock()
        pending = self.run.save(f"probe{self.num_saves}")
        self.blocking.append(clock() - started_s)
        pending.wait()
        self.durable.append(clock() - started_s)
        if self.num_saves > 1:
            delete_checkpoint(self.store, before)

    def load(self, clock: Clock) -> None:
        """Load the newest one, not from the cache of the kernel."""
        name = f"probe{self.num_saves}"
        for entry in self.store.list(name):
            _drop_cache(self.store.local_path(entry.key))
        started_s = clock()
        # Into tensors of its own, as another process would: a restore would roll back the run, and
        # the next save of that begins like a first one.
        Checkpoint(self.store, name).load_weights(self.target)
        self.loads.append(clock() - started_s)

    def figures(self) -> StateFigures:
        """Return the medians."""
        blocking_s, durable_s, load_s = (
            statistics.median(values) for values in (self.blocking, self.durable, self.loads)
        )
        return StateFigures(self.size_bytes, self.first_blocking_s, blocking_s, durable_s, load_s)


@contextmanager
def _saver(scratch: _Scratch, name: str, size_bytes: int) -> Iterator[_Saver]:
    place = f"{scratch.target}/{name}"
    model = _Weights(size_bytes)
    with Checkpointer(
        place, resume="never", link_unchanged=False, handle_signals=False, model=model
    ) as run:
        yield _Saver(run, open_store(place), _Weights(size_bytes), size_bytes)


def _drop_cache(path: str | None) -> None:
    if path is None:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
