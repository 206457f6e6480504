"""Records and other files that no commit vouches for, from one store to another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..copies.transfer import FileCopy, copy_files
from ..errors import MissingError
from ..stores.base import Entry
from .route import Route

__all__ = ["Other", "send_others"]

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
        found = _look(route, other) if there is None else there.get(other.new_key)
        if found is not None and not _may_differ(other.entry, found):
            return False
        return _send(route, other)

    if not others:
        return 0
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="milepost-copy") as pool:
        return sum(pool.map(send, others))


def _look(route: Route, other: Other) -> Entry | None:
    try:
        return route.target.head(other.new_key)
    except MissingError:
        return None


def _may_differ(entry: Entry, found: Entry) -> bool:
    return entry.size_bytes != found.size_bytes or entry.modified_s > found.modified_s


def _send(route: Route, other: Other) -> bool:
    """Send a file as it is now; return ``False`` if it is gone."""
    key, size_bytes = other.entry.key, other.entry.size_bytes
    try:
        if size_bytes <= _SMALL_BYTES:
            # A file that grows meanwhile is sent as far as it is read.
            route.target.put(other.new_key, route.source.get(key))
            return True
        size_bytes = route.source.head(key).size_bytes
        route.target.delete(other.new_key)
        copy_files(route.source, route.target, [FileCopy(key, other.new_key, size_bytes)])
    except MissingError:
        return False
    return True
