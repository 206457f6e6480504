"""The hidden files that a writer leaves behind when it is stopped, and how old they are.

People keep things of their own in the folder of a run, and what is theirs is not touched whatever
it is called. So only names are taken that a writer can have made, and they are looked for only
where writers make them: beside the records of a run, and in the folders of checkpoints.
"""

# System calls on plain strings, as in the rest of the file store.
# ruff: noqa: PTH108

from __future__ import annotations

import os
from collections.abc import Iterator

from ..errors import storage_error
from ..format.layout import (
    ATTEMPT,
    DELETED,
    DIAGNOSTIC_FOLDERS,
    MANIFEST,
    PINS,
    SESSIONS,
    VALIDATIONS,
)
from . import posix

__all__ = ["clock_s", "temporary_files"]

Entries = list[os.DirEntry[str]]


def temporary_files(folder: str) -> Iterator[tuple[str, float]]:
    """Yield path and time of change, in seconds since 1970, of each one of a run.

    Args:
        folder: The folder of the run.
    """
    known = _entries(folder)
    yield from _in(known)
    for entry in known:
        if not entry.is_dir(follow_symlinks=False):
            continue
        if entry.name in (SESSIONS, PINS, VALIDATIONS):
            yield from _in(_entries(entry.path))
        elif entry.name in DIAGNOSTIC_FOLDERS:
            for below in _entries(entry.path):
                yield from _in_checkpoint(below)
        else:
            yield from _in_checkpoint(entry)


def _in_checkpoint(entry: os.DirEntry[str]) -> Iterator[tuple[str, float]]:
    """Yield those of a folder that holds a record of ours, or nothing but such files.

    The latter is what a stop leaves that came before the first record or after the last one.
    """
    if not entry.is_dir(follow_symlinks=False):
        return
    if any(os.path.lexists(f"{entry.path}/{name}") for name in (MANIFEST, ATTEMPT, DELETED)):
        yield from _in(_entries(entry.path))
        return
    try:
        with os.scandir(entry.path) as entries:
            # Ends at the first file of another kind: a stranger's folder may hold a million.
            is_ours = all(posix.is_temporary(below.name) for below in entries)
    except (FileNotFoundError, PermissionError):
        return  # gone, or not known to be ours
    except OSError as error:
        raise storage_error(error, operation="list", path=entry.path) from error
    if is_ours:
        yield from _in(_entries(entry.path))


def _in(known: Entries) -> Iterator[tuple[str, float]]:
    for entry in known:
        if posix.is_temporary(entry.name) and not entry.is_dir(follow_symlinks=False):
            try:
                yield entry.path, entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue  # its writer finished


def _entries(folder: str) -> Entries:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, operation="list", path=folder) from error


def clock_s(folder: str) -> float:
    """Return the time by the clock of the file system, in seconds since 1970.

    That of a network mount may differ from ours, and it is the one that stamps the files.
    """
    path = f"{folder}/{posix.temporary_name()}"
    try:
        fd = posix.create_file(path)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        raise storage_error(error, operation="create", path=path) from error
