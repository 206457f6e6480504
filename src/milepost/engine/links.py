"""Links: files that a checkpoint may share with the one before, because they did not change."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import CheckpointError
from ..format.manifest import FileEntry, Manifest
from ..stores.base import Store

__all__ = ["Links"]

_log = logging.getLogger("milepost")


class Links:
    """What was written last under each path, as far as it still is what would be written again.

    Args:
        store: The run's store.
        is_wanted: Whether files may be shared at all.

    Attributes:
        committed: Paths of the parts of this rank whose staged bytes are those of the last commit,
            also where another rank wrote them.
    """

    def __init__(self, store: Store, *, is_wanted: bool) -> None:
        self._store = store
        self._is_wanted = is_wanted
        self._written: dict[str, tuple[str, FileEntry]] = {}
        self.committed: set[str] = set()

    def note(self, manifest: Manifest) -> None:
        """Remember the files of a checkpoint that was committed."""
        for entry in manifest.files:
            self._written[entry.path] = (manifest.name, entry)

    def forget(self, path: str) -> None:
        """Share a file no more: what is staged for it has changed."""
        self._written.pop(path, None)
        self.committed.discard(path)

    def forget_all(self) -> None:
        """Share nothing: what is staged belongs to no checkpoint."""
        self._written.clear()
        self.committed.clear()

    def try_link(self, folder: str, path: str) -> FileEntry | None:
        """Put a file that did not change into another checkpoint.

        Args:
            folder: The folder of that checkpoint.
            path: The file in it.

        Returns:
            Its entry, or ``None`` if it has to be written.
        """
        if not (self._is_wanted and path in self._written):
            return None
        traits = self._store.traits
        if "/" in folder or not (traits.hard_links or traits.copies_itself):
            return None
        source, entry = self._written[path]
        try:
            self._store.link(f"{source}/{path}", f"{folder}/{path}")
        except CheckpointError as error:
            _log.info("Could not link %s of %s (%s); it is written again.", path, source, error)
            return None
        return replace(entry, linked_from=source)
