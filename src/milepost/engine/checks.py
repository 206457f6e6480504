"""A file's size and blocks, compared with what its commit says.

A block that does not match its checksum is read a second time before it is called damaged, for it
may have been altered on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import DamagedError
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.manifest import FileEntry
from ..stores.base import Reader

__all__ = [
    "check_block",
    "check_size",
    "name_tensors",
    "read_again",
    "read_block",
    "require_block",
]

_NAMED = 8
_log = logging.getLogger("milepost")


def check_size(reader: Reader, entry: FileEntry, where: str) -> None:
    """Refuse a file of another size than was written."""
    if reader.size_bytes != entry.size_bytes:
        raise DamagedError(
            f"{where} has {reader.size_bytes:,} bytes; {entry.size_bytes:,} were written.",
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=where,
            expected=entry.size_bytes,
            found=reader.size_bytes,
        )


def check_block(data: memoryview, entry: FileEntry, block: int, where: str) -> None:
    """Refuse a block that does not match its checksum."""
    found = crc32c(data)
    if found != entry.crcs[block]:
        raise DamagedError(
            f"Block {block} of {where} (bytes {block * BLOCK_BYTES:,} to "
            f"{block * BLOCK_BYTES + len(data):,}) is damaged.",
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=where,
            block=block,
            expected=f"{entry.crcs[block]:08x}",
            found=f"{found:08x}",
        )


def name_tensors(error: DamagedError, tensors: Sequence[str]) -> None:
    """Add what is in a block to an error that does not know it."""
    if "tensors" not in error.facts and tensors:
        error.facts = {**error.facts, "tensors": tuple(tensors)}
        error.what = f"{error.what.removesuffix('.')}; it holds {_named(tensors)}."


def _named(tensors: Sequence[str]) -> str:
    return ", ".join(tensors[:_NAMED]) + (" and others" if len(tensors) > _NAMED else "")


def read_block(
    reader: Reader,
    entry: FileEntry,
    block: int,
    data: memoryview,
    *,
    where: str,
) -> None:
    """Fill memory with a block, and check it; read it once more if it is not what was written.

    Args:
        reader: The file.
        entry: What the manifest says of it.
        block: Number of the block.
        data: Page-aligned memory of the length of the block.
        where: The file, for messages.

    Raises:
        DamagedError: Both times it did not match its checksum.
    """
    reader.read_into(block * BLOCK_BYTES, data)
    require_block(reader, entry, block, data, where=where)


def require_block(
    reader: Reader,
    entry: FileEntry,
    block: int,
    data: memoryview,
    *,
    where: str,
) -> None:
    """Check a block that was read, and read it once more if it is not what was written.

    See :func:`read_block`.
    """
    if crc32c(data) != entry.crcs[block]:
        read_again(reader, entry, block, data, where=where)


def read_again(
    reader: Reader,
    entry: FileEntry,
    block: int,
    data: memoryview,
    *,
    where: str,
) -> None:
    """Fill memory with a block that did not match; it must this time. See :func:`read_block`."""
    reader.read_into(block * BLOCK_BYTES, data)
    check_block(data, entry, block, where)
    _log.warning(
        "Block %d of %s came damaged, and whole when it was read again: something between here and "
        "its disk alters bytes.",
        block,
        where,
    )
