"""Signals to the launcher: noted, and put where its loop waits."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from .engine import Asked, Events

__all__ = ["LauncherSignals"]

_WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1")


class LauncherSignals:
    """Takes SIGTERM, SIGINT and SIGUSR1 while it is entered; the handlers before come back.

    Does nothing outside the main thread, where Python allows no handlers. A signal that is ignored,
    as SIGINT is in a background job of a shell, stays ignored.

    Args:
        events: Where each signal is put.
    """

    def __init__(self, events: Events) -> None:
        self.received: int | None = None
        """The first signal."""
        self._events = events
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> LauncherSignals:  # noqa: PYI034 - Self is younger than 3.10
        if threading.current_thread() is not threading.main_thread():
            return self
        for name in _WATCHED:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # The kernel would reap the workers, and nobody could tell how they ended.
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is None:
            self.received = number
        self._events.put(Asked(number))  # may be called in the middle of a get
