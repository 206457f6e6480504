"""A writer for stores that take an object from one end to the other: a thread uploads what is fed.

An object of one block or less is kept until it is closed, and created at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol, final

from ..errors import DamagedError, DeadlineError, UsageError
from ..format.digest import BLOCK_BYTES
from .base import Entry
from .feed import BlockFeed

__all__ = ["FeedWriter", "Uploading"]


class Uploading(Protocol):
    """What a store must be able to do for this writer."""

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Upload an object of at most a size, or replace it; return when it is there, whole."""

    def put_new(self, key: str, data: bytes) -> None:
        """Create a key."""

    def head(self, key: str) -> Entry:
        """Return the entry of a key."""


@final
class FeedWriter:
    """Uploads one new object while it is written. See ``base.Writer``.

    Args:
        store: Where to.
        key: The object.
        size_bytes: Its size, or more than that.
        timeout_s: How long a block may wait to be taken, and the last answer to come.
    """

    def __init__(self, store: Uploading, key: str, size_bytes: int, *, timeout_s: float) -> None:
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_open = True
        self._small = bytearray()
        self._feed = BlockFeed(key, size_bytes, timeout_s=timeout_s)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``."""
        self._write(offset, data, is_lasting=False)

    def refer_at(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which stays as it is, at ``offset``. See ``base.LastingWriter``."""
        self._write(offset, data, is_lasting=True)

    def _write(self, offset: int, data: memoryview, *, is_lasting: bool) -> None:
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        if self._size_bytes > BLOCK_BYTES:
            self._start()
            self._feed.put(offset, view, is_lasting=is_lasting)
            return
        with self._lock:
            is_next = offset == len(self._small) and offset + len(view) <= self._size_bytes
            if not self._is_open or not is_next:
                raise UsageError(
                    f"{self._key}: a block was written past the end, twice or after closing."
                )
            self._small += view

    def close(self, size_bytes: int | None = None) -> None:
        """Wait until the object is there, whole."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            is_small = self._size_bytes <= BLOCK_BYTES
            if size_bytes is not None:
                self._size_bytes = size_bytes
        if is_small:
            self._check_complete(self._size_bytes - len(self._small))
            self._store.put_new(self._key, bytes(self._small))
            return
        self._feed.end(self._size_bytes)
        thread = self._thread
        if thread is None or (self._feed.missing_bytes and self._error is None):
            self._drop()
            self._check_complete(self._feed.missing_bytes)
        assert thread is not None
        try:
            self._feed.wait_until_sent()
        except DeadlineError:
            self._drop()
            raise
        thread.join(self._timeout_s)
        if thread.is_alive():
            self._drop()
            raise DeadlineError(
                f"The upload of {self._key} did not end within {self._timeout_s:g} s.",
                safe="Nothing of it counts; earlier checkpoints are intact.",
                path=self._key,
            )
        if self._error is not None:
            raise self._error
        self._check_complete(self._size_bytes - self._store.head(self._key).size_bytes)

    def abort(self) -> None:
        """Drop what was written."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._drop()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and self._is_open:
                self._thread = threading.Thread(target=self._run, name="milepost-upload")
                self._thread.start()

    def _run(self) -> None:
        try:
            self._store.upload(self._key, self._feed, self._size_bytes)
        except BaseException as error:  # noqa: BLE001 - raised where blocks come, and by close
            self._error = error
            self._feed.fail(error)
        finally:
            self._feed.let_go()

    def _drop(self) -> None:
        self._feed.stop()
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _check_complete(self, missing_bytes: int) -> None:
        if missing_bytes:
            raise DamagedError(
                f"{self._key} was closed with {missing_bytes:,} of {self._size_bytes:,} bytes "
                "missing.",
                path=self._key,
                expected=self._size_bytes,
                found=self._size_bytes - missing_bytes,
            )
