"""Folders for copies that nobody but this user can change."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError, storage_error

__all__ = ["private_folder"]


def private_folder(folder: Path, *, elsewhere: str) -> Path:
    """Return a folder of this user's alone, made if it is not there.

    Args:
        folder: The folder.
        elsewhere: Where another one can be named, for the message.

    Raises:
        UsageError: Somebody else could write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise storage_error(error, operation="create", path=str(folder)) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        raise UsageError(
            f"{folder} is not this user's alone: others could change what is read from it.",
            hint=f"Remove it, or name another folder {elsewhere}.",
            path=str(folder),
        )
    return folder
