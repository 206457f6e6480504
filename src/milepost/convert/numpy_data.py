"""NumPy arrays and scalars in a file of torch's, rebuilt from checked pieces.

NumPy restores its own objects from a pickle without doubting it: a crafted dtype makes it follow
pointers that it was handed. So a file never gets to NumPy's functions. What it calls by their names
are the stand-ins below, which keep the pieces; :func:`settle` then builds plain arrays from them.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from types import FunctionType
from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedStateError

__all__ = ["STAND_INS", "settle"]

_CODE = re.compile(r"(?:[?bhilqBHILQefdFD]|b1|[iu][1248]|f[248]|c(?:8|16)|[SU][0-9]{1,6})")
_ORDERS = ("<", ">", "|", "=")


class _ArrayType:
    """Stands for the class of arrays."""


class _Dtype:
    """Stands for a dtype of plain numbers or text."""

    def __init__(self, code: object = None, align: object = None, copy: object = None) -> None:
        del align, copy
        if type(code) is not str or not _CODE.fullmatch(code):
            raise UnsupportedStateError(
                f"The file holds a NumPy array of the type {str(code)[:40]!r}, which is not one of "
                "plain numbers or text.",
                safe="Nothing of it was built.",
                hint="Load it with trust=True only if you made the file yourself.",
                refused=f"numpy.dtype({str(code)[:40]!r})",
            )
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, ...): of the rest, nothing is needed for a plain type.
        if type(state) is not tuple or len(state) < 2 or state[1] not in _ORDERS:
            raise FormatError("The file holds a malformed NumPy type.")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for an array."""

    def __init__(self, *arguments: object) -> None:
        del arguments
        self.array = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise FormatError("The file holds a malformed NumPy array.")
        _, shape, dtype, is_fortran, data = state
        self.array = _build(shape, dtype, data, order="F" if is_fortran else "C")


def _scalar(dtype: object = None, data: object = None) -> Any:
    return _build((), dtype, data, order="C")[()]


def _no_bytes(*arguments: object) -> bytes:
    """Stand for ``bytes``, which old pickles call for an empty value and which takes a size."""
    if arguments:
        raise FormatError("The file asks for bytes that it does not hold.")
    return b""


def _build(shape: Any, dtype: Any, data: Any, *, order: Any) -> np.ndarray[Any, Any]:
    is_shape = type(shape) is tuple and all(type(n) is int and 0 <= n < 2**63 for n in shape)
    if not is_shape or len(shape) > 32 or type(dtype) is not _Dtype or type(data) is not bytes:
        raise FormatError("The file holds a malformed NumPy array.")
    if math.prod(shape) * dtype.dtype.itemsize != len(data):
        raise FormatError("The file holds a NumPy array of a size that does not match its shape.")
    if not data:
        return np.empty(shape, dtype.dtype)
    return np.ndarray(shape, dtype.dtype, buffer=data, order=order).copy(order=order)


STAND_INS: tuple[tuple[Any, str], ...] = (
    (_ArrayType, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    # Their module moved between NumPy 1 and 2, and a file names the one it was written with.
    (_Array, "numpy._core.multiarray._reconstruct"),
    (_Array, "numpy.core.multiarray._reconstruct"),
    (_scalar, "numpy._core.multiarray.scalar"),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_no_bytes, "builtins.bytes"),
)
"""What a file gets when it names a part of NumPy."""


_PARTS = frozenset(part for part, _ in STAND_INS)


def settle(value: Any) -> Any:
    """Replace every stand-in in nested containers; lists and dicts are changed in place.

    Raises:
        FormatError: A stand-in where only the class itself can have been meant.
        RecursionError: Containers nested without measure.
    """
    return _settle(value, set())


def _settle(value: Any, seen: set[int]) -> Any:
    kind = type(value)
    if kind is _Array:
        return value.array
    if kind is _Dtype:
        return value.dtype
    if kind in (type, FunctionType) and value in _PARTS:
        raise FormatError("The file holds a part of NumPy as a value.")
    if kind is tuple:
        return tuple(_settle(member, seen) for member in value)
    if kind in (dict, OrderedDict, list):
        if id(value) in seen:
            return value
        seen.add(id(value))
        for key, member in value.items() if kind is not list else enumerate(value):
            value[key] = _settle(member, seen)
    return value
