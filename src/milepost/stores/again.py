"""Bytes that came wrong are asked for once more: they may have come to harm on the way."""

from __future__ import annotations

import logging

from ..format.digest import crc32c
from .base import Reader

__all__ = ["read_twice"]

_log = logging.getLogger("milepost")


def read_twice(reader: Reader, start: int, view: memoryview, *, expected: int) -> int:
    """Fill memory with a block and return its checksum, of a second try if the first was wrong.

    Args:
        reader: The file.
        start: Its first byte.
        view: Page-aligned memory of its length.
        expected: The checksum that it should have.
    """
    reader.read_into(start, view)
    found = crc32c(view)
    if found == expected:
        return found
    reader.read_into(start, view)
    found = crc32c(view)
    if found == expected:
        _log.warning(
            "A block at byte %d came with other bytes than are stored, and right when it was read "
            "again: something on the way there alters bytes.",
            start,
        )
    return found
