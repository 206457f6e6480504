"""The user's files of a checkpoint: found in a local folder, streamed to the run, checksummed.

A file is read in blocks, and the checksum is that of the block in memory which is then written. A
file that changes meanwhile fails the report: what was reported is no longer what is there.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..engine.demand import BlocksOnDemand
from ..engine.write import write_files
from ..errors import DamagedError, FormatError, MissingError, UsageError, storage_error
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.layout import ATTEMPT, DELETED, MANIFEST, METADATA, check_key
from ..format.manifest import FileEntry
from ..stores.base import Store
from ..stores.pages import page_memory

__all__ = ["LocalFile", "check_path", "checksum", "checksum_stored", "find_files", "upload"]

_OURS = frozenset({ATTEMPT, DELETED, MANIFEST, METADATA})
_TEMPORARY = re.compile(r"\.tmp-")
_MAX_FILES = 100_000
_MAX_DEPTH = 40
_GROUP = 32  # files open at a time


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the user's.

    Attributes:
        path: Its path in the checkpoint.
        source: Where it is.
        size_bytes: Its size when it was found.
        modified_ns: When it was changed last, then.
    """

    path: str
    source: str
    size_bytes: int
    modified_ns: int


def find_files(folder: str, *, leave_out: Collection[str] = ()) -> list[LocalFile]:
    """Return the files in a folder and below, sorted by path. Links are followed.

    Args:
        folder: The folder.
        leave_out: Paths that are not the user's.

    Raises:
        MissingError: There is no such folder.
        UsageError: A name that a checkpoint cannot hold, or something that is no file.
    """
    if not Path(folder).is_dir():
        raise MissingError(f"{folder} is not a folder.", path=folder)
    found: list[LocalFile] = []
    _walk(folder, "", found, (), leave_out)
    return sorted(found, key=lambda one: one.path)


def check_path(path: str, *, where: str) -> None:
    """Require that a checkpoint can hold a file of that path.

    Raises:
        UsageError: It cannot.
    """
    try:
        check_key(path, where=where)
    except FormatError as error:
        raise UsageError(
            f"A checkpoint cannot hold a file {path!r}.",
            safe="Nothing was written.",
            hint="Use letters, digits and '._+=@,~-' in the names of files and folders.",
            path=path,
        ) from error
    if path in _OURS or any(_TEMPORARY.match(part) for part in path.split("/")):
        raise UsageError(
            f"The name {path} is one that Milepost uses in the folders of checkpoints.",
            safe="Nothing was written.",
            hint="Rename the file, or put it into a folder of its own.",
            path=path,
        )


def upload(
    store: Store, folder: str, files: Sequence[LocalFile], *, skip: Collection[str] = ()
) -> list[FileEntry]:
    """Write files into the folder of an attempt, durably.

    Args:
        store: The run's store.
        folder: The folder.
        files: The files.
        skip: Paths that another rank writes: these are only checksummed.

    Returns:
        An entry a file, with its checksums.

    Raises:
        DamagedError: A file has changed since it was found.
        CheckpointError: It could not be read or written.
    """
    buffers = _Buffers()
    jobs = [
        _Job(f"{folder}/{one.path}", one.path, one.size_bytes, _Blocks(one, buffers))
        for one in files
        if one.path not in skip
    ]
    entries: list[FileEntry] = []
    for start in range(0, len(jobs), _GROUP):
        entries += write_files(store, jobs[start : start + _GROUP])
    _sync_folders(store, folder, (job.path for job in jobs))
    entries += [checksum(one) for one in files if one.path in skip]
    for one in files:
        _check_unchanged(one, os.stat(one.source))  # noqa: PTH116 - as _Blocks does
    return entries


def checksum(file: LocalFile) -> FileEntry:
    """Return the entry of a file without writing it anywhere."""
    blocks = _Blocks(file, _Buffers())
    return FileEntry(file.path, file.size_bytes, tuple(crc32c(block) for block in blocks))


