"""Blocks of a file that are made one at a time, when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from ..format.digest import BLOCK_BYTES, block_count

__all__ = ["BlocksOnDemand"]


class BlocksOnDemand(Sequence[memoryview]):
    """The blocks of a file of a known size.

    Args:
        size_bytes: The size of the file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    @abstractmethod
    def make(self, index: int, num_bytes: int) -> memoryview:
        """Return a block, in memory that may be used again for the next.

        Args:
            index: Its number.
            num_bytes: How many bytes it has.
        """

    def __len__(self) -> int:
        return block_count(self.size_bytes)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            raise TypeError("blocks are made one at a time")
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.make(index, min(BLOCK_BYTES, self.size_bytes - index * BLOCK_BYTES))
