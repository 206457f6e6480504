"""A run that has come to its end: a record, so that starting it again is no accident.

``events/finished-00000003.json`` is written when session 3 ended well on every rank. The run is
finished as long as no newer session was opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..errors import ExistsError, MissingError
from ..format import tree
from ..format.canonical import dump_record, load_record
from ..format.manifest import FORMAT_VERSION
from ..runs.sessions import list_sessions
from ..stores.base import Store

__all__ = ["is_finished", "mark_finished", "returned_by"]

_MAX_RECORD_BYTES = 64 * 1024 * 1024


def mark_finished(
    store: Store, session: int, value: Any = None, *, clock: Callable[[], float] = time.time
) -> None:
    """Note that a session has ended well.

    Args:
        store: The run's store.
        session: Number of the session.
        value: What the training returned; something that JSON can hold.
        clock: Returns the seconds since 1970.
    """
    fields = {
        "format": FORMAT_VERSION,
        "session": session,
        "created_s": clock(),
        "return_value": tree.encode(value, path=("return_value",)),
    }
    try:
        store.put_new(_key(session), dump_record(fields))
    except ExistsError:
        return  # an answer that was lost


def is_finished(store: Store) -> bool:
    """Return whether the newest session of a run has ended well."""
    return _find(store) is not None


def returned_by(store: Store) -> Any:
    """Return what the training of a finished run returned; ``None`` if it is not finished."""
    key = _find(store)
    if key is None:
        return None
    fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    return tree.decode(fields.get("return_value"))


def _find(store: Store) -> str | None:
    numbers = [session.number for session in list_sessions(store)]
    if not numbers:
        return None
    key = _key(max(numbers))
    try:
        store.head(key)
    except MissingError:
        return None
    return key


def _key(session: int) -> str:
    return f"events/finished-{session:08d}.json"
