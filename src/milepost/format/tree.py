"""Nested Python state <-> JSON with explicit tags.

What JSON has a form for is written as it is. Everything else becomes an object with a ``"$"`` key
that names its kind, so that tuples come back as tuples and ``{1: "x"}`` keeps its integer key.
Values that this file does not know (tensors, above all) go to a *sink* given by the caller, which
stores them elsewhere and returns the tag to write in their place. Nothing is ever pickled, imported
by name, or called by name: a tag that is not known is an error.

    value                      JSON
    None, bool, str, int       itself
    finite float               itself (shortest form that reads back to the same bits)
    other float                {"$": "float", "bits": "7ff8000000000000"}
    list                       [...]
    dict with text keys        {...} in the order of the dict
    other dict                 {"$": "dict", "items": [[key, value], ...]}
    OrderedDict, Counter       {"$": "ordered_dict" | "counter", "items": [...]}
    tuple, set, frozenset      {"$": "tuple" | "set" | "frozenset", "v": [...]}
    deque                      {"$": "deque", "v": [...], "maxlen": n | null}
    bytes, bytearray           {"$": "bytes" | "bytearray", "v": base64}
    complex                    {"$": "complex", "v": [real, imaginary]}
    numpy scalar, array        {"$": "numpy" , "dtype": "<f8", "shape": null | [...], "v": base64}
    date, datetime, timedelta  {"$": "date" | "datetime" | "timedelta", "v": ...}
    pathlib path, range        {"$": "path" | "range", "v": ...}
    registered class           {"$": "custom", "tag": ..., "v": ...}

Two names for one list come back as two lists; two names for one tensor come back as one tensor.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, TypeVar

from ..errors import FormatError, UnsupportedStateError, UsageError

__all__ = ["MAX_DEPTH", "Resolver", "Sink", "decode", "encode", "path_text", "register_codec"]

MAX_DEPTH = 100
"""Deepest nesting that is stored or read."""

Path = tuple[Any, ...]
Sink = Callable[[Path, Any], Any]
"""``sink(path, value)`` returns the tag object to write, or ``None`` if it does not know the value."""
Resolver = Callable[[Mapping[str, Any]], Any]
"""``resolver(tag object)`` returns the value for a tag that the sink made; raises ``KeyError`` if
it does not know the tag."""

T = TypeVar("T")

_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_DECODERS: dict[str, Callable[[Any], Any]] = {}


def register_codec(
    cls: type[T], tag: str, *, encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> None:
    """Teach Milepost to store instances of a class.

    Register it before the first save, and before the first load in every process that reads it.

    Args:
        cls: The exact class; subclasses are not covered.
        tag: A name for it on disk. Never change it afterwards.
        encode: Turns an instance into a value that can be stored: numbers, text, containers,
            arrays, tensors.
        decode: Turns that value back.

    Raises:
        UsageError: The tag is taken by another class.
    """
    for other, (taken, _) in _ENCODERS.items():
        if taken == tag and other is not cls:
            raise UsageError(f"The tag {tag!r} already belongs to {other.__qualname__}.")
    _ENCODERS[cls] = (tag, encode)
    _DECODERS[tag] = decode


def path_text(path: Path) -> str:
    """Write a path as one would in Python: ``callbacks['EMA']['shadow'][3]``."""
    head, *rest = path or ("state",)
    return str(head) + "".join(f"[{part!r}]" for part in rest)


def encode(value: Any, *, sink: Sink | None = None, path: Path = ()) -> Any:
    """Turn a value into JSON.

    Args:
        value: Anything made of the kinds listed above and of what the sink knows.
        sink: Stores what this file does not know, tensors for example.
        path: Where the value stands, for error messages and for the sink.

    Raises:
        UnsupportedStateError: A value has no form. Nothing has been written then.
    """
    if len(path) > MAX_DEPTH:
        raise UnsupportedStateError(
            f"{path_text(path[:6])}... nests deeper than {MAX_DEPTH} levels, or holds itself.",
            path=path_text(path),
        )
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is int:
        return value
    if kind is float:
        return _float(value)
    if kind is list:
        return [encode(v, sink=sink, path=(*path, i)) for i, v in enumerate(value)]
    if kind is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {k: encode(v, sink=sink, path=(*path, k)) for k, v in value.items()}
        return {"$": "dict", "items": _items(value, sink, path)}
    if sink is not None:
        tag = sink(path, value)
        if tag is not None:
            return tag
    return _encode_rare(value, sink, path)


def decode(value: Any, *, resolver: Resolver | None = None) -> Any:
    """Turn JSON made by :func:`encode` back into the value.

    Raises:
        FormatError: An unknown or malformed tag, or nesting deeper than ``MAX_DEPTH``.
    """
    return _decode(value, resolver, 0)


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$": "float", "bits": struct.pack(">d", value).hex()}


def _items(value: Mapping[Any, Any], sink: Sink | None, path: Path) -> list[list[Any]]:
    return [
        [encode(k, sink=None, path=(*path, k)), encode(v, sink=sink, path=(*path, k))]
        for k, v in value.items()
    ]


def _encode_rare(value: Any, sink: Sink | None, path: Path) -> Any:
    kind = type(value)

    def listed(values: Any) -> list[Any]:
        return [encode(v, sink=sink, path=(*path, i)) for i, v in enumerate(values)]

    if kind is tuple:
        return {"$": "tuple", "v": listed(value)}
    if kind is OrderedDict:
        return {"$": "ordered_dict", "items": _items(value, sink, path)}
    if kind is Counter:
        return {"$": "counter", "items": _items(value, sink, path)}
    if kind is set or kind is frozenset:
        return {"$": kind.__name__, "v": listed(sorted(value, key=lambda v: (str(type(v)), v)))}
    if kind is deque:
        return {"$": "deque", "v": listed(value), "maxlen": value.maxlen}
    if kind is bytes or kind is bytearray:
        return {"$": kind.__name__, "v": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"$": "complex", "v": [_float(value.real), _float(value.imag)]}
    if kind is datetime.datetime or kind is datetime.date:
        return {"$": kind.__name__, "v": value.isoformat()}
    if kind is datetime.timedelta:
        return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if kind is range:
        return {"$": "range", "v": [value.start, value.stop, value.step]}
    if isinstance(value, PurePath):
        return {"$": "path", "v": value.as_posix()}
    if kind in _ENCODERS:
        tag, encoder = _ENCODERS[kind]
        return {"$": "custom", "tag": tag, "v": encode(encoder(value), sink=sink, path=path)}
    if kind.__module__ == "numpy" or any(c.__module__ == "numpy" for c in kind.__mro__):
        return _encode_numpy(value, path)
    hint = "Give it as numbers, text, containers, arrays or tensors, or register a codec with "
    if isinstance(value, Enum):
        hint = "Store its .value, or register a codec with "
    raise UnsupportedStateError(
        f"{path_text(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored "
        "without running code on load.",
        hint=hint + "milepost.register_codec.",
        path=path_text(path),
        type=f"{kind.__module__}.{kind.__qualname__}",
    )


def _encode_numpy(value: Any, path: Path) -> Any:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not _NUMPY_DTYPE.fullmatch(dtype.str):
        raise UnsupportedStateError(
            f"{path_text(path)} is a numpy value of dtype {dtype}, which cannot be stored without "
            "running code on load.",
            hint="Use a plain number, text or datetime dtype.",
            path=path_text(path),
        )
    is_array = type(value).__name__ in ("ndarray", "memmap")
    return {
        "$": "numpy",
        "dtype": dtype.str,
        "shape": list(value.shape) if is_array else None,
        "v": base64.b64encode(value.tobytes()).decode("ascii"),
    }


_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,6}|[<>|=][mM]8(\[\d{0,6}\w{1,3}\])?")


def _decode(value: Any, resolver: Resolver | None, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise FormatError(f"The state nests deeper than {MAX_DEPTH} levels.")
    if isinstance(value, list):
        return [_decode(v, resolver, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {k: _decode(v, resolver, depth + 1) for k, v in value.items()}
    tag = value["$"]
    try:
        if tag in _CONTAINERS:
            parts = value["items"] if "items" in value else value["v"]
            return _CONTAINERS[tag]([_decode(v, resolver, depth + 1) for v in parts], value)
        if tag == "custom":
            inner = _decode(value["v"], resolver, depth + 1)
            if value["tag"] not in _DECODERS:
                raise FormatError(
                    f"The state holds a value of the registered kind {value['tag']!r}.",
                    hint="Call milepost.register_codec for it before loading.",
                )
            return _DECODERS[value["tag"]](inner)
        if tag in _LEAVES:
            return _LEAVES[tag](value)
        if resolver is not None:
            return resolver(value)
    except FormatError:
        raise
    except (KeyError, ValueError, TypeError, OverflowError, binascii.Error, struct.error) as error:
        raise FormatError(f"The state holds a malformed {str(tag)[:40]!r}: {error}.") from error
    raise FormatError(f"The state holds a value of an unknown kind {str(tag)[:40]!r}.")


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in parts]


_CONTAINERS: dict[str, Callable[[list[Any], Mapping[str, Any]], Any]] = {
    "dict": lambda parts, _: dict(_pairs(parts)),
    "ordered_dict": lambda parts, _: OrderedDict(_pairs(parts)),
    "counter": lambda parts, _: Counter(dict(_pairs(parts))),
    "tuple": lambda parts, _: tuple(parts),
    "set": lambda parts, _: set(parts),
    "frozenset": lambda parts, _: frozenset(parts),
    "deque": lambda parts, tag: deque(parts, tag["maxlen"]),
}


def _read_float(value: Any) -> float:
    if isinstance(value, dict):
        return float(struct.unpack(">d", bytes.fromhex(value["bits"]))[0])
    return float(value)


def _decode_numpy(tag: Mapping[str, Any]) -> Any:
    import numpy as np

    if not _NUMPY_DTYPE.fullmatch(tag["dtype"]):
        raise FormatError(f"The state holds a numpy value of dtype {tag['dtype']!r}.")
    dtype = np.dtype(tag["dtype"])
    data = base64.b64decode(tag["v"], validate=True)
    if tag["shape"] is None:
        (scalar,) = np.frombuffer(data, dtype)
        return scalar
    return np.frombuffer(data, dtype).reshape(tag["shape"]).copy()


_LEAVES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": _read_float,
    "bytes": lambda tag: base64.b64decode(tag["v"], validate=True),
    "bytearray": lambda tag: bytearray(base64.b64decode(tag["v"], validate=True)),
    "complex": lambda tag: complex(*map(_read_float, tag["v"])),
    "numpy": _decode_numpy,
    "date": lambda tag: datetime.date.fromisoformat(tag["v"]),
    "datetime": lambda tag: datetime.datetime.fromisoformat(tag["v"]),
    "timedelta": lambda tag: datetime.timedelta(*tag["v"]),
    "path": lambda tag: FilePath(tag["v"]),
    "range": lambda tag: range(*tag["v"]),
}
