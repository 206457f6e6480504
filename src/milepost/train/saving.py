"""When a training is saved, under which name, and with what.

One point of the training is saved once. When the last batch of an epoch and the epoch itself are
both due, the save is left to the epoch. The end of the training is always saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..engine.signals import asked_to_end
from ..errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    Preempted,
    UnsupportedStateError,
    UsageError,
)
from ..progress.pacing import Pacing
from ..progress.schedule import Due, Schedule
from ..progress.time import TimeUnit
from ..state.loader import ResumableLoader
from .evaluating import Evaluation
from .events import Event
from .metrics import scalar_metrics
from .notes import attach_note
from .rescue import Buffers, CleanPoint
from .state import State
from .stopping import Stopping

if TYPE_CHECKING:
    from ..checkpointer import Checkpointer
    from ..engine.pending import PendingSave

__all__ = ["Saving"]

_log = logging.getLogger(__name__)
_AFTER_ERROR = ("Saved after an error: callbacks may have seen a part of the next batch.",)


class Saving:
    """Save one training, where there is a folder to save to.

    Args:
        state: The training.
        loader: Its loader.
        checkpointer: The run; ``None``: nothing is saved, and signals end the process as usual.
        interval: When to save; see :class:`Schedule`.
        pacing: Finds out how often, if the interval leaves it open.
        stopping: Says whether a signal asked to end.
        is_alone: Whether there is one rank only. Of several, one that fails cannot save: the others
            are elsewhere.
    """

    def __init__(
        self,
        state: State,
        *,
        loader: ResumableLoader,
        checkpointer: Checkpointer | None,
        interval: Any,
        pacing: Pacing | None = None,
        stopping: Stopping,
        is_alone: bool = True,
    ) -> None:
        self._state = state
        self._loader = loader
        self._interval = interval
        self._pacing = pacing
        self._stopping = stopping
        self._is_alone = is_alone
        self._clean: CleanPoint | None = None
        self._buffers = Buffers(state.bare_model)
        self._loss: Any = None
        self._is_in_batch = False
        self._is_marked_here = False
        self._saved_at: tuple[int, int] | None = None
        self._last: PendingSave[Any] | None = None
        self._saves: list[PendingSave[Any]] = []
        self._untold: list[PendingSave[Any]] = []
        self._started_at = self._point
        self._asked_at: Mapping[str, Any] = {}
        self._schedule = self._new_schedule()
        self.checkpointer = checkpointer
        self.evaluation: Evaluation | None = None
        if pacing is not None and checkpointer is not None:
            checkpointer.pace(pacing)

    @property
    def checkpoint_folder(self) -> str | None:
        """Return the folder of the run, or ``None`` when nothing is saved."""
        return None if self.checkpointer is None else self.checkpointer.folder

    @property
    def counters(self) -> Mapping[str, Any]:
        """Return where the schedule stands, for an evaluation that may be cut off."""
        return self._asked_at

    @property
    def saved_names(self) -> list[str]:
        """Return the names of the saves of this process that are there or on their way.

        Those that failed are not among them, nor those that were deleted since. Oldest first.
        """
        return [one.name for one in self._saves if not one.done() or _is_there(one)]

    @property
    def newest_name(self) -> str | None:
        """Return the name of the newest save of this process that is committed, if any."""
        committed = (one for one in reversed(self._saves) if one.done() and not one.has_failed)
        return next((one.name for one in committed), None)

    def wait(self) -> None:
        """Wait for the end of the last save; how it ended is told elsewhere."""
        if self._last is not None:
            self._last.check_done(None)
        self._tell_ended()

    def start(self, counters: Mapping[str, Any] | None = None) -> None:
        """Begin to count intervals, at the start of ``fit``.

        Args:
            counters: Where an earlier process's schedule stood; ``None``: the present point.
        """
        timer = self._state.timer
        self._asked_at = timer.snapshot() if counters is None else counters
        self._schedule = self._new_schedule()
        self._schedule.start(self._asked_at)
        if self._pacing is not None:
            self._pacing.start()
            if not self._is_alone:
                self._pacing.hear(is_due=False)  # before the first batch rank 0 says nothing
        self._buffers = Buffers(self._state.bare_model)
        self._started_at = self._point
        self._saved_at = None
        self._clean, self._is_in_batch, self._is_marked_here = None, False, False
        if self.checkpointer is not None:
            self.checkpointer.prepare()

    def mark(self) -> None:
        """Note that this is a clean point."""
        self._is_in_batch = False
        if self.checkpointer is not None and self._is_alone:
            self._clean = CleanPoint.mark(self._buffers, self._loader)
            self._is_marked_here = True

    def mark_before_fetch(self) -> None:
        """Note that this is a clean point, unless nothing has moved since the last one."""
        if not self._is_marked_here:
            self.mark()

    def enter_batch(self) -> None:
        """Note that a batch was fetched, and that the timer does not count it yet."""
        self._is_in_batch = True
        self._is_marked_here = False

    def unmark(self) -> None:
        """Note that weights, timer or listeners are about to move on."""
        self._clean = None
        self._is_marked_here = False

    def leave_batch(self, *, is_save_due: bool | None = None) -> None:
        """Note that the timer has counted the batch.

        Args:
            is_save_due: What the leader of several ranks says, where it finds out how often.
        """
        self._is_in_batch = False
        self._loss = self._state.loss
        if self._pacing is not None:
            self._pacing.end_batch()
            if is_save_due is not None:
                self._pacing.hear(is_due=is_save_due)
        self._tell_ended()

    def after_batch(self, *, is_last_of_epoch: bool, is_finished: bool) -> None:
        """Save, if due, after the event ``BATCH_CHECKPOINT``.

        Args:
            is_last_of_epoch: No batch of this epoch is left.
            is_finished: The maximum duration is reached.
        """
        if self.checkpointer is None:
            return
        if not is_finished:
            self.checkpointer.prepare()  # the optimizers have what they keep by now
        if is_last_of_epoch and (is_finished or self._is_epoch_due()):
            return
        due = self._ask("batch", Event.BATCH_CHECKPOINT)
        if is_finished:
            due = due or Due(f"ba{self._state.timer.batch}", "end")
        if due is not None:
            self._save(due.name, is_final=is_finished)

    def after_epoch(self, *, is_finished: bool) -> None:
        """Save, if due, after the event ``EPOCH_CHECKPOINT``."""
        if self.checkpointer is None:
            return
        due = self._ask("epoch", Event.EPOCH_CHECKPOINT)
        if is_finished:
            due = due or Due(f"ep{self._state.timer.epoch}", "end")
        if due is not None and (is_finished or self._saved_at != self._point):
            self._save(due.name, is_final=is_finished)

    def save_now(self, name: str | None = None) -> PendingSave[Any]:
        """Save at the user's wish.

        Raises:
            UsageError: No folder, or in the middle of a batch.
        """
        if self.checkpointer is None:
            raise UsageError("There is no folder to save to.", hint="Give the trainer save_folder.")
        if self._is_in_batch:
            raise UsageError(
                "A checkpoint in the middle of a batch could not be resumed from.",
                hint="Save at batch_end or later.",
            )
        if name is not None:
            return self._save(name, reason="manual", is_named=True)
        return self._save(self._natural_name(), reason="manual")

    def stop_if_asked(self) -> None:
        """Save and leave, if a signal asked for it.

        Raises:
            Preempted: Once the state is safe, or the grace period is over.
        """
        if self._stopping.number is not None:
            self.stop()

    def stop(self) -> None:
        """Save this point, unless it was just saved, and leave.

        Raises:
            Preempted: Always.
        """
        assert self.checkpointer is not None
        stopping, number = self._stopping, self._stopping.number
        assert number is not None
        if self._point == self._started_at and self._saved_at != self._point:
            raise Preempted(number, self.checkpointer.resumed_from)  # nothing new to save
        name = None
        try:
            pending = self._save_here("signal", timeout_s=stopping.seconds_left)
            pending.wait(timeout_s=stopping.seconds_left)
            name = pending.name
        except DeadlineError:
            _log.error("Signal %d: the state was not safe within %g s.", number, stopping.grace_s)
        except CheckpointError:
            _log.exception("Signal %d: the state could not be saved.", number)
        if name is not None:
            _log.info("%s", asked_to_end(number, name))
        raise Preempted(number, name)

    def rescue(self, error: BaseException) -> None:
        """Keep what can be kept after an error in the loop; the error itself is the caller's.

        The last clean point is saved, so that a resume is exact. Where it is lost, because the
        optimizers had begun to step or a buffer had changed, the state goes into a diagnostic
        checkpoint that no resume takes. A failure in here becomes a note of the error.
        """
        state, clean = self._state, self._clean
        if self.checkpointer is None or isinstance(error, FencedError) or not self._is_alone:
            return
        if self._point == self._started_at:
            return  # nothing was trained yet that could be lost
        try:
            if clean is not None and clean.is_intact(self._buffers):
                clean.put_back(self._loader)
                pending = self._save_here("exception", timeout_s=None, notes=_AFTER_ERROR)
            else:
                # The batch that failed is the one in hand, which the timer does not count yet.
                in_hand = self._is_in_batch or self._loader.is_fetching
                name = f"ba{state.timer.batch + in_hand}"
                pending = self.checkpointer.save_diagnostic("failed", name, extra={}, wait=False)
            pending.wait()
            attach_note(error, self._where_saved(pending.name))
        except Exception as failure:  # noqa: BLE001 - recorded with the error that matters
            attach_note(error, f"The state could not be saved: {failure!r}")

    def _where_saved(self, name: str) -> str:
        """Return what to tell of a save after an error: its name, and where a resume begins."""
        assert self.checkpointer is not None
        if "/" not in name:
            return f"The state was saved as {name!r}, and a resume goes on from there."
        newest = self.newest_name or self.checkpointer.resumed_from
        resume = f"goes on from {newest!r}" if newest else "begins anew: there is no checkpoint"
        return f"The state was saved as {name!r}, for a look only. A resume {resume}."

    def _save_here(
        self, reason: str, *, timeout_s: float | None, notes: tuple[str, ...] = ()
    ) -> PendingSave[Any]:
        """Return a save of this point: the one made just now if it went well, else a new one."""
        last = self._last
        is_made = self._saved_at == self._point and not self._state.pending_eval
        if is_made and last is not None and last.exception(timeout_s) is None:
            return last
        name = self._natural_name()
        try:
            return self._save(name, reason=reason, notes=notes)
        except (FencedError, UnsupportedStateError):
            raise
        except CheckpointError as earlier:
            # The failure of an earlier save comes out here, once. It must not prevent this one.
            _log.warning("An earlier save failed: %s", earlier)
            return self._save(name, reason=reason, notes=notes)

    def _save(
        self,
        name: str,
        *,
        reason: str = "interval",
        is_final: bool = False,
        is_named: bool = False,
        notes: tuple[str, ...] = (),
    ) -> PendingSave[Any]:
        assert self.checkpointer is not None
        pending = self.checkpointer.save(
            name,
            metrics=self._metrics(),
            reason=reason,
            is_final=is_final,
            notes=(*self._loader.notes, *notes),
            is_natural=not is_named,
            is_step_next=reason == "interval" and not is_final,
        )
        self._last, self._saved_at = pending, self._point
        self._saves.append(pending)
        self._untold.append(pending)
        for callback in self._state.callbacks:
            callback.save_started(self._state, pending)
        return pending

    def _tell_ended(self) -> None:
        """Tell callbacks of saves that have ended since they were told last, in their order."""
        while self._untold and self._untold[0].done():
            pending = self._untold.pop(0)
            for callback in self._state.callbacks:
                callback.save_ended(self._state, pending)

    @property
    def _point(self) -> tuple[int, int]:
        """Return what tells two points of a training apart."""
        return self._state.timer.batch, self._state.timer.epoch

    def _natural_name(self) -> str:
        timer = self._state.timer
        return f"ba{timer.batch}" if timer.batch_in_epoch else f"ep{timer.epoch}"

    def _ask(self, moment: Any, event: Event) -> Due | None:
        self._asked_at = self._state.timer.snapshot()
        if any(callable(interval) for interval in self._schedule.intervals):
            self._is_marked_here = False  # the user's function may draw random numbers
        return self._schedule.due(moment, self._asked_at, self._state, event)

    def _is_epoch_due(self) -> bool:
        """Return whether the epoch that now ends is due, or ends the training."""
        counters = self._state.timer.snapshot()
        done, whole = counters["epoch"] + 1, self._state.max_duration
        if whole.unit is TimeUnit.EPOCH and done >= whole.value:
            return True
        return self._schedule.epoch_would_be_due({**counters, "epoch": done, "batch_in_epoch": 0})

    def _new_schedule(self) -> Schedule:
        return Schedule(
            self._interval,
            max_duration=self._state.max_duration,
            steps_per_epoch=self._state.steps_per_epoch,
            pacing=self._pacing,
        )

    def _metrics(self) -> dict[str, float]:
        """Return what checkpoints are ranked by: the loss, and metrics of these very weights."""
        found: dict[str, float] = {}
        if isinstance(self._loss, torch.Tensor):
            found["loss"] = float(self._loss)
        if self.evaluation is not None:
            found.update(scalar_metrics(self.evaluation.fresh_metrics()))
        return found


def _is_there(saved: PendingSave[Any]) -> bool:
    """Return whether a save that has ended left a checkpoint that was not deleted since."""
    return not saved.has_failed and bool(saved.wait().is_committed)
