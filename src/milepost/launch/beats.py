"""Which worker has stopped beating, and when to look again.

The moment of a beat is when its file was written. That is a time of the wall clock, which may jump;
so a beat is taken to be no older than the last look that found another one. A clock that jumps can
delay the discovery of a hang by one timeout, and never causes a false one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["Beats"]


class Beats:
    """Watches the beats of one attempt.

    Args:
        folder: The attempt's folder.
        timeout_s: Seconds without a beat that make a hang; ``None``: it never is one.
        clock: Seconds that never go back.
        wall: Seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall = wall
        self._looked_s = clock()
        self._written_ns: dict[int, int] = {}
        self._beat_s: dict[int, float] = {}

    def overdue(self, ranks: Iterable[int]) -> dict[int, float]:
        """Look, and return the ranks that hang with the seconds since their last beat.

        A rank that has never beaten does not hang: it may still be starting.
        """
        if self._timeout_s is None:
            return {}
        now_s = self._clock()
        for rank in ranks:
            self._look(rank, now_s)
        self._looked_s = now_s
        ages = {rank: now_s - self._beat_s[rank] for rank in ranks if rank in self._beat_s}
        return {rank: age_s for rank, age_s in ages.items() if age_s >= self._timeout_s}

    def next_look_s(self, ranks: Iterable[int]) -> float | None:
        """Return when, on the clock, a rank may first be overdue; ``None``: never."""
        if self._timeout_s is None:
            return None
        known = [self._beat_s.get(rank, self._looked_s) for rank in ranks]
        return min(known, default=self._looked_s) + self._timeout_s

    def _look(self, rank: int, now_s: float) -> None:
        try:
            written_ns = (self._folder / f"rank-{rank}.beat").stat().st_mtime_ns
        except FileNotFoundError:
            return
        if self._written_ns.get(rank) != written_ns:
            self._written_ns[rank] = written_ns
            age_s = self._wall() - written_ns / 1e9
            self._beat_s[rank] = max(self._looked_s, now_s - max(0.0, age_s))
