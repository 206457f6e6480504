"""Attempts of a session that were given up while their files could not be removed.

A store that is away when a save fails is away when its files are to be removed as well. They are
removed once something can be committed again, so that a run does not gather what every outage has
left; what a session leaves all the same, the next one sweeps. See ``publish.py``.
"""

from __future__ import annotations

import logging

from ..errors import CheckpointError, UsageError
from ..stores.base import Store
from .publish import Claim, abandon

__all__ = ["Leftovers"]

_log = logging.getLogger("milepost")


class Leftovers:
    """Gives up the attempts of one session. For one thread at a time.

    Args:
        store: The run's store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._claims: list[Claim] = []

    def give_up(self, held: Claim, error: BaseException) -> None:
        """Remove what a failed attempt wrote; where that fails too, say so and remember it.

        Args:
            held: The attempt.
            error: Why it failed.
        """
        try:
            left = abandon(self._store, held)
        except UsageError as second:  # it is committed: only the answer was lost
            _log.warning("After %s: %s was not removed: %s", error, held.folder, second)
            return
        except CheckpointError as second:
            _log.warning("After %s: %s was not removed: %s", error, held.folder, second)
            self._claims.append(held)
            return
        if left:
            _log.warning("After a failure %s could not be removed: %s", held.folder, left)
            self._claims.append(held)

    def remove(self) -> None:
        """Try again to remove what could not be, now that the store is known to answer.

        A save waits for it. So with the first that fails again the rest is left for the next time:
        each further try might wait as long for an answer.
        """
        claims, self._claims = self._claims, []
        while claims:
            held = claims.pop(0)
            try:
                left = abandon(self._store, held)
            except UsageError as error:
                _log.info("%s stays: %s", held.folder, error)
                continue
            except CheckpointError as error:
                _log.info("%s is not removed yet: %s", held.folder, error)
                left = [held.folder]
            if left:
                # Last: the next time begins with those that were not tried.
                self._claims = [*claims, held]
                return
            _log.info("Removed what a failed attempt had left in %s.", held.folder)
