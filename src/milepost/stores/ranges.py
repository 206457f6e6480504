"""Readers for stores that answer with ranges of bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol, final

from ..errors import DamagedError, StorageError

__all__ = ["RangeReader", "Ranged", "StreamReader", "Streamed"]


class Ranged(Protocol):
    """What a store must be able to do for this reader."""

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes that a key has."""


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
        self._refuse_past_end(offset, length)
        if length:
            part = self._store.read_range(self._key, offset, length)
        self._refuse_short(offset, length, part.nbytes)
        return part

    def close(self) -> None:
        """Do nothing."""

    def _refuse_past_end(self, offset: int, length: int) -> None:
        if length and offset + length > self.size_bytes:
            raise DamagedError(
                f"{self._key} ends before byte {offset + length:,}.",
                path=self._key,
                expected=offset + length,
                found=self.size_bytes,
            )

    def _refuse_short(self, offset: int, length: int, found_bytes: int) -> None:
        """Refuse an answer that lacks bytes of an object that has them: it says nothing of it."""
        if found_bytes != length:
            raise StorageError(
                f"{self._key} has {self.size_bytes:,} bytes, but of {length:,} from byte "
                f"{offset:,} on {found_bytes:,} came.",
                hint="The place may be unwell; try again later.",
                operation="read",
                path=self._key,
            )


class Streamed(Ranged, Protocol):
    """What a store must be able to do for a reader that streams."""

    def stream_range(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """Yield a range of bytes that a key has, as they come."""


@final
class StreamReader(RangeReader):
    """Reads ranges of one object, long ones as they come. See ``base.StreamingReader``.

    Args:
        store: Where from.
        key: The object.
        size_bytes: Its size.
    """

    def __init__(self, store: Streamed, key: str, size_bytes: int) -> None:
        super().__init__(store, key, size_bytes)
        self._streamed = store

    def stream(self, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield a range of bytes. See ``base.StreamingReader``."""
        came_bytes = 0
        self._refuse_past_end(offset, length)
        if length:
            for piece in self._streamed.stream_range(self._key, offset, length):
                came_bytes += piece.nbytes
                yield piece
        self._refuse_short(offset, length, came_bytes)
