"""Writing a file compressed: each block becomes a frame, one frame behind the other.

Several threads compress blocks of one file. Where a frame begins is known only once all before it
are there: a thread that is early leaves its frame and takes the next block. Whoever brings the
frame whose turn it is moves on all that are there by then, and writes the stored blocks that became
full, while the others compress. What is held beside the state is two frames for each thread, two
that wait, and a stored block for each thread: nothing is compressed in place, for the state in
memory is what the next save is compared with.

A frame is copied on its way, and the stored block that it lands in has a checksum of its own. So
the copy is compared with what was compressed once that checksum is taken: a bit that flips in
memory in between would otherwise be taken for what was meant.

A file that does not become smaller is not compressed: what was written is the file as it is.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import DeadlineError, StorageError
from ..format.digest import BLOCK_BYTES, block_count, crc32c
from ..format.frames import Frames, padded
from ..format.header import ITEM_SIZES, PAGE_BYTES, StoredTensor
from ..format.manifest import FileEntry
from ..frames.codec import CHUNK_BYTES, Method, compress
from ..stores.base import Writer
from ..stores.pages import page_memory

__all__ = ["SMALLEST_BYTES", "FrameCost", "FrameStream", "Packing", "packing_of"]

SMALLEST_BYTES = 64 * 1024
"""Files below this size are written as they are: they would take as many pages, or nearly."""

_MAX_EARLY = 2
_ZEROS = memoryview(bytes(PAGE_BYTES))
_TURN_S = 600.0
"""How long a frame waits for the one before: another thread compresses that, in milliseconds."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a frame.

    Attributes:
        data: Its bytes.
        before: CRC32C of what is before it in the frame.
        crc: The same with it.
        is_lent: Whether it lies in memory of the caller, who stays until it has moved.
    """

    data: memoryview
    before: int
    crc: int
    is_lent: bool = False


@dataclass(frozen=True, slots=True)
class _Landed:
    """Where in a stored block a piece of a frame lies, and its checksums as in :class:`_Piece`."""

    start: int
    stop: int
    before: int
    crc: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How to compress a file.

    Attributes:
        method: The method.
        item_bytes: Bytes of an element, of each block.
    """

    method: Method
    item_bytes: Sequence[int]


@dataclass(slots=True)
class FrameCost:
    """What compressing has cost.

    Attributes:
        plain_bytes: What went into frames.
        compress_s: Seconds in which threads compressed, added up.
        put_s: Seconds in which threads waited for the store to take what had become of it.
    """

    plain_bytes: int = 0
    compress_s: float = 0.0
    put_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, plain_bytes: int = 0, compress_s: float = 0.0, put_s: float = 0.0) -> None:
        """Add to it."""
        with self.lock:
            self.plain_bytes += plain_bytes
            self.compress_s += compress_s
            self.put_s += put_s


def packing_of(
    tensors: Sequence[StoredTensor], size_bytes: int, *, method: Method
) -> Packing | None:
    """Return how to compress a part; ``None``: it is too small for that.

    Args:
        tensors: What is in it, in its order: tensors of one size of elements lie side by side, so
            that a block is taken for one of those that are in its middle.
        size_bytes: Its size.
        method: The method.
    """
    if size_bytes < SMALLEST_BYTES:
        return None
    stops = [tensor.stop for tensor in tensors]
    sizes = []
    for block in range(block_count(size_bytes)):
        start = block * BLOCK_BYTES
        middle = (start + min(start + BLOCK_BYTES, size_bytes)) // 2
        tensor = tensors[min(bisect_right(stops, middle), len(tensors) - 1)]
        sizes.append(ITEM_SIZES[tensor.dtype])
    return Packing(method, sizes)


