"""Evaluation: when it is due, and one pass over an evaluator's data.

An evaluation never changes the training: the random generators, the mode of every module and the
weights are afterwards what they were. It may be cut off between two batches by a signal. Then the
algorithms still get ``EVAL_END``, so that swapped weights come back; the callbacks go back to what
they were before; and ``state.pending_eval`` says what has to be done first when the run goes on.

Of several ranks each goes through its share. They come together at the end of a pass, where they
say whether any of them was cut off, and where what was counted is added up. A model that is sharded
has to be called as many times on every rank, so a rank with fewer batches calls it on its last one
again, and counts nothing; such a pass is not cut off.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..progress.schedule import Moment, Schedule
from ..state.rng import capture_rng, preserve_rng
from .data import move_batch
from .dispatch import Dispatch
from .evaluator import LOSS, Evaluator
from .events import Event
from .group import Group
from .model import BatchModel
from .parallel import Layout, layout_of, reshard, share_buffers
from .state import State, loader_length
from .stopping import Stopping

__all__ = ["Evaluation", "EvaluationCutOff"]

_log = logging.getLogger("milepost")


class EvaluationCutOff(Exception):  # noqa: N818 - a way out of the loop, not an error
    """A signal came during an evaluation. Never leaves the trainer."""


class Evaluation:
    """Run a training's evaluators when they are due.

    Args:
        state: The training.
        model: How to call the model.
        dispatch: Calls the listeners.
        group: The ranks.
        stopping: Asked between two batches; cuts the evaluation off.
    """

    def __init__(
        self,
        state: State,
        *,
        model: BatchModel,
        dispatch: Dispatch,
        group: Group,
        stopping: Stopping,
    ) -> None:
        self._state = state
        self._model = model
        self._dispatch = dispatch
        self._group = group
        self._stopping = stopping
        self._is_called_together = not group.is_alone and (
            layout_of(state.model) is not Layout.WHOLE
        )
        self._num_rounds: dict[str, int] = {}
        self._schedules: dict[str, Schedule] = {}
        self._done_at_batch: dict[str, int] = {}

    def start(self) -> None:
        """Begin to count intervals from the timer's present state."""
        state = self._state
        for evaluator in state.evaluators:
            schedule = Schedule(
                evaluator.eval_interval,
                max_duration=state.max_duration,
                steps_per_epoch=state.steps_per_epoch,
            )
            schedule.start(state.timer.snapshot())
            self._schedules[evaluator.label] = schedule

    def due(self, moment: Moment) -> list[Evaluator]:
        """Return the evaluators that are due after this batch or epoch."""
        state = self._state
        counters, event = state.timer.snapshot(), Event(f"{moment}_end")
        return [
            evaluator
            for evaluator in state.evaluators
            if self._schedules[evaluator.label].due(moment, counters, state, event)
        ]

    def run(
        self, evaluators: Sequence[Evaluator], *, moment: Moment, counters: Mapping[str, Any]
    ) -> None:
        """Evaluate within a training, in a way that can be done again after a resume.

        Args:
            evaluators: Which, in this order.
            moment: After a batch or an epoch.
            counters: Where the schedule of saves stands, for the save that follows.

        Raises:
            EvaluationCutOff: A signal asked to end; ``state.pending_eval`` is set.
        """
        state = self._state
        state.pending_eval = {
            "moment": moment,
            "labels": [evaluator.label for evaluator in evaluators],
            "counters": dict(counters),
            "rng": capture_rng(),
            "num_ranks": self._group.world_size,
        }
        before = [(one, copy.deepcopy(one.state_dict())) for one in state.callbacks]
        try:
            for evaluator in evaluators:
                self.run_one(evaluator)
        except BaseException:
            for callback, held in before:
                callback.load_state_dict(held)
            raise
        state.pending_eval = None

    def run_one(self, evaluator: Evaluator) -> dict[str, Any]:
        """Evaluate once and leave everything but ``state.current_metrics`` as it was.

        Returns:
            The evaluator's metrics, name -> value.

        Raises:
            EvaluationCutOff: A signal asked to end.
        """
        state = self._state
        kept = state.batch, state.outputs, state.loss
        modes = [(module, module.training) for module in state.model.modules()]
        try:
            with preserve_rng(), torch.no_grad():
                state.model.eval()
                metrics = self._pass(evaluator)
        finally:
            for module, mode in modes:
                module.training = mode
            state.batch, state.outputs, state.loss = kept
        self._done_at_batch[evaluator.label] = state.timer.batch
        return metrics

    def fresh_metrics(self) -> dict[str, dict[str, Any]]:
        """Return the metrics computed with the present weights, by label."""
        now = self._state.timer.batch
        return {
            label: self._state.current_metrics[label]
            for label, batch in self._done_at_batch.items()
            if batch == now and label in self._state.current_metrics
        }

    def _pass(self, evaluator: Evaluator) -> dict[str, Any]:
        state, is_ended = self._state, False
        if not self._group.is_alone:
            share_buffers(state.model)
        self._dispatch.run(Event.EVAL_START)
        try:
            evaluator.metrics.reset(state.device)
            mean_loss = _Mean()
            is_cut = self._batches(evaluator, mean_loss)
            if self._stopping.agree_on_cut(is_cut=is_cut):
                raise EvaluationCutOff
            if not self._group.is_alone:
                mean_loss.add_up(state.device)
            # Into a new dict: a checkpoint being written may still hold the old one.
            metrics = evaluator.metrics.compute() or {LOSS: mean_loss.value}
            state.current_metrics = {**state.current_metrics, evaluator.label: metrics}
            is_ended = True
            self._dispatch.run(Event.EVAL_END)
        finally:
            if not is_ended:
                self._dispatch.undo_evaluation()
        return metrics

    def _batches(self, evaluator: Evaluator, mean_loss: _Mean) -> bool:
        """Evaluate this rank's batches; return whether a signal cut that off."""
        try:
            return self._all_batches(evaluator, mean_loss)
        finally:
            if self._is_called_together:
                reshard(self._state.model)

    def _all_batches(self, evaluator: Evaluator, mean_loss: _Mean) -> bool:
        num_done, num_rounds = 0, self._rounds_of(evaluator)
        batches = itertools.islice(evaluator.data.dataloader, evaluator.subset_num_batches)
        for batch in batches:
            if not self._is_called_together and self._stopping.should_cut_off():
                return True
            self._batch(evaluator, batch, mean_loss)
            num_done += 1
        for _ in range(num_done, num_rounds):
            self._predict()
        return False

    def _rounds_of(self, evaluator: Evaluator) -> int:
        """Return how many times the model must be called; 0: as many times as there are batches.

        Raises:
            UsageError: Some ranks have no batch to call it on; the same on every rank.
        """
        if not self._is_called_together:
            return 0
        label, limit = evaluator.label, evaluator.subset_num_batches
        if label not in self._num_rounds:
            length = loader_length(evaluator.data.dataloader)
            lengths = self._group.collect("compare its batches to evaluate", lambda: length)
            self._num_rounds[label] = _even_rounds(label, lengths)
        rounds = self._num_rounds[label]
        return rounds if limit is None else min(rounds, limit)

    def _predict(self) -> None:
        # Without the wrapper: that would synchronise buffers, and ranks have unequal shares.
        state = self._state
        with state.precision_context:
            state.outputs = self._model.predict(state.bare_model, state.batch)

    def _batch(self, evaluator: Evaluator, batch: Any, mean_loss: _Mean) -> None:
        state, run = self._state, self._dispatch.run
        state.batch = evaluator.data.device_transforms(move_batch(batch, state.device))
        run(Event.EVAL_BATCH_START)
        run(Event.EVAL_BEFORE_FORWARD)
        self._predict()
        with state.precision_context:
            if not len(evaluator.metrics):
                loss = self._model.loss(state.bare_model, state.outputs, state.batch)
                weight = evaluator.data.get_num_samples_in_batch(state.batch)
                mean_loss.add(loss, weight)
        run(Event.EVAL_AFTER_FORWARD)
        if len(evaluator.metrics):
            evaluator.metrics.update(state.outputs, self._model.targets(state.batch))
        run(Event.EVAL_BATCH_END)


