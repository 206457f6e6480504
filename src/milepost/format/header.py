"""The safetensors header: bytes <-> tensor entries.

A part is a safetensors file: 8 bytes of little-endian length, a JSON header of that length, then
the bytes of the tensors. We pad the header with spaces so that the data starts on a page boundary,
and sort tensors by element size, so that each is aligned to its own elements.

Headers may come from strangers, so they are capped before they are parsed. Tensor names are data
and never paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from ..collecting import no_collecting
from ..errors import FormatError
from . import canonical
from .stored import ITEM_SIZES, Kind, StoredTable, StoredTensor

__all__ = [
    "ITEM_SIZES",
    "MAX_HEADER_BYTES",
    "MAX_TENSORS",
    "PAGE_BYTES",
    "StoredTable",
    "StoredTensor",
    "encode_header",
    "parse_header",
    "parse_header_length",
]

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_TENSORS = 200_000
"""Most tensors in one part. The table of so many takes about 170 MB of memory while it is read."""

MAX_RANK = 64
MAX_NAME_CHARS = 4096
_METADATA = "__metadata__"
_TOO_LARGE = 2**63
_DICT, _LIST, _STR, _INT = (frozenset({kind}) for kind in (dict, list, str, int))
_dtype_of, _shape_of = itemgetter("dtype"), itemgetter("shape")
_offsets_of = itemgetter("data_offsets")

_MAX_MARKS: Mapping[bytes, int] = {
    # An entry has 10 quotes, 4 colons, 2 opening brackets, 1 opening brace, and as many commas as
    # its shape has dimensions, and 3 more. What is above that is for odd names and the metadata.
    b'"': 12 * MAX_TENSORS,
    b":": 6 * MAX_TENSORS,
    b"[": 4 * MAX_TENSORS,
    b"{": 3 * MAX_TENSORS,
    b",": 16 * MAX_TENSORS,
}
"""How often each mark of JSON may stand in a header: it bounds the objects that parsing makes."""


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[StoredTensor]]:
    """Lay out a part.

    Args:
        tensors: ``(key, dtype code, shape, num_bytes)`` of each, in the order in which they shall
            lie in the file.
        metadata: Text that goes into the header's ``__metadata__``.

    Returns:
        The length field with the header, padded to a whole number of pages, and one entry a tensor
        in the given order.

    Raises:
        FormatError: A name that stands twice, is reserved or is too long, or more tensors than
            ``MAX_TENSORS``.
    """
    header: dict[str, object] = {}
    if metadata:
        header[_METADATA] = dict(metadata)
    placed, position = [], 0
    for key, dtype, shape, num_bytes in tensors:
        if key in header or key == _METADATA or len(key) > MAX_NAME_CHARS:
            raise FormatError(
                f"A tensor cannot be stored under the name {key[:80]!r}: the name stands twice, is "
                f"reserved, or is longer than {MAX_NAME_CHARS:,} characters.",
                hint="Give it another name.",
                tensor=key,
            )
        header[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + num_bytes],
        }
        placed.append((key, dtype, shape, position, position + num_bytes))
        position += num_bytes
    if len(placed) > MAX_TENSORS:
        raise FormatError(
            f"A part holds at most {MAX_TENSORS:,} tensors, and not {len(placed):,}.",
            hint="Split the state over several items.",
        )
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    total = -(-(8 + len(body)) // PAGE_BYTES) * PAGE_BYTES
    body = body.ljust(total - 8, b" ")
    if len(body) > MAX_HEADER_BYTES or _has_too_many_marks(body):
        raise FormatError(
            f"The table of {len(placed):,} tensors takes {len(body):,} bytes, or has more "
            f"dimensions or odd names than a reader would take; a part's table holds at most "
            f"{MAX_HEADER_BYTES:,} bytes.",
            hint="Split the state over several items.",
        )
    entries = [StoredTensor(k, d, s, total + a, total + b) for k, d, s, a, b in placed]
    return len(body).to_bytes(8, "little") + body, entries


def _has_too_many_marks(header: bytes) -> bool:
    """Return whether parsing a header would make more objects than a reader can afford."""
    return any(header.count(mark) > limit for mark, limit in _MAX_MARKS.items())


def parse_header_length(first: bytes, *, size_bytes: int, where: str) -> int:
    """Return the length of the JSON header from a file's first 8 bytes.

    Raises:
        FormatError: Not a safetensors file, or a header larger than is read.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise FormatError(
            f"{where} is not a safetensors file, or its header is larger than "
            f"{MAX_HEADER_BYTES:,} bytes.",
            path=where,
        )
    return length


