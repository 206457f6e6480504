"""Values of stored tensors, read with torch; only for what cannot be told without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..state.source import StateSource, new_tensor

__all__ = ["Distance", "measure", "read_tensor"]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart two tensors are.

    Attributes:
        max_abs: Largest absolute difference of two elements; NaN where one of them is NaN.
        relative_l2: Norm of the difference over the norm of the first.
    """

    max_abs: float
    relative_l2: float


def read_tensor(source: StateSource, item: str, key: str) -> Tensor:
    """Read one tensor as it is stored."""
    tensor = new_tensor(source.tensors(item)[key])
    source.read([(item, key, tensor)])
    return tensor


def measure(one: Tensor, other: Tensor) -> Distance | None:
    """Return how far apart two tensors of one shape are, or ``None`` if they are not numbers.

    Computed in float64, or complex128 for complex ones.
    """
    if not (one.is_floating_point() or one.is_complex()):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    gap = (one - other).abs()
    norm = float(torch.linalg.vector_norm(one))
    apart = float(torch.linalg.vector_norm(gap))
    relative = apart / norm if norm else float("inf") if apart else 0.0
    return Distance(float(gap.max()) if gap.numel() else 0.0, relative)
