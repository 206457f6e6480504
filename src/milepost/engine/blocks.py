"""Blocks of files are read in threads, checked, and copied to where their bytes belong.

Each block is read once, into page-aligned memory. Bytes that lie in memory as they lie in the file
go straight there. Others, such as some columns of a matrix, are put together beside it in portions
of at most a block each, that are copied and dropped once they are whole: so what is held beside the
target is a few blocks, however large the tensors are and however they were cut. Only some files
are open at a time, for there may be more of them than a process may have open.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ..errors import DamagedError
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.manifest import FileEntry, Manifest
from ..stores.base import Reader, Store
from ..stores.pages import page_memory
from ..tensors.boxes import Box
from .pieces import Cut

__all__ = ["BlockReads", "Progress", "Range", "check_block", "check_size", "ranges_of"]

NUM_THREADS = 2
MAX_OPEN = 64
"""How many files are open before their first block is read; others are opened again for it."""

_PORTION_BYTES = BLOCK_BYTES
"""How many bytes are put together at most: a portion of this size lies in two blocks."""

_PAGES_BYTES = 128 * 1024
"""From how many bytes on a portion has pages of its own, which go back to the system with it. An
allocator that large pieces come from and go to in turns may keep many times as much."""

_NAMED = 8
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file, and where they go.

    Attributes:
        tensor: The tensor they are.
        start: The first byte.
        stop: The byte after the last.
        target: The flat bytes they go to, or what puts them together.
    """

    tensor: str
    start: int
    stop: int
    target: Tensor | _Portion

    def fill(self, at: int, data: Tensor) -> None:
        """Take some of the bytes, from byte ``at`` of the file on."""
        low = at - self.start
        if isinstance(self.target, _Portion):
            self.target.fill(low, data)
        else:
            self.target[low : low + len(data)].copy_(data)


class _Portion:
    """Bytes that are put together beside their place: memory for them is held only meanwhile.

    Args:
        num_bytes: How many.
        place: Where the values belong.
        strides: How far apart these are in the bytes, in elements of each dimension.
    """

    def __init__(self, num_bytes: int, place: Tensor, strides: Sequence[int]) -> None:
        self._num_bytes = self._missing_bytes = num_bytes
        self._place = place
        self._strides = strides
        self._memory: Tensor | None = None
        self._lock = threading.Lock()
        # That of the caller, whatever thread copies: it orders the copy after earlier work.
        is_cuda = place.device.type == "cuda"
        self._stream = torch.cuda.current_stream(place.device) if is_cuda else None

    def fill(self, low: int, data: Tensor) -> None:
        """Take some of the bytes; with the last of them the values go to their place."""
        with self._lock:
            if self._memory is None:
                self._memory = _memory(self._num_bytes)
            memory = self._memory
        memory[low : low + len(data)].copy_(data)
        with self._lock:
            self._missing_bytes -= len(data)
            if self._missing_bytes:
                return
            self._memory = None
        values = memory.view(self._place.dtype).as_strided(self._place.shape, self._strides)
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream:
            self._place.copy_(values)


def _memory(num_bytes: int) -> Tensor:
    if num_bytes < _PAGES_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(page_memory(num_bytes), dtype=torch.uint8, count=num_bytes)


def ranges_of(cut: Cut, box: Box, live: Tensor, *, tensor: str) -> Iterator[Range]:
    """Yield what to read for a cut of a tensor.

    Args:
        cut: The cut.
        box: The box that is wanted.
        live: Memory for the box.
        tensor: The tensor, for messages.
    """
    place = live[cut.shared.slices(within=box)] if cut.shared != box else live
    return _ranges(place, cut.start, cut.strides, tensor)


def _ranges(place: Tensor, start: int, strides: Sequence[int], tensor: str) -> Iterator[Range]:
    sizes = place.shape
    steps = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    span = 1 + sum(steps)
    num_bytes = span * place.element_size()
    if span == place.numel() and place.device.type == "cpu" and place.is_contiguous():
        # Not view(-1): a single value may keep a stride that it does not need.
        flat = place.as_strided((span,), (1,))
        flat = flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
        yield Range(tensor, start, start + num_bytes, flat)
    elif num_bytes <= _PORTION_BYTES:
        portion = _Portion(num_bytes, place, strides)
        yield Range(tensor, start, start + num_bytes, portion)
    else:
        # Where the elements are farthest apart, so that the halves lie one behind the other.
        dim = steps.index(max(steps))
        half = sizes[dim] // 2
        step_bytes = strides[dim] * place.element_size()
        first, second = place.narrow(dim, 0, half), place.narrow(dim, half, sizes[dim] - half)
        yield from _ranges(first, start, strides, tensor)
        yield from _ranges(second, start + half * step_bytes, strides, tensor)


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


