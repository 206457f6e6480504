"""How fast requests to one bucket may follow each other, for all threads of this process.

A service that says "slow down" means everybody. Whoever hears it first makes room for all: requests
then start one after the other, with a gap that doubles with each refusal and shrinks with each
answer, until there is none. Gaps vary by chance, so that processes which were refused together do
not come back together.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import final
from weakref import WeakValueDictionary

__all__ = ["Pace", "pace_of"]

_FIRST_GAP_S = 0.02
_LONGEST_GAP_S = 0.1
"""Services refuse thousands of requests a second; ten from each process of a large job are few."""

_SHRINKS_TO = 0.8
_RANDOM = secrets.SystemRandom()
"""Never the generators of the training, whose state is saved."""

_lock = threading.Lock()
_paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()


@final
class Pace:
    """Lets requests start at once, or with gaps after a refusal.

    Args:
        clock: Returns seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self._lock = threading.Lock()
        self._gap_s = 0.0
        self._next_s = 0.0
        self._deaf_until_s = 0.0

    @property
    def gap_s(self) -> float:
        """Return the mean time between two requests; 0 is no limit."""
        return self._gap_s

    def wait(self, deadline_s: float) -> None:
        """Wait until the next request may start, by the clock's ``deadline_s`` at the latest."""
        if self._gap_s == 0:  # without the lock: the common case
            return
        with self._lock:
            now_s = self.clock()
            start_s = max(now_s, self._next_s)
            self._next_s = start_s + varied(self._gap_s)
        pause_s = min(start_s, deadline_s) - now_s
        if pause_s > 0:
            self.sleep(pause_s)

    def slow_down(self) -> None:
        """Take note of a refusal. Those of requests that had already started count as one."""
        with self._lock:
            now_s = self.clock()
            if now_s < self._deaf_until_s:
                return
            self._gap_s = min(max(2 * self._gap_s, _FIRST_GAP_S), _LONGEST_GAP_S)
            self._deaf_until_s = now_s + self._gap_s
            self._next_s = max(self._next_s, now_s + varied(self._gap_s))

    def speed_up(self) -> None:
        """Take note of an answer."""
        if self._gap_s == 0:
            return
        with self._lock:
            gap_s = self._gap_s * _SHRINKS_TO
            self._gap_s = gap_s if gap_s > _FIRST_GAP_S / 2 else 0.0


def varied(mean_s: float) -> float:
    """Return a time of about ``mean_s``, drawn by chance."""
    return mean_s * _RANDOM.uniform(0.5, 1.5)


def pace_of(place: str) -> Pace:
    """Return the pace of a bucket, the same for everybody in this process who holds it."""
    with _lock:
        pace = _paces.get(place)
        if pace is None:
            pace = _paces[place] = Pace()
        return pace
