"""A store that keeps copies on this machine of what is written to it, and reads from them.

Writing goes to the store, and the same memory to the disk; what fails there is told once, and fails
nothing. Reading asks the store for the manifest, as ever, and then takes each file from the disk
that has a copy there, block by block and each compared with its checksum; a block that is not what
it should be comes from the store. All else goes to the store. See ``kept.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import final

from ..errors import CheckpointError, FormatError
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.layout import MANIFEST
from ..format.manifest import FileEntry, Manifest
from ..stores.base import (
    Entry,
    LastingWriter,
    LendingReader,
    Names,
    Reader,
    Store,
    StreamingReader,
    Writer,
)
from ..stores.local import LocalStore
from ..stores.pages import page_memory
from .kept import KeptCopies, may_be_kept

__all__ = ["CachedStore"]

_log = logging.getLogger("milepost")


@final
class CachedStore:
    """Passes everything on to a store, and keeps and reads copies of checkpoints' files.

    Args:
        store: The run's store.
        copies: The copies.

    Attributes:
        store: The run's store itself.
        local_bytes: How many bytes were read from copies.
        remote_bytes: How many bytes of files were read from the store.
    """

    def __init__(self, store: Store, copies: KeptCopies) -> None:
        self.store = store
        self._copies = copies
        self._lock = threading.Lock()
        self._manifests: dict[str, Manifest] = {}
        self._has_failed = self._is_told = False
        self.local_bytes = 0
        self.remote_bytes = 0
        self.url = store.url
        self.traits = store.traits

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r})"

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data``, durably, or raise ``ExistsError``."""
        self.store.put_new(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key`` in one durable step."""
        self.store.put(key, data)

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``, always those in the store."""
        folder, _, file = key.rpartition("/")
        if file != MANIFEST:
            return self.store.get(key, max_bytes=max_bytes)
        self._manifests.pop(folder, None)
        data = self.store.get(key, max_bytes=max_bytes)
        try:
            self._manifests[folder] = Manifest.from_bytes(data, where=f"{self.url}/{key}")
        except FormatError as error:  # for whoever reads it to say
            _log.info("%s has no copies: %s", folder, error)
        return data

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        return self.store.head(key)

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys."""
        return self.store.list(folder)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        return self.store.folders(folder)

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self.store.delete(key)

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist."""
        self.store.rename(key, new_key)

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key, and their copy a second name."""
        self.store.link(key, new_key)
        if may_be_kept(key) and may_be_kept(new_key):
            try:
                self._copies.link(key, new_key)
            except (CheckpointError, OSError) as error:
                self.note_failure(error)

    def point(self, key: str, target: str) -> None:
        """Make ``key`` name ``target``, which stands beside it."""
        self.store.point(key, target)

    def create_writer(self, key: str, size_bytes: int) -> Writer:
        """Begin to write a new key of a known size, and its copy."""
        writer = self.store.create_writer(key, size_bytes)
        if not may_be_kept(key):
            return writer
        try:
            copy = self._copies.create_writer(key, size_bytes)
        except (CheckpointError, OSError) as error:
            self.note_failure(error)
            return writer
        kind = _TwoLastingWriters if isinstance(writer, LastingWriter) else _TwoWriters
        return kind(writer, copy, on_failure=self.note_failure)

    def open_reader(self, key: str) -> Reader:
        """Open a key for reading, or its copy."""
        folder, _, path = key.partition("/")
        manifest = self._manifests.get(folder)
        entry = None
        if manifest is not None:
            entry = next((one for one in manifest.files if one.path == path), None)
        copy = None if manifest is None or entry is None else self._copies.find(manifest, entry)
        if entry is None or copy is None:
            reader = self.store.open_reader(key)
            kind: type[_Counted] = _Counted
            if isinstance(reader, StreamingReader):
                kind = _CountedStreamer
            elif isinstance(reader, LendingReader):
                kind = _CountedLender
            return kind(reader, self._count_remote)
        return _CheckedReader(
            copy,
            entry,
            remote=lambda: self.store.open_reader(key),
            count=(self._count_local, self._count_remote),
        )

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder, and of the folder itself, durable."""
        self.store.sync_folder(folder)

    def local_path(self, key: str) -> str | None:
        """Return the file of a key if the store keeps files."""
        return self.store.local_path(key)

    def keep(self, manifest: Manifest) -> None:
        """Keep the copy of a checkpoint that was committed. Never raises for want of a copy."""
        try:
            self._copies.keep(manifest)
        except (CheckpointError, OSError) as error:
            self.note_failure(error)
        self._is_told, self._has_failed = self._has_failed, False

    def begin(self, run_id: str) -> None:
        """Say which run will be saved to."""
        self._copies.begin(run_id)

    def close(self) -> None:
        """Let go of what was written of attempts that were not committed."""
        self._copies.close()

    def note_failure(self, error: BaseException) -> None:
        """Tell of copies that cannot be kept, once until a whole checkpoint can be again."""
        self._has_failed = True
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "Checkpoints are saved, but not all of them are kept on this machine: %s", error
            )

    def _count_local(self, num_bytes: int) -> None:
        with self._lock:
            self.local_bytes += num_bytes

    def _count_remote(self, num_bytes: int) -> None:
        with self._lock:
            self.remote_bytes += num_bytes