def checksum_stored(store: Store, folder: str, paths: Iterable[str]) -> list[FileEntry]:
    """Return entries of files that somebody wrote into the run, and make them durable.

    Raises:
        DamagedError: One of them changes while it is read.
    """
    entries = []
    buffer = memoryview(page_memory(BLOCK_BYTES))
    names = list(paths)
    for path in names:
        key = f"{folder}/{path}"
        before = store.head(key)
        crcs = []
        with closing(store.open_reader(key)) as reader:
            size = reader.size_bytes
            for start in range(0, size, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, size - start)]
                reader.read_into(start, block)
                crcs.append(crc32c(block))
        _sync_file(store.local_path(key))
        after = store.head(key)
        if before != after or after.size_bytes != size:
            raise _changed(path)
        entries.append(FileEntry(path, size, tuple(crcs)))
    _sync_folders(store, folder, names)
    return entries


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to write; see ``engine/write.py``."""

    key: str
    path: str
    size_bytes: int
    blocks: Sequence[memoryview]
    is_lasting: bool = False


class _Buffers(threading.local):
    """A block of memory for each thread that reads."""

    def __init__(self) -> None:
        self.pages = memoryview(page_memory(BLOCK_BYTES))


class _Blocks(BlocksOnDemand):
    """The blocks of a file, read when they are asked for. The next one takes the same memory."""

    def __init__(self, file: LocalFile, buffers: _Buffers) -> None:
        super().__init__(file.size_bytes)
        self._file = file
        self._buffers = buffers

    def make(self, index: int, num_bytes: int) -> memoryview:
        """See ``BlocksOnDemand``."""
        start = index * BLOCK_BYTES
        view = self._buffers.pages[:num_bytes]
        try:
            fd = os.open(self._file.source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check_unchanged(self._file, os.fstat(fd))
                filled = 0
                while filled < len(view):
                    count = os.preadv(fd, [view[filled:]], start + filled)
                    if count == 0:
                        raise _changed(self._file.path)
                    filled += count
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, operation="read", path=self._file.source) from error
        return view


def _walk(
    folder: str,
    before: str,
    found: list[LocalFile],
    above: tuple[tuple[int, int], ...],
    leave_out: Collection[str],
) -> None:
    """Add the files of a folder and below to those found."""
    try:
        status = os.stat(folder)  # noqa: PTH116 - one call for the folder and its identity
        me = (status.st_dev, status.st_ino)
        if me in above or len(above) > _MAX_DEPTH:
            raise UsageError(f"The folder {folder} contains itself, by a link.", path=folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                path = before + entry.name
                if path in leave_out:
                    continue
                check_path(path, where=folder)
                status = entry.stat()
                if stat.S_ISDIR(status.st_mode):
                    _walk(entry.path, f"{path}/", found, (*above, me), leave_out)
                elif stat.S_ISREG(status.st_mode):
                    found.append(LocalFile(path, entry.path, status.st_size, status.st_mtime_ns))
                else:
                    raise UsageError(f"{entry.path} is no file.", path=entry.path)
                if len(found) > _MAX_FILES:
                    raise UsageError(
                        f"{folder} holds more than {_MAX_FILES:,} files.",
                        hint="Pack them into fewer, an archive for example.",
                        path=folder,
                    )
    except OSError as error:
        raise storage_error(error, operation="read", path=error.filename or folder) from error


def _check_unchanged(file: LocalFile, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.modified_ns):
        raise _changed(file.path)


def _changed(path: str) -> DamagedError:
    return DamagedError(
        f"{path} was changed while it was being uploaded.",
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint="Report a folder that nobody writes to any more.",
        path=path,
    )


def _sync_folders(store: Store, folder: str, paths: Iterable[str]) -> None:
    """Make the names in folders below that of the checkpoint durable; its own follows last."""
    below = {path.rpartition("/")[0] for path in paths if "/" in path}
    every = {one[:end] for one in below for end in _ends(one)}
    for one in sorted(every, reverse=True):
        store.sync_folder(f"{folder}/{one}")


def _ends(path: str) -> list[int]:
    """Return where a path and each folder above it end."""
    return [index for index, letter in enumerate(path) if letter == "/"] + [len(path)]


def _sync_file(path: str | None) -> None:
    if path is None:
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, operation="fsync", path=path) from error
