"""A run that has come to its end: a record, so that starting it again is no accident.

``events/finished-00000003.json`` is written when session 3 ended well on every rank. The run is
finished as long as no newer session was opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import ExistsError, MissingError
from ..format.canonical import dump_record
from ..format.manifest import FORMAT_VERSION
from ..runs.sessions import list_sessions
from ..stores.base import Store

__all__ = ["is_finished", "mark_finished"]


def mark_finished(store: Store, session: int, *, clock: Callable[[], float] = time.time) -> None:
    """Note that a session has ended well."""
    fields = {"format": FORMAT_VERSION, "session": session, "created_s": clock()}
    try:
        store.put_new(_key(session), dump_record(fields))
    except ExistsError:
        return  # an answer that was lost


def is_finished(store: Store) -> bool:
    """Return whether the newest session of a run has ended well."""
    numbers = [session.number for session in list_sessions(store)]
    if not numbers:
        return False
    try:
        store.head(_key(max(numbers)))
    except MissingError:
        return False
    return True


def _key(session: int) -> str:
    return f"events/finished-{session:08d}.json"
