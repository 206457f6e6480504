"""A store in memory: for tests, and the oracle that other stores are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import final

from ..errors import DamagedError, ExistsError, FormatError, MissingError, UsageError
from ..format.layout import check_key
from .base import Entry, Names, Traits

__all__ = ["MemoryStore"]


@final
class MemoryStore:
    """Keeps each key in a dictionary. Nothing survives the process.

    Args:
        name: Told apart by it in messages.
        clock: Returns the seconds since 1970 that entries are stamped with.
    """

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self.url = f"memory://{name}"
        self.traits = Traits(is_local=False, exclusive_create=True, hard_links=True, symlinks=False)
        self._clock = clock
        self._lock = Lock()
        self._data: dict[str, tuple[bytes | bytearray, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data`` or raise ``ExistsError``."""
        self._check(key)
        with self._lock:
            self._refuse_existing(key)
            self._data[key] = (bytes(data), self._clock())

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key``."""
        self._check(key)
        with self._lock:
            self._data[key] = (bytes(data), self._clock())

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""
        data, _ = self._find(key)
        if len(data) > max_bytes:
            raise FormatError(
                f"{key} holds {len(data):,} bytes; at most {max_bytes:,} are read.", path=key
            )
        return data

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        data, modified_s = self._find(key)
        return Entry(key, len(data), modified_s)

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys."""
        prefix = f"{self._check(folder)}/" if folder else ""
        with self._lock:
            found = [
                Entry(key, len(data), modified_s)
                for key, (data, modified_s) in sorted(self._data.items())
                if key.startswith(prefix)
            ]
        yield from found

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        start = len(folder) + 1 if folder else 0
        below = (entry.key[start:].partition("/") for entry in self.list(folder))
        return sorted({name for name, slash, _ in below if slash})

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._check(key)
        with self._lock:
            self._data.pop(key, None)

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist, in one step."""
        self._check(new_key)
        found = self._find(key)
        with self._lock:
            self._refuse_existing(new_key)
            self._data[new_key] = found
            self._data.pop(key, None)

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key."""
        self._check(new_key)
        data, _ = self._find(key)
        with self._lock:
            self._refuse_existing(new_key)
            self._data[new_key] = (data, self._clock())

    def point(self, key: str, target: str) -> None:
        """Make ``key`` a text with the target's name."""
        self.put(key, f"{target}\n".encode())

    def create_writer(self, key: str, size_bytes: int) -> MemoryWriter:
        """Begin to write a new key of a known size."""
        self._check(key)
        data = bytearray(size_bytes)
        with self._lock:
            self._refuse_existing(key)
            # There from now on, as a file would be: a stop leaves it half written.
            self._data[key] = (data, self._clock())
        return MemoryWriter(self, key, data)

    def open_reader(self, key: str) -> MemoryReader:
        """Open a key for reading."""
        data, _ = self._find(key)
        return MemoryReader(key, data)

    def sync_folder(self, folder: str) -> None:
        """Do nothing: there is nothing to make durable."""

    def local_path(self, key: str) -> str | None:  # noqa: ARG002 - the contract's name
        """Return ``None``: there are no files."""
        return None

    def _check(self, key: str) -> str:
        return check_key(key, where=self.url)

    def _refuse_existing(self, key: str) -> None:
        if key in self._data:
            raise ExistsError(f"There is already a {key} in the store.", path=key)

    def _find(self, key: str) -> tuple[bytes, float]:
        self._check(key)
        with self._lock:
            if key not in self._data:
                raise MissingError(f"There is no {key} in the store.", path=key)
            data, modified_s = self._data[key]
            return bytes(data), modified_s


@final
class MemoryWriter:
    """Collects the blocks of one new key. See ``base.Writer``."""

    def __init__(self, store: MemoryStore, key: str, data: bytearray) -> None:
        self._store = store
        self._key = key
        self._data = data
        self._is_open = True

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``."""
        if not self._is_open or offset + data.nbytes > len(self._data):
            raise UsageError(f"{self._key}: a block was written past the end, or after closing.")
        self._data[offset : offset + data.nbytes] = data.cast("B")

    def close(self, size_bytes: int | None = None) -> None:
        """Accept no more."""
        if self._is_open and size_bytes is not None:
            del self._data[size_bytes:]
        self._is_open = False

    def abort(self) -> None:
        """Drop what was written."""
        if self._is_open:
            self._is_open = False
            self._store.delete(self._key)


@final
class MemoryReader:
    """Reads ranges of one key. See ``base.Reader``."""

    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        buffer.cast("B")[:] = self.lend(offset, buffer.nbytes)

    def lend(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes. See ``base.LendingReader``."""
        part = memoryview(self._data)[offset : offset + length]
        if len(part) < length:
            raise DamagedError(
                f"{self._key} ends at byte {self.size_bytes:,}; "
                f"{offset + length - self.size_bytes:,} more were expected.",
                path=self._key,
                expected=offset + length,
                found=self.size_bytes,
            )
        return part

    def close(self) -> None:
        """Do nothing."""
