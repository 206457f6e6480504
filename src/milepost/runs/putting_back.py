"""Taking back a deletion that has only begun; see ``runs/prune.py`` for when."""

from __future__ import annotations

from ..errors import ExistsError, FormatError, MissingError
from ..format.layout import DELETED, MANIFEST
from ..format.manifest import Manifest
from ..stores.base import Store
from .erase import condemn
from .folders import file_key
from .manifests import read_manifest

__all__ = ["put_back"]


def put_back(store: Store, name: str) -> bool:
    """Publish a checkpoint again whose deletion has removed nothing; return whether it is one."""
    deleted, manifest = file_key(name, DELETED), file_key(name, MANIFEST)
    try:
        commit = read_manifest(store, name, file=DELETED)
    except (FormatError, MissingError):
        return False  # not the record of a commit, or another process has finished either way
    if not _is_whole(store, name, commit):
        return False
    try:
        store.rename(deleted, manifest)
    except MissingError:
        return False
    except ExistsError:
        store.delete(deleted)  # a rename in two steps was stopped between them
    if _is_whole(store, name, commit):
        return True
    condemn(store, manifest, write_id=commit.write_id)
    return False


def _is_whole(store: Store, name: str, commit: Manifest) -> bool:
    """Return whether every file of a commit is in place, by its size."""
    start = len(name) + 1
    sizes = {entry.key[start:]: entry.size_bytes for entry in store.list(name)}
    return all(sizes.get(entry.path) == entry.size_bytes for entry in commit.files)
