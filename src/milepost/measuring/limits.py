"""What a place does at best, by the plainest means: the limit that Milepost is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch

from ..errors import storage_error
from ..format.digest import BLOCK_BYTES
from ..stores import posix
from ..stores.base import Store
from ..stores.blocks import LocalReader, LocalWriter
from ..stores.pages import page_memory

__all__ = ["FolderLimits", "PlaceLimits", "StoreLimits", "copy_s"]

Clock = Callable[[], float]
_NUM_THREADS = 4


class PlaceLimits(Protocol):
    """Measures a place."""

    def write_s(self, size_bytes: int, clock: Clock) -> float:
        """Write new bytes durably, and return the seconds."""

    def read_s(self, size_bytes: int, clock: Clock) -> float:
        """Read what was written last, and return the seconds."""

    def small_s(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of small operations by their name in ``Limits``."""

    def clear(self) -> None:
        """Remove what was written."""


def copy_s(source: torch.Tensor, target: torch.Tensor, clock: Clock) -> float:
    """Copy memory to memory that was touched before, and return the seconds."""
    started_s = clock()
    target.copy_(source)
    return clock() - started_s


class FolderLimits:
    """Writes and reads one large file directly, in blocks, by several threads.

    Args:
        folder: Where to; it exists.
        direct: Whether to go around the cache of the kernel where that can be.
    """

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        self._path = str(folder / "limit.bin")
        self._small = str(folder / "small")
        self._direct = direct
        self._pages = [_random_pages() for _ in range(_NUM_THREADS)]

    def write_s(self, size_bytes: int, clock: Clock) -> float:
        """Write a new file with direct I/O and sync it."""
        # Giving back the blocks of an old file takes time of its own.
        Path(self._path).unlink(missing_ok=True)
        started_s = clock()
        writer = LocalWriter(self._path, size_bytes, direct=self._direct, on_refused=_nothing)
        try:
            _share(size_bytes, lambda at, end, n: writer.write_at(at, self._pages[n][: end - at]))
            writer.close()
        except BaseException:
            writer.abort()
            raise
        return clock() - started_s

    def read_s(self, size_bytes: int, clock: Clock) -> float:
        """Read the file with direct I/O."""
        started_s = clock()
        reader = LocalReader(self._path, key="limit.bin", direct=self._direct, on_refused=_nothing)
        with closing(reader):
            _share(size_bytes, lambda at, end, n: reader.read_into(at, self._pages[n][: end - at]))
        return clock() - started_s

    def small_s(self, clock: Clock) -> dict[str, float]:
        """Make a small file durable, and link it."""
        second = f"{self._small}-2"
        for path in (self._small, second):
            Path(path).unlink(missing_ok=True)
        try:
            started_s = clock()
            fd = posix.create_file(self._small)
            try:
                posix.write_all(fd, b"\0" * 4096)
                os.fsync(fd)
            finally:
                os.close(fd)
            synced_s = clock()
        except OSError as error:
            raise storage_error(error, operation="write", path=self._small) from error
        found = {"sync_s": synced_s - started_s}
        try:
            posix.link_new(self._small, second)
        except OSError:
            return found  # refused here, which is a finding too
        return {**found, "link_s": clock() - synced_s}

    def clear(self) -> None:
        """Remove the files."""
        for path in (self._path, self._small, f"{self._small}-2"):
            Path(path).unlink(missing_ok=True)


class StoreLimits:
    """Uploads and downloads a few objects at once.

    Args:
        store: Where to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages = [_random_pages() for _ in range(_NUM_THREADS)]
        self._keys = [f"limit-{n}" for n in range(_NUM_THREADS)]

    def write_s(self, size_bytes: int, clock: Clock) -> float:
        """Upload an object by each thread."""
        self.clear()
        part_bytes = -(-size_bytes // _NUM_THREADS)
        started_s = clock()
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda n: self._upload(n, part_bytes), range(_NUM_THREADS)))
        return clock() - started_s

    def read_s(self, size_bytes: int, clock: Clock) -> float:
        """Download them, each by its thread."""
        part_bytes = -(-size_bytes // _NUM_THREADS)
        started_s = clock()
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda n: self._download(n, part_bytes), range(_NUM_THREADS)))
        return clock() - started_s

    def small_s(self, clock: Clock) -> dict[str, float]:
        """Write a small object, and read it."""
        started_s = clock()
        self._store.put("small", b"\0" * 4096)
        put_s = clock()
        self._store.get("small")
        return {"put_s": put_s - started_s, "get_s": clock() - put_s}

    def clear(self) -> None:
        """Delete the objects."""
        for key in (*self._keys, "small"):
            self._store.delete(key)

    def _upload(self, number: int, size_bytes: int) -> None:
        writer = self._store.create_writer(self._keys[number], size_bytes)
        try:
            for at in range(0, size_bytes, BLOCK_BYTES):
                writer.write_at(at, self._pages[number][: min(BLOCK_BYTES, size_bytes - at)])
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def _download(self, number: int, size_bytes: int) -> None:
        with closing(self._store.open_reader(self._keys[number])) as reader:
            for at in range(0, size_bytes, BLOCK_BYTES):
                reader.read_into(at, self._pages[number][: min(BLOCK_BYTES, size_bytes - at)])


def _share(size_bytes: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(start, end, thread)`` for each block, by several threads."""
    starts = range(0, size_bytes, BLOCK_BYTES)

    def run(thread: int) -> None:
        for at in starts[thread::_NUM_THREADS]:
            work(at, min(at + BLOCK_BYTES, size_bytes), thread)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(run, range(_NUM_THREADS)))


def _random_pages() -> memoryview:
    """Return a block of bytes that nobody can make smaller, in pages."""
    memory = page_memory(BLOCK_BYTES)
    memory[:BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    return memoryview(memory)


def _nothing() -> None:
    """Do nothing: where direct I/O is refused the cache is what there is."""