def parse_header(header: bytes, *, size_bytes: int, where: str) -> StoredTable:
    """Parse the JSON header of a part.

    Args:
        header: The header without the length field.
        size_bytes: Size of the whole file.
        where: Name of the file, for messages.

    Returns:
        Entries by key; they tile the data region exactly.

    Raises:
        FormatError: Anything else.
    """
    if _has_too_many_marks(header):
        raise _too_many(where)
    with no_collecting():
        return _parse(header, size_bytes, where)


def _parse(header: bytes, size_bytes: int, where: str) -> StoredTable:
    table = canonical.load(
        header,
        where=f"the header of {where}",
        max_bytes=MAX_HEADER_BYTES,
        num_keys=_num_keys,
    )
    if not isinstance(table, dict):
        raise FormatError(f"The header of {where} is not a table.", path=where)
    table.pop(_METADATA, None)
    if len(table) > MAX_TENSORS:
        raise _too_many(where)
    base = 8 + len(header)
    return _whole_table(table, base, size_bytes) or _looked_through(table, base, size_bytes, where)


def _whole_table(table: dict[str, Any], base: int, size_bytes: int) -> StoredTable | None:
    """Return the tensors if each entry is as it should be, and they lie in order.

    Each thing is looked at in all entries together. Which one is wrong is left to others to say.

    Args:
        table: The header, without its metadata.
        base: Where the data begins in the file.
        size_bytes: Size of the whole file.

    Returns:
        Them; ``None`` if they have to be looked through one by one.
    """
    entries = list(table.values())
    if not entries or not _DICT.issuperset(map(type, entries)) or {*map(len, entries)} != {3}:
        return None
    try:
        dtypes = list(map(_dtype_of, entries))
        shapes, offsets = list(map(_shape_of, entries)), list(map(_offsets_of, entries))
    except KeyError:
        return None
    if not _STR.issuperset(map(type, dtypes)) or max(map(len, table)) > MAX_NAME_CHARS:
        return None
    if not _LIST.issuperset(map(type, chain(shapes, offsets))) or {*map(len, offsets)} != {2}:
        return None
    places = list(chain.from_iterable(offsets))
    # A truth value equals a number, and would be taken for one.
    if not _INT.issuperset(map(type, chain(places, chain.from_iterable(shapes)))):
        return None
    of_each: list[Kind] = list(zip(dtypes, map(tuple, shapes), strict=True))
    kinds = list(dict.fromkeys(of_each))
    sizes = list(map(_num_bytes, kinds))
    if min(sizes) < 0:
        return None
    numbers = dict(zip(kinds, range(len(kinds)), strict=True))
    kind_of = list(map(numbers.__getitem__, of_each))
    edges = list(accumulate(map(sizes.__getitem__, kind_of), initial=0))
    if places[::2] != edges[:-1] or places[1::2] != edges[1:] or edges[-1] >= _TOO_LARGE:
        return None
    if base + edges[-1] != size_bytes:
        return None
    moved = list(map(base.__add__, edges))
    return StoredTable.side_by_side(list(table), kinds, kind_of, moved)


def _num_bytes(kind: Kind) -> int:
    """Return the bytes of a tensor; -1 if there can be none like it."""
    dtype, shape = kind
    if dtype not in ITEM_SIZES or not _is_shape(shape):
        return -1
    return math.prod(shape) * ITEM_SIZES[dtype]


