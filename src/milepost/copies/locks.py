"""Locks on folders that die with their holder, and waiting for them with a deadline.

``flock`` on a descriptor of the folder: nothing is written, threads of one process exclude each
other like processes, and the kernel lets go when the holder ends. A folder may be removed and made
anew while somebody waits for it; so after locking it is looked at whether the name still leads to
what was locked.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from ..errors import storage_error

__all__ = ["Waiting", "leads_to", "open_folder", "release", "try_lock"]


def open_folder(path: Path) -> int | None:
    """Return a descriptor of a folder, or ``None`` if there is none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, operation="open", path=str(path)) from error


def try_lock(fd: int, path: Path, *, is_shared: bool = False) -> bool:
    """Lock a folder without waiting; return whether it worked."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise storage_error(error, operation="lock", path=str(path)) from error
    return True


def leads_to(path: Path, fd: int) -> bool:
    """Return whether a name still leads to the folder that is open."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def release(fd: int) -> None:
    """Let go of a folder. Said aloud, for a forked child may have it open as well."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


class Waiting:
    """A lock that is being waited for.

    ``flock`` knows no deadline, so a thread waits in our place. If nobody wants the lock any more
    when it comes, the thread lets go of it at once.

    Args:
        fd: The folder to lock. :meth:`give_up` closes it.
        path: Its name, for messages.
        is_shared: Whether others may hold it too.
    """

    def __init__(self, fd: int, path: Path, *, is_shared: bool = False) -> None:
        self._fd = fd
        self._path = path
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._mutex = threading.Lock()
        self._came = threading.Event()
        self._is_given_up = False
        self._error: OSError | None = None
        threading.Thread(target=self._run, name="milepost-copy-wait", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait, and return whether the lock is ours."""
        if not self._came.wait(timeout_s):
            return False
        if self._error is not None:
            path = str(self._path)
            raise storage_error(self._error, operation="lock", path=path) from self._error
        return True

    def give_up(self) -> None:
        """Want it no more."""
        with self._mutex:
            self._is_given_up = True
            if self._came.is_set():
                release(self._fd)

    def _run(self) -> None:
        try:
            fcntl.flock(self._fd, self._kind)
        except OSError as error:
            self._error = error
        with self._mutex:
            if self._is_given_up:
                release(self._fd)
            self._came.set()
