"""What a checkpoint holds, read from its index and headers: no tensor values, and no torch.

A checkpoint of a single ``.pt`` file has no headers to read; it is opened with torch, and so is one
of several ranks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint
from ..errors import DamagedError, FormatError
from ..format import canonical
from ..format.digest import BLOCK_BYTES, block_crcs
from ..format.header import ITEM_SIZES, StoredTable, StoredTensor, parse_header, parse_header_length
from ..format.layout import INDEX
from ..format.manifest import FileEntry, check_version
from ..frames.reader import open_plain
from ..stores.again import read_twice
from ..stores.base import Reader
from .trees import tensor_keys

if TYPE_CHECKING:
    from ..state.source import StateSource

__all__ = ["Contents", "TensorRow", "read_contents", "same_bytes"]

_FLOATS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}
_COMPARED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One stored tensor.

    Attributes:
        item: The item it belongs to.
        key: Its name in the item.
        dtype: Its type as torch calls it; ``uint8`` for raw bytes of a type without a code.
        shape: Its dimensions.
        num_bytes: Bytes of its values.
        file: The file it is in.
        start: Its first byte in the file; ``None`` where it is read with torch.
    """

    item: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    start: int | None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        checkpoint: The checkpoint.
        trees: The structure of each item, with tags in the place of tensors.
        tensors: Every tensor by item and name.
        source: Values of the tensors, if the checkpoint had to be opened with torch.
    """

    checkpoint: Checkpoint
    trees: Mapping[str, Any]
    tensors: Mapping[tuple[str, str], TensorRow]
    source: StateSource | None = None


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Read what a checkpoint holds.

    Raises:
        MissingError: A file is not there.
        DamagedError: The index does not match its checksum.
        FormatError: A header or the index is not what it claims to be.
    """
    layout = checkpoint.manifest.layout
    if layout == "files":
        files = {
            entry.path: f"{entry.size_bytes:,} B, CRC32C {entry.crc:08x}"
            for entry in checkpoint.manifest.files
        }
        return Contents(checkpoint, {"files": files}, {})
    if layout == "torch":
        (file,) = (entry.path for entry in checkpoint.manifest.files)
        return _read_source(checkpoint, lambda _: file)
    if checkpoint.manifest.world_size > 1:
        # Put together from the tables of all ranks; of each rank's own items, rank 0's.
        return _read_source(checkpoint, lambda item: f"{item}-r*.safetensors")
    items = _read_index(checkpoint)
    tensors = {}
    for item, entry in items.items():
        rows = {}
        for file in entry["files"]:
            for stored in _read_header(checkpoint, checkpoint.manifest.file(file)).values():
                rows[stored.key] = _row(item, file, stored)
        # As in the state, not as in the file, where they lie by the size of their elements.
        for key in dict.fromkeys([*tensor_keys(entry["tree"]), *rows]):
            if key in rows:
                tensors[item, key] = rows[key]
    return Contents(checkpoint, {item: entry["tree"] for item, entry in items.items()}, tensors)


