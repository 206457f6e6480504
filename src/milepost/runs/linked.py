"""Checkpoints that were moved away, with a symbolic link left in their place.

Links are not followed: what they lead to can vanish with a disk that is not mounted, and deleting
through one would delete elsewhere. So such a checkpoint does not count, and that is said once.
"""

from __future__ import annotations

import logging
import os
from threading import Lock

from ..errors import UsageError
from ..format.layout import LATEST, RUN, check_name
from ..stores.base import Store
from .folders import NOT_CHECKPOINTS

__all__ = ["warn_of_links"]

_log = logging.getLogger("milepost")
_told: set[str] = set()
_lock = Lock()


def warn_of_links(store: Store) -> None:
    """Warn of the links in a run whose names could be those of checkpoints, of each once.

    What they lead to is not looked at: it may be a mount that does not answer.

    Args:
        store: The run's store. Nothing is done where it keeps no files.
    """
    path = store.local_path(RUN)
    if path is None:
        return
    folder = os.path.dirname(path)  # noqa: PTH120 - a string is all that is needed
    try:
        with os.scandir(folder) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink())
    except OSError:
        return  # whoever lists the run is told
    for name in links:
        if name in NOT_CHECKPOINTS or name == LATEST or not _may_name(name):
            continue
        link = f"{folder}/{name}"
        with _lock:
            is_new = link not in _told
            _told.add(link)
        if is_new:
            _log.warning(
                "%s is a symbolic link, and links are not followed: if it leads to a checkpoint, "
                "that does not count in this run. Put the folder itself back in its place.",
                link,
            )


def _may_name(name: str) -> bool:
    try:
        check_name(name)
    except UsageError:
        return False
    return True
