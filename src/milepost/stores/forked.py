"""Clients in forked children: they stay as they are, and are never dropped.

A forked child has the memory of its parent, but not its threads. A client of obstore is served by
threads, and to drop one takes locks. Where one of those threads held such a lock at the moment of
the fork, the child waits for it for ever, or ends with a segmentation fault. Nobody has to touch
the client for that: it is enough that the child collects garbage that the parent had not collected
yet. Workers of a loader are such children, and they begin while saves are uploaded.

So each client that is there at the moment of a fork is held once more in the child, for good.

New clients are of no use in such a child either: all are served by the same threads, which begin
with the first request of a process and are not there in the child, so that a request would wait for
ever. A child of a process that has sent none may begin them itself.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from ..errors import UsageError

__all__ = ["hold_in_children", "note_request", "refuse_without_threads"]

# A plain dict: to copy it, to add and to remove is one step each, whatever other threads do.
_alive: dict[int, weakref.ref[Any]] = {}
_held: list[Any] = []


class _Threads:
    """What is known of the threads that serve clients.

    Attributes:
        have_begun: Whether they have, here or in a process that this one was forked from.
        are_lost: Whether they had begun before the fork, so that they are not here.
    """

    have_begun = False
    are_lost = False


def hold_in_children(client: object) -> None:
    """Keep a client from being dropped in forked children."""
    number = id(client)
    _alive[number] = weakref.ref(client, lambda _: _alive.pop(number, None))


def note_request() -> None:
    """Say that a request is about to be sent: the threads of the clients begin with it."""
    _Threads.have_begun = True


def refuse_without_threads(url: str) -> None:
    """Refuse to make a client in a child of a process whose clients had begun their threads."""
    if _Threads.are_lost:
        raise UsageError(
            f"{url} cannot be opened here: this process was forked from one that had talked to "
            "a bucket.",
            hint="Start the process with spawn, and open the store there.",
            path=url,
        )


def _hold() -> None:
    """Refer to everything, so that nothing of it is garbage when the child begins."""
    found = (reference() for reference in _alive.copy().values())
    _held[:] = [client for client in found if client is not None]


def _let_go() -> None:
    _held.clear()


def _hold_for_good() -> None:
    """Count one reference more than there are, which outlives the end of the interpreter too."""
    _Threads.are_lost = _Threads.have_begun
    _hold()  # once more: other threads may have gone on between the first time and the fork
    for client in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_hold_for_good)
