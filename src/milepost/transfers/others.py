"""Records and other files that no commit vouches for, from one store to another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..copies.transfer import FileCopy, copy_files
from ..errors import MissingError, StorageError
from ..stores.base import Entry, NamingStrangers, Store
from .route import Route

__all__ = ["Other", "misnamed", "send_others"]

_SMALL_BYTES = 8 * 1024 * 1024
_NUM_THREADS = 8


@dataclass(frozen=True, slots=True)
class Other:
    """A file.

    Attributes:
        entry: What the source shows of it.
        new_key: Its key in the target.
    """

    entry: Entry
    new_key: str


def misnamed(source: Store, folder: str = "") -> dict[str, str]:
    """Return what in a folder is not sent since not every place takes its name, and that reason."""
    names = source.strangers(folder) if isinstance(source, NamingStrangers) else []
    start = len(folder) + 1 if folder else 0
    return {name[start:]: "its name has characters that not every place takes" for name in names}


def send_others(
    route: Route, others: Sequence[Other], there: dict[str, Entry] | None = None
) -> int:
    """Send files that are not there, have another size, or are newer than what is there.

    Args:
        route: Where from, and where to.
        others: The files.
        there: What the target is known to hold, by key; by default it is asked for each.

    Returns:
        How many were sent.
    """

    def send(other: Other) -> bool:
        found = _look(route, other.new_key) if there is None else there.get(other.new_key)
        if found is None or _may_differ(other.entry, found):
            return _send(route, other)
        if there is not None and _beside(other.new_key) in there:
            route.target.delete(_beside(other.new_key))
        return False

    if not others:
        return 0
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="milepost-copy") as pool:
        return sum(pool.map(send, others))


def _look(route: Route, key: str) -> Entry | None:
    try:
        return route.target.head(key)
    except MissingError:
        return None


def _may_differ(entry: Entry, found: Entry) -> bool:
    return entry.size_bytes != found.size_bytes or entry.modified_s > found.modified_s


def _beside(new_key: str) -> str:
    return f"{new_key}.milepost-new"


def _send(route: Route, other: Other) -> bool:
    """Send a file as it is now; return ``False`` if it is gone."""
    key = other.entry.key
    try:
        if other.entry.size_bytes <= _SMALL_BYTES:
            # A file that grows meanwhile is sent as far as it is read.
            route.target.put(other.new_key, route.source.get(key))
        else:
            _send_large(route, FileCopy(key, other.new_key, route.source.head(key).size_bytes))
    except MissingError:
        return False
    return True


def _send_large(route: Route, file: FileCopy) -> None:
    """Send a file that stores do not replace in one step; at every moment one copy there is whole.

    The new one comes beside the old one, which goes only then. If the old one is not there, but one
    beside it is, then a try was stopped in between, and that one is whole: it goes last.
    """
    target, new = route.target, file.new_key
    beside = _beside(new)
    if _look(route, new) is None:
        copy_files(route.source, target, [file])
        target.delete(beside)
        return
    target.delete(beside)  # a try was stopped while it was sent
    copy_files(route.source, target, [FileCopy(file.key, beside, file.size_bytes)])
    target.delete(new)
    try:
        target.link(beside, new)
    except StorageError:  # too large for the service to copy
        copy_files(target, target, [FileCopy(beside, new, file.size_bytes)])
    target.sync_folder(new.rpartition("/")[0])
    target.delete(beside)