def check_block(
    data: memoryview, entry: FileEntry, block: int, where: str, tensors: Sequence[str] = ()
) -> None:
    """Refuse a block that does not match its checksum, and name what is in it."""
    found = crc32c(data)
    if found != entry.crcs[block]:
        named = ", ".join(tensors[:_NAMED]) + (" and others" if len(tensors) > _NAMED else "")
        raise DamagedError(
            f"Block {block} of {where} (bytes {block * BLOCK_BYTES:,} to "
            f"{block * BLOCK_BYTES + len(data):,}) is damaged"
            + (f"; it holds {named}." if named else "."),
            hint="Load an earlier checkpoint; resume does so by itself.",
            path=where,
            block=block,
            tensors=tuple(tensors),
            expected=f"{entry.crcs[block]:08x}",
            found=f"{found:08x}",
        )


class _File:
    """A file whose blocks are read, open no longer than until the last of them was.

    Args:
        store: Its store.
        where: Its key.
        entry: What the manifest says of it.
        num_blocks: How many of its blocks are read.
    """

    def __init__(self, store: Store, where: str, entry: FileEntry, *, num_blocks: int) -> None:
        self.where = where
        self.entry = entry
        self._store = store
        self._num_left = num_blocks
        self._reader: Reader | None = None
        self._lock = threading.Lock()

    def open(self) -> Reader:
        """Open it, if it is not, and compare its size."""
        with self._lock:
            if self._reader is None:
                reader = self._store.open_reader(self.where)
                try:
                    check_size(reader, self.entry, self.where)
                except BaseException:
                    reader.close()
                    raise
                self._reader = reader
            return self._reader

    def leave(self) -> None:
        """Close it if this was the last of its blocks."""
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self.close()

    def close(self) -> None:
        """Close it, if it is open."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class BlockReads:
    """Reads the blocks of several files in threads.

    Args:
        store: Their store.
        key: Returns the key of a file.
        manifest: What the files are.
        progress: Called with the number of bytes of each block that was read.
    """

    def __init__(
        self,
        store: Store,
        key: Callable[[str], str],
        manifest: Manifest,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._key = key
        self._manifest = manifest
        self._progress = progress
        self._queue: SimpleQueue[tuple[_File, int, list[Range]]] = SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_inference = torch.is_inference_mode_enabled()

    def run(self, ranges: Mapping[str, list[Range]]) -> None:
        """Fill the ranges of each file. All files are looked at before any byte is copied."""
        files: list[_File] = []
        try:
            for path, wanted in ranges.items():
                blocks = _by_block(wanted)
                entry = self._manifest.file(path)
                file = _File(self._store, self._key(path), entry, num_blocks=len(blocks))
                files.append(file)
                file.open()
                if len(files) > MAX_OPEN:
                    file.close()
                for block, parts in blocks.items():
                    self._queue.put((file, block, parts))
            helpers = [
                threading.Thread(target=self._work, name=f"milepost-read-{n}")
                for n in range(1, min(NUM_THREADS, self._queue.qsize()))
            ]
            for helper in helpers:
                helper.start()
            self._work()
            for helper in helpers:
                helper.join()
        finally:
            for file in files:
                file.close()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            memory = page_memory(BLOCK_BYTES)
            buffer, view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
            with torch.inference_mode(self._is_inference), torch.no_grad():
                while self._error is None:
                    try:
                        job = self._queue.get_nowait()
                    except Empty:
                        return
                    self._read(*job, buffer, view)
        except BaseException as error:  # noqa: BLE001 - handed to run(), which raises it
            with self._lock:
                self._error = self._error or error

    def _read(
        self, file: _File, block: int, parts: list[Range], buffer: Tensor, view: memoryview
    ) -> None:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, file.entry.size_bytes)
        file.open().read_into(start, view[: stop - start])
        file.leave()
        names = list(dict.fromkeys(part.tensor for part in parts))
        check_block(view[: stop - start], file.entry, block, file.where, names)
        for part in parts:
            low, high = max(part.start, start), min(part.stop, stop)
            part.fill(low, buffer[low - start : high - start])
        if self._progress is not None:
            self._progress(stop - start)


def _by_block(wanted: Iterable[Range]) -> dict[int, list[Range]]:
    blocks: dict[int, list[Range]] = defaultdict(list)
    for part in wanted:
        for block in range(part.start // BLOCK_BYTES, (part.stop - 1) // BLOCK_BYTES + 1):
            blocks[block].append(part)
    return dict(sorted(blocks.items()))
