"""Links: files that a checkpoint may share with the one before, because they did not change.

A copy that a bucket makes is as good as what it copies. Where nobody compares what is uploaded with
what came, the first one is read back before it is copied, once in the life of a process: else one
bit that flipped on the way would be in every later checkpoint too.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import CheckpointError
from ..format.manifest import FileEntry, Manifest
from ..runs.folders import file_key
from ..runs.verify import verify_files
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
        self._written: dict[str, tuple[Manifest, FileEntry]] = {}
        self._compared: set[str] = set()
        self.committed: set[str] = set()

    def note(self, manifest: Manifest) -> None:
        """Remember the files of a checkpoint that was committed."""
        for entry in manifest.files:
            self._written[entry.path] = (manifest, entry)
            if entry.linked_from is None:
                self._compared.discard(entry.path)

    def entry(self, path: str) -> FileEntry | None:
        """Return the entry of a file that may be shared, if what is staged for it has not changed.

        Args:
            path: The file in the folder of a checkpoint.
        """
        return self._written[path][1] if self._is_wanted and path in self._written else None

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
        key = file_key(folder, path)
        try:
            if not self._has_its_size(source, entry) or not self._is_right(source, entry):
                return None
            self._store.link(file_key(source.name, path), key)
        except CheckpointError as error:
            _log.info(
                "Could not link %s of %s (%s); it is written again.", path, source.name, error
            )
            return None
        return replace(entry, linked_from=source.name)

    def _has_its_size(self, source: Manifest, entry: FileEntry) -> bool:
        """Return whether a file is as long as it was: linked, a shorter one would fail each save.

        Raises:
            CheckpointError: It is gone, or cannot be looked at.
        """
        size_bytes = self._store.head(file_key(source.name, entry.path)).size_bytes
        if size_bytes == entry.size_bytes:
            return True
        self.forget(entry.path)
        _log.warning(
            "%s of %s in %s has %s bytes by now and not %s: %s is damaged. It did not change since "
            "then, and is written again from memory.",
            entry.path,
            source.name,
            self._store.url,
            f"{size_bytes:,}",
            f"{entry.size_bytes:,}",
            source.name,
        )
        return False

    def _is_right(self, source: Manifest, entry: FileEntry) -> bool:
        """Return whether a file holds what was sent, as far as nobody has looked before."""
        traits = self._store.traits
        if traits.hard_links or traits.compares_uploads or entry.path in self._compared:
            return True
        problems = verify_files(self._store, source.name, source, [entry])
        if problems:
            self.forget(entry.path)
            _log.warning(
                "%s came to harm on the way there: %s It is written again; %s is damaged.",
                self._store.url,
                problems[0].text,
                source.name,
            )
            return False
        self._compared.add(entry.path)
        return True
