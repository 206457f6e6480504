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

__all__ = ["copy_seconds", "drop_cache", "fill_cache", "read_rate", "warm_pool", "write_rate"]

_MIB = 1024 * 1024
_REQUESTS_BYTES = (8 * _MIB, 16 * _MIB)
_THREADS = (1, 2, 4)


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

    The best of 1, 2 and 4 threads and of requests of 8 and 16 MiB, preallocated, with fsync of the
    file.
    """
    return _best(folder, num_bytes, _write)


def read_rate(folder: Path, num_bytes: int) -> float:
    """Return the best rate of direct reads of a file that :func:`write_rate` left behind."""
    return _best(folder, num_bytes, _read)


def fill_cache(folder: Path) -> None:
    """Bring every file below a folder into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(_READ[0]):
                    pass


def drop_cache(folder: Path) -> None:
    """Drop every file below a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


_Work = Callable[[Path, list[int], int, int], None]


def _best(folder: Path, num_bytes: int, run: _Work) -> float:
    return max(
        _transfer(folder, num_bytes, threads, request_bytes, run)
        for threads in _THREADS
        for request_bytes in _REQUESTS_BYTES
    )


def _transfer(folder: Path, num_bytes: int, threads: int, request_bytes: int, run: _Work) -> float:
    path = folder / "limit.bin"
    if run is _write:
        path.unlink(missing_ok=True)  # giving back the blocks of an old file takes time of its own
    offsets = list(range(0, num_bytes - request_bytes + 1, request_bytes))
    start = time.perf_counter()
    run(path, offsets, threads, request_bytes)
    return len(offsets) * request_bytes / (time.perf_counter() - start)


def _write(path: Path, offsets: list[int], threads: int, request_bytes: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(descriptor, 0, len(offsets) * request_bytes)
        view = memoryview(_WRITTEN)[:request_bytes]
        _share(offsets, threads, request_bytes, lambda at, _: os.pwrite(descriptor, view, at))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, offsets: list[int], threads: int, request_bytes: int) -> None:
    views = [memoryview(memory)[:request_bytes] for memory in _READ]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _share(
            offsets,
            threads,
            request_bytes,
            lambda at, thread: os.preadv(descriptor, [views[thread]], at),
        )
    finally:
        os.close(descriptor)


def _share(
    offsets: list[int], threads: int, request_bytes: int, work: Callable[[int, int], int]
) -> None:
    """Give every thread its share; each request must be whole."""

    def run(thread: int) -> None:
        mine = offsets[thread::threads]
        short.extend(offset for offset in mine if work(offset, thread) != request_bytes)

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
    memory = mmap.mmap(-1, _REQUESTS_BYTES[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # far fewer pieces of memory for a device to look at
    memory.write(fill * (len(memory) // len(fill)))
    return memory


_WRITTEN = _touched(os.urandom(1024 * 1024))
_READ = [_touched(b"\x01") for _ in range(_THREADS[-1])]
