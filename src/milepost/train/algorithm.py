"""Algorithms: changes to the training itself, applied at events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine.barrier import wait_for_copies
from .events import Event

if TYPE_CHECKING:
    from .state import State

__all__ = ["Algorithm"]


class Algorithm:
    """Change the training at the events it matches.

    What an algorithm does at ``EVAL_START`` it must undo at ``EVAL_END``: that event reaches it
    even when the evaluation is cut off by a signal or an error.

    Attributes:
        name: The key of its state in a checkpoint; see :class:`Callback`.
    """

    name: str | None = None

    def match(self, event: Event, state: State) -> bool:
        """Return whether to be applied at this event."""
        raise NotImplementedError

    def apply(self, event: Event, state: State) -> int | None:
        """Change the state. The number returned is free for the algorithm's own use."""
        raise NotImplementedError

    def run_event(self, event: Event, state: State) -> None:
        """Apply it, if it matches."""
        if self.match(event, state):
            wait_for_copies()  # it may change what a save is still copying
            self.apply(event, state)

    def after_load(self, state: State) -> None:
        """Run once a checkpoint was restored in full, model and algorithm."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of this object."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""

    def close(self) -> None:
        """Release what is held, at the end of every ``fit``, also after an error."""

    def post_close(self) -> None:
        """Run after everything was closed."""
