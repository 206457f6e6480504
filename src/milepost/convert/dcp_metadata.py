"""What the ``.metadata`` of a folder of torch.distributed.checkpoint (DCP) says.

The file is a pickle of a few classes of torch's. It is read as data (see ``pickle_data.py``), and
every number and name in it is checked before it is used: it may come from a stranger.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FormatError, UnsupportedStateError
from ..tensors.boxes import Box, covers_once
from .dcp_trees import Path
from .pickle_data import Made, Named, read_pickle

__all__ = ["DcpEntry", "DcpPiece", "read_dcp_metadata"]

SizeOf = Callable[[str], "int | None"]
_HOME = "torch.distributed.checkpoint.metadata"
_OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_ALLOWED = frozenset(
    {
        *(
            f"{_HOME}.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_OLD_HOME}.TensorProperties",
        f"{_OLD_HOME}.MEM_FORMAT_ENCODING",
        _INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.strided",
        "collections.OrderedDict",
        "builtins.getattr",  # how some versions write a member of an enum; never called
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        *_DTYPES,
    }
)
_MAX_RANK = 64
_MAX_NUMBER = 2**62
_FILE = re.compile(r"[A-Za-z0-9._+=@,~-]+(?:/[A-Za-z0-9._+=@,~-]+)*")


@dataclass(frozen=True, slots=True)
class DcpPiece:
    """Something that DCP has stored in one place.

    Attributes:
        file: The file, relative to the folder.
        start: Where it begins.
        length: Its bytes.
        box: Which box of its tensor it is; ``None`` for a value that is no tensor.
    """

    file: str
    start: int
    length: int
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """One entry of the state that DCP has saved.

    Attributes:
        name: Its name.
        path: The keys that the name was made of.
        pieces: Where it is stored.
        dtype: Its dtype; ``None`` for a value that is no tensor.
        shape: Its shape.
    """

    name: str
    path: Path
    pieces: tuple[DcpPiece, ...]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def read_dcp_metadata(data: bytes, size_of: SizeOf, *, where: str) -> dict[str, DcpEntry]:
    """Read what a ``.metadata`` says, and check it against the files that are there.

    Args:
        data: Its bytes.
        size_of: Returns the size of a file in the folder, or ``None`` if there is none.
        where: What it was read from, for messages.

    Returns:
        Every entry by its name, in the order of the state.

    Raises:
        UnsupportedStateError: It holds code, or entries of a kind that is not read.
        FormatError: It is damaged, or says what cannot be.
    """
    value = read_pickle(data, allowed=_ALLOWED, where=where)
    fields = _fields(value, "Metadata", where)
    stored, named = fields.get("state_dict_metadata"), fields.get("planner_data")
    if type(stored) is not dict:
        raise FormatError(f"{where} describes no state.", path=where)
    places = _places(fields.get("storage_data"), size_of, where)
    entries: dict[str, DcpEntry] = {}
    for name, one in stored.items():
        path = named.get(name) if type(named) is dict else None
        entries[_text(name, where)] = _entry(name, _path(path, name, where), one, places, where)
    return entries


def _entry(
    name: str,
    path: Path,
    value: Any,
    places: Mapping[tuple[str, tuple[int, ...] | None], DcpPiece],
    where: str,
) -> DcpEntry:
    if type(value) is Made and value.name == f"{_HOME}.BytesStorageMetadata":
        found = places.get((name, None))
        if found is None:
            raise FormatError(f"{where} does not say where {name[:80]!r} is.", path=where)
        return DcpEntry(name, path, (found,))
    fields = _fields(value, "TensorStorageMetadata", where)
    dtype, shape = _dtype(fields.get("properties"), name, where), _size(fields.get("size"), where)
    chunks = fields.get("chunks")
    pieces = []
    for one in chunks if type(chunks) is list else ():
        sub = _fields(one, "ChunkStorageMetadata", where)
        offsets, sizes = _size(sub.get("offsets"), where), _size(sub.get("sizes"), where)
        place = places.get((name, offsets))
        if place is None or len(offsets) != len(sizes) or len(sizes) != len(shape):
            raise FormatError(f"{where} has a malformed piece of {name[:80]!r}.", path=where)
        if math.prod(sizes) * dtype.itemsize > place.length:
            raise FormatError(
                f"{where} gives a piece of {name[:80]!r} more values than its place has bytes.",
                path=where,
            )
        pieces.append(DcpPiece(place.file, place.start, place.length, Box(offsets, sizes)))
    if not covers_once([p.box for p in pieces if p.box is not None], Box.whole(shape)):
        raise FormatError(
            f"The pieces of {name[:80]!r} in {where} do not cover it exactly once.", path=where
        )
    return DcpEntry(name, path, tuple(pieces), dtype, shape)


def _places(
    value: Any, size_of: SizeOf, where: str
) -> dict[tuple[str, tuple[int, ...] | None], DcpPiece]:
    """Return where each piece is stored, by name and offsets."""
    if type(value) is not dict:
        raise FormatError(f"{where} does not say where anything is.", path=where)
    found: dict[tuple[str, tuple[int, ...] | None], DcpPiece] = {}
    for index, info in value.items():
        fields = _fields(index, "MetadataIndex", where)
        offset = fields.get("offset")
        key = (
            _text(fields.get("fqn"), where),
            None if offset is None else _size(offset, where),
        )
        found[key] = _piece(info, size_of, where)
    return found


def _piece(info: Any, size_of: SizeOf, where: str) -> DcpPiece:
    if type(info) is not Made or info.name != _INFO or type(info.state) is not dict:
        raise UnsupportedStateError(f"{where} was not written by DCP's FileSystemWriter.")
    file, start, length = (info.state.get(k) for k in ("relative_path", "offset", "length"))
    if info.state.get("transform_descriptors"):
        raise UnsupportedStateError(
            f"{where} says that the files were transformed, such as compressed, when they were "
            "written.",
            hint="Save them again without extensions.",
            path=where,
        )
    parts = file.split("/") if type(file) is str else []
    if type(file) is not str or not _FILE.fullmatch(file) or {".", ".."} & set(parts):
        raise FormatError(
            f"{where} names a file {str(file)[:120]!r} that leads out of its folder or holds "
            "characters that are not allowed.",
            path=where,
        )
    size = size_of(file)
    if size is None:
        raise FormatError(
            f"{where} says that something is in {file}, and there is no such file.",
            hint="Copy the whole folder. Links are not followed.",
            path=where,
        )
    if (
        type(start) is not int
        or type(length) is not int
        or min(start, length) < 0
        or start + length > size
    ):
        raise FormatError(
            f"{where} says that something is in {file} at {start}, {length} bytes long, and the "
            f"file has {size:,}.",
            path=where,
        )
    return DcpPiece(file, start, length)


def _fields(value: Any, name: str, where: str) -> dict[str, Any]:
    """Return the fields of one of torch's classes."""
    if (
        type(value) is not Made
        or value.name != f"{_HOME}.{name}"
        or value.arguments
        or type(value.state) is not dict
    ):
        raise FormatError(f"{where} has something else where a {name} belongs.", path=where)
    return value.state


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise FormatError(f"{where} has a name that is no text.", path=where)
    return value


