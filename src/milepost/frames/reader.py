"""A reader of a compressed file that answers as one of its plain bytes would.

A frame is compared with its checksum before it is decompressed, and read a second time before it is
called damaged. What comes out is compared with the checksum of the plain block by whoever reads it,
as that of a file that is not compressed is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import final

from ..errors import DamagedError
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.frames import Frames
from ..format.manifest import FileEntry
from ..stores.base import CachedReader, LendingReader, Reader, Store, StreamingReader
from ..stores.pages import page_memory
from .codec import decompress, load_codec

__all__ = ["open_plain"]

_log = logging.getLogger("milepost")


def open_plain(store: Store, key: str, entry: FileEntry) -> Reader:
    """Open a file for reading its plain bytes, of the size and checksums of ``entry.plain``.

    Args:
        store: Its store.
        key: Its key.
        entry: What the manifest says of it.

    Raises:
        MissingError: It is not there.
        DamagedError: It is compressed, and of another size than was written.
        UsageError: It is compressed, and the library is not installed, or does not load.
    """
    if entry.frames is None:
        return store.open_reader(key)
    load_codec(f"Reading {key}, which is compressed,")
    reader = store.open_reader(key)
    if reader.size_bytes != entry.size_bytes:
        reader.close()
        raise DamagedError(
            f"{key} has {reader.size_bytes:,} bytes; {entry.size_bytes:,} were written.",
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=key,
            expected=entry.size_bytes,
            found=reader.size_bytes,
        )
    kind = _Framed
    if isinstance(reader, StreamingReader):
        kind = _FramedStreamer
    elif isinstance(reader, LendingReader):
        kind = _FramedLender
    return kind(reader, entry.frames, where=key)


class _Framed:
    """Reads the plain bytes of a compressed file. See ``stores.base.Reader``.

    Args:
        reader: The stored file.
        frames: Its frames.
        where: The file, for messages.
    """

    def __init__(self, reader: Reader, frames: Frames, *, where: str) -> None:
        self.size_bytes = frames.size_bytes
        self._reader = reader
        self._cached = reader if isinstance(reader, CachedReader) else None
        self._frames = frames
        self._starts = frames.starts()
        self._where = where
        self._local = threading.local()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        self._require(offset, len(view))
        while view:
            block, low = divmod(offset, BLOCK_BYTES)
            count = min(self._frames.block_bytes(block) - low, len(view))
            if count == self._frames.block_bytes(block):
                self._fill(block, view[:count])
            else:
                plain = self._pages("plain", self._frames.block_bytes(block))
                self._fill(block, plain)
                view[:count] = plain[low : low + count]
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Release the file or connection."""
        self._reader.close()

    def _require(self, offset: int, length: int) -> None:
        if offset + length > self.size_bytes:
            raise DamagedError(
                f"{self._where} ends at byte {self.size_bytes:,}; "
                f"{offset + length - self.size_bytes:,} more were expected.",
                path=self._where,
                expected=offset + length,
                found=self.size_bytes,
            )

    def _pages(self, name: str, num_bytes: int) -> memoryview:
        """Return memory of this thread's own."""
        pages: memoryview | None = getattr(self._local, name, None)
        if pages is None:
            pages = memoryview(page_memory(BLOCK_BYTES))
            setattr(self._local, name, pages)
        return pages[:num_bytes]

    def _fill(self, block: int, plain: memoryview) -> None:
        """Fill memory of the size of a block with its plain bytes."""
        frame = self._pages("frame", self._frames.lengths[block])
        self._read_frame(block, frame)
        if not self._is_right(block, frame):
            self._reader.read_into(self._starts[block], frame)
            if not self._is_right(block, frame):
                raise self._damage(block, frame)
            _log.warning(
                "Frame %d of %s came damaged, and whole when it was read again: something between "
                "here and its disk alters bytes.",
                block,
                self._where,
            )
        self._decode(block, frame, plain)

    def _read_frame(self, block: int, frame: memoryview) -> None:
        start = self._starts[block]
        if self._cached is not None and self._cached.is_cached(start, len(frame)):
            self._cached.copy_into(start, frame)
        else:
            self._reader.read_into(start, frame)

    def _decode(self, block: int, frame: memoryview, plain: memoryview) -> None:
        """Fill memory with the plain bytes of a frame that matches its checksum."""
        if len(frame) == len(plain):
            plain[:] = frame
            return
        decompress(frame, plain, where=f"Frame {block} of {self._where}")

    def _is_right(self, block: int, frame: memoryview) -> bool:
        return crc32c(frame) == self._frames.frame_crcs[block]

    def _damage(self, block: int, frame: memoryview) -> DamagedError:
        start = self._starts[block]
        return DamagedError(
            f"Frame {block} of {self._where} (bytes {start:,} to {start + len(frame):,}) is "
            "damaged.",
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=self._where,
            block=block,
            expected=f"{self._frames.frame_crcs[block]:08x}",
            found=f"{crc32c(frame):08x}",
        )


