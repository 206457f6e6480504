"""The bytes of a live tensor, row by row, for as long as they are wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LiveBytes"]


class LiveBytes:
    """Copies the bytes of a tensor out of wherever it is.

    The tensor is asked for when its first byte is wanted, taken to the host and made contiguous if
    it is not, and let go of after its last.

    Args:
        get: Returns the tensor.
        num_bytes: Its bytes.
    """

    def __init__(self, get: Callable[[], Tensor], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._get = get
        self._left_bytes = num_bytes
        self._flat: Tensor | None = None
        self._lock = threading.Lock()

    def __call__(self, start: int, view: memoryview) -> None:
        """Fill a view with the bytes from ``start`` on; each byte is to be asked for once."""
        with self._lock:
            if self._flat is None:
                value = self._get().detach().resolve_conj().resolve_neg().cpu().contiguous()
                self._flat = value.reshape(-1).view(torch.uint8)
            flat = self._flat
        torch.frombuffer(view, dtype=torch.uint8).copy_(flat[start : start + len(view)])
        with self._lock:
            self._left_bytes -= len(view)
            if self._left_bytes == 0:
                self._flat = None
