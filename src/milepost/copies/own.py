"""A copy of a checkpoint in a folder of the caller's own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..errors import ExistsError, MissingError
from ..format.layout import MANIFEST
from ..format.manifest import Manifest
from ..stores.base import Store
from ..stores.local import LocalStore
from .transfer import FileCopy, copy_files

__all__ = ["copy_to", "new_folder"]

_MAX_MANIFEST_BYTES = 32 * 1024 * 1024


def new_folder(name: str) -> Path:
    """Return a new, private folder among the temporary ones."""
    return Path(tempfile.mkdtemp(prefix=f"milepost-{name.rpartition('/')[2][:64]}-"))


def copy_to(store: Store, folder: str, path: str | os.PathLike[str] | None, *, name: str) -> str:
    """Copy the files of a checkpoint, or a plain folder, to a new folder; the commit comes last.

    What the commit lists is checked against it. What users have added beside is copied as it is.

    Args:
        store: Where it is.
        folder: Its folder in the store; ``""`` if the store begins there.
        path: Where to; ``None`` for a new, private folder.
        name: What a private folder is called after.

    Raises:
        ExistsError: There are files in the folder already.
        DamagedError: Bytes that do not match their checksum. Nothing of the copy is left.
    """
    target_path = new_folder(name) if path is None else Path(path)
    try:
        _copy(store, folder, LocalStore(target_path))
    except BaseException:
        if path is None:
            shutil.rmtree(target_path, ignore_errors=True)
        raise
    return str(target_path.absolute())


def _copy(store: Store, folder: str, target: LocalStore) -> None:
    if next(iter(target.list()), None) is not None:
        raise ExistsError(f"{target.url} is not empty.", path=target.url)
    prefix = f"{folder}/" if folder else ""
    listed = {entry.key[len(prefix) :]: entry.size_bytes for entry in store.list(folder)}
    commit: bytes | None = None
    files: list[FileCopy] = []
    try:
        commit = store.get(prefix + MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
    except MissingError:
        if folder or not listed:
            raise  # no checkpoint, and not a user's own folder either
    else:
        manifest = Manifest.from_bytes(commit, where=f"{store.url}/{prefix}{MANIFEST}")
        files += [FileCopy(prefix + e.path, e.path, e.size_bytes, e) for e in manifest.files]
    known = {MANIFEST, *(one.new_key for one in files)}
    files += [
        FileCopy(prefix + path, path, size_bytes)
        for path, size_bytes in listed.items()
        if path not in known
    ]
    copy_files(store, target, files)
    if commit is not None:
        target.put_new(MANIFEST, commit)
