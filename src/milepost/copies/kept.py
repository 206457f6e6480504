"""Copies of the newest checkpoints of a run in an object store, on the disk of this machine.

    <folder>/milepost-cache-<uid>/part-17-3f/ba8/model.safetensors       written by process 17
    <folder>/milepost-cache-<uid>/<run id>/00000002-00000007-<write id>/model.safetensors    kept

What is here decides nothing. Whether there is a checkpoint, and what is in it, says the manifest in
the object store: it names the attempt that wrote it by a random number, and the checksum of each
block. A file from here is used only in a checkpoint of that very attempt, and each block only after
its checksum was compared. So nothing here has to be durable, complete, or whole:

    process ends while              left                           the next one
    it writes a save                part-*, no lock                removes it
    it moves files of a commit      some files kept, some not      reads the others from far away
    it removes an old copy          a part of it                   the same, and removes the rest

Files of an attempt that was not committed are never moved, and go with the next save. Each process
of a machine keeps the files that it wrote itself. Nobody waits for anybody.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path

from ..errors import CheckpointError, UsageError, storage_error
from ..format.layout import DIAGNOSTIC_FOLDERS
from ..format.manifest import FileEntry, Manifest
from ..stores.base import Store, Writer
from ..stores.local import LocalStore
from ..stores.posix import expanded
from .locks import leads_to, open_folder, release, try_lock
from .private import private_folder

__all__ = ["NUM_KEPT", "KeptCopies", "check_remote", "may_be_kept"]

NUM_KEPT = 2
"""How many checkpoints of a run are kept: the newest, and the one to fall back to."""

_FORGOTTEN_S = 7 * 24 * 3600.0
"""After so long without a save the copies of a run are taken for left behind."""

_ID = re.compile(r"[0-9a-f]{32}")
_COPY = re.compile(r"[0-9]{8,}-[0-9]{8,}-[0-9a-f]{32}")
_PART = re.compile(r"part-[0-9]+-[0-9a-f]{16}")
_MAKE_TRIES = 8
_log = logging.getLogger("milepost")


def check_remote(store: Store) -> None:
    """Require that a run is not on a disk itself.

    Raises:
        UsageError: It is.
    """
    if store.traits.is_local:
        raise UsageError(
            f"local_cache= keeps copies of a run in an object store, and {store.url} is on a disk.",
            safe="Nothing was written.",
            hint="Leave out local_cache.",
            path=store.url,
        )


class KeptCopies:
    """The copies that one process keeps and finds. Several threads may use it.

    Args:
        folder: Where they are kept. Several runs, and several processes, may have the same.

    Raises:
        UsageError: Somebody else could change what is kept there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        parent = expanded(folder).absolute()
        self.folder = private_folder(
            parent / f"milepost-cache-{os.getuid()}", elsewhere="with local_cache="
        )
        self._lock = threading.Lock()
        self._part: tuple[Path, int] | None = None
        self._writing = ""
        self._newest: tuple[str, Path] | None = None
        self._run: Path | None = None
        self._pid = os.getpid()
        self._sweep()

    def begin(self, run_id: str) -> None:
        """Say which run will be saved to."""
        if _ID.fullmatch(run_id):
            self._run = self.folder / run_id

    def create_writer(self, key: str, size_bytes: int) -> Writer:
        """Begin to write the copy of a file of an attempt.

        Args:
            key: Its key in the run.
            size_bytes: Its size.

        Raises:
            StorageError: It cannot be written.
        """
        part = LocalStore(self._begin(key))
        part.delete(key)  # what an attempt of the same name has left
        return part.create_writer(key, size_bytes)

    def link(self, key: str, new_key: str) -> None:
        """Copy a file of a checkpoint that was kept by this process into an attempt.

        Raises:
            StorageError: It cannot be copied.
        """
        folder, _, path = key.partition("/")
        name, kept = self._newest or ("", self.folder)
        if name != folder or not (kept / path).is_file():
            return
        place = self._begin(new_key) / new_key
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            os.link(kept / path, place, follow_symlinks=False)
        except OSError as error:
            raise storage_error(error, operation="link", path=str(place)) from error

    def keep(self, manifest: Manifest) -> None:
        """Keep what this process wrote of a checkpoint that was committed, and let go of old ones.

        Raises:
            StorageError: Something could not be moved or removed.
        """
        part, place = self._part, self._place(manifest)
        if part is None or place is None:
            return
        written = part[0] / manifest.name
        try:
            for entry in manifest.files:
                path, new_path = written / entry.path, place / entry.path
                if path.is_file() and path.stat().st_size == entry.size_bytes:
                    new_path.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(new_path)
            _remove(written)
        except OSError as error:
            raise storage_error(error, operation="move", path=str(written)) from error
        with self._lock:
            self._writing = ""
            self._newest = (manifest.name, place)
        _let_go(place.parent, num_kept=NUM_KEPT)

    def find(self, manifest: Manifest, entry: FileEntry) -> Path | None:
        """Return the copy of a file of a checkpoint, or ``None``. Its bytes are not to be trusted.

        Args:
            manifest: The checkpoint.
            entry: The file.
        """
        place = self._place(manifest)
        if place is None:
            return None
        path = place / entry.path
        try:
            is_there = path.is_file() and path.stat().st_size == entry.size_bytes
        except OSError as error:
            _log.warning("The copy %s cannot be looked at: %s", path, error)
            return None
        return path if is_there else None

    def close(self) -> None:
        """Remove what was written of an attempt that was not committed."""
        with self._lock:
            part, self._part = self._part, None
        if part is None or os.getpid() != self._pid:
            return
        try:
            _remove(part[0])
        except OSError as error:
            _log.warning("%s could not be removed: %s", part[0], error)
        finally:
            release(part[1])

    def _begin(self, key: str) -> Path:
        """Return where to write files of an attempt; make room if it is the first."""
        folder = key.partition("/")[0]
        with self._lock:
            if self._part is None:
                self._part = _new_part(self.folder)
            part = self._part[0]
            is_new = folder != self._writing
            before, self._writing = self._writing, folder
        if is_new:
            if before:
                _remove(part / before)
            if self._run is not None:  # with what is being written there are no more than it keeps
                _let_go(self._run, num_kept=NUM_KEPT - 1)
        return part

    def _place(self, manifest: Manifest) -> Path | None:
        """Return the folder of a checkpoint's copy; ``None`` if it has none."""
        if not (_ID.fullmatch(manifest.run_id) and _ID.fullmatch(manifest.write_id)):
            return None
        name = f"{manifest.session:08d}-{manifest.attempt:08d}-{manifest.write_id}"
        is_apart = "/" in manifest.name
        return None if is_apart else self.folder / manifest.run_id / name

    def _sweep(self) -> None:
        """Remove what processes that have ended were writing, and runs that are left behind."""
        oldest_s = time.time() - _FORGOTTEN_S
        try:
            for one in self.folder.iterdir():
                if _PART.fullmatch(one.name):
                    _remove_unlocked(one)
                elif _ID.fullmatch(one.name) and one.stat().st_mtime < oldest_s:
                    _remove(one)
        except FileNotFoundError:
            return  # another process was quicker, and sees to the rest
        except (OSError, CheckpointError) as error:
            _log.warning("Old copies in %s could not be removed: %s", self.folder, error)


