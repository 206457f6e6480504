"""All ranks stop at one step, when a signal has come to any of them.

A rank that stopped alone would leave the others in a collective that never ends. So they agree on
the step, see ``steps.py``. Ranks that are not in step stop at different batches; their save is
refused, since a checkpoint must be of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .solo import Team
from .steps import StepTogether
from .team import StoreTeam

__all__ = ["StopTogether"]


class StopTogether:
    """Decides at which step to stop.

    Args:
        team: The ranks.
        clock: Returns seconds that never go back.
    """

    def __init__(self, team: Team, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._team = team
        self._stop = StepTogether(team, "stop", clock=clock)

    def look(self, batch: int, received: int | None) -> int | None:
        """Return the signal to stop for at this batch, or ``None``.

        Args:
            batch: The batches that this rank has finished.
            received: The signal that this rank has received itself, if any.
        """
        if not isinstance(self._team, StoreTeam):
            return received
        if received is not None:
            self._stop.decide(str(received))
        number = self._stop.look(batch)
        return None if number is None else int(number)
