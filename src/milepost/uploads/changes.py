"""Which files have changed since they were uploaded, without trust in clocks.

A file is known by its mark: number, size, and both of its times. Any other mark is a change, an
older time too. The same mark is no proof while the file's time is recent: file systems count time
in ticks, and a second write within one tick leaves the mark as it is. So until a mark has grown
old, by the clock of the file system itself, the bytes are compared as well.

A file may be written to while it is read. It is uploaded as it was up to the size that it had when
it was opened, from a copy, so that what is uploaded does not change on its way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ..errors import storage_error
from ..format.digest import BLOCK_BYTES, crc32c
from ..stores.temporary import clock_s
from .scan import FoundFile, Mark, mark_of

__all__ = ["Changes", "Taken"]

_OLD_S = 3.0
"""Longer than a tick of any file system."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a file held at one moment: its bytes, or the path of a copy."""

    path: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class _Sent:
    mark: Mark
    crc: int
    is_old: bool


@final
class Changes:
    """Remember what was uploaded of each file.

    Args:
        staging_folder: Where copies lie while they are uploaded; ``None``: in a temporary folder.
        small_bytes: Files up to this size are held in memory instead.
    """

    def __init__(self, staging_folder: str | None, *, small_bytes: int) -> None:
        self._base = staging_folder
        self._small_bytes = small_bytes
        self._folder: str | None = None
        self._lock = threading.Lock()
        self._sent: dict[str, _Sent] = {}
        self._num_taken = 0
        self._now_s = 0.0

    def begin(self, root: str) -> None:
        """Begin a round: read the clock of the file system."""
        self._now_s = clock_s(root)

    def may_differ(self, file: FoundFile) -> bool:
        """Return whether a file may hold anything else than what was uploaded of it."""
        sent = self._sent.get(file.key)
        return sent is None or sent.mark != file.mark or not sent.is_old

    @contextmanager
    def take(self, file: FoundFile) -> Iterator[Taken | None]:
        """Lend out what a file holds, and remember it as uploaded when the block ends well.

        ``None`` stands for a file that is gone, or that holds what was uploaded.

        Raises:
            StorageError: It cannot be read, or not be copied.
        """
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise storage_error(error, operation="open", path=file.path) from error
        copy = None
        try:
            mark = mark_of(os.fstat(fd))
            data = None
            if mark[2] <= self._small_bytes:
                data = b"".join(_read(fd, file.path, mark[2]))
                crc = crc32c(data)
            else:
                copy = self._new_path()
                crc = _copy(fd, file.path, mark[2], copy)
            sent = self._sent.get(file.key)
            is_known = sent is not None and sent.mark[2] == mark[2] and sent.crc == crc
            yield None if is_known else Taken(copy or file.path, data)
            self._sent[file.key] = _Sent(mark, crc, self._is_old(mark))
        finally:
            os.close(fd)
            if copy is not None:
                Path(copy).unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Forget what was uploaded of the files in a folder."""
        for one in [one for one in self._sent if one.startswith(f"{key}/")]:
            del self._sent[one]

    def keep(self, keys: Collection[str]) -> None:
        """Forget what was uploaded of files that are not there any more."""
        self._sent = {key: sent for key, sent in self._sent.items() if key in keys}

    def close(self) -> None:
        """Remove the folder of the copies."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_old(self, mark: Mark) -> bool:
        return self._now_s - max(mark[3:]) / 1e9 > _OLD_S

    def _new_path(self) -> str:
        with self._lock:
            if self._folder is None:
                if self._base is not None:
                    Path(self._base).mkdir(parents=True, exist_ok=True)
                self._folder = tempfile.mkdtemp(prefix="milepost-uploads-", dir=self._base)
            self._num_taken += 1
            return f"{self._folder}/{self._num_taken}"


def _copy(fd: int, path: str, size_bytes: int, target: str) -> int:
    crc = 0
    try:
        with Path(target).open("xb") as file:
            for piece in _read(fd, path, size_bytes):
                crc = crc32c(piece, crc)
                file.write(piece)
    except OSError as error:
        Path(target).unlink(missing_ok=True)
        raise storage_error(error, operation="write", path=target) from error
    return crc


def _read(fd: int, path: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a file up to a size; fewer if it was cut off meanwhile."""
    while size_bytes:
        try:
            piece = os.read(fd, min(BLOCK_BYTES, size_bytes))
        except OSError as error:
            raise storage_error(error, operation="read", path=path) from error
        if not piece:
            return
        size_bytes -= len(piece)
        yield piece
