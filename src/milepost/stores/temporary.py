"""The hidden files that a writer leaves behind when it is stopped, and how old they are."""

# System calls on plain strings, as in the rest of the file store.
# ruff: noqa: PTH108

from __future__ import annotations

import os
from collections.abc import Iterator

from ..errors import storage_error
from . import posix

__all__ = ["clock_s", "temporary_files"]


def temporary_files(folder: str) -> Iterator[tuple[str, float]]:
    """Yield path and time of change, in seconds since 1970, of each one below a folder."""
    try:
        with os.scandir(folder) as entries:
            known = list(entries)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, operation="list", path=folder) from error
    for entry in known:
        if entry.is_dir(follow_symlinks=False):
            yield from temporary_files(entry.path)
        elif entry.name.startswith(posix.TEMPORARY_PREFIX):
            try:
                yield entry.path, entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue  # its writer finished


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