def _size(value: Any, where: str) -> tuple[int, ...]:
    if type(value) is Made and value.name == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    is_size = type(value) in (tuple, list) and len(value) <= _MAX_RANK
    if not is_size or not all(type(n) is int and 0 <= n < _MAX_NUMBER for n in value):
        raise FormatError(f"{where} has a shape that is none.", path=where)
    return tuple(value)


def _dtype(value: Any, name: str, where: str) -> torch.dtype:
    """Return the dtype in the properties of a tensor: their first field."""
    homes = (f"{_HOME}.TensorProperties", f"{_OLD_HOME}.TensorProperties")
    if type(value) is Made and value.name in homes:
        first = value.state
        if type(first) is dict:
            first = (first.get("dtype"),)
        if type(first) is tuple and first and type(first[0]) is Named:
            dtype = _DTYPES.get(first[0].name)
            if dtype is not None:
                return dtype
    raise FormatError(f"{where} gives {name[:80]!r} no dtype.", path=where)


def _path(value: Any, name: str, where: str) -> Path:
    if value is None:
        return (name,)
    if (
        type(value) is not tuple
        or not 0 < len(value) <= _MAX_RANK
        or not all(type(k) is str or (type(k) is int and 0 <= k < _MAX_NUMBER) for k in value)
    ):
        raise FormatError(f"{where} gives {name[:80]!r} a malformed path.", path=where)
    return value
