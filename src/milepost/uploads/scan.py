"""What there is to upload: the committed checkpoints of a folder's runs, and everything else.

The checkpoints are looked for first. What a manifest depends on (the run's record, the record of
its session) was there before the manifest, so records that are listed afterwards hold it.

Symbolic links are not followed: what they lead to is either in the folder, under its own name, or
none of it. The pointer ``latest`` of a run is told as a text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import storage_error
from ..format.layout import (
    ATTEMPT,
    DELETED,
    DIAGNOSTIC_FOLDERS,
    LATEST,
    MANIFEST,
    METADATA,
    RUN,
    SESSIONS,
)
from ..stores.posix import is_temporary

__all__ = ["FoundCheckpoint", "FoundFile", "Mark", "Scan", "mark_of", "scan"]

Mark = tuple[int, int, int, int, int]
"""What tells a file from what it was: device, number, size, times of its bytes and its entry."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file.

    Attributes:
        path: Where it lies.
        key: The same below the scanned folder.
        mark: What it was when it was seen.
    """

    path: str
    key: str
    mark: Mark

    @property
    def size_bytes(self) -> int:
        """Return its size."""
        return self.mark[2]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint.

    Attributes:
        run: The folder of its run.
        name: Its folder within the run.
        key: Its folder below the scanned folder.
        mark: That of its manifest.
    """

    run: str
    name: str
    key: str
    mark: Mark

    def files(self) -> list[FoundFile]:
        """Return its files, without the manifest and without what is added to it afterwards."""
        left_out = {f"{self.key}/{name}" for name in (MANIFEST, METADATA, DELETED)}
        found = _all_below(f"{self.run}/{self.name}", self.key)
        return [file for file in found if file.key not in left_out]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder holds.

    Attributes:
        runs: Keys of the folders of runs.
        checkpoints: The committed checkpoints of all runs.
        records: The files that a run's checkpoints depend on.
        files: All other files.
        pointers: Key and text of each ``latest``.
    """

    runs: list[str]
    checkpoints: list[FoundCheckpoint]
    records: list[FoundFile]
    files: list[FoundFile]
    pointers: list[tuple[str, str]]


def mark_of(status: os.stat_result) -> Mark:
    """Return the mark of a file."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def scan(root: str, is_wanted: Callable[[str], bool] = lambda _: True) -> Scan:
    """Look at a folder.

    Args:
        root: The folder.
        is_wanted: Says of a name directly in it whether to look at that at all.

    Raises:
        StorageError: A folder cannot be read.
    """
    found = Scan([], [], [], [], [])
    for folder in _walk(root, "", is_wanted):
        if folder.is_run:
            found.runs.append(folder.key)
            found.checkpoints.extend(_checkpoints(folder))
    for folder in _walk(root, "", is_wanted):
        found.pointers.extend(folder.pointers())
        if folder.is_run:
            _take_run(folder, found)
        else:
            found.files.extend(folder.files())
    return found


@dataclass(frozen=True, slots=True)
class _Folder:
    path: str
    key: str
    entries: list[os.DirEntry[str]]

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.entries}

    @property
    def is_run(self) -> bool:
        return self.names >= {RUN, SESSIONS}

    def below(self, name: str) -> str:
        return f"{self.key}/{name}" if self.key else name

    def files(self) -> Iterator[FoundFile]:
        for entry in self.entries:
            if entry.is_file(follow_symlinks=False) and not is_temporary(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                except OSError as error:
                    raise storage_error(error, operation="look at", path=entry.path) from error
                yield FoundFile(entry.path, self.below(entry.name), mark_of(status))

    def pointers(self) -> Iterator[tuple[str, str]]:
        """Yield ``latest`` where it is a link to what stands beside it."""
        for entry in self.entries:
            if entry.name == LATEST and entry.is_symlink():
                try:
                    target = str(Path(entry.path).readlink())
                except OSError:
                    continue  # replaced since the folder was read
                if target in self.names:
                    yield self.below(LATEST), target

    def folders(self) -> Iterator[_Folder]:
        for entry in self.entries:
            if entry.is_dir(follow_symlinks=False):
                yield _read(entry.path, self.below(entry.name))


def _walk(path: str, key: str, is_wanted: Callable[[str], bool]) -> Iterator[_Folder]:
    """Yield a folder and those below it, but not what is below the folder of a run."""
    top = _read(path, key)
    wanted = [entry for entry in top.entries if is_wanted(entry.name)]
    folder = _Folder(path, key, wanted)
    yield folder
    if folder.is_run:
        return
    for below in folder.folders():
        yield from _walk(below.path, below.key, lambda _: True)


def _checkpoints(run: _Folder) -> Iterator[FoundCheckpoint]:
    for folder in _candidates(run):
        manifest = next((one for one in folder.files() if one.key.endswith(f"/{MANIFEST}")), None)
        if manifest is not None and DELETED not in folder.names:
            name = folder.path[len(run.path) + 1 :]
            yield FoundCheckpoint(run.path, name, folder.key, manifest.mark)


def _candidates(run: _Folder) -> Iterator[_Folder]:
    for folder in run.folders():
        yield from folder.folders() if _is_diagnostic(folder) else [folder]


def _take_run(run: _Folder, found: Scan) -> None:
    """Add the files of a run that are not those of its checkpoints."""
    for file in run.files():
        (found.records if file.key == run.below(RUN) else found.files).append(file)
    for folder in run.folders():
        if folder.key == run.below(SESSIONS):
            found.records.extend(folder.files())
        elif _is_diagnostic(folder):
            found.files.extend(folder.files())
            for below in folder.folders():
                _take_others(below, found)
        else:
            _take_others(folder, found)


def _take_others(folder: _Folder, found: Scan) -> None:
    """Add what is in a folder of a run, if it is none of an attempt or a checkpoint.

    An attempt that is being written, or given up, is nothing that could be used elsewhere.
    """
    if folder.names.isdisjoint((ATTEMPT, DELETED, MANIFEST)):
        found.files.extend(_all_below(folder.path, folder.key))
    elif MANIFEST in folder.names:
        found.files.extend(one for one in folder.files() if one.key.endswith(f"/{METADATA}"))


def _is_diagnostic(folder: _Folder) -> bool:
    return folder.path.rpartition("/")[2] in DIAGNOSTIC_FOLDERS


def _all_below(path: str, key: str) -> Iterator[FoundFile]:
    folder = _read(path, key)
    yield from folder.files()
    for below in folder.folders():
        yield from _all_below(below.path, below.key)


def _read(path: str, key: str) -> _Folder:
    try:
        with os.scandir(path) as entries:
            return _Folder(path, key, sorted(entries, key=lambda entry: entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return _Folder(path, key, [])
    except OSError as error:
        raise storage_error(error, operation="list", path=path) from error
