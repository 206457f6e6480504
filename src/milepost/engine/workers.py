"""Threads that take pieces of work from one queue; the caller is one of them.

An error of any of them is an end to the work of all: nobody takes another piece. What must not
happen any more once the caller has gone on, such as a write to the memory of a tensor, is done
under :meth:`Workers.touching`. After an error nobody gets in there, and the caller does not leave
before everybody is out. So it may leave threads behind that wait for a slow disk or service, as it
does when it is interrupted: they will touch nothing when that answers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Workers", "num_cores"]

_STILL_S = 60.0
"""How long an interrupted caller waits for those who are at it: at most a block each."""

_log = logging.getLogger("milepost")

Piece = TypeVar("Piece")


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class _Touching(AbstractContextManager[None]):
    """What :meth:`Workers.touching` returns: no generator, for there is one for each half MiB."""

    __slots__ = ("_workers",)

    def __init__(self, workers: Workers[Any]) -> None:
        self._workers = workers

    def __enter__(self) -> None:
        self._workers.begin()

    def __exit__(self, *error: object) -> None:
        self._workers.end()


class _StoppedError(Exception):
    """Another thread has failed, or the caller was interrupted. Nobody gets to see it."""


class Workers(Generic[Piece]):
    """Threads that do pieces of work.

    Args:
        name: What to call the threads.
        num_threads: How many there are at most, the caller among them.

    Attributes:
        is_still: Whether nobody touches anything any more, once ``run`` has ended.
    """

    def __init__(self, name: str, *, num_threads: int) -> None:
        self.is_still = True
        self._name = name
        self._num_threads = num_threads
        self._queue: SimpleQueue[Piece] = SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._touching: set[int] = set()
        self._changed = threading.Condition(self._lock)

    def put(self, piece: Piece) -> None:
        """Add a piece of work, before they begin."""
        self._queue.put(piece)

    def run(self, work: Callable[[Iterator[Piece]], None], *, at_most: int | None = None) -> None:
        """Do all pieces.

        Args:
            work: Called in each thread with the pieces that are this thread's.
            at_most: How many threads to use this time, if not all.

        Raises:
            BaseException: The first error of any thread, or an interrupt of the caller.
        """
        helpers = [
            threading.Thread(target=self._work, args=(work,), name=f"{self._name}-{n}")
            for n in range(1, min(at_most or self._num_threads, self._queue.qsize()))
        ]
        try:
            for helper in helpers:
                helper.start()
            self._work(work)
            for helper in helpers:
                if self._error is None or isinstance(self._error, Exception):
                    helper.join()
        except BaseException as error:
            self._fail(error)
            self._wait_until_still()
            raise
        if self._error is not None:
            self._wait_until_still()
            raise self._error

    def touching(self) -> AbstractContextManager[None]:
        """Do what must not happen after :meth:`run`; never begins after an error."""
        return _Touching(self)

    def begin(self) -> None:
        """Enter :meth:`touching`."""
        with self._lock:
            if self._error is not None:
                raise _StoppedError
            self._touching.add(threading.get_ident())

    def end(self) -> None:
        """Leave :meth:`touching`."""
        with self._lock:
            self._touching.discard(threading.get_ident())
            if self._error is not None:
                self._changed.notify_all()

    def _work(self, work: Callable[[Iterator[Piece]], None]) -> None:
        try:
            work(self._pieces())
        except BaseException as error:  # noqa: BLE001 - handed to run(), which raises it
            self._fail(error)

    def _pieces(self) -> Iterator[Piece]:
        while self._error is None:
            try:
                piece = self._queue.get_nowait()
            except Empty:
                return
            yield piece

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error

    def _wait_until_still(self) -> None:
        with self._changed:
            self._touching.discard(threading.get_ident())  # interrupted in the middle of it
            self.is_still = False
            self.is_still = self._changed.wait_for(lambda: not self._touching, timeout=_STILL_S)
        if not self.is_still:
            _log.error(
                "%d threads named %s were still at a block %.0f s after the work was broken off; "
                "the disk hangs. What they read into must not be used.",
                len(self._touching),
                self._name,
                _STILL_S,
            )
