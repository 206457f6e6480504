"""The memory of a tensor of the host as an array, without ``Tensor.numpy()``.

That one marks the storage for ever: whoever has the tensor can no longer resize it. And the array
would not keep the memory: torch may move a storage elsewhere, as when its tensor is handed to
another process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["host_bytes"]

Bytes = npt.NDArray[np.uint8]


class _Memory:
    """What numpy makes an array of; the array refers to it, and so to the storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def host_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor, not a copy: [num_bytes], uint8.

    To be used at once, and not kept: it is valid while nobody moves or resizes the storage.

    Args:
        tensor: A strided tensor of the host without gaps, whose values are not conjugated or
            negated on the way.
    """
    return np.asarray(_Memory(tensor))
