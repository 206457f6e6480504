"""One rank decides, and all ranks act on it at one step, off the hot path.

The rank that decides writes it on a board that all ranks look at now and then. Each rank that has
seen it writes down which step it has finished, and trains on. When all have, the step to act at is
the one after the latest of these.

Every rank knows that step in time, if each step has a collective that all ranks take part in: a
rank that has finished step S has taken part in it after every other rank had finished step S - 1,
and had written its note by then. Ranks that are not in step act at different ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .solo import Team
from .team import StoreTeam

__all__ = ["StepTogether"]

_LOOK_EVERY_S = 0.2


class StepTogether:
    """One decision, and the step at which it is carried out. Alone, that is the same step.

    Args:
        team: The ranks.
        name: What its notes begin with; of each decision of a team another.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self, team: Team, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._team = team
        self._name = name
        self._clock = clock
        self._looked_s = float("-inf")
        self._is_noted = False
        self._step: int | None = None
        self.decision: str | None = None
        """What was decided, as far as this rank knows."""

    def decide(self, decision: str) -> None:
        """Decide something, in ASCII; changes nothing once a decision is known here."""
        if self.decision is not None:
            return
        self.decision = decision
        if isinstance(self._team, StoreTeam):
            self._team.note(f"{self._name}/decided", decision)

    def look(self, step: int) -> str | None:
        """Return what is to be done now, or ``None``. Every rank asks after each step.

        Args:
            step: The steps that this rank has finished.
        """
        team = self._team
        if not isinstance(team, StoreTeam):
            return self.decision
        if self.decision is None:
            self.decision = self._find(team)
            if self.decision is None:
                return None
        if not self._is_noted:
            team.note(f"{self._name}/at/{team.rank}", str(step))
            self._is_noted = True
        if self._step is None:
            notes = team.notes([f"{self._name}/at/{rank}" for rank in range(team.world_size)])
            self._step = None if notes is None else max(map(int, notes)) + 1
        return self.decision if self._step is not None and step >= self._step else None

    def _find(self, team: StoreTeam) -> str | None:
        if self._clock() - self._looked_s < _LOOK_EVERY_S:
            return None
        self._looked_s = self._clock()
        notes = team.notes([f"{self._name}/decided"])
        return None if notes is None else notes[0]
