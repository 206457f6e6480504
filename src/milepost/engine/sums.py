"""Checksums of blocks, taken by the thread that fills them.

A checksum costs half as much while its bytes are still in the cache of the core that has copied
them. So whoever fills a block takes its checksum bit by bit, a piece behind the copy, and who
writes the block finds it here. It is the checksum of what was copied, and not of what the memory
holds later: a bit that flips in between is found when the block is read.

That is done by a thread that is ahead of those who write. One that they wait for only copies, and
they take the checksums: then the work is shared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from ..format.digest import BLOCK_BYTES, crc32c

__all__ = ["HOT_BYTES", "Sums"]

HOT_BYTES = 1024 * 1024
"""How much is copied before its checksum is taken: then it still is in a cache of the core."""


class Sums:
    """The checksums of the blocks of files that lie in memory, one behind the other.

    One thread takes them; others may ask for those of blocks that they know to be filled.

    Args:
        files: Where each file begins in the memory, and where it ends; in that order.
        view: Returns a range of the memory.
    """

    def __init__(
        self, files: Sequence[tuple[int, int]], view: Callable[[int, int], memoryview]
    ) -> None:
        self._files = files
        self._starts = [start for start, _ in files]
        self._view = view
        self._found: dict[int, int] = {}
        self._start = self._stop = 0
        self._at = 0
        self._value = 0

    def of(self, start: int) -> int | None:
        """Return the checksum of a block, if it was taken.

        Args:
            start: Where the block begins in the memory.
        """
        return self._found.get(start)

    def end_of_block(self, at: int) -> int:
        """Return where the block ends that a byte lies in."""
        return self._block_of(at)[1]

    def take(self, stop: int) -> None:
        """Go on with the checksum of a block, up to where it is filled.

        What is below, and was not taken when the block was begun, is taken now.

        Args:
            stop: Where that is: the byte behind the last one.
        """
        if not self._start < stop <= self._stop:
            self._start, self._stop = self._block_of(stop - 1)
            self._at, self._value = self._start, 0
        if stop <= self._at:
            return
        self._value = crc32c(self._view(self._at, stop), self._value)
        self._at = stop
        if stop == self._stop:
            self._found[self._start] = self._value

    def _block_of(self, at: int) -> tuple[int, int]:
        start, stop = self._files[bisect_right(self._starts, at) - 1]
        start += (at - start) // BLOCK_BYTES * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, stop)
