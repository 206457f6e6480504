"""Copying files from one store to another, in blocks, by several threads, checked on the way.

A block is compared with its checksum before it is written, so that no file of the copy ever holds
bytes that the commit does not vouch for. Files are opened as their first block comes up and closed
after their last, so that a checkpoint of a thousand files needs no thousand descriptors.

A store that takes a file from one end to the other holds what comes early. So no thread begins a
block that is far ahead of the first one of its file that is still under way: a single read that
takes long then makes the others wait, instead of filling the memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ..errors import CheckpointError, DamagedError, DeadlineError
from ..format.digest import BLOCK_BYTES
from ..format.manifest import FileEntry
from ..stores.again import read_twice
from ..stores.base import Reader, Store, Writer
from ..stores.pages import page_memory

__all__ = ["FileCopy", "Progress", "copy_files"]

NUM_THREADS = 4
Progress = Callable[[int], None]

_WINDOW_BLOCKS = 8
"""How far a thread may run ahead of the first block of a file that is under way."""

_STALL_S = 1800.0
"""Longer than any store tries one request."""

_log = logging.getLogger("milepost")


@dataclass(frozen=True, slots=True)
class FileCopy:
    """One file to copy.

    Attributes:
        key: Its key in the source.
        new_key: Its key in the target, which must not exist.
        size_bytes: Its size.
        entry: What the commit says of it; ``None`` for a file that no commit vouches for.
    """

    key: str
    new_key: str
    size_bytes: int
    entry: FileEntry | None = None


def copy_files(
    source: Store,
    target: Store,
    files: Sequence[FileCopy],
    *,
    num_threads: int = NUM_THREADS,
    keep_whole: bool = False,
    progress: Progress | None = None,
) -> None:
    """Copy files durably. On an error every file that was begun is gone from the target.

    Args:
        source: Where from.
        target: Where to.
        files: The files.
        num_threads: How many blocks are under way at once.
        keep_whole: Whether files that are whole stay in the target after an error, for the caller
            to go on from.
        progress: Called with the bytes of each block, by any of the threads.

    Raises:
        MissingError: A file is not in the source.
        DamagedError: A size or a checksum does not match.
        ExistsError: A file is in the target already.
    """
    _Transfer(source, target, files, keep_whole=keep_whole, progress=progress).run(num_threads)


class _Open:
    """One file under way."""

    def __init__(self, num_blocks: int) -> None:
        self.lock = threading.Lock()
        self.reader: Reader | None = None
        self.writer: Writer | None = None
        self.num_left = num_blocks
        self.first = 0  # of the blocks that are not copied yet
        self.ahead: set[int] = set()


class _Transfer:
    def __init__(
        self,
        source: Store,
        target: Store,
        files: Sequence[FileCopy],
        *,
        keep_whole: bool,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._target = target
        self._files = files
        self._keep_whole = keep_whole
        self._progress = progress or (lambda _: None)
        self._moved = threading.Condition()
        self._open = [_Open(max(1, -(-one.size_bytes // BLOCK_BYTES))) for one in files]
        self._queue: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, num_threads: int) -> None:
        for number, state in enumerate(self._open):
            for block in range(state.num_left):
                self._queue.put((number, block))
        helpers = [
            threading.Thread(target=self._work, name=f"milepost-copy-{n}")
            for n in range(1, min(num_threads, self._queue.qsize()))
        ]
        for helper in helpers:
            helper.start()
        self._work()
        for helper in helpers:
            helper.join()
        if self._error is not None:
            self._undo()
            raise self._error
        for folder in {one.new_key.rpartition("/")[0] for one in self._files}:
            self._target.sync_folder(folder)

    def _work(self) -> None:
        try:
            memory = memoryview(page_memory(BLOCK_BYTES))
            while self._error is None:
                try:
                    number, block = self._queue.get_nowait()
                except Empty:
                    return
                self._copy(number, block, memory)
        except BaseException as error:  # noqa: BLE001 - handed to run(), which raises it
            with self._lock:
                self._error = self._error or error
            with self._moved:
                self._moved.notify_all()

    def _copy(self, number: int, block: int, memory: memoryview) -> None:
        file, state = self._files[number], self._open[number]
        if not self._wait_for_turn(file, state, block):
            return
        reader, writer = self._begin(file, state)
        start = block * BLOCK_BYTES
        data = memory[: min(BLOCK_BYTES, file.size_bytes - start)]
        if data:
            if file.entry is None:
                reader.read_into(start, data)
            else:
                found = read_twice(reader, start, data, expected=file.entry.crcs[block])
                _check(file.entry, block, found, where=f"{self._source.url}/{file.key}")
            writer.write_at(start, data)
        with state.lock:
            state.num_left -= 1
            is_last = state.num_left == 0
        if is_last:
            writer.close()
            reader.close()
            state.reader = None
            state.writer = None if self._keep_whole else writer
        self._move_on(state, block)
        self._progress(len(data))

    def _wait_for_turn(self, file: FileCopy, state: _Open, block: int) -> bool:
        """Wait until a block is near enough; return ``False`` if another thread has failed."""
        with self._moved:
            near = self._moved.wait_for(
                lambda: block < state.first + _WINDOW_BLOCKS or self._error is not None, _STALL_S
            )
        if not near:
            raise DeadlineError(
                f"Block {state.first} of {file.key} did not come within {_STALL_S:g} s.",
                path=file.key,
            )
        return self._error is None

    def _move_on(self, state: _Open, block: int) -> None:
        with self._moved:
            state.ahead.add(block)
            while state.first in state.ahead:
                state.ahead.remove(state.first)
                state.first += 1
            self._moved.notify_all()

    def _begin(self, file: FileCopy, state: _Open) -> tuple[Reader, Writer]:
        with state.lock:
            if state.reader is None:
                state.reader = self._source.open_reader(file.key)
                _check_size(file, state.reader, where=f"{self._source.url}/{file.key}")
            if state.writer is None:
                state.writer = self._target.create_writer(file.new_key, file.size_bytes)
            return state.reader, state.writer

    def _undo(self) -> None:
        for file, state in zip(self._files, self._open, strict=True):
            if state.reader is not None:
                state.reader.close()
            if state.writer is not None:
                state.writer.abort()
                if not self._keep_whole:
                    self._delete(file.new_key)

    def _delete(self, key: str) -> None:
        try:
            self._target.delete(key)
        except CheckpointError as error:
            _log.warning("%s/%s is left of a copy that failed: %s", self._target.url, key, error)


def _check_size(file: FileCopy, reader: Reader, *, where: str) -> None:
    if reader.size_bytes != file.size_bytes:
        raise DamagedError(
            f"{where} has {reader.size_bytes:,} bytes; {file.size_bytes:,} were expected.",
            path=where,
            expected=file.size_bytes,
            found=reader.size_bytes,
        )


def _check(entry: FileEntry, block: int, found: int, *, where: str) -> None:
    if found != entry.crcs[block]:
        raise DamagedError(
            f"Block {block} of {where} has CRC32C {found:08x} and not {entry.crcs[block]:08x}.",
            safe="Nothing of the copy is left.",
            hint="Take an earlier checkpoint, or look closer with: milepost verify --level full.",
            path=where,
            block=block,
            expected=f"{entry.crcs[block]:08x}",
            found=f"{found:08x}",
        )