def _is_shape(lengths: Sequence[int]) -> bool:
    """Return whether a tensor can have that shape."""
    return len(lengths) <= MAX_RANK and all(0 <= length < _TOO_LARGE for length in lengths)


def _looked_through(table: dict[str, Any], base: int, size_bytes: int, where: str) -> StoredTable:
    """Return the tensors in whatever order they lie, or say what is wrong with one of them."""
    entries = _Entries(base, where)
    found = [entries.read(key, value) for key, value in table.items()]
    position = base
    for entry in _by_place(found):
        if entry.start != position:
            raise FormatError(
                f"The header of {where} leaves a gap or an overlap before {entry.key[:80]!r}.",
                path=where,
            )
        position = entry.stop
    if position != size_bytes:
        raise FormatError(
            f"The header of {where} describes {position:,} bytes; the file has {size_bytes:,}.",
            path=where,
        )
    return StoredTable.of(found)


def _num_keys(table: Any) -> int:
    """Return the number of keys of a header and its entries."""
    entries = list(table.values()) if type(table) is dict else []
    num_keys = len(entries)
    if not _DICT.issuperset(map(type, entries)):
        entries = [one for one in entries if type(one) is dict]
    return num_keys + sum(map(len, entries))


def _too_many(where: str) -> FormatError:
    return FormatError(
        f"The header of {where} describes more than the {MAX_TENSORS:,} tensors that a part holds.",
        path=where,
    )


def _by_place(entries: list[StoredTensor]) -> list[StoredTensor]:
    """Return tensors in the order in which they lie in the file; mostly they stand so."""
    if any(one.start > other.start or one.stop > other.stop for one, other in pairwise(entries)):
        return sorted(entries, key=lambda one: (one.start, one.stop))
    return entries


class _Entries:
    """Reads the entries of a header, and looks at each kind of tensor once.

    Args:
        base: Where the data begins in the file.
        where: Name of the file, for messages.
    """

    def __init__(self, base: int, where: str) -> None:
        self._base = base
        self._where = where
        self._kinds: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}

    def read(self, key: str, value: object) -> StoredTensor:
        if len(key) > MAX_NAME_CHARS:
            raise self._refuse(key, "has a name that is too long")
        if type(value) is not dict or len(value) != 3:
            raise self._refuse(key, "has a malformed entry")
        try:
            dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        except KeyError:
            raise self._refuse(key, "has a malformed entry") from None
        shape, num_bytes = self._kind(key, dtype, shape)
        if type(offsets) is not list or len(offsets) != 2:
            raise self._refuse(key, "has malformed offsets")
        start, stop = offsets
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < _TOO_LARGE:
            raise self._refuse(key, "has malformed offsets")
        if stop - start != num_bytes:
            raise self._refuse(key, "has a size that does not match its shape")
        return StoredTensor(key, dtype, shape, self._base + start, self._base + stop)

    def _kind(self, key: str, dtype: Any, shape: Any) -> tuple[tuple[int, ...], int]:
        """Return shape and bytes of a tensor."""
        # A truth value equals a number, and would be taken for one that is known.
        if type(shape) is not list or not _INT.issuperset(map(type, shape)):
            raise self._refuse(key, "has a malformed shape")
        if type(dtype) is not str:
            raise self._refuse(key, f"has an unknown dtype {str(dtype)[:20]!r}")
        kind = (dtype, *shape)
        found = self._kinds.get(kind)
        if found is None:
            if not _is_shape(shape):
                raise self._refuse(key, "has a malformed shape")
            if dtype not in ITEM_SIZES:
                raise self._refuse(key, f"has an unknown dtype {dtype[:20]!r}")
            num_bytes = math.prod(shape) * ITEM_SIZES[dtype]
            found = self._kinds[kind] = (tuple(shape), num_bytes)
        return found

    def _refuse(self, key: str, reason: str) -> FormatError:
        return FormatError(
            f"{self._where}: tensor {key[:80]!r} {reason}.", path=self._where, tensor=key
        )
