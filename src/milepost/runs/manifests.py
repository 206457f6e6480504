"""Reading commits, and remembering what was read.

A manifest is created exclusively and never changed, so that a process which looks at its run after
every save need not read all of them every time. What was read is remembered together with the
entry that the store had shown for it *before*: what is remembered is that commit or a newer one,
never an older. It is given out as long as the store shows the very same entry, and read anew
otherwise: another writer may have deleted the checkpoint and made one of the same name.

What an entry cannot tell, two commits of one size, under one name and within one tick of the
store's clock, does no harm:

- Those of the process itself are forgotten as it commits, see :meth:`ManifestCache.forget`.
- Another writer that counts belongs to a newer session, and then this one must delete nothing.
- Deletion reads the commit again and goes by its write id, see ``runs/erase.py``; so does
  verification, before the newest checkpoint is taken for whole.

Nothing is remembered beyond the process. What a session goes on from is chosen from what the store
shows after it was opened; a commit that was read just before, in the look that comes first, is read
once more only if it may be another by then. In a bucket an object stays what it is for as long as
its time stays the same: so one that is shown then with a time long before that look was the same in
it, see :meth:`ManifestCache.trust_noted`. A file system keeps no such promise, for times can be set
there: nothing is noted of it.
"""

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import final

from ..format.layout import MANIFEST
from ..format.manifest import Manifest
from ..stores.base import Entry, Store
from .folders import file_key
from .sessions import SessionCache
from .validations import VerdictCache

__all__ = ["ManifestCache", "read_manifest"]

_MAX_MANIFEST_BYTES = 32 * 1024 * 1024
_MAX_REMEMBERED_BYTES = 32 * 1024 * 1024


def read_manifest(store: Store, name: str, *, file: str = MANIFEST) -> Manifest:
    """Return the commit of one checkpoint; ``""`` is the folder that the store stands in.

    Args:
        store: The run's store.
        name: The checkpoint's folder.
        file: Where the record stands.

    Raises:
        MissingError: There is none.
        DamagedError: It is torn or altered.
        NewerFormatError: A newer Milepost wrote it.
    """
    key = file_key(name, file)
    data = store.get(key, max_bytes=_MAX_MANIFEST_BYTES)
    return Manifest.from_bytes(data, where=f"{store.url}/{key}")


@final
class ManifestCache:
    """The records of one run that one process has read. Several threads may use it.

    Args:
        max_bytes: How many bytes of manifests, as they are stored, are remembered at most; those
            beyond are read every time.
    """

    def __init__(self, max_bytes: int = _MAX_REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._lock = Lock()
        self._known: dict[str, tuple[Entry, Manifest]] = {}
        self._noted: dict[str, Manifest] = {}
        self._noted_from_s: float | None = None
        self.verdicts: VerdictCache = {}
        self.sessions: SessionCache = {}

    def read(self, store: Store, name: str, entry: Entry) -> Manifest:
        """Return the commit of a checkpoint, from the store if it is not the one remembered.

        Args:
            store: The run's store, always the same.
            name: The checkpoint's folder.
            entry: What the store has just shown for its manifest.

        Raises:
            MissingError: There is none any more.
            DamagedError: It is torn or altered.
            NewerFormatError: A newer Milepost wrote it.
        """
        known = self._known.get(name)
        if known is not None and known[0] == entry:
            return known[1]
        self.forget(name)
        noted = self._noted.pop(name, None)
        # A place that tells no times says 0.
        is_same = 0 < entry.modified_s < (self._noted_from_s or 0.0)
        manifest = noted if noted is not None and is_same else read_manifest(store, name)
        with self._lock:
            is_room = self._size_bytes + entry.size_bytes <= self._max_bytes
            if is_room and name not in self._known:
                self._known[name] = (entry, manifest)
                self._size_bytes += entry.size_bytes
        return manifest

    def note(self, name: str, manifest: Manifest) -> None:
        """Keep a commit that was read without a look at its entry, until it is known whether to."""
        self._noted[name] = manifest

    def trust_noted(self, from_s: float) -> None:
        """Give out what was noted, where the store shows that it is still the same.

        Args:
            from_s: A time by the store's clock before which nothing was noted. What is older than
                that was the same object when it was read.
        """
        self._noted_from_s = from_s

    def forget(self, name: str) -> None:
        """Read the commit of a checkpoint anew the next time. Call it after committing one."""
        with self._lock:
            known = self._known.pop(name, None)
            if known is not None:
                self._size_bytes -= known[0].size_bytes

    def clear(self) -> None:
        """Forget everything but what was noted."""
        self.forget_others(())
        self.verdicts.clear()
        self.sessions.clear()

    def forget_others(self, names: Collection[str]) -> None:
        """Forget all checkpoints but those of these names, and what was noted and not needed."""
        if self._noted_from_s is not None:
            self._noted.clear()
        with self._lock:
            others = self._known.keys() - names
        for name in others:
            self.forget(name)
