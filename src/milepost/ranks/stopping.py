"""All ranks stop at one step, when a signal has come to any of them.

A rank that stopped alone would leave the others in a collective that never ends. So a rank that was
asked to end writes that on a board that all ranks look at now and then, off the hot path; each rank
that has seen it writes down which batch it has finished, and trains on. When all have, the step to
stop at is the one after the latest of these.

Every rank knows that step in time, if each batch has a collective that all ranks take part in: a
rank that has finished batch S has taken part in it after every other rank had finished batch S - 1,
and had written its note by then. Ranks that are not in step stop at different batches; their save
is refused, since a checkpoint must be of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .solo import Team
from .team import StoreTeam

__all__ = ["StopTogether"]

_LOOK_EVERY_S = 0.2


class StopTogether:
    """Decides at which step to stop.

    Args:
        team: The ranks.
        clock: Returns seconds that never go back.
    """

    def __init__(self, team: Team, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._team = team
        self._clock = clock
        self._looked_s = float("-inf")
        self._signal: int | None = None
        self._is_noted = False
        self._step: int | None = None

    def look(self, batch: int, received: int | None) -> int | None:
        """Return the signal to stop for at this batch, or ``None``.

        Args:
            batch: The batches that this rank has finished.
            received: The signal that this rank has received itself, if any.
        """
        team = self._team
        if not isinstance(team, StoreTeam):
            return received
        if self._signal is None:
            self._signal = self._asked(team, received)
            if self._signal is None:
                return None
        if not self._is_noted:
            team.note(f"at/{team.rank}", str(batch))
            self._is_noted = True
        if self._step is None:
            notes = team.notes([f"at/{rank}" for rank in range(team.world_size)])
            self._step = None if notes is None else max(map(int, notes)) + 1
        return self._signal if self._step is not None and batch >= self._step else None

    def _asked(self, team: StoreTeam, received: int | None) -> int | None:
        """Return the signal that any rank has received, if it is known here by now."""
        if received is not None:
            team.note("asked", str(received))
            return received
        if self._clock() - self._looked_s < _LOOK_EVERY_S:
            return None
        self._looked_s = self._clock()
        notes = team.notes(["asked"])
        return None if notes is None else int(notes[0])
