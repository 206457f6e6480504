"""Emptying a folder: of a checkpoint that is deleted, or of an attempt that is given up.

It begins with a rename of the record that stands for the folder, the manifest or the claim, to
``deleted.json``. That stays until everything else is gone, so a stop in between is seen, and any
later session finishes the work. Meanwhile nobody can claim the folder, for it is not empty.

Two things must never be deleted:

- What another writer has put into a folder of the same name since. So the record is looked at
  again after the rename, and put back if it is not the one that was meant; and before each
  deletion ``deleted.json`` must still be the same. A process that was stopped for an hour in the
  middle of its work finds that others have finished it, and ends. No store can look and delete in
  one step: a stop of that length between these two calls is what remains.
- What Milepost did not make. A manifest lists its files; beside those only the names of our own
  records go. The folder of an attempt was empty when it was claimed: all of it goes. It was not if
  the claim says that it was adopted: then only the claim goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..errors import CheckpointError, DeadlineError, FormatError, MissingError, StorageError
from ..format.canonical import load_record
from ..format.layout import ATTEMPT, DELETED, INDEX, MANIFEST, METADATA
from ..stores.base import Store
from .folders import file_key

__all__ = ["condemn", "erase", "read_write_id"]

TEMPORARY_MAX_AGE_S = 3600.0
"""Temporary files of a store that are older than this have no writer any more."""

_MAX_RECORD_BYTES = 32 * 1024 * 1024
_RECORDS = frozenset({ATTEMPT, DELETED, INDEX, MANIFEST, METADATA})
_RANK_INDEX = re.compile(r"index-r[0-9]{5,}\.json")
_PART = re.compile(r"[^/]+\.safetensors(\.index\.json)?")


def read_write_id(store: Store, key: str) -> str | None:
    """Return the identity of the attempt that a claim or manifest belongs to.

    Returns:
        ``None`` if the record is torn.

    Raises:
        MissingError: It is not there.
    """
    try:
        fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    except FormatError:
        return None
    write_id = fields.get("write_id")
    return write_id if isinstance(write_id, str) else None


def condemn(store: Store, key: str, *, write_id: str | None) -> bool:
    """Rename a claim or manifest to ``deleted.json``, if it is that of one attempt.

    Args:
        store: The run's store.
        key: The record.
        write_id: The attempt that is meant; ``None`` for a record that cannot be read.

    Returns:
        Whether it was. If not, it is someone else's and stands as before, or is gone.

    Raises:
        ExistsError: There is a ``deleted.json`` beside it.
    """
    deleted = file_key(key.rpartition("/")[0], DELETED)
    try:
        if read_write_id(store, key) != write_id:
            return False
        store.rename(key, deleted)
        if read_write_id(store, deleted) == write_id:
            return True
        # Another one came between the look and the rename.
        store.rename(deleted, key)
    except MissingError:
        return False  # gone, or another process has finished the same work
    return False


def erase(store: Store, name: str) -> dict[str, CheckpointError]:
    """Remove what is ours from a folder that holds ``deleted.json``, and that last.

    A folder without it is left alone. What is not ours stays, and the folder with it. A manifest
    beside it goes first, and durably: as long as it stands, readers see the checkpoint.

    Returns:
        The keys that could not be removed, with the reason. ``deleted.json`` stays too, then; and
        everything else, if the manifest is among them, or if a store that is not of this machine
        falls away, where each further try would only take its time.

    Raises:
        CheckpointError: The store refused to show what is there, or to sync.
    """
    claimed, deleted, manifest = (file_key(name, file) for file in (ATTEMPT, DELETED, MANIFEST))
    failed: dict[str, CheckpointError] = {}

    def remove(keys: Iterable[str]) -> None:
        for key in keys:
            if store.head(deleted) != mark:
                raise MissingError(f"{deleted} is another one by now.", path=deleted)
            try:
                store.delete(key)
            except CheckpointError as error:
                failed[key] = error
                if isinstance(error, (StorageError, DeadlineError)) and not store.traits.is_local:
                    return

    try:
        mark = store.head(deleted)
        keys = _keys_of_ours(store, name)
        # The order of what stands for the folder must hold after a power cut as well.
        steps = (
            [manifest] if manifest in keys else [],
            [key for key in keys if key not in (claimed, deleted, manifest)],
            [claimed] if claimed in keys else [],
        )
        for step in [step for step in steps if step] or [[]]:
            remove(step)
            if failed:
                return failed
            store.sync_folder(name)
        _sweep_temporary(store, name)
        remove([deleted])
    except MissingError:
        return {}  # another process has finished the same work
    return failed


def _keys_of_ours(store: Store, name: str) -> list[str]:
    """Return the keys in a folder that are to be removed."""
    is_ours = _rule(store, file_key(name, DELETED))
    start = len(name) + 1
    return [entry.key for entry in store.list(name) if is_ours(entry.key[start:])]


def _rule(store: Store, deleted: str) -> Callable[[str], bool]:
    """Return what tells our files by their paths, from the record that was renamed."""
    try:
        fields = load_record(store.get(deleted, max_bytes=_MAX_RECORD_BYTES), where=deleted)
    except FormatError:
        return lambda path: _is_record(path) or _PART.fullmatch(path) is not None
    files = fields.get("files")
    if not isinstance(files, list):  # a claim
        is_adopted = fields.get("adopted") is True
        return lambda path: not is_adopted or path in (ATTEMPT, DELETED)
    listed = {entry.get("path") for entry in files if isinstance(entry, dict)}
    return lambda path: path in listed or _is_record(path)


def _is_record(path: str) -> bool:
    return path in _RECORDS or _RANK_INDEX.fullmatch(path) is not None


def _sweep_temporary(store: Store, name: str) -> None:
    hook = getattr(store, "sweep_temporary", None)
    if callable(hook):
        hook(TEMPORARY_MAX_AGE_S, name)
