"""A store that is far away, in a folder: it has no local files, and tells what is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from milepost.stores import LocalStore


class RemoteStore:
    """Passes everything on to a local store but its files.

    Args:
        folder: Where the bytes are.
        log: Every reader that is opened adds a line to it, from whichever process.
        before_read: Called with the key before each block is read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        log: str | os.PathLike[str] | None = None,
        before_read: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._store = LocalStore(folder)
        self._log = log
        self._before_read = before_read
        self.url = f"remote://{os.fspath(folder).lstrip('/')}"
        self.traits = replace(self._store.traits, is_local=False)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def local_path(self, key):
        return None

    def open_reader(self, key):
        if self._log is not None:
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, f"{os.getpid()} {key}\n".encode())
            os.close(fd)
        return RemoteReader(self._store.open_reader(key), key, self._before_read)


class RemoteReader:
    def __init__(self, reader, key, before_read) -> None:
        self._reader = reader
        self._key = key
        self._before_read = before_read
        self.size_bytes = reader.size_bytes

    def read_into(self, offset, buffer):
        self._before_read(self._key)
        self._reader.read_into(offset, buffer)

    def close(self):
        self._reader.close()