class _TwoWriters:
    """Writes a file and its copy; the copy is dropped when it fails."""

    def __init__(
        self, writer: Writer, copy: Writer, *, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._writer = writer
        self._copy = copy
        self._on_failure = on_failure
        self._is_kept = True

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``."""
        self._try(lambda: self._copy.write_at(offset, data))
        self._writer.write_at(offset, data)

    def close(self, size_bytes: int | None = None) -> None:
        """Make the bytes durable and the key visible under its name."""
        try:
            self._writer.close(size_bytes)
        except BaseException:
            self._copy.abort()
            raise
        if self._is_kept:
            self._try(lambda: self._copy.close(size_bytes))
        else:
            self._copy.abort()

    def abort(self) -> None:
        """Drop what was written."""
        self._copy.abort()
        self._writer.abort()

    def _try(self, work: Callable[[], None]) -> None:
        if not self._is_kept:
            return
        try:
            work()
        except (CheckpointError, OSError) as error:
            self._is_kept = False  # other threads may be writing to it: it goes at the end
            self._on_failure(error)


@final
class _TwoLastingWriters(_TwoWriters):
    """The same where the store can send memory from where it is; the disk has it before."""

    def refer_at(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which stays as it is, at ``offset``."""
        self._try(lambda: self._copy.write_at(offset, data))
        assert isinstance(self._writer, LastingWriter)
        self._writer.refer_at(offset, data)


class _Counted:
    """Counts what is read."""

    def __init__(self, reader: Reader, count: Callable[[int], None]) -> None:
        self.size_bytes = reader.size_bytes
        self._reader = reader
        self._count = count

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        self._reader.read_into(offset, buffer)
        self._count(buffer.nbytes)

    def close(self) -> None:
        """Release the file or connection."""
        self._reader.close()


@final
class _CountedLender(_Counted):
    """Counts what is lent, too."""

    def lend(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes. See ``base.LendingReader``."""
        assert isinstance(self._reader, LendingReader)
        view = self._reader.lend(offset, length)
        self._count(length)
        return view


@final
class _CountedStreamer(_Counted):
    """Counts what is streamed, too."""

    def stream(self, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield a range of bytes. See ``base.StreamingReader``."""
        assert isinstance(self._reader, StreamingReader)
        for piece in self._reader.stream(offset, length):
            self._count(piece.nbytes)
            yield piece


@final
class _CheckedReader:
    """Reads a copy, and what is not right in it from the store.

    Args:
        path: The copy.
        entry: What the manifest says of the file.
        remote: Opens the file in the store.
        count: Called with the bytes that were read from the copy, and from the store.
    """

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        *,
        remote: Callable[[], Reader],
        count: tuple[Callable[[int], None], Callable[[int], None]],
    ) -> None:
        self.size_bytes = entry.size_bytes
        self._path = path
        self._entry = entry
        self._open_remote = remote
        self._count_local, self._count_remote = count
        self._lock = threading.Lock()
        self._local: Reader | None = None
        self._remote: Reader | None = None
        self._is_bad = False

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if self._read_copy(offset, view):
            self._count_local(len(view))
        else:
            self._reader().read_into(offset, buffer)
            self._count_remote(len(view))

    def close(self) -> None:
        """Release the file and the connection."""
        with self._lock:
            for reader in (self._local, self._remote):
                if reader is not None:
                    reader.close()
            self._local = self._remote = None

    def _read_copy(self, offset: int, view: memoryview) -> bool:
        """Fill a view from the copy, block by block; return whether all of it is right."""
        while view:
            block = offset // BLOCK_BYTES
            stop = min((block + 1) * BLOCK_BYTES, self.size_bytes)
            length = min(stop - offset, len(view))
            if self._is_bad or length <= 0:
                return False
            if not self._read_block(block, stop, offset, view[:length]):
                return False
            offset, view = offset + length, view[length:]
        return True

    def _read_block(self, block: int, stop: int, start: int, view: memoryview) -> bool:
        """Fill a view with bytes of one block; return whether they are right."""
        first = block * BLOCK_BYTES
        is_whole = start == first and len(view) == stop - first
        whole = view if is_whole else memoryview(page_memory(stop - first))[: stop - first]
        try:
            self._copy().read_into(first, whole)
        except (CheckpointError, OSError) as error:
            self._give_up(str(error))
            return False
        if crc32c(whole) != self._entry.crcs[block]:
            self._give_up(f"block {block} does not match its checksum")
            return False
        if not is_whole:
            view[:] = whole[start - first : start - first + len(view)]
        return True

    def _copy(self) -> Reader:
        with self._lock:
            if self._local is None:
                store = LocalStore(self._path.parent)
                self._local = store.open_reader(self._path.name)
            return self._local

    def _reader(self) -> Reader:
        with self._lock:
            if self._remote is None:
                self._remote = self._open_remote()
            return self._remote

    def _give_up(self, why: str) -> None:
        with self._lock:
            was_bad, self._is_bad = self._is_bad, True
        if was_bad:
            return
        _log.warning("The copy %s is damaged and is not used: %s", self._path, why)
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("It could not be removed: %s", error)
