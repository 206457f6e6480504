"""Find the values of a tensor in what ``torch.save`` wrote of it, without loading anything.

Such an archive is a zip file with a small pickle, which says what the tensor is, and one member
with the bytes of its storage. Here the pickle is read as data and the bytes are left where they
are: whoever wants some of them reads just those.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import FormatError, UnsupportedStateError
from .pickle_data import Made, Named, Persistent, read_pickle

__all__ = ["Archived", "find_tensor"]

ReadAt = Callable[[int, int], bytes]
"""``read_at(start, count)`` returns bytes of a file, fewer at its end."""

_MAX_READ_BYTES = 1 << 20
_MAX_RANK = 64
_STORAGES: dict[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = "torch.storage.UntypedStorage"
_DTYPES: dict[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_OLD, _NEW = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ALLOWED = frozenset(
    {*_STORAGES, *_DTYPES, _UNTYPED, _OLD, _NEW, _PARAMETER, "collections.OrderedDict"}
)


@dataclass(frozen=True, slots=True)
class Archived:
    """A tensor in an archive.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        strides: How far apart its elements are in the storage, in elements.
        first: Its first element in the storage.
        start: The first byte of the storage in the file.
        num_bytes: The bytes of the storage.
        crc: The CRC-32 of the storage; 0 where the writer noted none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    start: int
    num_bytes: int
    crc: int

    @property
    def is_dense(self) -> bool:
        """Return whether the storage is the tensor, row by row, and nothing else."""
        expected, size = 1, self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return self.first == 0 and expected * size == self.num_bytes


def find_tensor(read_at: ReadAt, start: int, length: int, *, where: str) -> Archived:
    """Find the tensor in an archive that is a part of a file.

    Args:
        read_at: Reads the file.
        start: Where the archive begins in it.
        length: Its bytes.
        where: What it is, for messages.

    Raises:
        UnsupportedStateError: It holds something else than one plain tensor. Nothing was run.
        FormatError: It is damaged, or no such archive.
    """
    window = _Window(read_at, start, length, where)
    try:
        with zipfile.ZipFile(cast(io.BytesIO, window)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OverflowError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"{where} is no archive of torch's: {e}.", path=where) from e
    if "data.pkl" not in members:
        raise FormatError(f"{where} is no archive of torch's.", path=where)
    order = members.get("byteorder")
    if order is not None and _bytes_of(window, order) != b"little":
        raise UnsupportedStateError(f"{where} was written on a machine of another byte order.")
    value = read_pickle(_bytes_of(window, members["data.pkl"]), allowed=_ALLOWED, where=where)
    dtype, storage, num_elements, (first, shape, strides) = _described(value, where)
    info = members.get(f"data/{storage}")
    if info is None:
        raise FormatError(f"{where} lacks the values of its tensor.", path=where)
    size = dtype.itemsize
    last = first + sum(s * max(n - 1, 0) for n, s in zip(shape, strides, strict=True))
    end = 0 if 0 in shape else (last + 1) * size
    if max(end, num_elements) > info.file_size:
        raise FormatError(f"{where} holds fewer values than its tensor has.", path=where)
    begin = start + _start_of(window, info)
    return Archived(dtype, shape, strides, first, begin, info.file_size, info.CRC)


def _described(
    value: Any, where: str
) -> tuple[torch.dtype, str, int, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return dtype, storage, its elements; and first element, shape and strides of the tensor."""
    if type(value) is Made and value.name == _PARAMETER and value.arguments:
        value = value.arguments[0]
    if type(value) is not Made or value.name not in (_OLD, _NEW) or value.state is not None:
        raise UnsupportedStateError(
            f"{where} holds something else than one plain tensor.",
            safe="Nothing of it was run.",
            path=where,
        )
    try:
        stored, first, shape, strides, _, _, *more = value.arguments
        kind, named, storage, _, num_elements = stored.identity
        dtype = _STORAGES.get(named.name)
        if value.name == _NEW:
            dtype, *more = _DTYPES.get(more[0].name), *more[1:]
        is_plain = not any(more) and kind == "storage" and type(named) is Named
        sizes = (*shape, *strides, first, num_elements)
        is_right = (
            type(stored) is Persistent
            and type(storage) is str
            and type(shape) is type(strides) is tuple
            and len(shape) == len(strides) <= _MAX_RANK
            and all(type(n) is int and 0 <= n < 2**62 for n in sizes)
        )
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{where} describes its tensor in a malformed way.") from error
    if not is_right:
        raise FormatError(f"{where} describes its tensor in a malformed way.", path=where)
    if dtype is None or not is_plain:
        raise UnsupportedStateError(f"{where} holds a tensor of a special kind.", path=where)
    return dtype, storage, num_elements, (first, shape, strides)


def _start_of(window: _Window, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a member begin, and make sure that they are there as they are."""
    head = window.read_at(info.header_offset, 30)
    if len(head) != 30 or head[:4] != b"PK\x03\x04":
        raise FormatError(f"{window.where} has no member where it says.", path=window.where)
    name, extra = struct.unpack("<HH", head[26:30])
    begin: int = info.header_offset + 30 + name + extra
    is_stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
    if not is_stored or not 0 <= begin <= begin + info.file_size <= window.length:
        raise FormatError(f"{window.where} has a member that is compressed or not all there.")
    return begin


def _bytes_of(window: _Window, info: zipfile.ZipInfo) -> bytes:
    begin = _start_of(window, info)
    if info.file_size > _MAX_READ_BYTES:
        raise FormatError(f"{window.where} has a description of {info.file_size:,} bytes.")
    return window.read_at(begin, info.file_size)


class _Window(io.RawIOBase):
    """A part of a file as a file, of which little is read at a time."""

    def __init__(self, read_at: ReadAt, start: int, length: int, where: str) -> None:
        super().__init__()
        self._read_at = read_at
        self._start = start
        self._at = 0
        self.length = length
        self.where = where

    def read_at(self, at: int, count: int) -> bytes:
        """Return bytes of the part."""
        if count > _MAX_READ_BYTES or at < 0:
            raise FormatError(f"{self.where} has a table of {count:,} bytes.", path=self.where)
        return self._read_at(self._start + at, max(min(count, self.length - at), 0))

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Choose where the next read begins."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    def read(self, count: int = -1, /) -> bytes:
        """Return the next bytes."""
        found = self.read_at(self._at, self.length - self._at if count < 0 else count)
        self._at += len(found)
        return found
