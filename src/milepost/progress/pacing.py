"""How often to save, found out while training goes on.

From what a save costs (see ``savecost.py``) follows the interval. It is the longest of

    the time to write a save                          never two at once
    cost / budget                                     saves take that share of the time
    sqrt(2 * cost * mean time between failures)       saves and lost work together cost the least

The last one is Young's formula. With a mean time between failures alone there is no budget; with
both, the budget is a limit. With neither, the budget is 1 %. Neither makes it longer than an hour:
what was measured may be wrong, and what is not saved may be lost.

The first save is made after a few batches, so that there is something to measure; the second soon
after it, because the first of a process says little. A run that goes on begins with what it knew.
When something is saved never changes what is trained.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UsageError
from .savecost import Ending, Estimate, SaveCosts
from .time import Time, TimeUnit

__all__ = ["Pacing", "make_pacing"]

_log = logging.getLogger("milepost")

DEFAULT_BUDGET = 0.01
"""The share of the time that saves may take, where nothing else is said."""

_FIRST_BATCHES = 10
_SOON = 0.1
"""The second save follows the first in this part of the interval that the first suggests."""

_STUCK_S = 30.0
_STUCK = 10.0
"""A save in flight for so many intervals, of at least so many seconds, is worth a warning."""

_LONGEST_S = 3600.0
"""No interval is longer, but for the time that writing takes."""

_SELDOM_S = 1800.0
"""So long without a save is worth a warning."""

_NEWS = 1.5
"""By which factor the interval must have changed to be told again."""


class Pacing:
    """Decides when the next save is due from what saves have cost.

    Args:
        clock: Returns the seconds of training, in this process and earlier ones.
        overhead_budget: Share of the time that saves may take; ``None``: 1 %, or no limit where a
            mean time between failures is given.
        mean_time_between_failures_s: How often something ends the training, in seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        overhead_budget: float | None = None,
        mean_time_between_failures_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._mean_time_between_failures_s = mean_time_between_failures_s
        is_bare = overhead_budget is None and mean_time_between_failures_s is None
        self._budget = DEFAULT_BUDGET if is_bare else overhead_budget
        self._costs = SaveCosts()
        self._anchor_s = 0.0
        self._heard: bool | None = None
        self._told_s: float | None = None
        self._stuck: Ending | None = None
        self._is_seldom_told = False

    def learn(self, record: Mapping[str, Any]) -> None:
        """Begin with what an earlier process knew: its :attr:`record`, as a checkpoint has it."""
        self._costs.learn(Estimate.of(record))

    def start(self) -> None:
        """Begin to count from now: the training begins, or goes on from a checkpoint."""
        self._anchor_s = self._clock()
        self._costs.start(self._anchor_s)
        self._heard = None

    def end_batch(self) -> None:
        """Take note of the end of a batch."""
        self._costs.end_batch(self._clock())

    def note_save(self, pending: Ending, *, stall_s: float | None) -> None:
        """Take note of a save that has just begun; see :meth:`SaveCosts.note_save`."""
        now_s = self._clock()
        began_s, due_s = now_s - (stall_s or 0.0), self.due_s
        if due_s is not None and due_s < began_s:
            # From when it was due, not from the end of the batch in which it became due: otherwise
            # every interval would be half a batch too long.
            self._anchor_s = max(due_s, began_s - self._costs.known.batch_s)
        else:
            self._anchor_s = began_s
        self._costs.note_save(pending, now_s=now_s, stall_s=stall_s)
        if (self.interval_s or 0.0) <= _SELDOM_S:
            self._is_seldom_told = False

    def is_due(self) -> bool:
        """Return whether a save is due now; of several ranks what the leader has said."""
        return self.look() if self._heard is None else self._heard

    def look(self) -> bool:
        """Return whether a save is due, by this process's own clock."""
        in_flight_s, due_s = self._costs.in_flight_s(self._clock()), self.due_s
        if in_flight_s is not None:
            self._warn_if_stuck(in_flight_s)
            return False
        since_s = self._clock() - self._anchor_s
        if due_s is None:
            return self._costs.num_batches >= _FIRST_BATCHES or since_s >= _LONGEST_S
        if self._costs.wants_pause and since_s < _LONGEST_S:
            return False
        self._warn_if_seldom(since_s)
        return self._clock() >= due_s

    def _warn_if_stuck(self, in_flight_s: float) -> None:
        """Say that a save does not end: the training that goes on is not saved meanwhile."""
        pending, usual_s = self._costs.pending, max(self.interval_s or 0.0, _STUCK_S)
        if pending is not None and pending is not self._stuck and in_flight_s > _STUCK * usual_s:
            self._stuck = pending
            _log.warning(
                "The save of %s is on its way for %s already; nothing is saved before it ends.",
                pending.name,
                _span(in_flight_s),
            )

    def _warn_if_seldom(self, since_s: float) -> None:
        """Say that nothing is saved for long because saves are dear: that may not be meant."""
        wanted_s = self._wanted_s or 0.0
        if since_s >= _SELDOM_S and since_s < wanted_s and not self._is_seldom_told:
            self._is_seldom_told = True
            _log.warning(
                "Nothing was saved for %s, and nothing will be for another %s: saves come %s. "
                'To save more often, let a time stand beside it, such as ["auto", "15m"].',
                _span(since_s),
                _span(wanted_s - since_s),
                self.why,
            )

    def hear(self, *, is_due: bool) -> None:
        """Take over what the leader of several ranks has decided for this batch."""
        self._heard = is_due

    @property
    def due_s(self) -> float | None:
        """Return when the next save is due, by the clock; ``None``: nothing is known yet."""
        wanted_s = self._wanted_s
        return None if wanted_s is None else self._anchor_s + wanted_s

    @property
    def interval_s(self) -> float | None:
        """Return the present interval; ``None``: nothing is known yet."""
        wanted_s = self._wanted_s
        return None if wanted_s is None else max(wanted_s, self._costs.known.write_s)

    @property
    def _wanted_s(self) -> float | None:
        """Return the interval but for the time that writing takes, which is waited for."""
        cost_s = self._costs.known.cost_s
        if cost_s is None:
            return None
        wanted_s = max(self._by_budget_s(cost_s), self._by_failures_s(cost_s))
        return min(wanted_s * _SOON if self._costs.known.is_first else wanted_s, _LONGEST_S)

    def _by_budget_s(self, cost_s: float) -> float:
        return 0.0 if self._budget is None else cost_s / self._budget

    def _by_failures_s(self, cost_s: float) -> float:
        mean_s = self._mean_time_between_failures_s
        return 0.0 if mean_s is None else math.sqrt(2.0 * cost_s * mean_s)

    @property
    def record(self) -> dict[str, Any]:
        """Return what a checkpoint says about the interval: what was known, and what followed."""
        known = self._costs.known
        return {
            "every": "auto",
            "why": self.why,
            "interval_s": self.interval_s,
            # What only the first save of a process has told is not worth learning from.
            "stall_s": None if known.is_first else known.stall_s,
            "slowdown_s": known.slowdown_s,
            "write_s": known.write_s,
            "batch_s": known.batch_s,
            "overhead_budget": self._budget,
            "mean_time_between_failures_s": self._mean_time_between_failures_s,
        }

    @property
    def why(self) -> str:
        """Return the interval and where it comes from, in words."""
        known, interval_s = self._costs.known, self.interval_s
        cost_s, mean_s = known.cost_s, self._mean_time_between_failures_s
        if cost_s is None or interval_s is None:
            return f"after {_FIRST_BATCHES} batches, to measure what a save costs"
        if known.is_first:
            return f"after {_span(interval_s)}, to measure again: the first save is a slow one"
        cost = f"a save costs {_span(cost_s)}"
        if known.slowdown_s:
            cost += f", {_span(known.slowdown_s)} of it in slower batches"
        if interval_s <= known.batch_s * 1.01:
            return f"after every batch: {cost}"
        every = f"every {_span(interval_s)}: {cost}"
        if interval_s <= known.write_s:
            return f"{every}, and it takes that long until the last one is written"
        if interval_s >= _LONGEST_S:
            return f"{every}, and the interval is never longer than that"
        if self._budget is not None and cost_s / self._budget >= self._by_failures_s(cost_s):
            return f"{every}, and saves may take {100 * self._budget:.3g} % of the time"
        assert mean_s is not None
        return f"{every}, and a failure is expected every {_span(mean_s)}"

    def news(self) -> str | None:
        """Return :attr:`why` if the interval has changed much since that was told last."""
        interval_s, told_s, known = self.interval_s, self._told_s, self._costs.known
        if interval_s is None or known.is_first:
            return None
        interval_s = max(interval_s, known.batch_s)
        if told_s is not None and told_s / _NEWS <= interval_s <= told_s * _NEWS:
            return None
        self._told_s = interval_s
        return self.why