def _even_rounds(label: str, lengths: Sequence[int | None]) -> int:
    """Return how many batches the rank with the most has; 0 if that is not known."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        _log.warning(
            "A loader to evaluate %s on does not know its length. The model is sharded, so every "
            "rank must have as many batches: if not, the ranks wait for each other in vain.",
            label,
        )
        return 0
    without = [rank for rank, length in enumerate(known) if length == 0]
    if without and len(without) < len(known):
        raise UsageError(
            f"Rank {', '.join(map(str, without))} has no batch to evaluate {label} on, and a "
            "sharded model is called by all ranks together.",
            hint="Use a smaller batch size, or drop_last=False, so that every rank has one.",
            ranks=without,
        )
    return max(known)


class _Mean:
    """The mean of losses over samples."""

    def __init__(self) -> None:
        self._total = torch.zeros(())
        self._weight = 0

    def add(self, loss: torch.Tensor | Sequence[torch.Tensor], weight: int) -> None:
        summed = loss if isinstance(loss, torch.Tensor) else torch.stack(tuple(loss)).sum()
        self._total = self._total.to(summed.device) + summed.detach().float() * weight
        self._weight += weight

    def add_up(self, device: torch.device) -> None:
        """Add up over all ranks."""
        sums = torch.stack(
            [
                self._total.to(device).double(),
                torch.tensor(float(self._weight), device=device, dtype=torch.double),
            ]
        )
        dist.all_reduce(sums)
        self._total, self._weight = sums[0].float(), int(sums[1])

    @property
    def value(self) -> torch.Tensor:
        return self._total / max(1, self._weight)
