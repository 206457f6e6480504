"""What a person sees of a training that runs: its progress, on rank 0."""

from __future__ import annotations

from torch import Tensor

from ..display import Bar
from ..progress.time import TimeUnit
from .saving import Saving
from .state import State

__all__ = ["num_batches", "show", "text_beside"]


def num_batches(state: State) -> float | None:
    """Return how many batches the whole training has, if that is known."""
    whole, steps = state.max_duration, state.steps_per_epoch
    if whole.unit is TimeUnit.BATCH:
        return float(whole.value)
    if whole.unit is TimeUnit.EPOCH and steps is not None:
        return float(whole.value * steps)
    return None


def show(bar: Bar, state: State, saving: Saving) -> None:
    """Bring a progress bar up to date."""
    text = text_beside(state, saving)
    bar.update(state.timer.batch, total=num_batches(state), text=text)


def text_beside(state: State, saving: Saving) -> str:
    """Return what stands beside the bar: the epoch, the loss, and what a resume would go on from.

    The loss is named where it is in memory: no device is waited for to draw a bar.
    """
    words = [f"epoch {state.timer.epoch}"]
    loss = state.loss
    if isinstance(loss, Tensor) and loss.device.type == "cpu" and loss.numel() == 1:
        words.append(f"loss {loss.item():.3g}")
    resumed_from = None if saving.checkpointer is None else saving.checkpointer.resumed_from
    if saving.newest_name:
        words.append(f"saved {saving.newest_name}")
    elif resumed_from:
        words.append(f"resumed from {resumed_from}")
    return ", ".join(words)
