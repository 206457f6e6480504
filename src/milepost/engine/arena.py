"""The arena: reused host memory that mirrors the part files byte for byte.

One page-aligned anonymous mapping on huge pages where the system grants them. It grows when a state
needs more and is otherwise used again and again, because first touch of fresh memory costs several
times the copy that follows. It is private memory: nothing of it is left behind by a killed process.

The first touch can be had ahead of the first save, by a thread that asks the kernel for the pages a
few at a time. That writes nothing, so that a save need not wait for it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..stores.pages import advise, page_memory

__all__ = ["Arena"]

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PIECE_BYTES = 32 * 1024 * 1024
"""What is asked of the kernel at a time: it holds the lock of the process's memory meanwhile."""
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
        self._stop = threading.Event()
        self._preparing: threading.Thread | None = None
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
        advise(self._new_map(num_bytes), _MADV_POPULATE_WRITE)
        return True

    def prepare(self, num_bytes: int) -> None:
        """Have a thread get about as much memory, ahead of the first save.

        Does nothing where there is memory already.

        Args:
            num_bytes: An estimate of what will be needed.
        """
        if self._map is not None or num_bytes < _HUGE_PAGE_BYTES:
            return
        memory = self._new_map(num_bytes + num_bytes // _SPARE + _HUGE_PAGE_BYTES)
        self._stop.clear()
        self._preparing = threading.Thread(
            target=_populate,
            args=(memory, self._bytes.data_ptr(), num_bytes, self._stop),
            name="milepost-arena",
            daemon=True,  # an end of the process need not wait for it
        )
        self._preparing.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until what was prepared is there; return whether it is."""
        if self._preparing is not None:
            self._preparing.join(timeout_s)
            return not self._preparing.is_alive()
        return True

    def stop(self) -> None:
        """Get no more memory ahead."""
        self._stop.set()

    def _new_map(self, num_bytes: int) -> mmap.mmap:
        # Let go of the old memory first: a growing state must not need both at once.
        self.stop()
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        self._array = self._bytes.numpy()
        size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._map = page_memory(size)
        advise(self._map, getattr(mmap, "MADV_HUGEPAGE", None))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self._bytes.numpy()
        self.generation += 1
        return self._map

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


def _populate(memory: mmap.mmap, address: int, num_bytes: int, stop: threading.Event) -> None:
    """Ask for the pages of memory, which stays mapped meanwhile, piece by piece."""
    # By the C library: the call of Python holds the interpreter lock for all of its time.
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(0, min(num_bytes, len(memory)), _PIECE_BYTES):
        length = min(_PIECE_BYTES, len(memory) - start)
        if stop.is_set() or call(address + start, length, _MADV_POPULATE_WRITE):
            return  # an older kernel: the first copy touches them, as it would have anyway
