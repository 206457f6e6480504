"""The files of a checkpoint, block by block, each compared with its checksum."""

from __future__ import annotations

from collections.abc import Callable

from ..format.digest import BLOCK_BYTES
from ..format.manifest import Manifest
from ..frames.reader import open_plain
from ..stores.base import Store
from ..stores.pages import page_memory
from .checks import check_size, read_block

__all__ = ["CheckedFiles"]


class CheckedFiles:
    """Loads blocks of a checkpoint's files, of the plain bytes of those that are compressed.

    Args:
        store: The run's store.
        folder: The checkpoint's folder in it; ``""`` if the store begins there.
        manifest: Its manifest.
        progress: Called with the number of bytes of each block that was read.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._entries = {entry.path: entry for entry in manifest.files}
        self._manifest = manifest
        self._progress = progress
        self.read_bytes = 0
        """How many bytes were read."""

    def load(self, file: str, index: int) -> memoryview:
        """Return a block of a file, in pages of its own.

        Raises:
            FormatError: The manifest does not list the file.
            DamagedError: It does not match its checksum.
        """
        stored = self._entries.get(file) or self._manifest.file(file)
        entry = stored.plain
        where = f"{self._folder}/{file}" if self._folder else file
        start = index * BLOCK_BYTES
        # Opened for each block: there may be more files than a process may have open.
        reader = open_plain(self._store, where, stored)
        try:
            check_size(reader, entry, where)
            length = min(BLOCK_BYTES, entry.size_bytes - start)
            view = memoryview(page_memory(length))[:length]
            read_block(reader, entry, index, view, where=where)
        finally:
            reader.close()
        self.read_bytes += length
        if self._progress is not None:
            self._progress(length)
        return view
