"""One copy of a remote checkpoint on this machine, for all who read it, gone with the last.

    <cache>/<key>/            locked by whoever looks, downloads or removes: the turn
    <cache>/<key>/part-17-3f/ being downloaded by process 17
    <cache>/<key>/files/      the whole copy; locked, shared, by each who reads it
    <cache>/<key>/gone-3f/    being removed

The key is a digest of the checkpoint's manifest. So two handles on one checkpoint, or on two equal
copies of it, share one folder, and a checkpoint that was made anew under an old name does not.

Who wants the copy takes the turn, waiting for it; makes the copy if there is none; locks it; and
lets go of the turn. Who has done with it takes the turn and lets go of the copy, and if nobody else
holds that, removes it. Each step that others must not see by halves happens under the turn, and
``files`` gets its name in one step, when every byte has been compared with its checksum and the
manifest, written last, is on the disk.

    process ends while          left                     the next one
    it downloads                part-*, no lock          gets the turn, removes it, downloads
    it reads                    files, one lock less     uses it; whoever is the last removes it
    it was the last reader      files, no lock           uses it, or removes it as left behind
    it removes                  gone-*, no lock          removes it

If a download fails, its process raises the error and lets go of the turn; whoever waits takes it
and tries for itself. Nobody ever writes into ``files``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, DeadlineError, storage_error
from ..format.layout import MANIFEST
from ..format.manifest import Manifest
from ..stores.base import Store
from ..stores.local import LocalStore
from ..stores.posix import expanded
from .locks import Waiting, leads_to, open_folder, release, try_lock
from .private import private_folder
from .transfer import FileCopy, copy_files

__all__ = ["CACHE_VARIABLE", "STALL_TIMEOUT_S", "cache_folder", "shared_copy"]

CACHE_VARIABLE = "MILEPOST_CACHE_DIR"
STALL_TIMEOUT_S = 600.0
"""How long another process's download may stand still before who waits for it gives up."""

_LEAVE_TIMEOUT_S = 10.0
_FILES = "files"
_KEY = re.compile(r"[0-9a-f]{32}")
_LEFT = re.compile(r"part-[0-9]+-[0-9a-f]{16}|gone-[0-9a-f]{16}")
_MAX_MANIFEST_BYTES = 32 * 1024 * 1024
_log = logging.getLogger("milepost")


