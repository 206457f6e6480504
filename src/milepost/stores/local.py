"""A store in a folder of a POSIX file system.

What makes it durable, in this order: the bytes are written to a hidden temporary file and synced,
the file gets its name, the folder is synced (and the folders above it as far as they are new).
What makes ``put_new`` exclusive: the name is given by ``link``, which never replaces. Where hard
links are refused it is given by a rename that never replaces, and where that is refused too, the
file is created exclusively under its final name and written there: still exclusive, but a reader
may then see it half written, which the seal of every record tells.

Names of parts (``create_writer``, ``link``) are durable after ``sync_folder``.

Symbolic links are neither listed nor followed; the folder of the store itself may be one.
"""

# System calls on plain strings, so that each one is seen where it happens.
# ruff: noqa: PTH102, PTH104, PTH105, PTH106, PTH108, PTH112, PTH120, PTH211

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ..errors import CheckpointError, ExistsError, FormatError, MissingError, storage_error
from ..format.layout import check_key
from . import posix
from .base import Entry, Names, Traits
from .blocks import LocalReader, LocalWriter
from .folders import holds_key, is_folder, scan_folder, strangers
from .temporary import clock_s, temporary_files

__all__ = ["LocalStore"]

_MAKE_TRIES = 8
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


@final
class LocalStore:
    """Keeps each key as a file below one folder.

    Args:
        folder: The folder. It is created by the first write.
        direct: Whether blocks bypass the page cache where the file system allows it.

    Attributes:
        leftovers: Temporary files that could not be removed, with the reason; see
            ``sweep_temporary``.
    """

    def __init__(self, folder: str | os.PathLike[str], *, direct: bool = True) -> None:
        self._root = str(posix.expanded(folder).absolute())
        self.url = f"file://{self._root}"
        self.traits = Traits(is_local=True, exclusive_create=True, hard_links=True, symlinks=True)
        self.leftovers: list[tuple[str, OSError]] = []
        self._direct = direct
        self._durable: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data``, durably, or raise ``ExistsError``."""
        path = self._path(key)
        with _typed("create", path):
            temp = self._write_temporary(path, data)
            try:
                self._name_new(temp, path)
            finally:
                self._discard(temp)
        self._sync_names(os.path.dirname(path))

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key`` in one durable step."""
        path = self._path(key)
        with _typed("write", path):
            temp = self._write_temporary(path, data)
            try:
                os.replace(temp, path)
            except OSError:
                self._discard(temp)
                raise
        self._sync_names(os.path.dirname(path))

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""
        path = self._path(key)
        with _typed("read", path, key=key):
            fd = posix.open_file(path)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise MissingError(f"{key} is not a file.", path=path)
                if status.st_size > max_bytes:
                    raise FormatError(
                        f"{key} holds {status.st_size:,} bytes; at most {max_bytes:,} are read.",
                        path=path,
                    )
                chunks = []
                while chunk := os.read(fd, max(status.st_size, 4096)):
                    chunks.append(chunk)
                return b"".join(chunks)
            finally:
                os.close(fd)

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        path = self._path(key)
        with _typed("look at", path, key=key):
            status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MissingError(f"{key} is not a file.", path=path)
        return Entry(key, status.st_size, status.st_mtime)

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys.

        Files whose names could not be keys are not ours and are left out.
        """
        before = f"{check_key(folder, where=self.url)}/" if folder else ""
        for name, entry in scan_folder(self._root, folder):
            key = before + name
            if is_folder(entry):
                yield from self.list(key)
            elif entry.is_file(follow_symlinks=False):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                except OSError as error:
                    raise storage_error(error, operation="look at", path=entry.path) from error
                yield Entry(key, status.st_size, status.st_mtime)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        before = f"{check_key(folder, where=self.url)}/" if folder else ""
        return sorted(
            name
            for name, entry in scan_folder(self._root, folder)
            if is_folder(entry) and holds_key(self._root, before + name)
        )

    def strangers(self, folder: str = "") -> Names:
        """Return what ``list`` leaves out because of its name."""
        return list(strangers(self._root, check_key(folder, where=self.url) if folder else ""))

    def delete(self, key: str) -> None:
        """Remove ``key``, and the folders above it that became empty."""
        path = self._path(key)
        with _typed("delete", path):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
        self._remove_empty(os.path.dirname(path))

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist, durably.

        One step where the system has a rename that never replaces. Elsewhere a second name is
        given first and the old one removed then, so that a stop in between leaves both. Where hard
        links are refused as well, the look at ``new_key`` and the rename are two steps.
        """
        path, new_path = self._path(key), self._path(new_key)
        with _typed("rename", path, key=key):
            self._make_folder(new_path)
            if not posix.rename_new(path, new_path):
                self._rename_in_two_steps(path, new_path)
        self._sync_names(os.path.dirname(new_path))
        if os.path.dirname(path) != os.path.dirname(new_path):
            self._sync(os.path.dirname(path))
            self._remove_empty(os.path.dirname(path))

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second name, or copy them where hard links are refused."""
        path, new_path = self._path(key), self._path(new_key)
        self.head(key)
        with _typed("link", new_path):
            self._make_folder(new_path)
            try:
                os.link(path, new_path, follow_symlinks=False)
            except OSError as error:
                if error.errno not in posix.LINK_REFUSED:
                    raise
                posix.copy_new(path, new_path)

    def point(self, key: str, target: str) -> None:
        """Make ``key`` a symlink to ``target``, or a text with its name where links are refused."""
        path = self._path(key)
        with _typed("point", path):
            self._make_folder(path)
            temp = f"{os.path.dirname(path)}/{posix.temporary_name()}"
            try:
                os.symlink(target, temp)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise
                self.put(key, f"{target}\n".encode())
                return
            try:
                os.replace(temp, path)
            except OSError:
                self._discard(temp)
                raise
        self._sync_names(os.path.dirname(path))

    def create_writer(self, key: str, size_bytes: int) -> LocalWriter:
        """Begin to write a new key of a known size."""
        path = self._path(key)
        tries = 0
        while True:
            with _typed("create", path):
                self._make_folder(path)
            try:
                return LocalWriter(
                    path, size_bytes, direct=self._direct, on_refused=self._stop_direct
                )
            except MissingError:  # another process removed the folder while it was empty
                tries += 1
                if tries == _MAKE_TRIES:
                    raise

    def open_reader(self, key: str) -> LocalReader:
        """Open a key for reading."""
        return LocalReader(
            self._path(key), key=key, direct=self._direct, on_refused=self._stop_direct
        )

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder, and of the folder itself and those above it, durable."""
        self._sync_names(self._path(folder) if folder else self._root)

    def local_path(self, key: str) -> str | None:
        """Return the file of a key."""
        return self._path(key)

    def sweep_temporary(self, max_age_s: float, folder: str = "") -> Names:
        """Remove temporary files that writers left behind, and folders that they kept alive.

        Args:
            max_age_s: Younger ones may still be in use and stay. Ages are taken by the clock of
                the file system.
            folder: The folder of the run whose files they are.

        Returns:
            The paths that were removed, relative to the store's folder.
        """
        run = self._path(folder) if folder else self._root
        found = list(temporary_files(run))
        if not found:
            return []
        now_s = clock_s(run)
        removed = []
        for path, modified_s in found:
            if now_s - modified_s >= max_age_s and self._discard(path):
                removed.append(os.path.relpath(path, self._root))
                self._remove_empty(os.path.dirname(path))
        return removed

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key, where=self.url)}"

    def _stop_direct(self) -> None:
        self._direct = False

    def _make_folder(self, path: str) -> None:
        """Create the folders above a file."""
        missing, folder = [], os.path.dirname(path)
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            self._durable.discard(folder)
            try:
                os.mkdir(folder)
            except FileExistsError as error:
                if not os.path.isdir(folder):
                    raise ExistsError(f"A file is in the way at {folder}.", path=folder) from error
            except NotADirectoryError as error:
                raise ExistsError(f"A file is in the way of {folder}.", path=folder) from error

    def _write_temporary(self, path: str, data: bytes) -> str:
        """Write and sync a temporary file beside ``path``; return its path."""
        tries = 0
        while True:
            self._make_folder(path)
            temp = f"{os.path.dirname(path)}/{posix.temporary_name()}"
            try:
                fd = posix.create_file(temp)
                break
            except FileNotFoundError:  # another process removed the folder while it was empty
                tries += 1
                if tries == _MAKE_TRIES:
                    raise
        try:
            try:
                posix.write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            self._discard(temp)
            raise
        return temp

    def _name_new(self, temp: str, path: str) -> None:
        try:
            posix.link_new(temp, path)
        except OSError as error:
            if error.errno not in posix.LINK_REFUSED:
                raise
            if not posix.rename_new(temp, path):
                posix.copy_new(temp, path)

    def _rename_in_two_steps(self, path: str, new_path: str) -> None:
        try:
            os.link(path, new_path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in posix.LINK_REFUSED:
                raise
            if os.path.lexists(new_path):
                raise ExistsError(f"{new_path} is already there.", path=new_path) from error
            os.rename(path, new_path)
        else:
            os.unlink(path)

    def _discard(self, path: str) -> bool:
        """Remove a temporary file; record it if that fails. Return whether it is gone."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.leftovers.append((path, error))
            return False
        return True

    def _remove_empty(self, folder: str) -> None:
        while folder != self._root and folder.startswith(self._root):
            try:
                os.rmdir(folder)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    return
                if error.errno != errno.ENOENT:
                    raise storage_error(error, operation="remove", path=folder) from error
            folder = os.path.dirname(folder)

    def _sync_names(self, folder: str) -> None:
        """Sync a folder, then those above it up to the store's own name.

        Those above are synced once by this object, and again after it created a folder there:
        they may have been made by a process that was stopped before it synced them.
        """
        self._sync(folder)
        while folder not in self._durable:
            parent = os.path.dirname(folder)
            if folder == self._root and not os.access(parent, os.R_OK):
                # A folder that we may pass through but not read cannot be opened for syncing; we
                # did not create ours in it either.
                break
            self._sync(parent)
            self._durable.add(folder)
            folder = parent if folder != self._root else folder

    def _sync(self, folder: str) -> None:
        with _typed("fsync", folder):
            posix.sync_folder(folder)


@contextmanager
def _typed(operation: str, path: str, *, key: str | None = None) -> Iterator[None]:
    """Turn the errors of system calls into typed ones; with a key, a missing file is that key."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if key is not None and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MissingError(f"There is no {key} in the store.", path=path) from error
        raise storage_error(error, operation=operation, path=path) from error
