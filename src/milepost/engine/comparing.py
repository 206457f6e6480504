"""Whether a frozen tensor still is what the arena holds of it, byte for byte.

Eight bytes are compared at a time, in portions that stay in the cache: single bytes would take five
times as long, and an answer for all at once would take memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..tensors.memory import host_bytes

__all__ = ["same_bytes"]

_PORTION_BYTES = 1024 * 1024
_WORD_BYTES = 8


def same_bytes(staged: Tensor, live: Tensor) -> bool:
    """Compare bit patterns: a NaN equals itself, and -0.0 does not equal 0.0.

    Args:
        staged: Memory of the host, without gaps.
        live: A tensor of that dtype and shape, of any device and stride.
    """
    if staged.numel() == 0:
        return True
    with torch.no_grad():
        # Held by name: an array of its bytes does not keep the memory in place.
        dense = live.to(staged.device).contiguous()
        first, second = host_bytes(staged), host_bytes(dense)
    stop = len(first) // _WORD_BYTES * _WORD_BYTES
    for low in range(0, stop, _PORTION_BYTES):
        portion = slice(low, min(low + _PORTION_BYTES, stop))
        if not np.array_equal(first[portion].view(np.int64), second[portion].view(np.int64)):
            return False
    return bool(np.array_equal(first[stop:], second[stop:]))
