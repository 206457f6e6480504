"""Saves that are due by the clock, on all ranks at one step.

Each rank has a clock of its own, so that of the leader decides. The others learn of it off the hot
path, and all agree on the step, see ``steps.py``: that is one or two steps after the clock has come
to it, and at most a fifth of a second later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..naming import natural_name
from ..progress.schedule import Schedule
from .solo import Team
from .steps import StepTogether

__all__ = ["TimedTogether"]


class TimedTogether:
    """Says when a save is due by the clock.

    Args:
        team: The ranks.
        schedule: Intervals of time.
        clock: Returns seconds that never go back, by which the others look for what was decided.
    """

    def __init__(
        self, team: Team, schedule: Schedule, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._team = team
        self._schedule = schedule
        self._clock = clock
        self._num_steps = 0
        self._num_decided = 0
        self._next = self._new()

    def start(self, counters: Mapping[str, Any]) -> None:
        """Count intervals from here."""
        self._schedule.start(counters)

    def look(self, counters: Mapping[str, Any]) -> str | None:
        """Return the name of the save that is due now, or ``None``. Every rank asks in each batch.

        Args:
            counters: The timer's snapshot. That of the leader says how late it is.
        """
        # Steps are counted here: the batches of a training that is rolled back begin anew.
        self._num_steps += 1
        if self._team.rank == 0 and self._next.decision is None:
            due = self._schedule.due("batch", counters)
            if due is not None:
                self._next.decide(due.name)
        name = self._next.look(self._num_steps)
        if name is not None:
            self._num_decided += 1
            self._next = self._new()
            if name.startswith("ba"):
                return natural_name(counters)  # by the batch after which it is saved
        return name

    def _new(self) -> StepTogether:
        return StepTogether(self._team, f"timed-{self._num_decided}", clock=self._clock)
