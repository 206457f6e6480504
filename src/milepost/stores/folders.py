"""What is in the folders of a file store: the names that may be keys, and nothing else.

Names that could not be keys are not ours and are left out, and so are unfinished files. Symbolic
links are neither keys nor followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..errors import storage_error
from ..format.layout import is_key
from . import posix

__all__ = ["Entries", "holds_key", "is_folder", "scan_folder", "strangers"]

Entries = list[tuple[str, os.DirEntry[str]]]


def scan_folder(root: str, folder: str) -> Entries:
    """Return what may be, or hold, keys in a folder, in the order of the keys below it.

    Args:
        root: The folder of the store.
        folder: Relative to it; empty for the store's own.
    """
    path, before = (f"{root}/{folder}", f"{folder}/") if folder else (root, "")
    try:
        with os.scandir(path) as entries:
            known = [(e.name, e) for e in entries if _is_key(before + e.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, operation="list", path=path) from error
    return sorted(known, key=lambda pair: pair[0] + "/" * is_folder(pair[1]))


def holds_key(root: str, folder: str) -> bool:
    """Return whether there is a key below a folder, as soon as one is seen.

    A folder that must not be read counts as one that holds keys: who asks for one of them is then
    told that access was refused, and who does not is not hindered by a stranger's folder.
    """
    path, below = f"{root}/{folder}", []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not _is_key(f"{folder}/{entry.name}"):
                    continue
                if entry.is_file(follow_symlinks=False):
                    return True
                if is_folder(entry):
                    below.append(f"{folder}/{entry.name}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        return True
    except OSError as error:
        raise storage_error(error, operation="list", path=path) from error
    return any(holds_key(root, one) for one in below)


def strangers(root: str, folder: str) -> Iterator[str]:
    """Yield what :func:`scan_folder` leaves out below a folder because of its name.

    Of a folder with such a name only that is told, with a slash at its end.
    """
    path, before = (f"{root}/{folder}", f"{folder}/") if folder else (root, "")
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise storage_error(error, operation="list", path=path) from error
    for entry in found:
        key = before + entry.name
        if entry.is_symlink() or entry.name.startswith(posix.TEMPORARY_PREFIX):
            continue
        if not is_key(key):
            yield os.fsencode(key).decode(errors="backslashreplace") + "/" * is_folder(entry)
        elif is_folder(entry):
            yield from strangers(root, key)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder itself, and not a link to one."""
    return entry.is_dir(follow_symlinks=False)


def _is_key(key: str) -> bool:
    if key.rpartition("/")[2].startswith(posix.TEMPORARY_PREFIX):
        return False
    return is_key(key)