def may_be_kept(key: str) -> bool:
    """Return whether a file may have a copy: not those for a look at what went wrong."""
    folder, slash, _ = key.partition("/")
    return bool(slash) and folder not in DIAGNOSTIC_FOLDERS


def _let_go(run: Path, *, num_kept: int) -> None:
    """Remove all copies of a run but the newest. Other processes may do so too."""
    try:
        copies = sorted(one.name for one in run.iterdir() if _COPY.fullmatch(one.name))
        for name in copies[: max(0, len(copies) - num_kept)]:
            _remove(run / name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, operation="remove", path=str(run)) from error


def _new_part(folder: Path) -> tuple[Path, int]:
    """Make a folder to write to, and lock it for as long as this process lives."""
    for _ in range(_MAKE_TRIES):
        part = folder / f"part-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            part.mkdir(mode=0o700)
        except OSError as error:
            raise storage_error(error, operation="create", path=str(part)) from error
        fd = open_folder(part)
        if fd is None:
            continue  # swept before it was locked
        if try_lock(fd, part) and leads_to(part, fd):
            return part, fd
        release(fd)
    raise storage_error(
        OSError(f"it was removed {_MAKE_TRIES} times"), operation="lock", path=str(folder)
    )


def _remove_unlocked(part: Path) -> None:
    fd = open_folder(part)
    if fd is None:
        return
    try:
        if try_lock(fd, part) and leads_to(part, fd):
            _remove(part)
    finally:
        release(fd)


def _remove(folder: Path) -> None:
    """Remove a folder that another process may be removing too."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
