"""Writing: blocks go from memory to the store from several threads, checksummed on the way.

The checksum of a block is taken from the staged memory right before that memory is written, while
it is hot in the cache, or was taken by whoever filled it: see ``sums.py``. Hashing and writing
release the interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..format.digest import BLOCK_BYTES, block_count, crc32c
from ..format.manifest import FileEntry
from ..stores.base import LastingWriter, Store, Writer
from .demand import BlocksOnDemand
from .framing import FrameCost, FrameStream, Packing
from .workers import Workers

__all__ = [
    "NUM_THREADS",
    "NUM_THREADS_AWAITED",
    "FileJob",
    "Job",
    "LendingBlocks",
    "SizedJob",
    "WriteCost",
    "copied_job",
    "file_job",
    "write_files",
]

NUM_THREADS = 2
"""How many threads write while the training goes on: enough to keep a disk busy nearly always."""

NUM_THREADS_AWAITED = 4
"""And how many while it waits: the disk has work from others while some of them checksum."""


class Job(Protocol):
    """A file to write, wherever its bytes come from.

    A block is asked for once, right before it is written, by the thread that writes it; it is not
    needed any more when that thread asks for the next one, or gives it back: see
    :class:`LendingBlocks`. Blocks are asked for in the order of the jobs.
    """

    @property
    def key(self) -> str:
        """Return its key in the store."""

    @property
    def path(self) -> str:
        """Return its path in the checkpoint's folder."""

    @property
    def size_bytes(self) -> int:
        """Return its size."""

    @property
    def blocks(self) -> Sequence[memoryview]:
        """Return its blocks; see :class:`FileJob`."""

    @property
    def is_lasting(self) -> bool:
        """Return whether blocks stay as they are until the file is closed or dropped."""


@runtime_checkable
class LendingBlocks(Protocol):
    """What the blocks of a job may be able to do besides: take back the memory of one."""

    def give_back(self, index: int) -> None:
        """Take note that a block is not needed any more. May be told twice."""


