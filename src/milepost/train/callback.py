"""Callbacks: what a user wants done at the events of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .events import Event

if TYPE_CHECKING:
    from ..engine.pending import PendingSave
    from .state import State

__all__ = ["Callback"]


class Callback:
    """Do something at the events of a training.

    Override the methods of the events that matter. What ``state_dict`` returns is saved with
    every checkpoint and given back to ``load_state_dict`` when the training goes on.

    Attributes:
        name: The key of its state in a checkpoint. ``None``: the name of the class; the second of
            a class gets ``-2``, the third ``-3``, in the order given.

    Examples:
        >>> class Count(Callback):
        ...     batches = 0
        ...     def batch_end(self, state):
        ...         self.batches += 1
    """

    name: str | None = None

    def run_event(self, event: Event, state: State) -> None:
        """Call the method of an event."""
        getattr(self, event.value)(state)

    def init(self, state: State) -> None:
        """Run when the trainer is made, before a checkpoint is loaded."""

    def after_load(self, state: State) -> None:
        """Run once a checkpoint was restored in full, still during the trainer's construction."""

    def fit_start(self, state: State) -> None:
        """Run when ``fit`` begins, also when it goes on from a checkpoint."""

    def epoch_start(self, state: State) -> None:
        """Run before the first batch of an epoch."""

    def after_dataloader(self, state: State) -> None:
        """Run when ``state.batch`` holds the next batch, on the device."""

    def batch_start(self, state: State) -> None:
        """Run before a batch is trained on."""

    def before_train_batch(self, state: State) -> None:
        """Run before the gradients are cleared."""

    def before_forward(self, state: State) -> None:
        """Run before the forward pass of a microbatch."""

    def after_forward(self, state: State) -> None:
        """Run when ``state.outputs`` is set."""

    def before_loss(self, state: State) -> None:
        """Run before the loss of a microbatch."""

    def after_loss(self, state: State) -> None:
        """Run when ``state.loss`` is set."""

    def before_backward(self, state: State) -> None:
        """Run before the backward pass of a microbatch."""

    def after_backward(self, state: State) -> None:
        """Run after the backward pass of a microbatch."""

    def after_train_batch(self, state: State) -> None:
        """Run after the optimizers stepped, before the timer counts the batch."""

    def batch_end(self, state: State) -> None:
        """Run when the timer has counted the batch."""

    def batch_checkpoint(self, state: State) -> None:
        """Run after the batch's evaluation, just before a save that is due."""

    def epoch_end(self, state: State) -> None:
        """Run when the timer has counted the epoch."""

    def epoch_checkpoint(self, state: State) -> None:
        """Run after the epoch's evaluation, just before a save that is due."""

    def eval_start(self, state: State) -> None:
        """Run before an evaluator's first batch."""

    def eval_batch_start(self, state: State) -> None:
        """Run when ``state.batch`` holds the next batch to evaluate."""

    def eval_before_forward(self, state: State) -> None:
        """Run before the forward pass of an evaluation."""

    def eval_after_forward(self, state: State) -> None:
        """Run when ``state.outputs`` is set in an evaluation."""

    def eval_batch_end(self, state: State) -> None:
        """Run after a batch was evaluated."""

    def eval_end(self, state: State) -> None:
        """Run when ``state.current_metrics`` holds an evaluator's results."""

    def save_started(self, state: State, pending: PendingSave[Any]) -> None:
        """Run when the state was copied for a save, which is written while the training goes on."""

    def save_ended(self, state: State, pending: PendingSave[Any]) -> None:
        """Run after the first batch by which a save has ended, for example to log its ``stats``.

        Which batch that is depends on the disk, and differs from rank to rank: change nothing here
        that is trained, draw no random numbers, and wait for no other rank. If
        ``pending.has_failed``, the error comes out elsewhere.
        """

    def fit_end(self, state: State) -> None:
        """Run when the maximum duration is reached."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of this object."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""

    def close(self) -> None:
        """Release what is held, at the end of every ``fit``, also after an error."""

    def post_close(self) -> None:
        """Run after every callback was closed."""
