"""The folder of a copy, from its claim to its commit.

    step                              in the folder                  a reader sees
    claim: create attempt.json, excl. attempt.json                   incomplete, not counted
    files written and synced          attempt.json, files            incomplete, not counted
    publish: claim still ours, sizes  the same, names durable        incomplete, not counted
    publish: create manifest, excl.   attempt.json, files, manifest  the checkpoint

A stop leaves what the next try goes on from: the claim bears the write id of the checkpoint, and
who finds that takes it over. It names no session, since no session writes: so a training that runs
at the target removes it only after a day without a write, and not as the leftover of a session that
has ended.

Two copies into one folder at a time: on a file system the claim is locked (``flock``, gone with its
holder), and the second one is refused. In a bucket the second one is refused if the process of the
first is known to live, on this machine. If that cannot be known it goes on beside it: an object is
there whole or not at all, both make the same ones, and neither deletes what the other has sent. The
one exception is a copy that the service should make and did not answer for: what it has left is
deleted, which may hit the same object of the other one. Both look before they commit that all is
there, so that ends in a refusal and not in a hole.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..copies.locks import leads_to, release, try_lock
from ..errors import (
    DamagedError,
    ExistsError,
    FormatError,
    IncompleteError,
    InUseError,
    MissingError,
    StorageError,
    storage_error,
)
from ..format.canonical import dump_record, load_record
from ..format.layout import ATTEMPT, DELETED, MANIFEST
from ..format.manifest import FORMAT_VERSION, Manifest
from ..runs.folders import file_key
from ..runs.identity import Identity, is_gone, this_process
from ..stores.base import Store

__all__ = ["NO_SESSION", "Commit", "CopyClaim", "claim_copy", "is_committed"]

NO_SESSION = 0
"""What the claim of a copy says in the place of a session; those are numbered from 1."""

_MAX_RECORD_BYTES = 32 * 1024 * 1024
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that is to be copied.

    Attributes:
        manifest: What it says.
        data: Its bytes.
    """

    manifest: Manifest
    data: bytes

    @classmethod
    def read(cls, store: Store, folder: str) -> Commit:
        """Read the commit of a checkpoint.

        Raises:
            MissingError: There is none.
            DamagedError: It is torn or altered.
        """
        key = file_key(folder, MANIFEST)
        data = store.get(key, max_bytes=_MAX_RECORD_BYTES)
        return cls(Manifest.from_bytes(data, where=f"{store.url}/{key}"), data)


@dataclass(frozen=True, slots=True)
class CopyClaim:
    """A folder that one copy may write into.

    Attributes:
        store: The target.
        folder: The folder.
        commit: What will be committed there.
        there: Sizes of the files that an earlier try has left, by key.
    """

    store: Store
    folder: str
    commit: Commit
    there: dict[str, int]

    def publish(self) -> None:
        """Commit the copy, whose files are all written and durable.

        Raises:
            IncompleteError: A file is missing, or the claim was swept.
            DamagedError: A file has another size.
            ExistsError: There is another commit by now.
        """
        if _write_id(self.store, self.folder) != self.commit.manifest.write_id:
            raise IncompleteError(
                f"The copy of {self.commit.manifest.name} at {self._place} was removed by another "
                "program while it was made.",
                hint="Copy it again.",
                path=self._place,
            )
        sizes = {entry.key: entry.size_bytes for entry in self.store.list(self.folder)}
        for entry in self.commit.manifest.files:
            found = sizes.get(file_key(self.folder, entry.path))
            if found is None:
                raise IncompleteError(
                    f"{entry.path} is missing at {self._place}, so it was not committed.",
                    hint="Copy it again.",
                    path=entry.path,
                )
            if found != entry.size_bytes:
                raise DamagedError(
                    f"{entry.path} at {self._place} has {found:,} bytes and not "
                    f"{entry.size_bytes:,}, so it was not committed.",
                    hint="Copy it again.",
                    path=entry.path,
                    expected=entry.size_bytes,
                    found=found,
                )
        self.store.sync_folder(self.folder)
        try:
            self.store.put_new(file_key(self.folder, MANIFEST), self.commit.data)
        except ExistsError:
            if not is_committed(self.store, self.folder, self.commit):
                raise

    @property
    def _place(self) -> str:
        return file_key(self.store.url, self.folder) if self.folder else self.store.url


