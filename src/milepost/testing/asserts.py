"""Comparing two states exactly: bits, not values.

``NaN`` equals the same ``NaN``, ``-0.0`` differs from ``0.0``, ``1`` differs from ``1.0`` and from
``True``, and a tuple differs from a list. The first difference is told with the path that leads to
it, as in ``state['optimizers']['AdamW'][3]``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from ..tensors.memory import host_bytes

__all__ = ["assert_equal_states", "first_difference"]


def assert_equal_states(left: Any, right: Any, *, path: str = "state") -> None:
    """Require that two states are equal bit for bit.

    Args:
        left: Containers, numbers, text, tensors and arrays, nested in any way.
        right: What it must equal.
        path: What to call the whole in the message.

    Raises:
        AssertionError: They differ; the message leads to the first difference.
    """
    difference = first_difference(left, right, path=path)
    if difference is not None:
        raise AssertionError(difference)


def first_difference(left: Any, right: Any, *, path: str = "state") -> str | None:
    """Return the first difference of two states with the path to it, or ``None``."""
    if type(left) is not type(right):
        return f"{path}: {_kind(left)} and {_kind(right)}"
    if isinstance(left, torch.Tensor):
        return _tensors(left, right, path)
    if isinstance(left, np.ndarray | np.generic):
        return _arrays(np.asarray(left), np.asarray(right), path)
    if isinstance(left, Mapping):
        return _mappings(left, right, path)
    if isinstance(left, AbstractSet):
        return None if left == right else f"{path}: {left!r} and {right!r}"
    if isinstance(left, Sequence) and not isinstance(left, str | bytes | bytearray):
        return _sequences(left, right, path)
    if isinstance(left, float):
        same = struct.pack("<d", left) == struct.pack("<d", right)
        return None if same else f"{path}: {left!r} and {right!r}"
    return None if left == right else f"{path}: {left!r} and {right!r}"


def _mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str) -> str | None:
    only_left = [key for key in left if key not in right]
    only_right = [key for key in right if key not in left]
    if only_left or only_right:
        return f"{path}: keys only left {only_left!r}, only right {only_right!r}"
    for key, value in left.items():
        difference = first_difference(value, right[key], path=f"{path}[{key!r}]")
        if difference is not None:
            return difference
    return None


def _sequences(left: Sequence[Any], right: Sequence[Any], path: str) -> str | None:
    if len(left) != len(right):
        return f"{path}: {len(left)} and {len(right)} entries"
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        difference = first_difference(one, other, path=f"{path}[{index}]")
        if difference is not None:
            return difference
    return None


def _tensors(left: torch.Tensor, right: torch.Tensor, path: str) -> str | None:
    for name in ("dtype", "shape", "layout"):
        one, other = getattr(left, name), getattr(right, name)
        if one != other:
            return f"{path}: {name} {one} and {other}"
    if left.layout is not torch.strided:
        return _sparse(left, right, path)
    if left.is_quantized:
        left, right = left.int_repr(), right.int_repr()
    return _bytes(_bits(left), _bits(right), path, element_bytes=left.element_size())


def _sparse(left: torch.Tensor, right: torch.Tensor, path: str) -> str | None:
    if left.layout is torch.sparse_coo:
        pairs = [("_indices", left._indices(), right._indices())]  # noqa: SLF001 - not coalesced
        pairs.append(("_values", left._values(), right._values()))  # noqa: SLF001
    else:
        names = ("crow_indices", "col_indices", "values")
        if left.layout in (torch.sparse_csc, torch.sparse_bsc):
            names = ("ccol_indices", "row_indices", "values")
        pairs = [(name, getattr(left, name)(), getattr(right, name)()) for name in names]
    for name, one, other in pairs:
        difference = _tensors(one, other, f"{path}.{name}")
        if difference is not None:
            return difference
    return None


def _bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host_bytes(dense).tobytes()


def _arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], path: str) -> str | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{path}: {left.dtype}{left.shape} and {right.dtype}{right.shape}"
    if left.dtype.hasobject:
        return first_difference(left.tolist(), right.tolist(), path=path)
    return _bytes(left.tobytes(), right.tobytes(), path, element_bytes=left.dtype.itemsize)


def _bytes(left: bytes, right: bytes, path: str, *, element_bytes: int) -> str | None:
    if left == right:
        return None
    pairs = enumerate(zip(left, right, strict=True))
    first = next(index for index, (one, other) in pairs if one != other)
    return f"{path}: differs, first at element {first // max(1, element_bytes)}"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if np.isscalar(value) else type(value).__name__
