"""The least that a save or a load has to do, and nothing else: what is between a limit and us.

The limits of the disk are those of a machine that does nothing else. Who saves or loads tensors has
to copy and to checksum them too, and on few cores the disk gets slower by that. So the same threads
do the same work here, without commits, headers, plans or errors: one thread copies, takes checksums
and is followed by those that write; those that read check and copy what they have read.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c
from torch import Tensor

__all__ = ["Bare"]

_BLOCK_BYTES = 8 * 1024 * 1024
_HOT_BYTES = 1024 * 1024
_WRITERS, _READERS = 4, 8


class Bare:
    """Copies, checksums and direct I/O of some tensors, by memory that is used again.

    Args:
        tensors: The tensors, on the host and contiguous.
        folder: Where the file is.
    """

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        bytes_of = [np.frombuffer(t.numpy(), np.uint8) for t in tensors]
        self._blocks = [
            data[at : at + _BLOCK_BYTES]
            for data in bytes_of
            for at in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES)
        ]
        self._path = folder / "bare.bin"
        self._memory = _huge(len(self._blocks) * _BLOCK_BYTES)
        self._sums = [0] * len(self._blocks)
        self._staged = [threading.Event() for _ in self._blocks]
        self._share = sum(map(len, self._blocks)) / sum(map(len, bytes_of))

    def save(self) -> float:
        """Return the seconds of a durable save of all of it, by those of its whole blocks."""
        self._path.unlink(missing_ok=True)
        for event in self._staged:
            event.clear()
        started_s = time.perf_counter()
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, len(self._memory))

            def write(number: int, _: int) -> None:
                self._staged[number].wait()
                start = number * _BLOCK_BYTES
                view = memoryview(self._memory)[start : start + _BLOCK_BYTES]
                if os.pwrite(descriptor, view, start) != _BLOCK_BYTES:
                    raise RuntimeError("a write was cut short")

            _in_threads(len(self._blocks), _WRITERS, write, meanwhile=self._stage)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return (time.perf_counter() - started_s) / self._share

    def load(self) -> float:
        """Return the seconds of a load of what was saved, into the tensors, as above."""
        memory = [memoryview(_huge(_BLOCK_BYTES)) for _ in range(_READERS)]
        at_work = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        started_s = time.perf_counter()
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:

            def read(number: int, thread: int) -> None:
                view = memory[thread]
                if os.preadv(descriptor, [view], number * _BLOCK_BYTES) != _BLOCK_BYTES:
                    raise RuntimeError("a read was cut short")
                with at_work:
                    if crc32c(view) != self._sums[number]:
                        raise RuntimeError("not what was written")
                    self._blocks[number][:] = np.frombuffer(view, np.uint8)

            _in_threads(len(self._blocks), _READERS, read)
        finally:
            os.close(descriptor)
        return (time.perf_counter() - started_s) / self._share

    def _stage(self) -> None:
        memory = np.frombuffer(self._memory, np.uint8)
        for number, block in enumerate(self._blocks):
            start, found = number * _BLOCK_BYTES, 0
            for at in range(0, _BLOCK_BYTES, _HOT_BYTES):
                hot = memory[start + at : start + at + _HOT_BYTES]
                np.copyto(hot, block[at : at + _HOT_BYTES])
                found = crc32c(hot.data, found)
            self._sums[number] = found
            self._staged[number].set()


def _in_threads(
    count: int,
    num_threads: int,
    work: Callable[[int, int], None],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    numbers, failed = itertools.count(), list[BaseException]()

    def run(thread: int) -> None:
        try:
            while (number := next(numbers)) < count:
                work(number, thread)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that measures
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(num_threads)]
    for one in threads:
        one.start()
    meanwhile()
    for one in threads:
        one.join()
    if failed:
        raise failed[0]


def _huge(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        memory[at] = 1
    return memory
