"""Nested Python state <-> JSON with explicit tags.

What JSON has a form for is written as it is. Everything else becomes an object with a ``"$"`` key
that names its kind, so that tuples come back as tuples and ``{1: "x"}`` keeps its integer key.
Values that this file does not know (tensors, above all) go to a *sink* given by the caller, which
stores them elsewhere and returns the tag to write in their place. Nothing is ever pickled, imported
by name, or called by name: a tag that is not known is an error.

    value                      JSON
    None, bool, str, int       itself
    int of more than 2048 bits {"$": "int", "hex": "-1f..."}
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
    PurePosixPath, ...         {"$": "posix_path" | "windows_path", "v": ...}
    registered class           {"$": "custom", "tag": ..., "v": ...}

Two names for one list come back as two lists; two names for one tensor come back as one tensor.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path as FilePath
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from ..errors import FormatError, UnsupportedStateError, UsageError
from .arrays import decode_array, encode_array, is_numpy

__all__ = [
    "MAX_DEPTH",
    "Resolver",
    "Sink",
    "decode",
    "encode",
    "key_text",
    "num_codecs",
    "path_text",
    "register_codec",
]

MAX_DEPTH = 100
"""Deepest nesting that is stored or read."""

_MAX_DECIMAL_BITS = 2048
_AS_THEY_ARE = frozenset({type(None), bool, str})

Path = tuple[Any, ...]
Sink = Callable[[Path, Any], Any]
"""``sink(path, value)`` returns the tag object to write, or ``None`` if it does not know the
value."""
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


def num_codecs() -> int:
    """Return how many classes were registered with :func:`register_codec` so far."""
    return len(_ENCODERS)


def path_text(path: Path) -> str:
    """Write a path as one would in Python: ``callbacks['EMA']['shadow'][3]``."""
    head, *rest = path or ("state",)
    return str(head) + "".join(f"[{key_text(part, write=repr)}]" for part in rest)


def key_text(key: Any, *, write: Callable[[Any], str] = str) -> str:
    """Write one key of a path, also one of more decimal digits than Python writes.

    Args:
        key: An index, or the key of a dict.
        write: How to write any other key.
    """
    try:
        return write(key)
    except ValueError:
        return f"{type(key).__qualname__} of too many digits"


def encode(value: Any, *, sink: Sink | None = None, path: Path = (), depth: int = 0) -> Any:
    """Turn a value into JSON.

    Args:
        value: Anything made of the kinds listed above and of what the sink knows.
        sink: Stores what this file does not know, tensors for example.
        path: Where the value stands, for error messages and for the sink.
        depth: How deep that is in what is stored.

    Raises:
        UnsupportedStateError: A value has no form. Nothing has been written then.
    """
    return _encode(value, sink, path, depth)


def decode(value: Any, *, resolver: Resolver | None = None) -> Any:
    """Turn JSON made by :func:`encode` back into the value.

    Raises:
        FormatError: An unknown or malformed tag, or nesting deeper than ``MAX_DEPTH``.
    """
    return _decode(value, resolver, 0)


def _encode(value: Any, sink: Sink | None, path: Path, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UnsupportedStateError(
            f"{path_text(path[:6])}... nests deeper than {MAX_DEPTH} levels, or holds itself.",
            hint="Store a flatter value.",
            path=path_text(path),
        )
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return _int(value)
    if kind is float:
        return _float(value)
    if kind is list:
        return _encode_list(value, sink, path, depth)
    if kind is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {k: _encode(v, sink, (*path, k), depth + 1) for k, v in value.items()}
        return {"$": "dict", "items": _items(value, sink, path, depth)}
    if sink is not None:
        tag = sink(path, value)
        if tag is not None:
            return tag
    return _encode_rare(value, sink, path, depth)


def _encode_list(value: list[Any], sink: Sink | None, path: Path, depth: int) -> list[Any]:
    if depth < MAX_DEPTH and _AS_THEY_ARE.issuperset(map(type, value)):
        return list(value)  # such as the names of all parameters
    return [_encode(v, sink, (*path, i), depth + 1) for i, v in enumerate(value)]


def _int(value: int) -> Any:
    # Python refuses to read or write more decimal digits than a limit, of at least 640.
    if value.bit_length() <= _MAX_DECIMAL_BITS:
        return value
    return {"$": "int", "hex": format(value, "x")}


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$": "float", "bits": struct.pack(">d", value).hex()}


def _items(value: Mapping[Any, Any], sink: Sink | None, path: Path, depth: int) -> list[list[Any]]:
    return [
        [_encode(k, None, (*path, k), depth + 1), _encode(v, sink, (*path, k), depth + 1)]
        for k, v in value.items()
    ]


def _encode_rare(value: Any, sink: Sink | None, path: Path, depth: int) -> Any:
    kind = type(value)
    if kind in _ENCODERS:
        tag, encoder = _ENCODERS[kind]
        return {"$": "custom", "tag": tag, "v": _encode(encoder(value), sink, path, depth + 1)}
    if kind in _LEAF_FORMS:
        return {"$": kind.__name__, "v": _LEAF_FORMS[kind](value)}
    if kind in _MAPPING_TAGS:
        return {"$": _MAPPING_TAGS[kind], "items": _items(value, sink, path, depth)}
    if kind in _SEQUENCES:
        parts = [_encode(v, sink, (*path, i), depth + 1) for i, v in enumerate(value)]
        if kind is set or kind is frozenset:
            parts.sort(key=json.dumps)  # the same bytes in every process
        bound = {"maxlen": value.maxlen} if kind is deque else {}
        return {"$": kind.__name__, "v": parts, **bound}
    if isinstance(value, PurePath):
        return _path(value)
    if is_numpy(value):
        return encode_array(value, where=path_text(path))
    raise _unsupported(value, path)


def _path(value: PurePath) -> Any:
    if isinstance(value, FilePath):
        return {"$": "path", "v": value.as_posix()}
    tag = "windows_path" if isinstance(value, PureWindowsPath) else "posix_path"
    return {"$": tag, "v": str(value)}


def _unsupported(value: Any, path: Path) -> UnsupportedStateError:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = "Give it as numbers, text, containers, arrays or tensors, or register a codec with "
    if isinstance(value, Enum):
        hint = "Store its .value, or register a codec with "
    return UnsupportedStateError(
        f"{path_text(path)} is a {name}, which cannot be stored without running code on load.",
        hint=hint + "milepost.register_codec.",
        path=path_text(path),
        type=name,
    )


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


_LEAF_FORMS: dict[type, Callable[[Any], Any]] = {
    bytes: _base64,
    bytearray: _base64,
    complex: lambda value: [_float(value.real), _float(value.imag)],
    datetime.date: lambda value: value.isoformat(),
    datetime.datetime: lambda value: value.isoformat(),
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    range: lambda value: [_int(value.start), _int(value.stop), _int(value.step)],
}
_MAPPING_TAGS: dict[type, str] = {OrderedDict: "ordered_dict", Counter: "counter"}
_SEQUENCES = frozenset({tuple, set, frozenset, deque})


def _decode(value: Any, resolver: Resolver | None, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise FormatError(f"The state nests deeper than {MAX_DEPTH} levels.")
    if isinstance(value, list):
        return [_decode(v, resolver, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {k: _decode(v, resolver, depth + 1) for k, v in value.items()}
    try:
        return _decode_tag(value, resolver, depth)
    except FormatError:
        raise
    except (KeyError, ValueError, TypeError, OverflowError, binascii.Error, struct.error) as error:
        tag = str(value["$"])[:40]
        raise FormatError(f"The state holds a malformed {tag!r}: {error}.", tag=tag) from error


def _decode_tag(value: Mapping[str, Any], resolver: Resolver | None, depth: int) -> Any:
    tag = value["$"]
    if tag in _MAPPINGS:
        pairs = []
        for key, part in map(_pair, _list(value["items"])):
            pairs.append((_decode(key, None, depth + 1), _decode(part, resolver, depth + 1)))
        return _MAPPINGS[tag](dict(pairs))
    if tag in _CONTAINERS:
        parts = [_decode(part, resolver, depth + 1) for part in _list(value["v"])]
        return _CONTAINERS[tag](parts, value)
    if tag in _LEAVES:
        return _LEAVES[tag](value)
    if tag == "custom":
        return _decode_custom(value["tag"], _decode(value["v"], resolver, depth + 1))
    if resolver is not None:
        return resolver(value)
    raise FormatError(f"The state holds a value of an unknown kind {str(tag)[:40]!r}.")


def _decode_custom(tag: str, inner: Any) -> Any:
    if tag not in _DECODERS:
        raise FormatError(
            f"The state holds a value of the registered kind {tag!r}.",
            hint="Call milepost.register_codec for it before loading.",
            tag=tag,
        )
    try:
        return _DECODERS[tag](inner)
    except Exception as error:
        raise FormatError(
            f"The codec of {tag!r} could not read its value: {type(error).__name__}: {error}.",
            tag=tag,
        ) from error


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("a list was expected")
    return value


def _pair(value: Any) -> tuple[Any, Any]:
    key, part = _list(value)
    return key, part


_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "ordered_dict": OrderedDict,
    "counter": Counter,
}
_CONTAINERS: dict[str, Callable[[list[Any], Mapping[str, Any]], Any]] = {
    "tuple": lambda parts, _: tuple(parts),
    "set": lambda parts, _: set(parts),
    "frozenset": lambda parts, _: frozenset(parts),
    "deque": lambda parts, tag: deque(parts, tag["maxlen"]),
}


def _read_float(value: Any) -> float:
    if isinstance(value, dict):
        return float(struct.unpack(">d", bytes.fromhex(value["bits"]))[0])
    if type(value) not in (int, float):
        raise TypeError("a number was expected")
    return float(value)


def _read_int(value: Any) -> int:
    if isinstance(value, Mapping):
        text = value["hex"] if value["$"] == "int" else ""
        number = int(text, 16)
        if format(number, "x") != text:
            raise ValueError("a whole number in hex was expected")
        return number
    if type(value) is not int:
        raise TypeError("a whole number was expected")
    return value


_LEAVES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": _read_float,
    "bytes": lambda tag: base64.b64decode(tag["v"], validate=True),
    "bytearray": lambda tag: bytearray(base64.b64decode(tag["v"], validate=True)),
    "complex": lambda tag: complex(*map(_read_float, _pair(tag["v"]))),
    "numpy": decode_array,
    "date": lambda tag: datetime.date.fromisoformat(tag["v"]),
    "datetime": lambda tag: datetime.datetime.fromisoformat(tag["v"]),
    "timedelta": lambda tag: datetime.timedelta(*_list(tag["v"])),
    "path": lambda tag: FilePath(tag["v"]),
    "posix_path": lambda tag: PurePosixPath(tag["v"]),
    "windows_path": lambda tag: PureWindowsPath(tag["v"]),
    "range": lambda tag: range(*map(_read_int, _list(tag["v"]))),
    "int": _read_int,
}