def is_committed(store: Store, folder: str, commit: Commit) -> bool:
    """Return whether a folder holds the very same commit.

    Raises:
        ExistsError: It holds another one.
    """
    key = file_key(folder, MANIFEST)
    try:
        found = store.get(key, max_bytes=_MAX_RECORD_BYTES)
    except MissingError:
        return False
    if found == commit.data:
        return True
    raise ExistsError(
        f"There is another checkpoint at {store.url}/{folder}".rstrip("/") + ".",
        safe="It was not touched.",
        hint="Copy to another place, or delete that one first.",
        path=key,
    )


@contextmanager
def claim_copy(
    store: Store, folder: str, commit: Commit, *, clock: Callable[[], float] = time.time
) -> Iterator[CopyClaim]:
    """Take a folder for a copy, or go on with one that an earlier try has begun there.

    Raises:
        ExistsError: There are other files in the folder, or an attempt of a training.
        InUseError: Another process is copying there.
    """
    there = {entry.key: entry.size_bytes for entry in store.list(folder)}
    claimed = file_key(folder, ATTEMPT)
    _refuse_others(store, folder, commit, there)
    if claimed not in there:
        try:
            store.put_new(claimed, dump_record(_fields(commit.manifest, clock())))
        except ExistsError:
            _refuse_others(store, folder, commit, {claimed: 0})
    with _alone(store, claimed):
        if claimed in there:
            _take_over(store, claimed, commit, clock)
        yield CopyClaim(store, folder, commit, there)


def _refuse_others(store: Store, folder: str, commit: Commit, there: dict[str, int]) -> None:
    if not there:
        return
    place = f"{store.url}/{folder}".rstrip("/")
    if file_key(folder, DELETED) in there:
        what = f"What is at {place} is being deleted."
    elif _write_id(store, folder) != commit.manifest.write_id:
        what = f"There are other files at {place}."
    elif not _fields_there(store, folder).get("is_copy"):
        what = f"A training is writing {commit.manifest.name} to {place}."
    else:
        return
    raise ExistsError(
        what, safe="They were not touched.", hint="Copy to another place.", path=place
    )


def _take_over(store: Store, claimed: str, commit: Commit, clock: Callable[[], float]) -> None:
    """Make an earlier claim ours, unless the process that made it is known to live."""
    fields = load_record(store.get(claimed, max_bytes=_MAX_RECORD_BYTES), where=claimed)
    me = this_process()
    owner = Identity(
        *(fields.get(k, "") for k in ("host", "pid", "boot_id", "process_start", "machine_id"))
    )
    is_here = bool(me.boot_id) and owner.boot_id == me.boot_id
    if store.local_path(claimed) is None and is_here and owner != me and not is_gone(owner, me):
        raise InUseError(
            f"Process {owner.pid} on this machine is copying to {store.url}.",
            safe="Nothing was changed.",
            hint="Wait until it has ended.",
            path=claimed,
        )
    if store.local_path(claimed) is None:
        store.put(claimed, dump_record(_fields(commit.manifest, clock())))


@contextmanager
def _alone(store: Store, claimed: str) -> Iterator[None]:
    """Lock a claim on a file system for as long as the copy is made."""
    path = store.local_path(claimed)
    if path is None:
        yield
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error, operation="open", path=path) from error
    can_lock = True
    try:
        try:
            is_ours = try_lock(fd, Path(path)) and leads_to(Path(path), fd)
        except StorageError as error:
            if error.errno not in _NO_LOCKS:
                raise
            can_lock, is_ours = False, True
        if not is_ours:
            raise InUseError(
                f"Another process is copying to {path.rpartition('/')[0]}.",
                safe="Nothing was changed.",
                hint="Wait until it has ended.",
                path=path,
            )
        yield
    finally:
        release(fd) if can_lock else os.close(fd)


def _fields(manifest: Manifest, started_s: float) -> dict[str, object]:
    me = this_process()
    return {
        "format": FORMAT_VERSION,
        "session": NO_SESSION,
        "attempt": 0,
        "write_id": manifest.write_id,
        "is_copy": True,
        "host": me.host,
        "pid": me.pid,
        "boot_id": me.boot_id,
        "process_start": me.process_start,
        "machine_id": me.machine_id,
        "started_s": started_s,
    }


def _fields_there(store: Store, folder: str) -> dict[str, object]:
    key = file_key(folder, ATTEMPT)
    try:
        return dict(load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key))
    except (MissingError, FormatError):
        return {}


def _write_id(store: Store, folder: str) -> object:
    return _fields_there(store, folder).get("write_id")
