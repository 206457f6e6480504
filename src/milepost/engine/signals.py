"""SIGTERM and SIGUSR1: asked to end, soon.

A handler only notes the signal and the moment; the training loop looks at it between two batches,
when the state is whole. A handler that was installed before is still called. When the grace period
is over and nobody has acted, the next signal ends the process as if nobody watched.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..options import check_seconds

__all__ = ["StopSignals", "asked_to_end"]

_WATCHED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopSignals:
    """Notes the first request to end.

    Args:
        grace_s: Seconds between the signal and the moment the process has to be gone; infinity for
            no limit.
        clock: Returns seconds that never go back.
    """

    def __init__(self, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        check_seconds("grace_s", grace_s, is_zero_fine=True)
        self.grace_s = min(grace_s, threading.TIMEOUT_MAX)
        self.received: int | None = None
        self.is_looked_at = False
        """Whether the loop has looked for signals: if not, nobody will act on one."""
        self._clock = clock
        self._at_s = 0.0
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    def install(self) -> None:
        """Begin to watch. Does nothing outside the main thread, where Python allows no handlers."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number in _WATCHED:
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Put back the handlers that were there before, unless somebody else replaced ours."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def end_heeded(self) -> None:
        """Let the process end as it was asked to: it is about to, and is not asked once more.

        A launcher that sees one worker end asks the others again. Handlers stay until then, and the
        interpreter takes them away a moment before the process is gone: a request in that moment is
        ignored.
        """
        if self._previous:
            atexit.register(_ignore, tuple(self._previous))

    @property
    def is_unheeded(self) -> bool:
        """Return whether a signal has come that nobody will act on."""
        return self.received is not None and not self.is_looked_at

    @property
    def seconds_left(self) -> float:
        """Return what is left of the grace period; the whole of it before any signal."""
        if self.received is None:
            return self.grace_s
        return max(0.0, self.grace_s - (self._clock() - self._at_s))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child has inherited this handler, and nobody there would look at the note.
            self._pass_on(number)
            return
        if self.received is not None and not self.seconds_left:
            self._pass_on(number)
            return
        if self.received is None:
            self.received, self._at_s = number, self._clock()
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _pass_on(self, number: int) -> None:
        signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
        os.kill(os.getpid(), number)


def asked_to_end(number: int, name: str) -> str:
    """Return what to tell of a process that a signal ended in order."""
    return f"Asked to end by {signal.Signals(number).name}; saved as {name}."


def _ignore(numbers: tuple[int, ...]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
