"""The arena: reused host memory that mirrors the part files byte for byte.

One page-aligned anonymous mapping on huge pages where the system grants them. It grows when a state
needs more and is otherwise used again and again, because first touch of fresh memory costs several
times the copy that follows. It is private memory: nothing of it is left behind by a killed process.

The first touch can be had ahead of the first save, by a thread of its own: see ``populating.py``.
Then more is mapped than is likely to be needed, which costs nothing before it is touched, so that
an estimate that turns out too small throws nothing away.
"""

from __future__ import annotations

import mmap
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from ..stores.pages import HUGE_PAGE_BYTES, advise, page_memory
from .pinned import register, unregister
from .populating import Populating

__all__ = ["Arena"]

_SPARE = 8
"""One part in so many is mapped beyond an estimate, and not touched: the state may be larger."""


class Arena:
    """Page-aligned host memory.

    A view stays valid until :meth:`reserve` has to grow; then it still refers to the old memory,
    which lives as long as any view of it.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._array = self._bytes.numpy()
        self._populating: Populating | None = None
        self._prepared_bytes = 0
        self._is_used = False
        self._pinned = _Pinned()
        # CUDA must not know memory that is there no more, also when nobody closes the run.
        finalize(self, self._pinned.end).atexit = False
        self.generation = 0
        """Grows whenever the memory was replaced, so that what it held is gone."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes that are mapped."""
        return 0 if self._map is None else len(self._map)

    def reserve(self, num_bytes: int) -> bool:
        """Make sure that ``num_bytes`` are there; return whether the memory was replaced."""
        is_first, self._is_used = not self._is_used, True
        if num_bytes > self.capacity_bytes:
            self._new_map(num_bytes)
            self._populate(0, num_bytes)
            return True
        if is_first and self._map is not None:
            self._settle_on(num_bytes)
        return False

    def prepare(self, num_bytes: int, *, most_bytes: int = 0) -> None:
        """Have a thread get about as much memory, ahead of the first save.

        A later call corrects the estimate: what is missing is got too, and what is not needed given
        back. Does nothing once a state was copied.

        Args:
            num_bytes: An estimate of what will be needed.
            most_bytes: What the state may come to, if the estimate turns out too small.
        """
        if self._is_used or num_bytes < HUGE_PAGE_BYTES:
            return
        if num_bytes > self.capacity_bytes:
            modest_bytes = num_bytes + num_bytes // _SPARE + HUGE_PAGE_BYTES
            try:
                self._new_map(max(modest_bytes, most_bytes))
            except OSError:  # where address space is counted, too much is refused
                self._new_map(modest_bytes)
        self._settle_on(num_bytes)

    def join(self, timeout_s: float) -> bool:
        """Wait until what was prepared is there; return whether it is."""
        return self._populating is None or self._populating.join(timeout_s)

    def close(self) -> None:
        """Get no more memory ahead, and take back what CUDA knows; it can be read as before."""
        if self._populating is not None:
            self._populating.stop()
        self._pinned.end()

    def pin(self, num_bytes: int) -> None:
        """Have CUDA know the memory, if it can, so that devices copy to it by themselves.

        Args:
            num_bytes: How much of it is used. To be called when so much is reserved.
        """
        self._pinned.begin(self._bytes.data_ptr(), num_bytes)

    def _settle_on(self, num_bytes: int) -> None:
        """Have as much memory as is needed: no less, and hardly more."""
        assert self._map is not None
        num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if num_bytes > self._prepared_bytes:
            self._populate(self._prepared_bytes, num_bytes)
        elif num_bytes < self._prepared_bytes:
            is_under_way = not self.join(0)
            if self._populating is not None:
                self._populating.stop()
            self._map.madvise(mmap.MADV_DONTNEED, num_bytes, self._prepared_bytes - num_bytes)
            self._prepared_bytes = num_bytes
            if is_under_way:
                self._populate(0, num_bytes)

    def _populate(self, start: int, stop: int) -> None:
        assert self._populating is not None
        self._populating.ask(start, stop)
        self._prepared_bytes = stop

    def _new_map(self, num_bytes: int) -> None:
        # Let go of the old memory first: a growing state must not need both at once.
        self.close()
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        self._array, self._populating = self._bytes.numpy(), None
        self._prepared_bytes = 0
        size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._map = page_memory(size)
        advise(self._map, getattr(mmap, "MADV_HUGEPAGE", None))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self._bytes.numpy()
        self._populating = Populating(self._map, self._bytes.data_ptr())
        self.generation += 1

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


class _Pinned:
    """The range of memory that CUDA knows, or was asked to."""

    def __init__(self) -> None:
        self._address = 0
        self._num_bytes = 0
        self._is_known = False

    def begin(self, address: int, num_bytes: int) -> None:
        """Have CUDA know a range, once: where it refuses, it is not asked again for that memory."""
        if address == self._address and num_bytes <= self._num_bytes:
            return
        self.end()
        self._address, self._num_bytes = address, num_bytes
        self._is_known = register(address, num_bytes)

    def end(self) -> None:
        """Take it back from CUDA."""
        if self._is_known:
            unregister(self._address)
        self._address, self._num_bytes, self._is_known = 0, 0, False