class FrameStream:
    """Compresses the blocks of one file and writes them.

    Args:
        writer: Where to; it is closed by :meth:`close`.
        size_bytes: Size of the plain bytes.
        packing: How to compress them.
        cost: What the cost is added to.
        key: The file, for messages.
    """

    def __init__(
        self, writer: Writer, size_bytes: int, *, packing: Packing, cost: FrameCost, key: str
    ) -> None:
        self._writer = writer
        self._size_bytes = size_bytes
        self._packing = packing
        self._cost = cost
        self._key = key
        num_blocks = block_count(size_bytes)
        self._plain_crcs = [0] * num_blocks
        self._lengths = [0] * num_blocks
        self._frame_crcs = [0] * num_blocks
        self._crcs = [0] * num_blocks  # the stored file has no more blocks than the plain one
        self._state = threading.Condition()
        self._next = 0
        self._early: dict[int, list[_Piece]] = {}
        self._moving: deque[_Piece] = deque()
        self._landed: list[_Landed] = []
        self._pages: memoryview | None = None
        self._free: list[memoryview] = []
        self._filled = 0
        self._stored_bytes = 0
        self._is_stopped = False

    def take(self, block: int, data: memoryview, checksum: int) -> None:
        """Compress a block, and write what became of it as far as its turn has come.

        Args:
            block: Its number.
            data: Its bytes, which may change once this returns.
            checksum: Its CRC32C.

        Raises:
            CheckpointError: It could not be written, or the work was broken off.
        """
        self._plain_crcs[block] = checksum
        started_s = time.perf_counter()
        item_bytes = self._packing.item_bytes[block]
        chunks = compress(data, method=self._packing.method, item_bytes=item_bytes)
        if chunks is None or padded(sum(map(len, chunks))) >= padded(len(data)):
            starts = range(0, len(data), CHUNK_BYTES)
            frame, is_lent = [data[at : at + CHUNK_BYTES] for at in starts], True
        else:
            frame, is_lent = [memoryview(chunk) for chunk in chunks], False
        self._cost.add(plain_bytes=len(data), compress_s=time.perf_counter() - started_s)
        crc, pieces = 0, []
        for piece in frame:
            before, crc = crc, crc32c(piece, crc)
            pieces.append(_Piece(piece, before, crc, is_lent))
        self._frame_crcs[block], self._lengths[block] = crc, sum(map(len, frame))
        self._bring(block, pieces)

    def close(self) -> None:
        """Write what is left, and make the file durable, after the last block was taken."""
        if self._pages is not None and self._filled:
            last = self._pages[: self._filled]
            self._write(self._stored_bytes - self._filled, last, self._landed)
        self._pages = None
        self._free.clear()
        if self._stored_bytes == self._size_bytes:
            self._writer.close()
        else:
            self._writer.close(self._stored_bytes)

    def stop(self) -> None:
        """Let nobody wait for another thread any more."""
        with self._state:
            self._is_stopped = True
            self._state.notify_all()

    def entry(self, path: str) -> FileEntry:
        """Return what the manifest says of the file, once it is closed."""
        crcs = tuple(self._crcs[: block_count(self._stored_bytes)])
        frames = Frames(
            self._size_bytes,
            tuple(self._plain_crcs),
            tuple(self._lengths),
            tuple(self._frame_crcs),
        )
        is_plain = self._stored_bytes == self._size_bytes
        return FileEntry(path, self._stored_bytes, crcs, frames=None if is_plain else frames)

    def _bring(self, block: int, frame: list[_Piece]) -> None:
        """Leave a frame, and move on all whose turn it is by now."""
        with self._state:
            self._early[block] = frame
            may_go = self._state.wait_for(
                lambda: self._may_go(block, is_lent=frame[0].is_lent) or self._is_stopped, _TURN_S
            )
            if self._is_stopped:
                raise StorageError(f"Writing {self._key} was given up.", operation="write")
            if not may_go:
                raise DeadlineError(
                    f"Block {block} of {self._key} waited {_TURN_S:g} s for those before it to be "
                    "compressed.",
                    safe="Nothing of it counts; earlier checkpoints are intact.",
                    path=self._key,
                )
        while self._move():
            pass

    def _may_go(self, block: int, *, is_lent: bool) -> bool:
        return self._next >= block or (not is_lent and len(self._early) <= _MAX_EARLY)

    def _move(self) -> bool:
        """Move what can be to the next stored block; write that if it is full, or return False."""
        with self._state:
            while self._filled < BLOCK_BYTES and (self._moving or self._begin_next()):
                self._copy_piece()
            if self._filled < BLOCK_BYTES:
                return False
            assert self._pages is not None
            full, self._pages, self._filled = self._pages, None, 0
            landed, self._landed = self._landed, []
            offset = self._stored_bytes - BLOCK_BYTES
        self._write(offset, full, landed)
        with self._state:
            self._free.append(full)
        return True

    def _begin_next(self) -> bool:
        """Begin to move the next frame, if it is there."""
        frame = self._early.pop(self._next, None)
        if frame is None:
            return False
        gap = _ZEROS[: padded(self._stored_bytes) - self._stored_bytes]
        self._moving.append(_Piece(gap, 0, crc32c(gap)))
        self._moving.extend(frame)
        self._next += 1
        self._state.notify_all()
        return True

    def _copy_piece(self) -> None:
        piece = self._moving.popleft()
        if self._pages is None:
            self._pages = self._free.pop() if self._free else memoryview(page_memory(BLOCK_BYTES))
        count = min(len(piece.data), BLOCK_BYTES - self._filled)
        start, stop = self._filled, self._filled + count
        self._pages[start:stop] = piece.data[:count]
        self._filled = stop
        self._stored_bytes += count
        crc = piece.crc
        if count < len(piece.data):
            crc = crc32c(self._pages[start:stop], piece.before)
            self._moving.appendleft(_Piece(piece.data[count:], crc, piece.crc, piece.is_lent))
        self._landed.append(_Landed(start, stop, piece.before, crc))

    def _write(self, offset: int, data: memoryview, landed: Sequence[_Landed]) -> None:
        self._crcs[offset // BLOCK_BYTES] = crc32c(data)
        if any(crc32c(data[at.start : at.stop], at.before) != at.crc for at in landed):
            raise StorageError(
                f"What was compressed of {self._key} changed in memory before it was written.",
                safe="Nothing of it counts; earlier checkpoints are intact.",
                hint="Look at the memory of this machine: its bits flip.",
                operation="write",
                path=self._key,
            )
        started_s = time.perf_counter()
        self._writer.write_at(offset, data)
        self._cost.add(put_s=time.perf_counter() - started_s)
