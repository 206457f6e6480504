"""The training loop: epochs and batches, in the order that ``events`` writes down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import UsageError
from ..liveness import beat
from ..progress.schedule import Moment
from ..state.loader import ResumableLoader
from ..state.rng import apply_rng, capture_rng
from .data import DataSpec, move_batch
from .dispatch import Dispatch
from .evaluating import Evaluation
from .evaluator import TRAIN_LABEL, Evaluator
from .events import Event
from .group import Group
from .metrics import Metrics
from .saving import Saving
from .sharing import is_left_to_the_user, warn_if_alike
from .state import State
from .step import TrainStep
from .stopping import Stopping
from .tally import is_untrue_anywhere

__all__ = ["Loop"]

_NONE = object()
"""In the place of a batch where a loader has no more."""


class Loop:
    """Take a training from where it stands to its maximum duration.

    Args:
        state: The training.
        data: The training data.
        loader: The same data's loader, which can come back to a position.
        dispatch: Calls the listeners.
        step: Trains on one batch.
        evaluation: Evaluates when due.
        saving: Saves when due.
        metrics: The training metrics, counted over an epoch.
        group: The ranks.
        stopping: Whether a signal asked to end.
        asks_for_batches: Whether the ranks must ask each other if all of them have a batch.
        steps_schedulers_per_batch: Whether schedulers step after batches, not after epochs.

    Attributes:
        on_batch: Called after every batch, to show the progress.
    """

    def __init__(  # noqa: PLR0913 - one for each piece, all by keyword
        self,
        state: State,
        *,
        data: DataSpec,
        loader: ResumableLoader,
        dispatch: Dispatch,
        step: TrainStep,
        evaluation: Evaluation,
        saving: Saving,
        metrics: Metrics,
        group: Group,
        stopping: Stopping,
        asks_for_batches: bool,
        steps_schedulers_per_batch: bool,
    ) -> None:
        self._state = state
        self._data = data
        self._loader = loader
        self._run_event = dispatch.run
        self._step = step
        self._evaluation = evaluation
        self._saving = saving
        self._metrics = metrics
        self._group = group
        self._stopping = stopping
        self._asks_for_batches = asks_for_batches
        self._steps_schedulers_per_batch = steps_schedulers_per_batch
        self.on_batch: Callable[[], None] = lambda: None
        self._rng: Mapping[str, Any] | None = None
        self._is_to_compare = not group.is_alone and is_left_to_the_user(loader.loader)
        self._is_over = False
        self._is_exhausted = False

    def begin(self, rng: Mapping[str, Any] | None) -> None:
        """Begin where the state stands: at the start, or where a checkpoint or a ``fit`` ended.

        Args:
            rng: The random generators of the checkpoint; ``None``: they stay as they are.
        """
        state = self._state
        pending = state.pending_eval
        self._rng = rng
        if rng is None and state.timer.batch:
            # An earlier fit ended here. Going back to its place in the data must draw nothing.
            self._rng = capture_rng()
            if state.timer.batch_in_epoch:
                self._loader.load_state_dict(self._loader.state_dict())
        self._evaluation.start()
        self._saving.start(None if pending is None else pending["counters"])
        self._check_over()
        if pending is not None:
            self._finish_evaluation(pending)

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left to do, the end of an epoch included."""
        return self._is_over and not self._is_last_of_epoch

    def run_epoch(self) -> None:
        """Train on the rest of an epoch, up to the maximum duration."""
        state = self._state
        self._loader.set_epoch(state.timer.epoch)
        if state.timer.batch_in_epoch == 0:
            self._begin_epoch()
        for batch in self._batches():
            self._run_batch(batch)
            if self._is_over and not self._is_last_of_epoch:
                break
        if self._is_exhausted or self._is_last_of_epoch:
            self._end_epoch()

    def _begin_epoch(self) -> None:
        is_resumed = self._rng is not None
        if self._rng is not None:
            apply_rng(self._rng)
        self._metrics.reset(self._state.device)
        self._saving.mark()
        self._run_event(Event.EPOCH_START)
        self._saving.mark()
        # Restoring what a loader carries from epoch to epoch may draw numbers, so the generators
        # are put back once more, to where the callbacks left them.
        self._rng = capture_rng() if is_resumed else None

    def _batches(self) -> Iterator[Any]:
        """Yield what is left of the epoch, marking the clean point before each fetch."""
        rng, self._rng = self._rng, None
        steps = self._steps_limit
        self._is_exhausted = False
        if self._is_last_of_epoch and steps is not None:
            # Not one batch is left, but the samplers' own generators must go where they would
            # have gone, so the epoch is opened once more.
            self._loader.open_epoch(rng)
            return
        batches = self._loader.iterate(rng)
        while steps is None or self._state.timer.batch_in_epoch < steps:
            self._saving.mark_before_fetch()
            batch = next(batches, _NONE)
            if self._is_missing(batch):
                self._is_exhausted = True
                self._require_batches()
                return
            self._saving.enter_batch()
            yield batch

    def _run_batch(self, batch: Any) -> None:
        state, data = self._state, self._data
        if self._is_to_compare:
            self._is_to_compare = False
            warn_if_alike(batch, self._group)
        state.batch = data.device_transforms(move_batch(batch, state.device))
        state.batch_num_samples = data.get_num_samples_in_batch(state.batch)
        state.batch_num_tokens = data.get_num_tokens_in_batch(state.batch)
        self._run_event(Event.AFTER_DATALOADER)
        self._run_event(Event.BATCH_START)
        sums = self._step.run()
        if sums.wall_s is not None:
            state.timer.hold(sums.wall_s)
        state.timer.on_batch_complete(sums.num_samples, sums.num_tokens)
        self._stopping.learn(sums.signal_number)
        beat(state.timer.batch)
        self._saving.leave_batch(is_save_due=sums.is_save_due)
        if self._steps_schedulers_per_batch:
            self._step_schedulers()
        self._run_event(Event.BATCH_END)
        self._evaluate("batch", self._evaluation.due("batch"))
        self._checkpoint("batch")
        self.on_batch()

    def _end_epoch(self) -> None:
        state = self._state
        self._saving.unmark()
        self._loader.end_epoch()
        self._is_exhausted = False
        state.timer.on_epoch_complete()
        if not self._steps_schedulers_per_batch:
            self._step_schedulers()
        if len(self._metrics):
            computed = self._metrics.compute()
            state.current_metrics = {**state.current_metrics, TRAIN_LABEL: computed}
        self._run_event(Event.EPOCH_END)
        self._evaluate("epoch", self._evaluation.due("epoch"))
        self._checkpoint("epoch")

    def _is_missing(self, batch: Any) -> bool:
        """Return whether this rank has no batch, or another one has none where that can be.

        Loaders of one length end together. Where a length is not known, a rank that trained on
        alone would wait for the others in the middle of the batch.
        """
        is_there = batch is not _NONE
        if not self._asks_for_batches:
            return not is_there
        device = self._state.device
        return is_untrue_anywhere(self._group, device=device, is_true=is_there)

    def _evaluate(self, moment: Moment, evaluators: list[Evaluator]) -> None:
        if evaluators:
            self._saving.mark()
            self._evaluation.run(evaluators, moment=moment, counters=self._saving.counters)

    def _checkpoint(self, moment: Moment) -> None:
        """Run the checkpoint event, save if due, and leave if a signal asked for it."""
        self._saving.unmark()
        if moment == "batch":
            self._run_event(Event.BATCH_CHECKPOINT)
            self._check_over()
            self._saving.mark()
            self._saving.after_batch(
                is_last_of_epoch=self._is_last_of_epoch, is_finished=self._is_over
            )
        else:
            self._run_event(Event.EPOCH_CHECKPOINT)
            self._check_over()
            self._saving.mark()
            self._saving.after_epoch(is_finished=self._is_over)
        self._saving.stop_if_asked()

    def _finish_evaluation(self, pending: Mapping[str, Any]) -> None:
        """Do the evaluation that was cut off, and what would have followed it."""
        if pending.get("num_ranks", 1) == self._group.world_size:
            apply_rng(pending["rng"])
        elif self._rng is not None:
            apply_rng(self._rng)  # each rank's own, also on ranks that there were not
        labels = set(pending["labels"])
        evaluators = [one for one in self._state.evaluators if one.label in labels]
        self._state.pending_eval = None
        self._evaluate(pending["moment"], evaluators)
        self._checkpoint(pending["moment"])
        self._rng = capture_rng()

    def _check_over(self) -> None:
        # Asked once for each point: a duration in seconds may pass between two questions.
        self._is_over = self._state.timer >= self._state.max_duration

    def _step_schedulers(self) -> None:
        for scheduler in self._state.schedulers:
            scheduler.step()

    @property
    def _steps_limit(self) -> int | None:
        """Return where to stop before the loader does, or ``None``.

        A loader that ends by itself is read to its end, so that its samplers see it too.
        """
        steps, length = self._state.steps_per_epoch, self._loader.num_batches
        return None if steps is None or steps == length else steps

    @property
    def _is_last_of_epoch(self) -> bool:
        steps, done = self._state.steps_per_epoch, self._state.timer.batch_in_epoch
        return steps is not None and done >= steps

    def _require_batches(self) -> None:
        if self._state.timer.batch_in_epoch == 0:
            raise UsageError(
                "The training loader yielded no batch.",
                hint="Is the data set empty, or an iterator that can be used only once?",
            )