def same_bytes(a: Contents, left: TensorRow, b: Contents, right: TensorRow) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bytes.

    Blocks with equal checksums at equal places are taken as equal without being read.

    Raises:
        DamagedError: A block that was read does not match its checksum.
    """
    if left.start is None or right.start is None:
        return _same_in_memory(a, left, b, right)
    if _share_checksums(a, left, b, right):
        return True
    with (
        closing(_Bytes(a.checkpoint, left.file)) as one,
        closing(_Bytes(b.checkpoint, right.file)) as other,
    ):
        for at in range(0, left.num_bytes, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, left.num_bytes - at)
            if one.read(left.start + at, length) != other.read(right.start + at, length):
                return False
    return True


def _share_checksums(a: Contents, left: TensorRow, b: Contents, right: TensorRow) -> bool:
    if left.num_bytes == 0:
        return True
    if left.start is None or left.start != right.start:
        return False
    blocks = slice(left.start // BLOCK_BYTES, (left.start + left.num_bytes - 1) // BLOCK_BYTES + 1)
    one = a.checkpoint.manifest.file(left.file).plain.crcs[blocks]
    return one == b.checkpoint.manifest.file(right.file).plain.crcs[blocks]


def _same_in_memory(a: Contents, left: TensorRow, b: Contents, right: TensorRow) -> bool:
    import torch

    from .values import read_tensor

    one, other = (
        read_tensor(contents.source or contents.checkpoint.source(), row.item, row.key)
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        for contents, row in ((a, left), (b, right))
    )
    return torch.equal(one, other)


def _read_source(checkpoint: Checkpoint, file_of: Callable[[str], str]) -> Contents:
    source = checkpoint.source()
    tensors = {}
    for item in source.trees:
        for key, info in source.tensors(item).items():
            num_bytes = ITEM_SIZES[info.code]
            for length in info.shape:
                num_bytes *= length
            name = _dtype_name(info.code)
            tensors[item, key] = TensorRow(
                item, key, name, info.shape, num_bytes, file_of(item), None
            )
    return Contents(checkpoint, source.trees, tensors, source)


def _row(item: str, file: str, stored: StoredTensor) -> TensorRow:
    return TensorRow(
        item,
        stored.key,
        _dtype_name(stored.dtype),
        stored.shape,
        stored.num_bytes,
        file,
        stored.start,
    )


def _dtype_name(code: str) -> str:
    """Return what torch calls the dtype of a code: ``BF16`` is ``bfloat16``."""
    if code in _FLOATS:
        return _FLOATS[code]
    kind = code.rstrip("0123456789")
    return f"{_KINDS[kind]}{code[len(kind) :]}" if kind in _KINDS else code.lower()


def _read_index(checkpoint: Checkpoint) -> Mapping[str, Any]:
    key = _key(checkpoint, INDEX)
    entry = checkpoint.manifest.file(INDEX)
    data = checkpoint.store.get(key, max_bytes=max(entry.size_bytes, 1))
    if len(data) != entry.size_bytes or tuple(block_crcs(data)) != entry.crcs:
        raise DamagedError(
            f"{key} does not match its checksum.",
            hint=f"Look closer with: milepost verify {checkpoint.url.removeprefix('file://')}",
            path=key,
        )
    index = canonical.load(data, where=key)
    items = index.get("items") if isinstance(index, dict) else None
    if not isinstance(items, dict):
        raise FormatError(f"{key} is not an index.", path=key)
    check_version(index.get("format"), where=key)
    for item in items.values():
        if not isinstance(item, dict) or "tree" not in item or type(item.get("files")) is not list:
            raise FormatError(f"{key} is not an index.", path=key)
    return items


def _read_header(checkpoint: Checkpoint, entry: FileEntry) -> StoredTable:
    size_bytes = entry.plain.size_bytes
    with closing(_Bytes(checkpoint, entry.path)) as part:
        length = parse_header_length(part.read(0, 8), size_bytes=size_bytes, where=part.where)
        return parse_header(part.read(8, length), size_bytes=size_bytes, where=part.where)


def _key(checkpoint: Checkpoint, path: str) -> str:
    return f"{checkpoint.folder}/{path}" if checkpoint.folder else path


class _Bytes:
    """Reads ranges of one file of a checkpoint, checks each block, and keeps the last one.

    Of a file that is compressed these are ranges of its plain bytes.
    """

    def __init__(self, checkpoint: Checkpoint, path: str) -> None:
        self.where = _key(checkpoint, path)
        stored = checkpoint.manifest.file(path)
        self._entry = stored.plain
        self._reader: Reader = open_plain(checkpoint.store, self.where, stored)
        # Never closed by hand: an error on its way may still hold views of it.
        self._pages = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._block: int | None = None

    def read(self, start: int, length: int) -> bytes:
        return b"".join(self._pieces(start, length))

    def close(self) -> None:
        self._reader.close()

    def _pieces(self, start: int, length: int) -> Iterator[bytes]:
        stop = start + length
        while start < stop:
            block, offset = divmod(start, BLOCK_BYTES)
            count = min(stop - start, BLOCK_BYTES - offset)
            self._fill(block)
            yield bytes(self._pages[offset : offset + count])
            start += count

    def _fill(self, block: int) -> None:
        if block == self._block:
            return
        start = block * BLOCK_BYTES
        num_bytes = min(BLOCK_BYTES, self._entry.size_bytes - start)
        if num_bytes <= 0:
            raise FormatError(f"{self.where} ends too early.", path=self.where)
        self._block = None
        view = self._pages[:num_bytes]
        found = read_twice(self._reader, start, view, expected=self._entry.crcs[block])
        if found != self._entry.crcs[block]:
            raise DamagedError(
                f"Block {block} of {self.where} does not match its checksum.",
                hint="Look closer with: milepost verify",
                path=self.where,
                block=block,
            )
        self._block = block