def make_pacing(
    *,
    is_wanted: bool,
    option: str,
    clock: Callable[[], float],
    overhead_budget: float | None,
    mean_time_between_failures: str | Time | None,
) -> Pacing | None:
    """Return what decides when saves are due, if an interval leaves it open.

    Args:
        is_wanted: Whether one does.
        option: What the interval is called, for messages.
        clock: See :class:`Pacing`.
        overhead_budget: See :class:`Pacing`.
        mean_time_between_failures: A time such as ``"6h"``.

    Raises:
        UsageError: A budget or a time that makes no sense, or that nothing asks for.
    """
    given = {
        "overhead_budget": overhead_budget,
        "mean_time_between_failures": mean_time_between_failures,
    }
    named = [name for name, value in given.items() if value is not None]
    if not is_wanted:
        if named:
            raise UsageError(
                f"{named[0]}= says how often to save, and {option}= says it too.",
                hint=f'Leave it out, or use {option}="auto".',
            )
        return None
    if overhead_budget is not None and not _is_share(overhead_budget):
        raise UsageError(
            f"overhead_budget={overhead_budget!r} is no share of the time.",
            hint="Use a number above 0 and below 1: 0.01 for one percent.",
        )
    mean_s: float | None = None
    if mean_time_between_failures is not None:
        mean = Time.of(mean_time_between_failures)
        if mean.unit is not TimeUnit.SECOND or mean.value <= 0:
            raise UsageError(
                f"mean_time_between_failures={mean} is no time on a clock.",
                hint='Use text such as "6h" or "90sec".',
            )
        mean_s = float(mean.value)
    return Pacing(clock=clock, overhead_budget=overhead_budget, mean_time_between_failures_s=mean_s)


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1  # type: ignore[operator]


def _span(seconds: float) -> str:
    for span_s, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= span_s:
            return f"{seconds / span_s:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
