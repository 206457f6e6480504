"""Blocks of files are read in threads, checked, and copied to where their bytes belong.

A block is read in one of four ways. What a store hands out from memory of its own is checked and
copied from there. What comes as the answer of a service is checked and copied straight into place
piece by piece, as it comes. What the page cache holds is copied straight into place, and checked
there while it is hot. Everything else goes past the page cache into page-aligned memory, is checked
there and copied. So after an error what was being read into is
neither old nor new; nothing must be done with it but to restore it from elsewhere. Nobody writes to
it any more by then, whatever thread still waits for an answer.

Only some files are open at a time, for there may be more of them than a process may have open.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..errors import DamagedError, StorageError
from ..fetching import Fetching
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.manifest import FileEntry, Manifest
from ..frames.reader import open_plain
from ..stores.base import CachedReader, LendingReader, Reader, Store, StreamingReader
from ..stores.pages import page_memory
from .checks import check_size, name_tensors, read_again, require_block
from .ranges import Batch, Range
from .workers import Workers, num_cores

__all__ = ["BlockReads", "Progress"]

NUM_THREADS = 8
"""How many threads read from a disk: while some check and copy, it has work from others."""

NUM_THREADS_CACHED = 4
"""And how many at most from the page cache, where nobody waits for a disk: one more than cores."""

NUM_REQUESTS = 8
"""How many requests to a service are on their way. One connection takes 50 to 100 MB/s."""

MAX_OPEN = 64
"""How many files are open before their first block is read; others are opened again for it."""

_IN_FLIGHT_BYTES = 128 * 1024 * 1024
_STREAMED_BLOCKS, _STREAMS_EACH = 8, 2
"""How many blocks one request asks for at most where they come as a stream, and how many requests
each of those on their way is for at least. A request costs a service as much as many blocks do, and
some read ahead for it what then nobody asks for; but the last of them must not come alone."""

_HOT_BYTES = 2 * 1024 * 1024
"""How much is copied before it is checked: then it still is in a cache of the core."""

_STRAIGHT_BYTES = 256 * 1024
"""From how many bytes on they are copied from the page cache into place, and less beside it."""

_SAFE = "What was being loaded into is neither old nor new; load something else into it."

Progress = Callable[[int], None]

_Piece = Callable[[memoryview], None]
"""A piece of work for one thread, called with memory for a block."""


class _File:
    """A file whose blocks are read, open no longer than until the last of them was.

    Args:
        store: Its store.
        where: Its key.
        entry: What the manifest says of it.
        num_blocks: How many of its blocks are read.

    Attributes:
        lender: Its reader, if that has memory of its own to hand out.
        streamer: Its reader, if that hands out bytes as they come.
        cached: Its reader, if that can tell what is in the page cache.
    """

    def __init__(self, store: Store, where: str, entry: FileEntry, *, num_blocks: int) -> None:
        self.where = where
        self.entry = entry.plain
        self._stored = entry
        self._store = store
        self._num_left = num_blocks
        self._num_reading = 0
        self._is_closed = False
        self._reader: Reader | None = None
        self.lender: LendingReader | None = None
        self.streamer: StreamingReader | None = None
        self.cached: CachedReader | None = None
        self._lock = threading.Lock()

    def open(self) -> Reader:
        """Open it, if it is not, and compare its size."""
        with self._lock:
            return self._open()

    def _open(self) -> Reader:
        if self._is_closed:
            raise StorageError(f"{self.where} is not read any more.", path=self.where)
        if self._reader is None:
            reader = open_plain(self._store, self.where, self._stored)
            try:
                check_size(reader, self.entry, self.where)
            except BaseException:
                reader.close()
                raise
            self._reader = reader
            self.lender = reader if isinstance(reader, LendingReader) else None
            self.streamer = reader if isinstance(reader, StreamingReader) else None
            self.cached = reader if isinstance(reader, CachedReader) else None
        return self._reader

    def length_of(self, block: int) -> int:
        """Return how many bytes a block has."""
        return min(BLOCK_BYTES, self.entry.size_bytes - block * BLOCK_BYTES)

    @contextmanager
    def reading(self, num_blocks: int) -> Iterator[Reader]:
        """Open it to read some of its blocks; close it after the last ones."""
        with self._lock:
            reader = self._open()
            self._num_reading += 1
        try:
            yield reader
        finally:
            with self._lock:
                self._num_reading -= 1
                self._num_left -= num_blocks
                is_over = not self._num_left or self._is_closed
            if is_over:
                self.let_go()

    def let_go(self) -> None:
        """Close it, if it is open and nobody reads it; it may be opened again."""
        with self._lock:
            if self._num_reading:  # a number that the system gives to another file at once
                return
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def close(self) -> None:
        """Close it for good, at once or when those who read it now are done."""
        with self._lock:
            self._is_closed = True
        self.let_go()


@dataclass(frozen=True, slots=True)
class _Block:
    """A block to read.

    Attributes:
        number: Its number in the file.
        parts: What is wanted of it.
    """

    number: int
    parts: list[Range | Batch]

    @property
    def start(self) -> int:
        """Return its first byte in the file."""
        return self.number * BLOCK_BYTES

    @property
    def tensors(self) -> list[str]:
        """Return what is in it."""
        return list(dict.fromkeys(name for part in self.parts for name in part.tensors))

    def fill(self, data: memoryview, parts: Iterable[Range | Batch]) -> None:
        """Copy parts of it to where they belong."""
        start, stop = self.start, self.start + len(data)
        flat = np.frombuffer(data, dtype=np.uint8)
        for part in parts:
            low, high = max(part.start, start), min(part.stop, stop)
            part.fill(low, flat[low - start : high - start])


class BlockReads:
    """Reads the blocks of several files in threads.

    Args:
        store: Their store.
        key: Returns the key of a file.
        manifest: What the files are.
        progress: Called with the number of bytes of each block that was read.
        fetching: How blocks come from a service.
        firsts: First blocks that were read and checked before, by file. Those that are used are
            taken out.
    """

    def __init__(
        self,
        store: Store,
        key: Callable[[str], str],
        manifest: Manifest,
        progress: Progress | None,
        *,
        fetching: Fetching,
        firsts: dict[str, memoryview] | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._manifest = manifest
        self._listeners = [] if progress is None else [progress]
        self._fetching = fetching
        self._firsts = {} if firsts is None else firsts
        self._is_inference = torch.is_inference_mode_enabled()
        is_local = store.traits.is_local
        num_threads = NUM_THREADS if is_local else NUM_REQUESTS
        self._at_work = threading.BoundedSemaphore(num_cores())
        self._num_together = 1 if is_local else max(1, fetching.chunk_bytes // BLOCK_BYTES)
        if not (is_local or store.traits.streams):
            at_once = _IN_FLIGHT_BYTES // (BLOCK_BYTES * self._num_together)
            num_threads = max(1, min(NUM_REQUESTS, at_once))
        self._workers = Workers[_Piece]("milepost-read", num_threads=num_threads)

    def run(self, ranges: Mapping[str, Sequence[Range | Batch]]) -> None:
        """Fill the ranges of each file. All files are looked at before any byte is copied."""
        files: list[_File] = []
        num_bytes = 0
        try:
            found = {path: _by_block(wanted) for path, wanted in ranges.items()}
            num_together = self._num_asked_together(sum(map(len, found.values())))
            for path, blocks in found.items():
                if path in self._firsts and blocks[0].number == 0:
                    first = self._firsts.pop(path)
                    self._workers.put(partial(self._take, blocks.pop(0), first))
                    num_bytes += len(first)
                entry = self._manifest.file(path)
                file = _File(self._store, self._key(path), entry, num_blocks=len(blocks))
                files.append(file)
                for together in _neighbours(blocks, at_most=num_together):
                    self._workers.put(partial(self._read, file, together))
                num_bytes += sum(file.length_of(block.number) for block in blocks)
            self._look_at(files)
            if self._store.traits.is_local:
                few = min(NUM_THREADS_CACHED, num_cores() + 1)
                self._workers.run(self._work, at_most=few if _is_cached(files) else None)
            else:
                with self._fetching.shown(self._manifest.name, num_bytes) as came:
                    self._listeners.append(came)
                    self._workers.run(self._work)
        except DamagedError as error:
            error.safe = error.safe or _SAFE
            raise
        finally:
            for file in files:
                file.close()

    def _num_asked_together(self, num_blocks: int) -> int:
        """Return how many neighbouring blocks one request asks for."""
        if not self._store.traits.streams or self._fetching.chunk_bytes >= BLOCK_BYTES:
            return self._num_together
        each = -(-num_blocks // (NUM_REQUESTS * _STREAMS_EACH))
        return max(1, min(each, _STREAMED_BLOCKS))

    def _look_at(self, files: Sequence[_File]) -> None:
        def look(number: int) -> None:
            files[number].open()
            if number >= MAX_OPEN:
                files[number].let_go()

        if self._store.traits.is_local or len(files) == 1:
            for number in range(len(files)):
                look(number)
        else:  # a service takes its time for each answer
            with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="milepost-look") as pool:
                for looked in [pool.submit(look, number) for number in range(len(files))]:
                    looked.result()

    def _work(self, pieces: Iterator[_Piece]) -> None:
        memory = memoryview(page_memory(BLOCK_BYTES))
        with torch.inference_mode(self._is_inference), torch.no_grad():
            for piece in pieces:
                piece(memory)

    def _take(self, block: _Block, data: memoryview, _: memoryview) -> None:
        """Copy a block that was read and checked before."""
        self._fill(block, data, block.parts)
        self._tell(len(data))

    def _read(self, file: _File, blocks: list[_Block], memory: memoryview) -> None:
        try:
            self._read_blocks(file, blocks, memory)
        except DamagedError as error:
            number = error.facts.get("block")
            name_tensors(error, [n for b in blocks if b.number == number for n in b.tensors])
            raise

    def _read_blocks(self, file: _File, blocks: list[_Block], memory: memoryview) -> None:
        with file.reading(len(blocks)) as reader:
            lent = memoryview(b"")
            length = blocks[-1].start + file.length_of(blocks[-1].number) - blocks[0].start
            if file.streamer is not None:
                with closing(file.streamer.stream(blocks[0].start, length)) as pieces:
                    self._take_streamed(file, reader, blocks, pieces, memory)
                return
            if file.lender is not None:
                lent = file.lender.lend(blocks[0].start, length)
            for block in blocks:
                data = memory[: file.length_of(block.number)]
                if lent:
                    start = block.start - blocks[0].start
                    self._take_lent(file, reader, block, lent[start : start + len(data)], data)
                elif file.cached is not None and file.cached.is_cached(block.start, len(data)):
                    self._copy_cached(file, file.cached, block, data)
                else:
                    self._copy_read(file, reader, block, data)
                self._tell(len(data))

    def _copy_read(self, file: _File, reader: Reader, block: _Block, data: memoryview) -> None:
        """Read a block past the page cache into ``data``, check it, and copy it into place."""
        reader.read_into(block.start, data)
        with self._at_work:  # more than there are cores would only take the caches from each other
            require_block(reader, file.entry, block.number, data, where=file.where)
            self._fill(block, data, block.parts)

    def _tell(self, num_bytes: int) -> None:
        for listener in self._listeners:
            listener(num_bytes)

    def _fill(self, block: _Block, data: memoryview, parts: Iterable[Range | Batch]) -> None:
        with self._workers.touching():
            block.fill(data, parts)

    def _take_lent(
        self, file: _File, reader: Reader, block: _Block, lent: memoryview, data: memoryview
    ) -> None:
        """Copy a block from memory of the store; ``data`` is memory for another try."""
        entry, number = file.entry, block.number
        if crc32c(lent) != entry.crcs[number]:
            read_again(reader, entry, number, data, where=file.where)
            lent = data
        self._fill(block, lent, block.parts)

    def _take_streamed(
        self,
        file: _File,
        reader: Reader,
        blocks: Sequence[_Block],
        pieces: Iterator[memoryview],
        memory: memoryview,
    ) -> None:
        """Copy blocks that come in pieces into place, and what has to into ``memory`` first."""
        came = memoryview(b"")
        for block in blocks:
            data = memory[: file.length_of(block.number)]
            places, rest = _in_place(block, data)
            found = 0
            for place in places:
                at = 0
                while at < len(place):
                    came = came or next(pieces)
                    hot, came = came[: len(place) - at], came[len(place) - at :]
                    found = crc32c(hot, found)
                    target = np.frombuffer(place[at : at + len(hot)], dtype=np.uint8)
                    with self._workers.touching():
                        target[:] = np.frombuffer(hot, dtype=np.uint8)
                    at += len(hot)
            self._finish(file, reader, block, data, rest, found=found)
            self._tell(len(data))

    def _copy_cached(
        self, file: _File, reader: CachedReader, block: _Block, data: memoryview
    ) -> None:
        """Copy a block from the page cache into place, and what has to into ``data`` first."""
        pieces, rest = _in_place(block, data)
        found, at = 0, block.start
        for piece in pieces:
            for low in range(0, len(piece), _HOT_BYTES):
                hot = piece[low : low + _HOT_BYTES]
                with self._workers.touching():
                    reader.copy_into(at, hot)
                found = crc32c(hot, found)
                at += len(hot)
        self._finish(file, reader, block, data, rest, found=found)

    def _finish(
        self,
        file: _File,
        reader: Reader,
        block: _Block,
        data: memoryview,
        rest: list[Range | Batch],
        *,
        found: int,
    ) -> None:
        """Check a block most of which is in its place already, and copy the rest from ``data``."""
        entry, number = file.entry, block.number
        if found != entry.crcs[number]:
            read_again(reader, entry, number, data, where=file.where)
            rest = block.parts
        self._fill(block, data, rest)


def _is_cached(files: Sequence[_File]) -> bool:
    """Return whether files seem to be in the page cache, by a block from the middle of one."""
    largest = max(files, key=lambda file: file.entry.size_bytes, default=None)
    if largest is None or largest.cached is None:
        return False
    block = largest.entry.size_bytes // 2 // BLOCK_BYTES
    return largest.cached.is_cached(block * BLOCK_BYTES, largest.length_of(block))


def _in_place(block: _Block, data: memoryview) -> tuple[list[memoryview], list[Range | Batch]]:
    """Return where the bytes of a block can be copied to, in their order, and what is left then.

    Large parts go to their place, and everything around them to where it is in ``data``.
    """
    pieces: list[memoryview] = []
    rest: list[Range | Batch] = []
    at, rest_stop, stop = block.start, 0, block.start + len(data)
    for part in sorted(block.parts, key=lambda part: part.start):
        low, high = max(part.start, block.start), min(part.stop, stop)
        if low < at:  # of the same bytes as a part that goes to its place: copied from beside it
            return [data], block.parts
        is_large = high - low >= _STRAIGHT_BYTES and low >= rest_stop
        place = part.memory(low, high) if is_large else None
        if place is None:
            rest.append(part)
            rest_stop = max(rest_stop, high)
            continue
        if at < low:
            pieces.append(data[at - block.start : low - block.start])
        pieces.append(place)
        at = high
    if at < stop:
        pieces.append(data[at - block.start :])
    return pieces, rest


def _by_block(wanted: Iterable[Range | Batch]) -> list[_Block]:
    blocks: dict[int, list[Range | Batch]] = defaultdict(list)
    for part in wanted:
        for block in range(part.start // BLOCK_BYTES, (part.stop - 1) // BLOCK_BYTES + 1):
            blocks[block].append(part)
    return [_Block(number, parts) for number, parts in sorted(blocks.items())]


def _neighbours(blocks: Iterable[_Block], *, at_most: int) -> Iterator[list[_Block]]:
    together: list[_Block] = []
    for block in blocks:
        if together and (len(together) == at_most or block.number != together[-1].number + 1):
            yield together
            together = []
        together.append(block)
    if together:
        yield together
