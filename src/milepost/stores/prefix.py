"""The same store, seen from below one of its folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from ..errors import UsageError
from ..format.layout import check_key
from .base import (
    UNSEEN,
    BegunUpload,
    BegunUploads,
    Entry,
    Names,
    NamingStrangers,
    Reader,
    ShowingUploads,
    Store,
    Writer,
)

__all__ = ["PrefixStore"]


@final
class PrefixStore:
    """Puts a folder in front of every key.

    Args:
        store: The store that keeps the bytes.
        prefix: The folder, without a slash at either end.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix, where=store.url)
        self.url = f"{store.url.rstrip('/')}/{prefix}"
        self.traits = store.traits

    def __repr__(self) -> str:
        return f"PrefixStore({self._store!r}, {self._prefix!r})"

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data``, durably, or raise ``ExistsError``."""
        self._store.put_new(self._key(key), data)

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key`` in one durable step."""
        self._store.put(self._key(key), data)

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""
        return self._store.get(self._key(key), max_bytes=max_bytes)

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        return self._seen(self._store.head(self._key(key)))

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys."""
        for entry in self._store.list(self._folder(folder)):
            yield self._seen(entry)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        return self._store.folders(self._folder(folder))

    def strangers(self, folder: str = "") -> Names:
        """Return what ``list`` leaves out because of its name, if the store below tells."""
        if not isinstance(self._store, NamingStrangers):
            return []
        found = self._store.strangers(self._folder(folder))
        return [name[len(self._prefix) + 1 :] for name in found]

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._store.delete(self._key(key))

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist."""
        self._store.rename(self._key(key), self._key(new_key))

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key."""
        self._store.link(self._key(key), self._key(new_key))

    def point(self, key: str, target: str) -> None:
        """Make ``key`` name ``target``, which stands beside it."""
        self._store.point(self._key(key), target)

    def create_writer(self, key: str, size_bytes: int) -> Writer:
        """Begin to write a new key of a known size."""
        return self._store.create_writer(self._key(key), size_bytes)

    def open_reader(self, key: str) -> Reader:
        """Open a key for reading."""
        return self._store.open_reader(self._key(key))

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder, and of the folder itself, durable."""
        self._store.sync_folder(self._folder(folder))

    def local_path(self, key: str) -> str | None:
        """Return the file of a key if the store keeps files."""
        return self._store.local_path(self._key(key))

    def sweep_temporary(self, max_age_s: float, folder: str = "") -> Names:
        """Remove old temporary files of the run in a folder, if the store below makes any."""
        sweep = getattr(self._store, "sweep_temporary", None)
        if not callable(sweep):
            return []
        removed: Names = sweep(max_age_s, self._folder(folder))
        return [path[len(self._prefix) + 1 :] for path in removed]

    def why_uploads_are_unseen(self) -> str:
        """Return why uploads that have not ended cannot be shown, if they cannot."""
        if not isinstance(self._store, ShowingUploads):
            return UNSEEN
        return self._store.why_uploads_are_unseen()

    def begun_uploads(self, start: str = "") -> BegunUploads:
        """Return the uploads to keys that begin with ``start`` and have not ended."""
        length = len(self._prefix) + 1
        shown = self._showing().begun_uploads(f"{self._prefix}/{start}")
        found = tuple(replace(one, key=one.key[length:]) for one in shown.found)
        return replace(shown, found=found)

    def upload_written_s(self, upload: BegunUpload) -> float:
        """Return when anything of an upload came last."""
        return self._showing().upload_written_s(self._below(upload))

    def end_upload(self, upload: BegunUpload) -> None:
        """Drop an upload with all of its parts."""
        self._showing().end_upload(self._below(upload))

    def _showing(self) -> ShowingUploads:
        if not isinstance(self._store, ShowingUploads):
            raise UsageError(f"{self._store!r} knows no uploads in parts.", path=self.url)
        return self._store

    def _below(self, upload: BegunUpload) -> BegunUpload:
        return replace(upload, key=self._key(upload.key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key, where=self.url)}"

    def _folder(self, folder: str) -> str:
        return self._key(folder) if folder else self._prefix

    def _seen(self, entry: Entry) -> Entry:
        key = entry.key[len(self._prefix) + 1 :]
        return Entry(key, entry.size_bytes, entry.modified_s)
