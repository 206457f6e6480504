"""Torch dtypes <-> the dtype codes of the container.

A dtype that the container has no code for is stored as raw bytes: code ``U8`` with one more
dimension, the bytes of an element; the tag in the tree then names the real dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["CODES", "dtype_name", "dtype_of_code", "named_dtype"]

_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}

_RAW = ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_NAMES.values(), *_RAW) if hasattr(torch, name)
}

CODES: Mapping[torch.dtype, str] = {
    _BY_NAME[name]: code for code, name in _NAMES.items() if name in _BY_NAME
}
"""Code of the container for each dtype that has one."""

_OF_CODE = {code: dtype for dtype, code in CODES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype | None:
    """Return the storable dtype of that name, or ``None`` if there is none in this torch."""
    return _BY_NAME.get(name)


def dtype_of_code(code: str) -> torch.dtype | None:
    """Return the dtype of a code, or ``None`` if this torch lacks it."""
    return _OF_CODE.get(code)
