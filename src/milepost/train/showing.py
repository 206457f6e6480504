"""What a person sees of a training that runs: its progress, on rank 0."""

from __future__ import annotations

from ..display import Bar
from ..progress.time import TimeUnit
from .saving import Saving
from .state import State

__all__ = ["num_batches", "show"]


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
    text = f"epoch {state.timer.epoch}"
    if saving.newest_name:
        text += f", saved {saving.newest_name}"
    bar.update(state.timer.batch, total=num_batches(state), text=text)
