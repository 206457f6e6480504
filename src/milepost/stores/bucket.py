"""What stores in buckets have in common, whatever client they use.

A bucket knows no folders, no links and no renaming: an object is there, whole and durable, when its
upload has been answered. Where the service does not refuse to create what is there already, a look
comes before: among the threads that share the store that is exclusive all the same, among processes
it is not, which is said loudly, once.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ExistsError, MissingError, UsageError
from ..format.digest import BLOCK_BYTES
from ..format.layout import check_key, is_key
from .base import Entries, Entry, Names, Traits
from .ranges import RangeReader
from .uploading import FeedWriter

__all__ = ["BucketStore"]

_log = logging.getLogger("milepost")


class BucketStore(ABC):
    """Keeps each key as an object below a prefix of a bucket.

    Args:
        url: The address of the prefix.
        exclusive_create: Whether the service refuses to create what is there already.
    """

    def __init__(self, url: str, *, exclusive_create: bool) -> None:
        self.url = url
        self.traits = Traits(
            is_local=False, exclusive_create=exclusive_create, hard_links=False, symlinks=False
        )
        self._pid = os.getpid()
        self._creating = threading.Lock()
        self._was_warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(
            f"{self!r} cannot be pickled: it holds credentials.",
            hint="Give the address to the other process, and let it open the store itself.",
        )

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data`` or raise ``ExistsError``."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key``."""

    @abstractmethod
    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""

    @abstractmethod
    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""

    @abstractmethod
    def _list_all(self, folder: str) -> Entries:
        """Return every object below a folder, whatever its name."""

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys."""
        found = self._list_all(folder)
        # Programs that show buckets as folders make an empty object for each, "ep1/", which clients
        # show as "ep1".
        above = {one for entry in found for one in _folders_above(entry.key)}
        keys = [
            entry
            for entry in found
            if is_key(entry.key)
            and entry.key != folder
            and not (entry.size_bytes == 0 and entry.key in above)
        ]
        yield from sorted(keys, key=lambda entry: entry.key)

    def strangers(self, folder: str = "") -> Names:
        """Return what ``list`` leaves out because of its name."""
        names = (entry.key for entry in self._list_all(folder) if entry.key)
        return sorted({_first_stranger(name) for name in names if not is_key(name)})

    @abstractmethod
    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key``."""

    @abstractmethod
    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key: a copy."""

    @abstractmethod
    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Upload an object from one end to the other; one of that name is replaced."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes that a key has, all of them. Used by the reader."""

    @abstractmethod
    def _wait_s(self, size_bytes: int) -> float:
        """Return how long a block may wait to be taken, and the end of an upload to come."""

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist, in two steps. For records."""
        data = self.get(key)
        self.put_new(new_key, data)
        self.delete(key)

    def point(self, key: str, target: str) -> None:
        """Make ``key`` a text with the target's name."""
        self.put(key, f"{target}\n".encode())

    def create_writer(self, key: str, size_bytes: int) -> FeedWriter:
        """Begin to write a new key of a known size."""
        self._refuse_existing(key)
        return FeedWriter(self, key, size_bytes, timeout_s=self._wait_s(size_bytes))

    def open_reader(self, key: str) -> RangeReader:
        """Open a key for reading."""
        return RangeReader(self, key, self.head(key).size_bytes)

    def sync_folder(self, folder: str) -> None:  # noqa: B027 - there is nothing to do
        """Do nothing: what was answered is durable."""

    def local_path(self, key: str) -> str | None:  # noqa: ARG002 - the contract's name
        """Return ``None``: there are no files, or it is not known."""
        return None

    def _send_again(self, key: str, new_key: str, size_bytes: int) -> None:
        """Copy an object by reading and writing it."""
        writer = FeedWriter(self, new_key, size_bytes, timeout_s=self._wait_s(size_bytes))
        try:
            # Not from within the upload, whose client can send no other request meanwhile.
            for start in range(0, size_bytes, BLOCK_BYTES):
                writer.write_at(
                    start, self.read_range(key, start, min(BLOCK_BYTES, size_bytes - start))
                )
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def _create_after_look(self, key: str, data: bytes) -> None:
        """Create ``key`` where the service does not refuse; safe for one process only."""
        with self._creating:
            self._refuse_existing(key)
            self.put(key, data)

    def _warn_of_one_writer(self) -> None:
        if not self._was_warned:
            self._was_warned = True
            _log.warning(
                "%s does not refuse to create what is there already: it is safe for one writer "
                "only. Never let two processes save to one run there at the same time.",
                self.url,
            )

    def _refuse_existing(self, key: str) -> None:
        try:
            self.head(key)
        except MissingError:
            return
        raise ExistsError(f"There is already a {self._name(key)}.", path=key)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _check(self, key: str) -> str:
        """Return a key that may be used, in a process that may use it."""
        self._refuse_fork()
        return check_key(key, where=self.url)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self!r} cannot be used in a forked child of the process that opened it.",
                hint="Start the process with spawn, and open the store there.",
            )


def _folders_above(key: str) -> Names:
    parts = key.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _first_stranger(name: str) -> str:
    """Return the shortest beginning of a name that is no key, with a slash if it is a folder."""
    return next((f"{one}/" for one in _folders_above(name) if not is_key(one)), name)
