"""Readers of a checkpoint's folder, and deletion, kept apart.

Whoever lends out the folder of a checkpoint on a file system opens its manifest and takes a shared
lock on it (``flock``). Whoever deletes takes the exclusive lock, without waiting, for the moment in
which the manifest becomes ``deleted.json``:

    reader    open manifest.json, lock it shared, look that the name still leads to what is locked
    deletion  open manifest.json, lock it alone, rename it, let go

Of a reader and a deletion at one moment the first to lock wins. A reader that opened the manifest
before the rename and locked it after finds that the name leads nowhere; one that locked it before
makes the deletion wait for a later round. Once the manifest is renamed, no reader begins.

The lock belongs to the open file and needs nothing else: no record is written, so a run that may
only be read can be lent out; threads and processes count alike; the kernel lets go when the process
ends, however it ends, so there is nothing to expire and no number of a process to be mistaken. A
forked child that may read on, such as the worker of a loader, holds the lock with its parent.

A file system without such locks protects nothing, and a warning says so. On a network mount it
depends on the mount whether readers on other machines are seen.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InUseError, MissingError, storage_error
from ..format.layout import MANIFEST
from ..stores.base import Store
from .folders import file_key

__all__ = ["hold", "shut_out"]

_log = logging.getLogger("milepost")

# The last one: a network mount, and a file that we may not open for writing.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


@contextmanager
def hold(store: Store, name: str) -> Iterator[None]:
    """Keep a checkpoint from being deleted for as long as its folder is read.

    Does nothing where the store keeps no files.

    Args:
        store: The run's store.
        name: The checkpoint's folder; ``""`` if the store stands in it.

    Raises:
        MissingError: There is no such checkpoint, or it is being deleted.
    """
    path = store.local_path(file_key(name, MANIFEST))
    if path is None:
        yield
        return
    fd = _open(path, os.O_RDONLY)
    try:
        if not _lock(fd, fcntl.LOCK_SH, path) or not _leads_to(path, fd):
            raise MissingError(
                f"The checkpoint {name or store.url} is being deleted.", path=path, name=name
            )
        yield
    finally:
        # Said aloud, for a forked child may still have the file open.
        _unlock(fd)


@contextmanager
def shut_out(store: Store, name: str) -> Iterator[None]:
    """Let no reader into a checkpoint's folder while it is unpublished.

    Raises:
        InUseError: It is being read.
        MissingError: There is no commit any more.
    """
    path = store.local_path(file_key(name, MANIFEST))
    if path is None:
        yield
        return
    try:
        # On NFS the exclusive lock needs a file that is open for writing.
        fd = _open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fd = _open(path, os.O_RDONLY)
    try:
        if not _lock(fd, fcntl.LOCK_EX, path):
            raise InUseError(
                f"{name} is being read.",
                safe="Nothing of it was deleted.",
                hint="It goes once nobody reads it any more.",
                name=name,
            )
        yield
    finally:
        _unlock(fd)


def _open(path: str, mode: int) -> int:
    try:
        return os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise MissingError(f"There is no {path}.", path=path) from error
    except OSError as error:
        raise storage_error(error, operation="open", path=path) from error


def _lock(fd: int, kind: int, path: str) -> bool:
    """Lock an open file without waiting; return ``False`` if somebody else has."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise storage_error(error, operation="lock", path=path) from error
        if kind == fcntl.LOCK_SH:
            _log.warning(
                "%s cannot be locked (%s): retention does not know that it is being read.",
                path,
                error.strerror,
            )
    return True


def _unlock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(fd)


def _leads_to(path: str, fd: int) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
