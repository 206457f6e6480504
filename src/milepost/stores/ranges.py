"""A reader for stores that answer with ranges of bytes."""

from __future__ import annotations

from typing import Protocol, final

from ..errors import DamagedError

__all__ = ["RangeReader", "Ranged"]


class Ranged(Protocol):
    """What a store must be able to do for this reader."""

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes of a key; fewer where it ends."""


@final
class RangeReader:
    """Reads ranges of one object. See ``base.Reader``.

    Args:
        store: Where from.
        key: The object.
        size_bytes: Its size.
    """

    def __init__(self, store: Ranged, key: str, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        buffer.cast("B")[:] = self.lend(offset, buffer.nbytes)

    def lend(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes. See ``base.LendingReader``."""
        part = memoryview(b"")
        if length and offset + length <= self.size_bytes:
            part = self._store.read_range(self._key, offset, length)
        if part.nbytes != length:
            raise DamagedError(
                f"{self._key} ends before byte {offset + length:,}.",
                path=self._key,
                expected=offset + length,
                found=offset + part.nbytes,
            )
        return part

    def close(self) -> None:
        """Do nothing."""
