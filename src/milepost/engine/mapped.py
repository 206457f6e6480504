"""Tensors over the pages of the file that they are stored in: nothing is read before it is used.

The mapping is private and may be written to: a page that is written to is copied first, so that a
write is seen by nobody else and never reaches the file. It lives as long as any of the tensors, and
what it shows stays even when the file is deleted. Tensors with strides of their own are copied.

What it cannot do is to raise: a page that the disk does not give, or that is gone because somebody
cut the file short, ends the process (SIGBUS). And a page may be dropped and read again, so that a
comparison with the checksums is true of the moment. So nothing is mapped unless somebody asks for
just that, and training does not.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from ..collecting import no_collecting
from ..errors import DamagedError, MissingError, UsageError, storage_error
from ..format.digest import BLOCK_BYTES
from ..format.manifest import FileEntry
from ..state.source import TensorInfo, new_tensor
from ..stores import posix
from ..stores.base import Store
from ..stores.pages import page_memory
from ..tensors.boxes import Box
from ..tensors.dtypes import dtype_of_code
from ..tensors.unpack import leaf_keys, unpack_item
from .checks import check_block, check_size, name_tensors
from .pieces import Piece, StoredWhole
from .read import CheckpointSource
from .workers import Workers

__all__ = ["map_item"]

_NUM_THREADS = 4
_HINT = "Read it with load or load_weights"


def map_item(
    source: CheckpointSource, item: str, *, store: Store, folder: str, verify: bool
) -> Any:
    """Put an item together out of tensors that are mapped.

    Args:
        source: The checkpoint.
        item: The item.
        store: Its store.
        folder: Its folder in the store.
        verify: Whether to compare every byte of its files with the checksums before.

    Raises:
        MissingError: There is no such item.
        UsageError: It is not in files of this machine, or not as it is used.
        DamagedError: A file has another size than was written; or, with ``verify``, other bytes.
    """
    if item not in source.trees:
        raise MissingError(
            f"{source.name} holds no item {item!r}.", hint=f"It holds {sorted(source.trees)}."
        )
    tree, wholes = source.trees[item], source.wholes(item)
    files: dict[str, mmap.mmap] = {}
    made: dict[str, Tensor] = {}
    with no_collecting():
        for key in dict.fromkeys(leaf_keys(tree)):
            if key not in wholes:
                raise MissingError(f"{source.name}: item {item!r} lacks the tensor {key!r}.")
            piece = _only_piece(wholes[key], f"{item}/{key} of {source.name}")
            if piece.file not in files:
                where = f"{folder}/{piece.file}" if folder else piece.file
                entry = source.manifest.file(piece.file)
                inside = _Inside(piece.file, wholes) if verify else None
                files[piece.file] = _map(store, where, entry, inside)
            made[key] = _tensor(files[piece.file], wholes[key], piece)
        return unpack_item(tree, made.__getitem__)


def _only_piece(stored: StoredWhole, name: str) -> Piece:
    """Return where a tensor lies that is stored in one piece."""
    if len(stored.pieces) == 1 and stored.pieces[0].box == Box.whole(stored.shape):
        return stored.pieces[0]
    raise UsageError(
        f"{name} is stored in {len(stored.pieces)} pieces, which lie apart.",
        safe="Nothing was changed.",
        hint=f"{_HINT}, or join the pieces with milepost consolidate.",
    )


def _tensor(data: mmap.mmap, stored: StoredWhole, piece: Piece) -> Tensor:
    count = math.prod(stored.shape)
    dtype = dtype_of_code(stored.code)
    if dtype is None or not count:
        return new_tensor(TensorInfo(stored.code, stored.shape))
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=piece.start)
    return flat.view(stored.shape)


class _Inside:
    """What lies in the blocks of a file, for messages."""

    def __init__(self, file: str, wholes: Mapping[str, StoredWhole]) -> None:
        self._found = [
            (piece.start, piece.stop, key)
            for key, stored in wholes.items()
            for piece in stored.pieces
            if piece.file == file
        ]

    def names(self, block: int) -> list[str]:
        """Return what lies in a block."""
        low, high = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        return [key for start, stop, key in self._found if start < high and stop > low]


def _map(store: Store, where: str, entry: FileEntry, inside: _Inside | None) -> mmap.mmap:
    """Map a file, after a comparison with its checksums if what is inside is given."""
    if entry.frames is not None:
        raise UsageError(
            f"{where} is compressed; what is in it is nowhere as it is used.",
            safe="Nothing was changed.",
            hint=f"{_HINT}.",
        )
    path = store.local_path(where)
    if path is None:
        raise UsageError(
            f"{store.url} keeps no files on this machine that could be mapped.",
            safe="Nothing was changed.",
            hint=f"{_HINT}, or copy the checkpoint with to_directory.",
        )
    with closing(store.open_reader(where)) as reader:  # which says what is missing, in our words
        check_size(reader, entry, where)
    try:
        fd = posix.open_file(path)
        try:
            if inside is not None:
                _check(fd, entry, where, inside)
            return _mapping(fd, entry, where)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, operation="map", path=path) from error


def _mapping(fd: int, entry: FileEntry, where: str) -> mmap.mmap:
    try:
        return mmap.mmap(fd, entry.size_bytes, access=mmap.ACCESS_COPY)
    except ValueError as error:  # it was cut short after it was looked at
        raise DamagedError(
            f"{where} ends before byte {entry.size_bytes:,}.",
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=where,
            expected=entry.size_bytes,
        ) from error


def _check(fd: int, entry: FileEntry, where: str, inside: _Inside) -> None:
    """Read every block of a file as its mapping will show it, and compare it."""
    crew = Workers[int]("milepost-check", num_threads=_NUM_THREADS)
    for block in range(len(entry.crcs)):
        crew.put(block)

    def work(blocks: Iterator[int]) -> None:
        memory = memoryview(page_memory(BLOCK_BYTES))
        for block in blocks:
            start = block * BLOCK_BYTES
            data = memory[: min(BLOCK_BYTES, entry.size_bytes - start)]
            _fill(fd, start, data, where)
            try:
                check_block(data, entry, block, where)
            except DamagedError as error:
                name_tensors(error, inside.names(block))
                raise

    crew.run(work)


def _fill(fd: int, offset: int, data: memoryview, where: str) -> None:
    # Through the page cache: what is compared are the very pages that are mapped.
    while data:
        count = os.preadv(fd, [data], offset)
        if not count:
            raise DamagedError(f"{where} ends at byte {offset:,}.", path=where, found=offset)
        data, offset = data[count:], offset + count
