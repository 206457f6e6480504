"""Which worker has stopped beating, and when to look again.

The moment of a beat is when its file was written. That is a time of the wall clock, which may jump;
so a beat is taken to be no older than the last look that found another one. A clock that jumps can
delay the discovery of a hang by one timeout, and never causes a false one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

__all__ = ["Beats"]


class Beats:
    """Watches the beats of one attempt.

    Args:
        folder: The attempt's folder.
        timeout_s: Seconds without a beat that make a hang; ``None``: it never is one.
        start_timeout_s: The same for the first beat, counted from now.
        clock: Seconds that never go back.
        wall: Seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float | None,
        start_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._wall = wall
        self._started_s = self._looked_s = clock()
        self._written_ns: dict[int, int] = {}
        self._beat_s: dict[int, float] = {}

    def overdue(self, ranks: Collection[int]) -> dict[int, float]:
        """Look, and return the ranks that hang with the seconds since their last beat.

        For a rank that has never beaten they are counted from the start.
        """
        if self._timeout_s is None and self._start_timeout_s is None:
            return {}
        now_s = self._clock()
        for rank in ranks:
            self._look(rank, now_s)
        self._looked_s = now_s
        late = {}
        for rank in ranks:
            since_s, due_s = self._due(rank)
            if due_s is not None and now_s >= due_s:
                late[rank] = now_s - since_s
        return late

    def has_beaten(self, rank: int) -> bool:
        """Return whether a rank had beaten when it was last looked at."""
        return rank in self._beat_s

    def next_look_s(self, ranks: Collection[int]) -> float | None:
        """Return when, on the clock, a rank may first be overdue; ``None``: never."""
        due = [self._due(rank)[1] for rank in ranks]
        if self._timeout_s is not None:
            # One that has not beaten yet may have begun to right after the last look.
            due += [self._looked_s + self._timeout_s for rank in ranks if rank not in self._beat_s]
        return min((one for one in due if one is not None), default=None)

    def _due(self, rank: int) -> tuple[float, float | None]:
        """Return since when a rank is waited for, and when it is overdue if nothing comes."""
        since_s, limit_s = self._started_s, self._start_timeout_s
        if rank in self._beat_s:
            since_s, limit_s = self._beat_s[rank], self._timeout_s
        return since_s, None if limit_s is None else since_s + limit_s

    def _look(self, rank: int, now_s: float) -> None:
        try:
            written_ns = (self._folder / f"rank-{rank}.beat").stat().st_mtime_ns
        except FileNotFoundError:
            return
        if self._written_ns.get(rank) != written_ns:
            self._written_ns[rank] = written_ns
            age_s = self._wall() - written_ns / 1e9
            self._beat_s[rank] = max(self._looked_s, now_s - max(0.0, age_s))
