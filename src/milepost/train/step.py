"""One training batch: microbatches forward and backward, then the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .data import DataSpec
from .dispatch import Dispatch
from .events import Event
from .metrics import Metrics
from .model import BatchModel
from .parallel import without_sync
from .state import State
from .tally import Sums, Tally

__all__ = ["TrainStep"]


class TrainStep:
    """Train on ``state.batch``.

    Args:
        state: The training.
        model: How to call the model.
        data: How to split and count batches.
        dispatch: Calls the listeners.
        metrics: Training metrics; empty: none are computed.
        tally: Adds up the loss and what was counted over all ranks.
        on_non_finite: Called with this rank's loss when that of any rank is NaN or infinite, while
            the weights are still those of the batch before; it raises.
        on_step: Called right before the optimizers change the weights.
    """

    def __init__(
        self,
        state: State,
        *,
        model: BatchModel,
        data: DataSpec,
        dispatch: Dispatch,
        metrics: Metrics,
        tally: Tally,
        on_non_finite: Callable[[torch.Tensor], None],
        on_step: Callable[[], None],
    ) -> None:
        self._state = state
        self._model = model
        self._data = data
        self._run_event = dispatch.run
        self._metrics = metrics
        self._tally = tally
        self._on_non_finite = on_non_finite
        self._on_step = on_step

    def run(self) -> Sums:
        """Take one optimizer step on the whole batch; return the batch as all ranks had it."""
        state = self._state
        self._run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        whole, total = state.batch, torch.zeros((), device=state.device)
        num_samples = self._data.get_num_samples_in_batch(whole)
        parts = self._data.split_batch(whole, state.grad_accum)
        for number, part in enumerate(parts, start=1):
            is_last = number == len(parts)
            state.batch = part
            share = self._data.get_num_samples_in_batch(part) / max(1, num_samples)
            with nullcontext() if is_last else without_sync(state.model):
                weighted = self._forward(share)
                total = total + weighted.detach().float()
                if is_last:
                    self._send(total)
                self._backward(weighted)
        state.batch = whole
        # One check for all microbatches, so that an accelerator waits only once. The gradients are
        # spoilt by now, but the weights are not.
        sums = self._tally.read()
        if not bool(torch.isfinite(sums.loss)):
            self._on_non_finite(total)
        state.loss = sums.loss
        self._on_step()
        self._step_optimizers()
        self._run_event(Event.AFTER_TRAIN_BATCH)
        return sums

    def _send(self, loss: torch.Tensor) -> None:
        state = self._state
        self._tally.send(
            loss,
            num_samples=state.batch_num_samples,
            num_tokens=state.batch_num_tokens,
            wall_s=state.timer.clock_s,
        )

    def _forward(self, share: float) -> torch.Tensor:
        """Run forward on ``state.batch``; return its part of the batch's loss."""
        state = self._state
        self._run_event(Event.BEFORE_FORWARD)
        with state.precision_context:
            state.outputs = self._model.forward(state.model, state.batch)
        self._run_event(Event.AFTER_FORWARD)
        self._run_event(Event.BEFORE_LOSS)
        with state.precision_context:
            state.loss = self._model.loss(state.bare_model, state.outputs, state.batch)
        self._run_event(Event.AFTER_LOSS)
        if len(self._metrics):
            with torch.no_grad():
                self._metrics.update(_detached(state.outputs), self._model.targets(state.batch))
        self._run_event(Event.BEFORE_BACKWARD)
        loss = state.loss
        summed = loss if isinstance(loss, torch.Tensor) else torch.stack(tuple(loss)).sum()
        # Weighted by its size, so that unequal microbatches add up to the mean of the batch.
        return summed if share == 1.0 else summed * share

    def _backward(self, weighted: torch.Tensor) -> None:
        state = self._state
        (weighted if state.scaler is None else state.scaler.scale(weighted)).backward()
        self._run_event(Event.AFTER_BACKWARD)

    def _step_optimizers(self) -> None:
        scaler = self._state.scaler
        for optimizer in self._state.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    if isinstance(outputs, Sequence) and not isinstance(outputs, str):
        return [_detached(one) for one in outputs]
    return outputs
