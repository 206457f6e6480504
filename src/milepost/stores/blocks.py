"""Block-wise writing and reading of one local file, past the page cache where that works.

Direct I/O needs page-aligned memory, offsets and lengths. The callers' buffers and offsets are
aligned; the only odd length is that of a file's last block. Its last, partial page is written from
a page of our own and the file is cut to its exact size at the end, and read through a second,
ordinary descriptor.

A file system that refuses direct I/O says so with EINVAL at the first try; the file then goes on
through the page cache. The bytes are the same either way.
"""

# System calls on plain strings, so that each one is seen where it happens.
# ruff: noqa: PTH108

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from threading import Lock
from typing import final

from ..errors import DamagedError, MissingError, storage_error
from . import posix
from .pages import page_memory
from .residence import is_resident, may_ask

__all__ = ["LocalReader", "LocalWriter"]

PAGE_BYTES = 4096

_SAMPLE_BYTES = 64 * 1024
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_PREALLOCATION = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


@final
class LocalWriter:
    """Writes one new file. See ``base.Writer``.

    Args:
        path: The file. It must not exist.
        size_bytes: Its final size, or more than that; the room is reserved at once where the file
            system can.
        direct: Whether to try to bypass the page cache.
        on_refused: Called once when the file system turns out to refuse direct I/O.

    Attributes:
        abort_errors: What went wrong while dropping the file, if anything.
    """

    def __init__(
        self, path: str, size_bytes: int, *, direct: bool, on_refused: Callable[[], None]
    ) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._on_refused = on_refused
        self._lock = Lock()
        self._is_direct = False
        self.abort_errors: list[OSError] = []
        try:
            self._fd: int | None = posix.create_file(path)
        except OSError as error:
            raise storage_error(error, operation="create", path=path) from error
        try:
            if direct:
                self._turn_direct(self._fd)
            self._reserve(self._fd)
        except OSError as error:
            self.abort()
            raise storage_error(error, operation="reserve room for", path=path) from error
        except BaseException:
            self.abort()
            raise

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``."""
        fd = self._fd
        if fd is None:
            raise storage_error(
                OSError(errno.EBADF, "the writer is closed"), operation="write", path=self._path
            )
        view = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        whole = len(view) - len(view) % PAGE_BYTES
        try:
            self._write(fd, offset, view[:whole] if self._is_direct else view)
            if self._is_direct and whole < len(view):
                self._write_tail(fd, offset + whole, view[whole:])
            elif whole < len(view) and not self._is_direct:
                # Either all was written above, or direct I/O was refused half way: the tail is
                # written again then, with the same bytes.
                self._write(fd, offset + whole, view[whole:])
        except OSError as error:
            raise storage_error(error, operation="write", path=self._path) from error

    def close(self, size_bytes: int | None = None) -> None:
        """Cut the file to its size, make the bytes durable and close it.

        Room that was reserved and is not needed goes back. On an error the file is removed: after
        a failed sync nobody knows what is on the disk.
        """
        with self._lock:
            fd = self._fd
        if fd is None:
            return
        try:
            os.ftruncate(fd, self._size_bytes if size_bytes is None else size_bytes)
            os.fsync(fd)
            with self._lock:
                self._fd = None
            os.close(fd)
        except OSError as error:
            self.abort()
            raise storage_error(error, operation="fsync", path=self._path) from error

    def abort(self) -> None:
        """Close and remove the file. Never raises; does nothing once the file is complete.

        A writer that comes so late that its file was removed and made anew by another leaves that
        one alone.
        """
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if os.path.samestat(os.fstat(fd), os.lstat(self._path)):
                os.unlink(self._path)
        except OSError as error:
            self.abort_errors.append(error)
        try:
            os.close(fd)
        except OSError as error:
            self.abort_errors.append(error)

    def _turn_direct(self, fd: int) -> None:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            self._is_direct = True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._on_refused()

    def _turn_buffered(self, fd: int) -> None:
        with self._lock:
            if self._is_direct:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._is_direct = False
                self._on_refused()

    def _reserve(self, fd: int) -> None:
        if self._size_bytes > 0:
            try:
                os.posix_fallocate(fd, 0, self._size_bytes)
            except OSError as error:
                if error.errno not in _NO_PREALLOCATION:
                    raise

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        while view:
            was_direct = self._is_direct
            try:
                written = os.pwrite(fd, view, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT or not was_direct:
                    raise
                self._turn_buffered(fd)
                continue
            if written <= 0:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            view, offset = view[written:], offset + written

    def _write_tail(self, fd: int, offset: int, tail: memoryview) -> None:
        # Not closed by hand: the traceback of an error may still hold a slice of it.
        page = page_memory(PAGE_BYTES)
        page[: len(tail)] = bytes(tail)
        self._write(fd, offset, memoryview(page))


@final
class LocalReader:
    """Reads one file. See ``base.Reader``.

    Args:
        path: The file.
        key: Its key, for messages.
        direct: Whether to try to bypass the page cache.
        on_refused: Called once when the file system turns out to refuse direct I/O.
    """

    def __init__(
        self, path: str, *, key: str, direct: bool, on_refused: Callable[[], None]
    ) -> None:
        self._path = path
        self._key = key
        self._on_refused = on_refused
        self._direct_fd: int | None = None
        self._lock = Lock()
        try:
            self._fd: int | None = posix.open_file(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingError(f"There is no {key} in the store.", path=path) from error
        except OSError as error:
            raise storage_error(error, operation="open", path=path) from error
        status = os.fstat(self._fd)
        self.size_bytes = status.st_size
        self._may_ask = may_ask(status, path)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise MissingError(f"{key} is not a file.", path=path)
        if direct and self.size_bytes >= PAGE_BYTES:
            self._open_direct()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on, past the page cache where that works."""
        self._fill(offset, buffer, is_direct=True)

    def copy_into(self, offset: int, buffer: memoryview) -> None:
        """Fill any memory from ``offset`` on, through the page cache."""
        self._fill(offset, buffer, is_direct=False)

    def is_cached(self, offset: int, length: int) -> bool:
        """Return whether a range seems to be in the page cache, by its last pages.

        Whatever brought the file there read it from its beginning.
        """
        fd = self._fd
        if fd is None or length <= 0 or not self._may_ask:
            return False
        sample_bytes = min(length, _SAMPLE_BYTES)
        return is_resident(fd, offset + length - sample_bytes, sample_bytes)

    def _fill(self, offset: int, buffer: memoryview, *, is_direct: bool) -> None:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        while view:
            count = self._read_some(offset, view, is_direct=is_direct)
            if count == 0:
                raise DamagedError(
                    f"{self._key} ends at byte {offset:,}; {len(view):,} more were expected.",
                    path=self._key,
                    expected=offset + len(view),
                    found=offset,
                )
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            open_fds = [fd for fd in (self._fd, self._direct_fd) if fd is not None]
            self._fd = self._direct_fd = None
        for fd in open_fds:
            os.close(fd)

    def _open_direct(self) -> None:
        try:
            self._direct_fd = posix.open_file(self._path, direct=True)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                self.close()
                raise storage_error(error, operation="open", path=self._path) from error
            self._on_refused()
            return
        # Between the two opens another file may have taken the name.
        first, second = os.fstat(self._fd or 0), os.fstat(self._direct_fd)
        if (first.st_dev, first.st_ino) != (second.st_dev, second.st_ino):
            os.close(self._direct_fd)
            self._direct_fd = None

    def _read_some(self, offset: int, view: memoryview, *, is_direct: bool) -> int:
        fd, direct_fd = self._fd, self._direct_fd if is_direct else None
        whole = len(view) - len(view) % PAGE_BYTES
        if fd is None:
            closed = OSError(errno.EBADF, "the reader is closed")
            raise storage_error(closed, operation="read", path=self._path)
        try:
            if direct_fd is not None and whole and offset % PAGE_BYTES == 0:
                try:
                    return os.preadv(direct_fd, [view[:whole]], offset)
                except OSError as error:
                    if error.errno not in _NOT_DIRECT:
                        raise
                    # This buffer is not aligned enough for the device: read it the plain way.
            return os.preadv(fd, [view], offset)
        except OSError as error:
            raise storage_error(error, operation="read", path=self._path) from error
