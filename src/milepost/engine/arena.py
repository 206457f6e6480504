"""The arena: reused host memory that mirrors the part files byte for byte.

One page-aligned anonymous mapping on huge pages where the system grants them. It grows when a state
needs more and is otherwise used again and again, because first touch of fresh memory costs several
times the copy that follows. It is private memory: nothing of it is left behind by a killed process.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..stores.pages import advise, page_memory

__all__ = ["Arena"]

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Arena:
    """Page-aligned host memory.

    A view stays valid until :meth:`reserve` has to grow; then it still refers to the old memory,
    which lives as long as any view of it.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._array = self._bytes.numpy()
        self.generation = 0
        """Grows whenever the memory was replaced, so that what it held is gone."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes that are mapped."""
        return 0 if self._map is None else len(self._map)

    def reserve(self, num_bytes: int) -> bool:
        """Make sure that ``num_bytes`` are there; return whether the memory was replaced."""
        if num_bytes <= self.capacity_bytes:
            return False
        # Let go of the old memory first: a growing state must not need both at once.
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        self._array = self._bytes.numpy()
        size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._map = page_memory(size)
        advise(self._map, getattr(mmap, "MADV_HUGEPAGE", None))
        advise(self._map, _MADV_POPULATE_WRITE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self._bytes.numpy()
        self.generation += 1
        return True

    def tensor(self, start: int, stop: int) -> Tensor:
        """Return a range of the memory as bytes: [stop - start], uint8."""
        return self._bytes[start:stop]

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a range of the memory as an array of bytes: [stop - start], uint8."""
        return self._array[start:stop]

    def view(self, start: int, stop: int) -> memoryview:
        """Return a range of the memory for reading and writing."""
        assert self._map is not None
        return memoryview(self._map)[start:stop]