@contextmanager
def shared_copy(
    store: Store,
    folder: str,
    *,
    cache: Path | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> Iterator[str]:
    """Give the files of a checkpoint as a local folder, to read only.

    Args:
        store: The run's store.
        folder: The checkpoint's folder in it; ``""`` if the store begins there.
        cache: Where copies are kept; by default :func:`cache_folder`.
        stall_timeout_s: See ``STALL_TIMEOUT_S``.

    Raises:
        MissingError: There is no such checkpoint, or a file of it is missing.
        DamagedError: Bytes that do not match their checksum.
        DeadlineError: Another process is downloading it and has come to a standstill.
    """
    prefix = f"{folder}/" if folder else ""
    data = store.get(prefix + MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
    manifest = Manifest.from_bytes(data, where=f"{store.url}/{prefix}{MANIFEST}")
    root = cache_folder() if cache is None else cache
    copy = _Copy(root / hashlib.sha256(data).hexdigest()[:32], f"{store.url}/{prefix}".rstrip("/"))

    def download(target: LocalStore) -> None:
        files = [
            FileCopy(prefix + one.path, one.path, one.size_bytes, one) for one in manifest.files
        ]
        copy_files(store, target, files)
        target.put_new(MANIFEST, data)

    fd = copy.enter(download, stall_timeout_s=stall_timeout_s)
    try:
        yield str(copy.files)
    finally:
        copy.leave(fd)
        _sweep(root)


def cache_folder() -> Path:
    """Return the folder with the copies of this user on this machine.

    It is private, in the folder that ``MILEPOST_CACHE_DIR`` names or in that for temporary files.

    Raises:
        UsageError: Somebody else could write to it.
    """
    named = os.environ.get(CACHE_VARIABLE)
    parent = expanded(named) if named else Path(tempfile.gettempdir())
    return private_folder(
        parent.absolute() / f"milepost-copies-{os.getuid()}",
        elsewhere=f"in the environment variable {CACHE_VARIABLE}",
    )


class _Copy:
    """The place of one copy.

    Args:
        place: Its folder.
        label: What is copied, for messages.
    """

    def __init__(self, place: Path, label: str) -> None:
        self._place = place
        self._label = label
        self.files = place / _FILES

    def enter(self, download: Callable[[LocalStore], None], *, stall_timeout_s: float) -> int:
        """Make the copy if there is none, and lock it; return what holds the lock."""
        turn = self._take_turn(stall_timeout_s)
        try:
            fd = open_folder(self.files)
            if fd is None:
                _empty(self._place)
                _sweep(self._place.parent)
                self._download(download)
                fd = open_folder(self.files)
            assert fd is not None
            # Nobody of us holds it alone, for that takes the turn; but a program that clears the
            # folder for temporary files does so for a moment.
            if not try_lock(fd, self.files, is_shared=True):
                _wait_for(Waiting(fd, self.files, is_shared=True), self._label)
            return fd
        except BaseException:
            self._remove_unused()
            raise
        finally:
            release(turn)

    def leave(self, fd: int) -> None:
        """Let go of the copy, and remove it if nobody else reads it."""
        try:
            turn = self._take_turn(_LEAVE_TIMEOUT_S)
        except CheckpointError as error:
            _log.info("The copy of %s is left for others to remove: %s", self._label, error)
            release(fd)
            return
        try:
            release(fd)
            self._remove_unused()
        finally:
            release(turn)

    def _remove_unused(self) -> None:
        try:
            _remove_unused(self._place)
        except (OSError, CheckpointError) as error:
            # What the caller does, or fails at, goes on; whoever comes next tries again.
            _log.warning("The copy of %s could not be removed: %s", self._label, error)

    def _download(self, download: Callable[[LocalStore], None]) -> None:
        part = self._place / f"part-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            part.mkdir()
            download(LocalStore(part))
            for file in part.rglob("*"):
                if file.is_file():
                    file.chmod(0o444)  # many may read it
            part.rename(self.files)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise storage_error(error, operation="write", path=str(part)) from error
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _take_turn(self, stall_timeout_s: float) -> int:
        """Lock the place of the copy, waiting for others for as long as they get on."""
        while True:
            try:
                self._place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise storage_error(error, operation="create", path=str(self._place)) from error
            fd = open_folder(self._place)
            if fd is None:
                continue  # removed since
            if not try_lock(fd, self._place):
                self._wait(fd, stall_timeout_s)
            if leads_to(self._place, fd):
                return fd
            release(fd)

    def _wait(self, fd: int, stall_timeout_s: float) -> None:
        waiting = Waiting(fd, self._place)
        seen = _last_change(self._place)
        try:
            while not waiting.wait(stall_timeout_s):
                before, seen = seen, _last_change(self._place)
                self._check_getting_on(seen != before, stall_timeout_s)
        except BaseException:
            waiting.give_up()
            raise

    def _check_getting_on(self, is_getting_on: bool, stall_timeout_s: float) -> None:  # noqa: FBT001
        if is_getting_on:
            return
        parts = [one.name.split("-")[1] for one in self._place.glob("part-*")]
        who = f"Process {', '.join(parts)}" if parts else "Another process"
        raise DeadlineError(
            f"{who} of this machine is copying {self._label} and has written nothing for "
            f"{stall_timeout_s:g} s.",
            safe="The checkpoint itself is untouched.",
            hint="End that process if it hangs; the next one takes over.",
            path=str(self._place),
            pids=parts,
        )


def _last_change(place: Path) -> tuple[int, int]:
    """Return what changes as long as a download gets on."""
    times = []
    for file in place.rglob("*"):
        with suppress(FileNotFoundError):
            times.append(file.lstat().st_mtime_ns)
    return len(times), max(times, default=0)


def _wait_for(waiting: Waiting, label: str) -> None:
    try:
        if waiting.wait(_LEAVE_TIMEOUT_S):
            return
    except BaseException:
        waiting.give_up()
        raise
    waiting.give_up()
    raise DeadlineError(
        f"The copy of {label} is locked by a program that is not ours, for longer than "
        f"{_LEAVE_TIMEOUT_S:g} s.",
        hint=f"Name another folder in the environment variable {CACHE_VARIABLE}.",
    )


def _empty(place: Path) -> None:
    """Remove what others have left. Needs the turn."""
    for left in place.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)


def _remove_unused(place: Path) -> None:
    """Remove a copy that nobody reads, and what others have left. Needs the turn."""
    files = place / _FILES
    fd = open_folder(files)
    if fd is not None:
        try:
            if not try_lock(fd, files):
                return
            files.rename(place / f"gone-{secrets.token_hex(8)}")
        finally:
            release(fd)
    _empty(place)
    place.rmdir()


def _sweep(root: Path) -> None:
    """Remove the copies whose readers were killed; those in use are locked and stay."""
    try:
        for place in root.iterdir():
            if _KEY.fullmatch(place.name):
                _sweep_one(place)
    except (OSError, CheckpointError) as error:
        _log.warning("Copies that nobody reads could not be removed from %s: %s", root, error)


def _sweep_one(place: Path) -> None:
    fd = open_folder(place)
    if fd is None:
        return
    try:
        if try_lock(fd, place) and leads_to(place, fd):
            _remove_unused(place)
    finally:
        release(fd)
