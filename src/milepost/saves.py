"""Saves: what a checkpoint of a loop consists of, and where in the loop one may be taken.

A save is right only if progress, loader, gradients and random state all belong to one point: a
whole number of batches. Between two batches they do. In the body of a loop, after an error and
after a signal this file makes them agree, or saves for a look only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint
from .engine.pending import PendingSave
from .engine.save import SaveRequest
from .errors import CheckpointError, UsageError
from .format.layout import check_name
from .naming import NameFormat, as_number, natural_name
from .progress.pacing import Pacing
from .progress.timer import Timer
from .resumption import Resumption
from .staging import LAST_SAVE
from .state.after_batches import AfterBatches
from .state.batch_in_hand import BatchInHand
from .state.loader import ResumableLoader
from .state.owned import Late
from .state.repeated import changed_before_note, done_again_note, listed
from .state.rng import capture_rng
from .state.tracked import Tracked, check_item_names
from .state.transient import TransientBuffers
from .state.walks import walked_once
from .tensors.pack import PackedItem, pack_item
from .writer import RunWriter

__all__ = ["Saves"]

_log = logging.getLogger("milepost")

_LAST = ("exception", "signal")
"""Reasons for which a save must not fail because something wrote where nothing should: no other
follows. It is copied at once."""

_FOR_GOOD = -1
"""The number of no batch: memory was prepared when the optimizers had what they keep."""

_OWN_STEPS = (
    "Batches are counted with step(), and no loader is iterated with run.batches(): where a "
    "tracked loader is in its epoch is not known, and a resume begins the epoch of the data anew."
)


class Saves:
    """Takes the checkpoints of one loop.

    Args:
        tracked: What is saved.
        writer: The run.
        resumption: Has the random state of the checkpoint until the loop goes on.
        hand: The batch that the loop's body works on.
        timer: The progress.
        name_format: Pattern for names that come from the progress.
        is_async: Whether a save returns once the state is copied.
        loaders: The tracked loaders, which know what a resume cannot reproduce exactly.

    Attributes:
        iterated: The loader that is being iterated, if any.
        last: The newest save of this process.
        logged_error: An error that was logged because another one mattered more.
        saved_at: The point of the newest save: epoch and batch.
        stray_note: A warning about parameters that are optimized and not saved, if there are any.
        transient: Watches the buffers that are not saved.
        pacing: Learns what saves cost, if it decides when they are due.
        after: What the loop does after the last batch of an epoch.
        epochs_note: A warning about epochs that are not counted, if there are any.
    """

    def __init__(
        self,
        tracked: Tracked,
        writer: RunWriter,
        *,
        resumption: Resumption,
        hand: BatchInHand,
        timer: Timer,
        name_format: NameFormat | None,
        is_async: bool,
        loaders: Mapping[int, ResumableLoader],
    ) -> None:
        self._tracked = tracked
        self._writer = writer
        self._resumption = resumption
        self._hand = hand
        self._timer = timer
        self._name_format = name_format
        self._is_async = is_async
        self._loaders = loaders
        self._metrics: dict[str, Any] = {}
        self._saved: PendingSave[Checkpoint] | None = None
        self.iterated: ResumableLoader | None = None
        self.last: PendingSave[Checkpoint] | None = None
        self.logged_error: Exception | None = None
        self.saved_at: tuple[int, int] | None = None
        self.stray_note = ""
        self.transient = TransientBuffers({})
        self.pacing: Pacing | None = None
        self.after = AfterBatches()
        self.epochs_note = ""
        self._steps_note = ""
        self._told: set[str] = set()
        self._prepared_at: int | None = None

    def note_own_steps(self) -> None:
        """Note that a loop counts batches that it takes from somewhere itself."""
        if not self._steps_note and any(one.is_read_by_us for one in self._loaders.values()):
            self._steps_note = _OWN_STEPS
            _log.warning(_OWN_STEPS)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Note the newest metrics. A tensor is read when a save is made."""
        for name, value in metrics.items():
            self._metrics[name] = value.detach() if isinstance(value, Tensor) else value

    def save(  # noqa: PLR0913 - one for each thing that differs, all by keyword
        self,
        name: str | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        reason: str = "manual",
        is_final: bool = False,
        notes: Sequence[str] = (),
        wait: bool = False,
        rng: Mapping[str, Any] | None = None,
        is_natural: bool = False,
        is_step_next: bool = False,
    ) -> PendingSave[Checkpoint]:
        """Save the state of everything tracked; see ``Checkpointer.save``."""
        self._resumption.settle()
        started_s = self._timer.clock_s
        with self._whole_batches() as before, walked_once():
            counters = self._timer.snapshot()
            numbers = {**self._metrics, **(metrics or {})}
            numbers = {key: as_number(key, value) for key, value in numbers.items()}
            plain = natural_name(counters) if name is None else name
            if self._name_format is not None and (name is None or is_natural):
                plain = self._name_format.name(plain, counters, numbers)
            check_name(plain)
            request = SaveRequest(
                name=plain,
                reason=reason,
                is_final=is_final,
                time=counters,
                metrics=numbers,
                notes=(*self._exactness_notes(), *self._repetition_notes(), *notes),
                interval={} if self.pacing is None else self.pacing.record,
            )
            is_last = is_final or reason in _LAST
            is_waited_for = wait or not self._is_async
            pending = self._begin(
                request,
                rng=rng or before,
                is_waited_for=is_waited_for or is_last,
                eager_reason=LAST_SAVE
                if is_last
                else self._writer.eager_reason(
                    is_step_next=is_step_next, is_waited_for=is_waited_for
                ),
            )
            self.saved_at, self._saved = self._point(), pending
        try:
            if wait:
                pending.wait()
            elif not self._is_async:
                self._writer.wait()
        except BaseException:
            pending.wait_until_copied()  # after an interrupt anything may be written to
            raise
        if self.pacing is not None:
            stall_s = self._timer.clock_s - started_s
            self._pace(self.pacing, pending, stall_s if reason == "interval" else None)
        return pending

    def _pace(
        self, pacing: Pacing, pending: PendingSave[Checkpoint], stall_s: float | None
    ) -> None:
        pacing.note_save(pending, stall_s=stall_s)
        news = pacing.news()
        if news is not None and self._writer.team.rank == 0:
            _log.info("Saving %s.", news)

    def save_diagnostic(
        self, folder: str, name: str, *, extra: Mapping[str, Any], wait: bool = True
    ) -> PendingSave[Checkpoint]:
        """Save the state for a look; see ``Checkpointer.save_diagnostic``."""
        check_item_names(extra)
        request = SaveRequest(
            name=f"{folder}/{name}",
            reason="nan" if folder == "nan" else "exception",
            time=self._timer.snapshot(),
            metrics={},
        )
        pending = self._begin(request, extra=extra, is_waited_for=True)
        if wait:
            pending.wait()
        return pending

    def save_after_error(self) -> PendingSave[Checkpoint] | None:
        """Save after an exception in the loop.

        If nothing was changed since the last finished batch, the checkpoint is one to resume from:
        the batch is trained again with the random numbers it had. Otherwise the state is between
        two steps and goes to ``failed/``, for a look and never for a resume. After the last batch
        of an epoch, what the loop does before the next one is done again in the same way.

        Returns:
            The save, committed; ``None`` if this point or a later one was saved already.
        """
        self._writer.wait_for_writing(None)
        self._log_earlier_errors()
        if self._writer.team.world_size > 1:
            _log.warning("A rank that fails alone cannot save: the others are elsewhere.")
            return None
        rng: Mapping[str, Any] | None = None
        loader = self.iterated
        is_fetching = loader is not None and loader.is_fetching
        if loader is not None and is_fetching:
            # What the loader drew before it failed is drawn again. One that keeps its own position
            # has gone on already, and would leave out the batch.
            rng = None if loader.kind == "stateful" else loader.fetch_rng
        elif self._hand.is_held:
            rng = self._hand.give_back() if self._hand.is_undone_by_repeating else None
        if rng is None and (is_fetching or self._hand.is_held):
            self._hand.put_down()
            return self.save_diagnostic("failed", f"ba{self._timer.batch + 1}", extra={})
        self._hand.put_down()
        changed = self.after.changes()
        if changed:
            _log.warning(
                "The error came after the last batch of an epoch and before the epoch was counted, "
                "and by then the loop had changed %s: this state is for a look only, since a "
                "resume from it would change that once more.",
                listed(changed),
            )
            return self.save_diagnostic("failed", f"ba{self._timer.batch}", extra={})
        is_saved = self.saved_at is not None and self.saved_at >= self._point()
        if is_saved and self._saved is not None and self._saved.exception() is None:
            return None
        return self.save(reason="exception", wait=True, rng=rng)

    def save_before_stop(self, grace_left_s: Callable[[], float | None]) -> str | None:
        """Save within the grace period.

        Args:
            grace_left_s: Returns the seconds that are left; ``None`` for as many as it takes.

        Returns:
            The checkpoint's name, ``None`` if nothing could be saved.
        """
        try:
            pending = self._saved if self._is_saved() else None
            self._writer.wait_for_writing(grace_left_s())
            self._log_earlier_errors()
            if pending is None or pending.exception() is not None:
                pending = self.save(reason="signal")
            return pending.wait(grace_left_s()).name
        except CheckpointError as error:
            _log.error("Asked to end, and the state could not be saved: %s", error)
            return None

    def _begin(
        self,
        request: SaveRequest,
        *,
        rng: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        eager_reason: str = LAST_SAVE,
        is_waited_for: bool = False,
    ) -> PendingSave[Checkpoint]:
        started_s = time.perf_counter()
        owned: Late | None = None
        try:
            with walked_once():
                items = self._capture(rng=rng, extra=extra or {})
                if not eager_reason:
                    # With "overlap" it was promised that whoever writes waits.
                    is_promised = self._writer.options.staging == "overlap"
                    owned = self._tracked.owned(with_embeddings=is_promised)
        except BaseException as error:
            self._writer.fail(request.name, error)
            raise
        capture_s = time.perf_counter() - started_s
        self.last = self._writer.save(
            items,
            request,
            owned=owned,
            eager_reason=eager_reason,
            is_waited_for=is_waited_for,
            capture_s=capture_s,
        )
        return self.last

    def prepare(self) -> None:
        """Have memory got for the state ahead of the first save.

        The first call goes by what optimizers will keep as far as one can tell; one at a later
        batch looks once more, when they keep it.
        """
        if self.last is not None or self._prepared_at == _FOR_GOOD:
            return
        if self._prepared_at != self._timer.batch:
            self._writer.prepare(self._tracked.sizes())
            self._prepared_at = self._timer.batch if self._prepared_at is None else _FOR_GOOD

    def wait_until_copied(self, timeout_s: float | None = None) -> None:
        """Wait until the state may be changed by anything; how the copy went is told elsewhere."""
        if self.last is not None:
            self.last.wait_until_copied(timeout_s)

    def _capture(
        self, *, rng: Mapping[str, Any] | None, extra: Mapping[str, Any]
    ) -> list[PackedItem]:
        items = self._tracked.capture()
        gradients = self._hand.gradients(self._tracked.parameter_names())
        if gradients:
            # Those that are not reduced yet differ from rank to rank.
            items.append(pack_item("gradients", gradients, home="each"))
        items += [pack_item(name, value, home="each") for name, value in extra.items()]
        # A checkpoint made before the first batch after a resume has the random state it resumed.
        state = dict(rng or self._resumption.rng or capture_rng())
        loaders = self._tracked.rank_states()
        if loaders:
            state["loaders"] = loaders
        items.append(pack_item("rng", [state], home="each"))
        return items

    @contextmanager
    def _whole_batches(self) -> Iterator[Mapping[str, Any] | None]:
        """Make progress and state agree while the state is captured within a batch.

        Yields:
            The random state to store, if it is not the present one.
        """
        hand = self._hand
        if not hand.is_held:
            yield self.after.rng  # what comes after the last batch is done again
        elif hand.is_untouched:
            rng = hand.give_back()
            if rng is None:
                raise UsageError(
                    "Nothing was computed from the batch in hand yet, and its loader cannot take "
                    "it back: a checkpoint now would lose the batch.",
                    hint="Save at the end of the loop's body.",
                )
            try:
                yield rng
            finally:
                hand.take_again()
        else:
            counters = self._timer.state_dict()
            self._timer.on_batch_complete(hand.num_samples or 0)
            try:
                yield None
            finally:
                self._timer.load_state_dict(counters)

    def _point(self) -> tuple[int, int]:
        return (self._timer.epoch, self._timer.batch)

    def _is_saved(self) -> bool:
        return self.saved_at == self._point()

    def _log_earlier_errors(self) -> None:
        """Log errors of earlier saves, which must not be in the way of the last one."""
        try:
            self._writer.settle()
        except CheckpointError as error:
            _log.error("An earlier save failed: %s", error)
            self.logged_error = error

    def _exactness_notes(self) -> tuple[str, ...]:
        notes = [note for loader in self._loaders.values() for note in loader.notes]
        changed = self.transient.note()
        if changed:
            self._warn_once(changed, about="buffers")
        own = (self.stray_note, self._steps_note, self.epochs_note, changed)
        notes += [note for note in own if note]
        return tuple(dict.fromkeys(notes))

    def _repetition_notes(self) -> tuple[str, ...]:
        """Return what a resume does twice, and warn of it."""
        if self._hand.is_given_back:
            note = changed_before_note(self._hand.changed_small())
        else:
            note = done_again_note(self.after.changes())
        if note:
            self._warn_once(note, about="repetition")
        return (note,) if note else ()

    def _warn_once(self, note: str, *, about: str) -> None:
        if about not in self._told:
            self._told.add(about)
            _log.warning(note)
