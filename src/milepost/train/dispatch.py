"""Calling algorithms and callbacks at the events, and closing them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from .algorithm import Algorithm
from .callback import Callback
from .events import Event
from .state import State

__all__ = ["Dispatch"]

_log = logging.getLogger(__name__)


class Dispatch:
    """Call what listens to the events of one training.

    Args:
        state: What everything is called with. Its lists are read at each event, so they may change.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, event: Event) -> None:
        """Call the algorithms, then the callbacks."""
        for algorithm in self._state.algorithms:
            algorithm.run_event(event, self._state)
        for callback in self._state.callbacks:
            callback.run_event(event, self._state)

    def undo_evaluation(self) -> None:
        """Tell only the algorithms that an evaluation ended, because it was cut off."""
        for algorithm in self._state.algorithms:
            algorithm.run_event(Event.EVAL_END, self._state)

    def after_load(self) -> None:
        """Tell everything that a checkpoint was restored in full."""
        for listener in self._listeners():
            listener.after_load(self._state)

    def close(self) -> None:
        """Close everything, then call ``post_close`` on what closed well.

        Raises:
            Exception: The first error, once everything had its turn; the others are logged.
        """
        failures: list[Exception] = []
        closed = [one for one in self._listeners() if _try(one.close, failures)]
        for one in closed:
            _try(one.post_close, failures)
        for failure in failures[1:]:
            _log.error("Another error while closing: %r", failure, exc_info=failure)
        if failures:
            raise failures[0]

    def _listeners(self) -> Sequence[Algorithm | Callback]:
        return [*self._state.algorithms, *self._state.callbacks]


def _try(call: Callable[[], None], failures: list[Exception]) -> bool:
    """Call, keep what it raises for later, and return whether all went well."""
    try:
        call()
    except Exception as failure:  # noqa: BLE001 - kept, and raised when all had their turn
        failures.append(failure)
        return False
    return True
