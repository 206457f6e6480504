"""An exponential moving average of the weights, used for evaluation.

The average never trains: it is swapped into the model at ``EVAL_START`` and out at ``EVAL_END``.
One copy of the weights is stored here, always the one that is not in the model, so a checkpoint
written between the two events holds both: the average as the model, the raw weights here, with a
flag. Loading such a checkpoint swaps back, and the raw weights train on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ...errors import MismatchError, UsageError
from ...progress.time import Time, TimeUnit
from ...tensors.boxes import Box, is_sharded, local_box, local_tensor
from ..algorithm import Algorithm
from ..events import Event
from ..state import State

__all__ = ["EMA"]


class EMA(Algorithm):
    """Keep an average of the parameters and evaluate with it.

    After each update ``average = decay * average + (1 - decay) * weights``. It starts from the
    weights at the beginning of the training. Buffers, such as the statistics of batch norm, are
    not averaged.

    Args:
        decay: How much of the old average stays, from 0 to below 1.
        update_every: How often, in batches or epochs: ``"1ba"``.

    Raises:
        UsageError: A decay outside 0 to 1, or an interval in another unit.
    """

    def __init__(self, decay: float, *, update_every: str | Time = "1ba") -> None:
        interval = Time.of(update_every)
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"decay={decay} is not from 0 to below 1.")
        if interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or interval.value < 1:
            raise UsageError(f"update_every={interval} is not a number of batches or epochs.")
        self.decay = decay
        self.update_every = interval
        self._model: torch.nn.Module | None = None
        self._stored: dict[str, torch.Tensor] = {}
        self._is_swapped = False

    @property
    def is_swapped(self) -> bool:
        """Return whether the model holds the average at this moment."""
        return self._is_swapped

    @property
    def average(self) -> dict[str, torch.Tensor]:
        """Return the averaged parameters by name: live tensors, not copies."""
        return dict(self._live()) if self._is_swapped else self._stored

    def match(self, event: Event, state: State) -> bool:
        """Apply at the start, around evaluations, and after every ``update_every``."""
        if event in (Event.INIT, Event.EVAL_START, Event.EVAL_END):
            return True
        if self.update_every.unit is TimeUnit.BATCH:
            return event is Event.BATCH_END and state.timer.batch % self.update_every.value == 0
        return event is Event.EPOCH_END and state.timer.epoch % self.update_every.value == 0

    def apply(self, event: Event, state: State) -> None:
        """Take the weights over, update the average, or swap the two."""
        if event is Event.INIT:
            self._model = state.bare_model
            lazy = [name for name, parameter in self._live() if is_lazy(parameter)]
            if lazy:
                raise UsageError(
                    f"There is nothing to average yet at {', '.join(lazy)}.",
                    hint="Run one batch through the lazy module first: that gives it values.",
                )
            self._stored = {name: p.detach().clone() for name, p in self._live()}
            self._is_swapped = False
        elif event is Event.EVAL_START:
            self._swap(to_average=True)
        elif event is Event.EVAL_END:
            self._swap(to_average=False)
        else:
            with torch.no_grad():
                for name, parameter in self._live():
                    self._stored[name].mul_(self.decay).add_(parameter, alpha=1.0 - self.decay)

    def after_load(self, state: State) -> None:  # noqa: ARG002
        """Put the raw weights back, where the checkpoint was written in an evaluation."""
        self._swap(to_average=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that are not in the model, and which of the two they are."""
        return {"is_swapped": self._is_swapped, "weights": dict(self._stored)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a stored average.

        Raises:
            MismatchError: Other parameters than this model's, or other shapes.
        """
        weights = state["weights"]
        if self._stored:
            ours = {name: tuple(value.shape) for name, value in self._stored.items()}
            theirs = {name: tuple(value.shape) for name, value in weights.items()}
            if ours != theirs:
                odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
                raise MismatchError(
                    f"The stored average does not fit the model at {', '.join(odd)}.",
                    hint="Resume with the model of the checkpoint, or load the weights only.",
                    names=odd,
                )
        for name, value in weights.items():
            mine = self._stored.get(name)
            if mine is None:
                self._stored[name] = value.detach().clone()
            elif is_sharded(mine):
                whole = Box.whole(value.shape)
                local_tensor(mine).copy_(value[local_box(mine).slices(within=whole)])
            else:
                mine.copy_(value)
        self._is_swapped = bool(state["is_swapped"])

    def _live(self) -> list[tuple[str, torch.Tensor]]:
        if self._model is None:
            raise UsageError("This EMA belongs to no training yet; pass it to a Trainer.")
        return [(n.replace("_orig_mod.", ""), p) for n, p in self._model.named_parameters()]

    def _swap(self, *, to_average: bool) -> None:
        if self._is_swapped is to_average:
            return
        with torch.no_grad():
            for name, parameter in self._live():
                held = parameter.detach().clone()
                parameter.copy_(self._stored[name])
                self._stored[name].copy_(held)
        self._is_swapped = to_average
