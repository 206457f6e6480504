"""What a save costs the training that goes on, measured from batch to batch.

    stall       how long training is held up when a save begins, and waits for it afterwards
    slowdown    how much longer the batches take, all together, while it is written

How the slowdown is told from chance is in ``slowdown.py``. A stall counts at most a few times what
stalls usually are. As long as there are so few that nobody can tell what is usual, the shortest
counts: to save too often for a while costs little, and one long stall would stop saves for hours.

The first save of a process takes memory that later ones use again, so it says little about them:
it is only one more of the few of which the shortest counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from .slowdown import Slowdown

__all__ = ["Ending", "Estimate", "SaveCosts"]

_COLD_BATCHES = 2
"""So many first batches are not measured: what is done for the first time takes longer."""

_KEPT_SAVES = 8
_FEWEST_SAVES = 3
"""With fewer there is no telling what is usual."""

_FEW = 2
"""If a save is in flight for so many batches, every second one is the first after it began."""

_MOST_OF_MEDIAN = 4.0


_LONGEST_S = 1e9
"""What takes longer is no record of a save."""


class Ending(Protocol):
    """A save on its way.

    Attributes:
        name: Name of the checkpoint.
        stats: What it has cost, once it has ended: ``barrier_s``, how long training has waited for
            it since it began; of several ranks ``slowest_blocking_s``, how long it has held up the
            one that it held up longest, this wait included.
    """

    name: str
    stats: Mapping[str, Any]

    def done(self) -> bool:
        """Return whether it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is known of saves, in seconds.

    Attributes:
        stall_s: How long one holds training up; ``None``: not known.
        slowdown_s: How much longer batches take while it is written.
        write_s: How long it is in flight.
        batch_s: How long a batch takes.
        is_first: Whether all that is known comes from the first save of a process.
    """

    stall_s: float | None = None
    slowdown_s: float = 0.0
    write_s: float = 0.0
    batch_s: float = 0.0
    is_first: bool = True

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Estimate:
        """Return what an earlier process knew; what is no number is left out."""
        names = ("stall_s", "slowdown_s", "write_s", "batch_s")
        found = {name: record[name] for name in names if _is_span(record.get(name))}
        return cls(**found, is_first="stall_s" not in found)

    @property
    def cost_s(self) -> float | None:
        """Return what a save costs, all together; ``None``: not known."""
        return None if self.stall_s is None else self.stall_s + self.slowdown_s


class SaveCosts:
    """Measures what saves cost. All times are given; nothing here has a clock.

    Attributes:
        known: What is known; it changes when a save begins or ends, and a few times afterwards.
        pending: The save in flight.
        num_batches: Batches since the start.
    """

    def __init__(self) -> None:
        self.known = Estimate()
        self.pending: Ending | None = None
        self.num_batches = 0
        self._learned = Estimate()
        self._first_stall_s: float | None = None
        self._stalls: deque[float] = deque(maxlen=_KEPT_SAVES)
        self._writes: deque[float] = deque(maxlen=_KEPT_SAVES)
        self._counts: deque[int] = deque(maxlen=_KEPT_SAVES)
        self._barriers: deque[float] = deque(maxlen=_KEPT_SAVES)
        self._slowdown = Slowdown()
        self._num_busy = 0
        self._is_first = self._is_usual = False
        self._began_s = self._saved_s = 0.0

    @property
    def wants_pause(self) -> bool:
        """Return whether the next save should wait for a few batches, to compare with."""
        return self.pending is None and self._slowdown.wants_pause

    def in_flight_s(self, now_s: float) -> float | None:
        """Return how long the save in flight has been so, if there is one."""
        return None if self.pending is None or self.pending.done() else now_s - self._saved_s

    def learn(self, known: Estimate) -> None:
        """Begin with what an earlier process knew, until there is something of one's own."""
        self._learned = known
        self._settle()

    def start(self, now_s: float) -> None:
        """Begin to count batches from now."""
        self._began_s, self.num_batches = now_s, 0
        self.pending, self._num_busy = None, 0

    def end_batch(self, now_s: float) -> None:
        """Take note of the end of a batch."""
        took_s, self._began_s = now_s - self._began_s, now_s
        self.num_batches += 1
        if self.pending is not None:
            self._num_busy += 1
            self._slowdown.add_batch(took_s, is_busy=True)
            if self.pending.done():
                self._end_save(now_s)
        elif self.num_batches > _COLD_BATCHES:
            self._slowdown.add_batch(took_s, is_busy=False)
            if self._slowdown.has_news:
                self._settle()

    def note_save(self, pending: Ending, *, now_s: float, stall_s: float | None) -> None:
        """Take note of a save that has just begun.

        Args:
            pending: The save on its way.
            now_s: The present.
            stall_s: How long training was held up; ``None`` for a save that is none of the usual
                ones, such as one that was waited for.
        """
        if self.pending is not None:
            self._end_save(now_s)
        self._slowdown.begin_save()
        self._is_first = self._first_stall_s is None and stall_s is not None
        self._is_usual = self._first_stall_s is not None and stall_s is not None
        if self._first_stall_s is None:
            self._first_stall_s = stall_s or 0.0
        elif stall_s is not None:
            self._stalls.append(stall_s)
        self.pending, self._num_busy = pending, 0
        self._saved_s = self._began_s = now_s
        self._settle()

    def _end_save(self, now_s: float) -> None:
        assert self.pending is not None
        if (self._is_first or self._is_usual) and self.pending.done():
            stats = self.pending.stats
            barrier_s = stats.get("barrier_s", 0.0)
            # Ranks train in step: all of them wait for the one that was held up longest.
            slowest_s = stats.get("slowest_blocking_s", 0.0)
            if self._is_usual:
                self._barriers.append(barrier_s)
                self._stalls[-1] = max(self._stalls[-1] + barrier_s, slowest_s)
            else:
                assert self._first_stall_s is not None
                self._first_stall_s = max(self._first_stall_s + barrier_s, slowest_s)
        self._writes.append(now_s - self._saved_s)
        self._counts.append(self._num_busy)
        self.pending = None
        self._settle()

    def _settle(self) -> None:
        learned = self._learned
        stall_s, is_first = learned.stall_s, learned.is_first
        if self._stalls:
            # A first save that was waited for has left a zero, which says nothing.
            few = [self._first_stall_s] if self._first_stall_s else []
            stall_s, is_first = _usual(self._stalls, few=few), False
        elif stall_s is None:
            stall_s = self._first_stall_s
        batch_s = self._slowdown.batch_s
        self.known = Estimate(
            stall_s=stall_s,
            slowdown_s=self._slowdown_s(),
            write_s=_usual(self._writes) if self._writes else learned.write_s,
            batch_s=learned.batch_s if batch_s is None else batch_s,
            is_first=is_first,
        )

    def _slowdown_s(self) -> float:
        longer_s = self._slowdown.longer_s()
        if longer_s is None or not self._counts:
            return self._learned.slowdown_s
        num_busy = _usual(self._counts)
        if num_busy <= _FEW and self._barriers:
            # Then the median is of batches that have waited, and the wait is counted already.
            return max(0.0, longer_s * num_busy - _usual(self._barriers))
        return longer_s * num_busy


def _is_span(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LONGEST_S  # type: ignore[operator]


def _usual(values: Sequence[float], *, few: Sequence[float] = ()) -> float:
    """Return the mean, in which no value counts more than a few times the median.

    Args:
        values: At least one.
        few: More of them, as long as there are too few for a median; then the least is returned.
    """
    if len(values) < _FEWEST_SAVES:
        return min(*values, *few, math.inf)
    most = _MOST_OF_MEDIAN * median(values)
    return sum(min(value, most) for value in values) / len(values)
