"""Files whose bytes are made while they are written, so that nothing of their size is held.

A part is laid out as usual; what stands in it is copied from wherever it is, block by block, in the
threads that write.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ..format.digest import BLOCK_BYTES
from ..format.header import StoredTensor
from ..stores.pages import page_memory
from .demand import BlocksOnDemand
from .write import SizedJob

__all__ = ["Fill", "part_job"]

Fill = Callable[[int, memoryview], None]
"""``fill(start, view)`` fills a view with the bytes of something from ``start`` on. It is called in
several threads, for ranges in about their order, each once."""


def part_job(
    key: str, path: str, *, header: bytes, tensors: Sequence[StoredTensor], fills: Sequence[Fill]
) -> SizedJob:
    """Return the job of writing a part.

    Args:
        key: Its key in the store.
        path: Its path in the checkpoint's folder.
        header: Its length field and header.
        tensors: What is in it, in the order of the file, from the end of the header to its own.
        fills: What makes the bytes of each.
    """
    size = tensors[-1].stop if tensors else len(header)
    starts = [entry.start for entry in tensors]

    def fill(start: int, view: memoryview) -> None:
        stop = start + len(view)
        if start < len(header):
            piece = header[start : min(stop, len(header))]
            view[: len(piece)] = piece
        for index in range(max(bisect_right(starts, start) - 1, 0), len(tensors)):
            entry = tensors[index]
            low, high = max(start, entry.start), min(stop, entry.stop)
            if entry.start >= stop:
                break
            if low < high:
                fills[index](low - entry.start, view[low - start : high - start])

    return SizedJob(key, path, _Blocks(fill, size), size)


class _Blocks(BlocksOnDemand):
    """The blocks of a file; each is made in memory of the thread that asks for it.

    A block is good until the same thread asks for the next one.
    """

    def __init__(self, fill: Fill, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._fill = fill

    def make(self, index: int, num_bytes: int) -> memoryview:
        """See ``BlocksOnDemand``."""
        view = _own_block()[:num_bytes]
        self._fill(index * BLOCK_BYTES, view)
        return view


_memory = threading.local()


def _own_block() -> memoryview:
    """Return memory of one block that belongs to this thread; it goes when the thread ends."""
    if not hasattr(_memory, "block"):
        _memory.block = memoryview(page_memory(BLOCK_BYTES))
    view: memoryview = _memory.block
    return view
