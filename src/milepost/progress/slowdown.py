"""How much longer batches take while a save is written.

Batches with a save in flight are compared with batches of the same time: those without a save among
the last ones before it began, and, as soon as there are enough, those after it. The slower of the
two counts, so that batches that change their pace for a reason of their own, in the middle of a
save, do not look like slow ones. What a save shows is the difference. A long save speaks for
itself, and is forgotten if the next one came before it could be compared with what followed; the
differences of short ones are put together. Medians are compared, so that an evaluation between two
batches, or a batch that waits for data, counts for nothing, and so does what can be chance.

Where saves follow each other without a pause there is nothing to compare with: then nothing new is
known, and after many batches a short pause is wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

__all__ = ["Slowdown"]

_KEPT_BATCHES = 256
_RECENT = 64
_FEWEST_FREE = 8
_FEWEST_BUSY = 2

_LONG = 32
"""A save of so many batches speaks for itself."""

_MOST_BLIND = 1024
"""After so many batches without a comparison, saves pause for a few."""

_CHANCE_ERRORS = 2.0
_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = 1.2533
"""Standard error of a median, in those of a mean, if errors are normal; and the deviation."""


class Slowdown:
    """Compares batches with a save in flight with others of the same time."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_RECENT)
        self._before: list[float] = []
        self._after: deque[float] = deque(maxlen=_RECENT)
        self._busy: deque[float] = deque(maxlen=_KEPT_BATCHES)
        self._free_excess: deque[float] = deque(maxlen=_KEPT_BATCHES)
        self._busy_excess: deque[float] = deque(maxlen=_KEPT_BATCHES)
        self._num_free = self._num_blind = 0

    def add_batch(self, took_s: float, *, is_busy: bool) -> None:
        """Take note of a batch.

        Args:
            took_s: How long it took.
            is_busy: Whether a save was in flight.
        """
        self._recent.append((took_s, is_busy))
        if is_busy:
            self._busy.append(took_s)
            self._num_blind += 1
        else:
            self._after.append(took_s)
            self._num_free += 1

    def begin_save(self) -> None:
        """Take note that a save begins, and keep what the one before has shown."""
        if len(self._busy) < _LONG or len(self._after) >= _FEWEST_FREE:
            free, busy = self._excess()
            self._free_excess.extend(free)
            self._busy_excess.extend(busy)
        self._before = [took_s for took_s, is_busy in self._recent if not is_busy]
        if len(self._before) >= _FEWEST_FREE:
            self._num_blind = 0
        self._num_free = 0
        self._after.clear()
        self._busy.clear()

    @property
    def has_news(self) -> bool:
        """Return whether there are so many more batches after the save that it is worth a look."""
        num = self._num_free
        return num >= _FEWEST_FREE and num & (num - 1) == 0

    @property
    def wants_pause(self) -> bool:
        """Return whether the next save should wait for a few batches, to compare with."""
        return self._num_blind >= _MOST_BLIND and self._num_free < _FEWEST_FREE

    @property
    def batch_s(self) -> float | None:
        """Return how long a batch takes, without a save if possible; ``None``: not known."""
        free = [took_s for took_s, is_busy in self._recent if not is_busy]
        batches = free or [took_s for took_s, _ in self._recent]
        return median(batches) if batches else None

    def longer_s(self) -> float | None:
        """Return how much longer a batch takes while a save is written; ``None``: not known."""
        free, busy = self._excess()
        if len(busy) < _LONG:
            free, busy = [*self._free_excess, *free], [*self._busy_excess, *busy]
        if len(free) < _FEWEST_FREE or len(busy) < _FEWEST_BUSY:
            return None
        spread_s = _MAD_TO_SIGMA * _deviation(free)
        error_s = _MEDIAN_ERROR * spread_s * math.sqrt(1 / len(free) + 1 / len(busy))
        longer_s = median(busy)
        return longer_s if longer_s > _CHANCE_ERRORS * error_s else 0.0

    def _excess(self) -> tuple[Collection[float], Collection[float]]:
        """Return by how much batches before and in the last save are longer than is usual."""
        if len(self._before) < _FEWEST_FREE:
            return (), ()
        usual_s = median(self._before)
        if len(self._after) >= _FEWEST_FREE:
            usual_s = max(usual_s, median(self._after))
        return [one - usual_s for one in self._before], [one - usual_s for one in self._busy]


def _deviation(values: Collection[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)