@final
class _FramedLender(_Framed):
    """The same of a store that hands out memory of its own: neighbours come with one answer."""

    def lend(self, offset: int, length: int) -> memoryview:
        """Return a range of plain bytes. See ``stores.base.LendingReader``."""
        assert isinstance(self._reader, LendingReader)
        self._require(offset, length)
        first, last = offset // BLOCK_BYTES, (offset + max(length, 1) - 1) // BLOCK_BYTES
        start = self._starts[first]
        stop = self._starts[last] + self._frames.lengths[last]
        lent = self._reader.lend(start, stop - start)
        base = first * BLOCK_BYTES
        size = last * BLOCK_BYTES + self._frames.block_bytes(last) - base
        plain = memoryview(page_memory(size))[:size]
        for block in range(first, last + 1):
            low = self._starts[block] - start
            frame = lent[low : low + self._frames.lengths[block]]
            at = block * BLOCK_BYTES - base
            into = plain[at : at + self._frames.block_bytes(block)]
            if self._is_right(block, frame):
                self._decode(block, frame, into)
            else:
                self._fill(block, into)
        return plain[offset - base : offset - base + length]


@final
class _FramedStreamer(_Framed):
    """The same of a store that hands out long ranges as they come."""

    def stream(self, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield a range of plain bytes. See ``stores.base.StreamingReader``.

        What is yielded is this thread's own memory, good until the next piece is asked for.
        """
        assert isinstance(self._reader, StreamingReader)
        self._require(offset, length)
        if not length:
            return
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        start, stop = self._starts[first], self._starts[last] + self._frames.lengths[last]
        with closing(self._reader.stream(start, stop - start)) as pieces:
            came = _Came(pieces)
            for block in range(first, last + 1):
                frame = self._pages("frame", self._frames.lengths[block])
                came.skip(self._starts[block] - start - came.num_bytes)
                came.fill(frame)
                plain = self._pages("plain", self._frames.block_bytes(block))
                if self._is_right(block, frame):
                    self._decode(block, frame, plain)
                else:
                    self._fill(block, plain)
                low = max(offset - block * BLOCK_BYTES, 0)
                yield plain[low : offset + length - block * BLOCK_BYTES]


class _Came:
    """Bytes that come in pieces of any size.

    Attributes:
        num_bytes: How many were taken.
    """

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self.num_bytes = 0
        self._pieces = pieces
        self._left = memoryview(b"")

    def skip(self, num_bytes: int) -> None:
        """Take some and drop them."""
        while num_bytes:
            num_bytes -= len(self._take(num_bytes))

    def fill(self, view: memoryview) -> None:
        """Take as many as fill memory."""
        while view:
            piece = self._take(len(view))
            view[: len(piece)] = piece
            view = view[len(piece) :]

    def _take(self, most_bytes: int) -> memoryview:
        while not self._left:
            self._left = next(self._pieces).cast("B")
        piece, self._left = self._left[:most_bytes], self._left[most_bytes:]
        self.num_bytes += len(piece)
        return piece