@runtime_checkable
class SummedBlocks(Protocol):
    """What the blocks of a job may be able to do besides: tell their checksums."""

    def checksum(self, index: int) -> int | None:
        """Return the checksum of a block that was asked for, if it was taken when it was filled."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to write.

    Attributes:
        key: Its key in the store.
        path: Its path in the checkpoint's folder.
        blocks: Its bytes in blocks of ``digest.BLOCK_BYTES``, the last one shorter; each page
            aligned and readable up to the next page border.
        is_lasting: Whether the blocks stay as they are until the file is closed or dropped.
    """

    key: str
    path: str
    blocks: Sequence[memoryview]
    is_lasting: bool = field(default=False, kw_only=True)

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return sum(len(block) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SizedJob(FileJob):
    """A file to write whose blocks are not there yet.

    Attributes:
        num_bytes: The size of the file.
    """

    num_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return self.num_bytes


@dataclass(slots=True)
class WriteCost:
    """What writing files has cost, beside the bytes.

    Attributes:
        sync_s: Seconds in which files were made durable, added up over the threads.
        frames: What compressing has cost.
    """

    sync_s: float = 0.0
    frames: FrameCost = field(default_factory=FrameCost)


def file_job(key: str, path: str, data: memoryview) -> FileJob:
    """Return the job of writing one contiguous range of memory, which stays as it is meanwhile."""
    starts = range(0, len(data), BLOCK_BYTES)
    blocks = [data[start : start + BLOCK_BYTES] for start in starts]
    return FileJob(key, path, blocks, is_lasting=True)


def copied_job(
    key: str,
    path: str,
    data: memoryview,
    *,
    wait: Callable[[int], None],
    sum_of: Callable[[int], int | None],
) -> SizedJob:
    """Return the job of writing a range of memory that is still being filled from its start on.

    Args:
        key: Its key in the store.
        path: Its path in the checkpoint's folder.
        data: The memory, which stays as it is once it is filled.
        wait: Called with the place where a block ends, before it is written; returns when
            everything below is there, or raises.
        sum_of: Returns the checksum of the block that begins at a place, if it was taken.
    """
    return SizedJob(key, path, _Awaited(data, wait, sum_of), len(data), is_lasting=True)


class _Awaited(BlocksOnDemand):
    """The blocks of memory that is being filled."""

    def __init__(
        self,
        data: memoryview,
        wait: Callable[[int], None],
        sum_of: Callable[[int], int | None],
    ) -> None:
        super().__init__(len(data))
        self._data = data
        self._wait = wait
        self._sum_of = sum_of

    def make(self, index: int, num_bytes: int) -> memoryview:
        """See :class:`BlocksOnDemand`; it is there already, or soon."""
        start = index * BLOCK_BYTES
        self._wait(start + num_bytes)
        return self._data[start : start + num_bytes]

    def checksum(self, index: int) -> int | None:
        """See :class:`SummedBlocks`."""
        return self._sum_of(index * BLOCK_BYTES)


def write_files(
    store: Store,
    jobs: Sequence[Job],
    *,
    num_threads: int = NUM_THREADS,
    cost: WriteCost | None = None,
    packings: Mapping[str, Packing] | None = None,
) -> list[FileEntry]:
    """Write files and make them durable.

    Args:
        store: Where to.
        jobs: The files.
        num_threads: How many threads write.
        cost: What the cost is added to.
        packings: How to compress files, by their paths; others are written as they are.

    Returns:
        One entry a file, in the order of the jobs, with its checksums.

    Raises:
        CheckpointError: The first error of any thread; all files of the call were dropped.
    """
    if not jobs:
        return []
    return _Pipeline(store, jobs, cost or WriteCost(), packings or {}, num_threads).run()


class _Pipeline:
    def __init__(
        self,
        store: Store,
        jobs: Sequence[Job],
        cost: WriteCost,
        packings: Mapping[str, Packing],
        num_threads: int,
    ) -> None:
        self._store = store
        self._cost = cost
        self._jobs = jobs
        self._crcs = [[0] * block_count(job.size_bytes) for job in jobs]
        self._left = [len(job.blocks) for job in jobs]
        self._writers: list[Writer] = []
        self._packings = packings
        self._streams: dict[int, FrameStream] = {}
        self._workers = Workers[tuple[int, int]]("milepost-write", num_threads=num_threads)
        self._lock = threading.Lock()

    def run(self) -> list[FileEntry]:
        try:
            for index, job in enumerate(self._jobs):
                self._writers.append(self._store.create_writer(job.key, job.size_bytes))
                packing = self._packings.get(job.path)
                if packing is not None:
                    self._streams[index] = FrameStream(
                        self._writers[index],
                        job.size_bytes,
                        packing=packing,
                        cost=self._cost.frames,
                        key=job.key,
                    )
            self._write_all()
        except BaseException:
            # Not under the hands of a thread that is stuck with one: what it writes to would be
            # closed, and may be another file then.
            if self._workers.is_still:
                for writer in self._writers:
                    writer.abort()
            raise
        return [self._entry(index) for index in range(len(self._jobs))]

    def _entry(self, index: int) -> FileEntry:
        job, stream = self._jobs[index], self._streams.get(index)
        if stream is not None:
            return stream.entry(job.path)
        return FileEntry(job.path, job.size_bytes, tuple(self._crcs[index]))

    def _write_all(self) -> None:
        for index, job in enumerate(self._jobs):
            for block in range(len(job.blocks)):
                self._workers.put((index, block))
            if len(job.blocks) == 0:
                self._close(index)
        self._workers.run(self._work)

    def _work(self, pieces: Iterator[tuple[int, int]]) -> None:
        try:
            for index, block in pieces:
                data = self._jobs[index].blocks[block]
                try:
                    with self._workers.touching():
                        self._write(index, block, data)
                finally:
                    self._give_back(index, block)
        except BaseException:
            for stream in self._streams.values():
                stream.stop()  # a thread may wait there for what this one will not bring
            raise

    def _write(self, index: int, block: int, data: memoryview) -> None:
        stream = self._streams.get(index)
        checksum = self._checksum(index, block, data)
        if stream is None:
            self._crcs[index][block] = checksum
            self._write_plain(index, block, data)
        else:
            stream.take(block, data, checksum)
        self._give_back(index, block)  # not only when the file is durable
        with self._lock:
            self._left[index] -= 1
            is_last = self._left[index] == 0
        if is_last:
            # The thread that wrote the last block makes the file durable while the other goes on.
            self._close(index)

    def _write_plain(self, index: int, block: int, data: memoryview) -> None:
        job, writer = self._jobs[index], self._writers[index]
        if job.is_lasting and isinstance(writer, LastingWriter):
            writer.refer_at(block * BLOCK_BYTES, data)
        else:
            writer.write_at(block * BLOCK_BYTES, data)

    def _checksum(self, index: int, block: int, data: memoryview) -> int:
        blocks = self._jobs[index].blocks
        known = blocks.checksum(block) if isinstance(blocks, SummedBlocks) else None
        return crc32c(data) if known is None else known

    def _give_back(self, index: int, block: int) -> None:
        blocks = self._jobs[index].blocks
        if isinstance(blocks, LendingBlocks):
            blocks.give_back(block)

    def _close(self, index: int) -> None:
        started_s = time.perf_counter()
        stream = self._streams.get(index)
        if stream is not None:
            stream.close()
        else:
            self._writers[index].close()
        with self._lock:
            self._cost.sync_s += time.perf_counter() - started_s
