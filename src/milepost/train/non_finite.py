"""A loss that is no number: looked into later, never trained on.

The tally of a batch tells every rank at once, before any of them has changed its weights. So all of
them write one diagnostic checkpoint together, and raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NonFiniteLossError
from .group import Group
from .state import State

if TYPE_CHECKING:
    from ..checkpointer import Checkpointer

__all__ = ["NonFinite"]


class NonFinite:
    """Writes a diagnostic checkpoint where a loss is NaN or infinite.

    Args:
        state: The training.
        checkpointer: Its run; ``None``: nothing is saved.
        group: The ranks.
    """

    def __init__(self, state: State, *, checkpointer: Checkpointer | None, group: Group) -> None:
        self._state = state
        self._checkpointer = checkpointer
        self._group = group

    def refuse(self, own_loss: torch.Tensor) -> None:
        """Save the state, the batch and the outputs as they are now, and raise.

        Args:
            own_loss: The loss of this rank, finite or not.

        Raises:
            NonFiniteLossError: Always.
        """
        state, checkpointer = self._state, self._checkpointer
        batch = state.timer.batch + 1
        what = self._words(batch, float(own_loss))
        if checkpointer is None:
            raise NonFiniteLossError(what, safe="The weights are those before it.", batch=batch)
        try:
            extra = {"batch": state.batch, "outputs": _detached(state.outputs)}
            pending = checkpointer.save_diagnostic("nan", f"ba{batch}", extra=extra, wait=True)
        except Exception as failure:
            raise NonFiniteLossError(
                what, safe=f"State and batch could not be saved: {failure}", batch=batch
            ) from failure
        raise NonFiniteLossError(
            what,
            safe=f"State, batch and outputs before the step are in {pending.name!r}.",
            hint="Look into them, then resume from a checkpoint before with other settings.",
            checkpoint=pending.name,
            batch=batch,
        )

    def _words(self, batch: int, own_loss: float) -> str:
        if self._group.is_alone:
            return f"The loss of batch {batch} is {own_loss}."
        losses = self._group.collect("tell its loss", lambda: own_loss)
        odd = [f"{v} on rank {r}" for r, v in enumerate(losses) if not math.isfinite(v)]
        return f"The loss of batch {batch} is {', '.join(odd) or 'too large when summed up'}."


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_detached(one) for one in value]
    return value
