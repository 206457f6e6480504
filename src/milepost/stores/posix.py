"""The few system calls that the durable file store is made of.

Each function does one thing to one file or folder and lets ``OSError`` out; the store above turns
it into a typed error. After an ``fsync`` that failed, the same file is never synced again: the
kernel may have dropped the dirty pages and report success the second time.
"""

# System calls on plain strings, so that each one is seen where it happens.
# ruff: noqa: PTH108, PTH116

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "LINK_REFUSED",
    "TEMPORARY_PREFIX",
    "copy_new",
    "create_file",
    "expanded",
    "is_temporary",
    "link_new",
    "open_file",
    "rename_new",
    "sync_folder",
    "temporary_name",
    "write_all",
]

TEMPORARY_PREFIX = ".tmp-"
"""How the names of the store's own unfinished files begin. They are never listed."""

LINK_REFUSED = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV})
"""Errors that mean "not by a hard link, here", as opposed to "something is wrong"."""

_TEMPORARY = re.compile(r"\.tmp-[0-9]+-[0-9a-f]{16}")
_RENAME_REFUSED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_CHUNK_BYTES = 8 * 1024 * 1024
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def expanded(place: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` replaced; ``~name`` of no user stays as it is, as in a shell."""
    return Path(os.path.expanduser(place))  # noqa: PTH111 - that of Path raises for no user


def temporary_name() -> str:
    """Return a new name for an unfinished file, unlike that of any other process."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return whether :func:`temporary_name` may have made a name; a stranger's is never taken."""
    return _TEMPORARY.fullmatch(name) is not None


def create_file(path: str) -> int:
    """Create a file that must not exist yet and return its descriptor, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def open_file(path: str, *, direct: bool = False, folder: int | None = None) -> int:
    """Open a file for reading. A symlink is refused; a pipe does not make us wait.

    Args:
        path: The file.
        direct: Whether to go around the cache of the kernel.
        folder: A folder's descriptor that the path begins in; by default the current folder.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    return os.open(path, flags | (os.O_DIRECT if direct else 0), dir_fd=folder)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``, going on after short writes."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        view = view[written:]


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network mounts have no such operation on folders; their names are durable, or not,
        # without us.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def link_new(source: str, target: str) -> None:
    """Give a freshly written file of ours its final name, which must not exist.

    The source must have had exactly one name so far. On a network mount the answer to the request
    may be lost and the repeated request be refused because the first one worked; the count of
    names then tells the truth.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        if os.stat(source, follow_symlinks=False).st_nlink != 2:
            raise


def rename_new(source: str, target: str) -> bool:
    """Rename in one step without replacing anything.

    Returns:
        ``False`` if the system or the mount cannot do that; nothing has happened then.

    Raises:
        FileExistsError: The target is there.
    """
    call = _renameat2()
    if call is None:
        return False
    done = call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in _RENAME_REFUSED:
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def copy_new(source: str, target: str) -> None:
    """Copy a file to a new one, durably. The target must not exist; on an error it is gone."""
    reader = open_file(source)
    try:
        writer = create_file(target)
        try:
            while chunk := os.read(reader, _CHUNK_BYTES):
                write_all(writer, chunk)
            os.fsync(writer)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writer)
    finally:
        os.close(reader)


@lru_cache(maxsize=1)
def _renameat2() -> Any:
    """Return the C library's ``renameat2``, or ``None`` where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        ]
        function.restype = ctypes.c_int
    return function
