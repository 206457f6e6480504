"""What this machine can do at best: memory copy, direct writes, direct reads.

Every figure of the benchmarks is a ratio to one of these, measured in the same run.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["copy_seconds", "drop_cache", "read_rate", "write_rate"]

REQUEST_BYTES = 16 * 1024 * 1024


def copy_seconds(tensors: Sequence[Tensor], pool: Sequence[Tensor]) -> float:
    """Return the seconds of one copy of tensors into memory that was touched before."""
    start = time.perf_counter()
    for source, destination in zip(tensors, pool, strict=True):
        destination.copy_(source)
    return time.perf_counter() - start


def warm_pool(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return touched memory of the same shapes."""
    pool = [torch.empty_like(tensor) for tensor in tensors]
    copy_seconds(tensors, pool)
    return pool


def write_rate(folder: Path, num_bytes: int) -> float:
    """Return the best rate of durable direct writes, in bytes a second.

    The best of 1, 2 and 4 threads, preallocated, with fsync of the file.
    """
    return max(_transfer(folder, num_bytes, threads, _write) for threads in (1, 2, 4))


def read_rate(folder: Path, num_bytes: int) -> float:
    """Return the best rate of direct reads of a file that :func:`write_rate` left behind."""
    return max(_transfer(folder, num_bytes, threads, _read) for threads in (1, 2, 4))


def drop_cache(folder: Path) -> None:
    """Drop every file below a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _transfer(
    folder: Path, num_bytes: int, threads: int, run: Callable[[Path, list[int], int], None]
) -> float:
    path = folder / "limit.bin"
    if run is _write:
        path.unlink(missing_ok=True)  # giving back the blocks of an old file takes time of its own
    offsets = list(range(0, num_bytes - REQUEST_BYTES + 1, REQUEST_BYTES))
    start = time.perf_counter()
    run(path, offsets, threads)
    return len(offsets) * REQUEST_BYTES / (time.perf_counter() - start)


def _write(path: Path, offsets: list[int], threads: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(descriptor, 0, len(offsets) * REQUEST_BYTES)
        view = memoryview(_WRITTEN)
        _share(offsets, threads, lambda offset, _: os.pwrite(descriptor, view, offset))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, offsets: list[int], threads: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _share(
            offsets,
            threads,
            lambda offset, thread: os.preadv(descriptor, [_READ[thread]], offset),
        )
    finally:
        os.close(descriptor)


def _share(offsets: list[int], threads: int, work: Callable[[int, int], int]) -> None:
    """Give every thread its share; each request must be whole."""

    def run(thread: int) -> None:
        mine = offsets[thread::threads]
        short.extend(offset for offset in mine if work(offset, thread) != REQUEST_BYTES)

    short: list[int] = []
    others = [threading.Thread(target=run, args=(thread,)) for thread in range(1, threads)]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()
    if short:
        raise RuntimeError(f"{len(short)} requests were cut short")


def _touched(fill: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, REQUEST_BYTES)
    memory.write(fill * (REQUEST_BYTES // len(fill)))
    return memory


_WRITTEN = _touched(os.urandom(1024 * 1024))
_READ = [_touched(b"\x01") for _ in range(4)]
