"""The checkpointer: any training loop, kept alive.

    with Checkpointer("runs/digits", every="100ba", model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(10):
            for inputs, targets in run.batches(loader):
                ...

Everything about a batch that has to be right for an exact resume happens between two batches, in
one place: count it, save if a save is due, look whether a signal asked us to end.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .checkpoint import Checkpoint, Place, Run
from .engine.pending import PendingSave
from .engine.signals import StopSignals, asked_to_end
from .errors import CheckpointError, Preempted, UsageError
from .fetching import Fetching
from .liveness import beat
from .naming import NameFormat
from .opening import Resume, WriterOptions
from .progress.pacing import Pacing, make_pacing
from .progress.schedule import Schedule, is_auto
from .progress.time import Time
from .progress.timer import Timer
from .progress.uncounted import NO_EPOCHS_NOTE, refuse_end, refuse_second_pass
from .ranks.solo import RankCheck, Team
from .ranks.stopping import StopTogether
from .ranks.team import join_team
from .ranks.timed import TimedTogether
from .resumption import Resumption
from .runs.keep import KeepPolicy
from .saves import Saves
from .staging import CopyCheck, Staging
from .state.batch_in_hand import BatchInHand, num_samples
from .state.dealt_loader import resumable
from .state.loader import ResumableLoader
from .state.objects import PerRank, Stateful, Value
from .state.report import LoadReport
from .state.small import SmallState
from .state.stages import Stage
from .state.tracked import Tracked
from .state.transient import TransientBuffers
from .stores.url import AnyPlace, settled
from .writer import RunWriter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Checkpointer", "PerRank", "Stage", "Value"]

_log = logging.getLogger("milepost")


class Checkpointer:
    """Save and resume a training loop.

    Args:
        folder: Folder of the run, address of a bucket, store, or object store provider.
        every: When to save: ``"1ep"``, ``"100ba"``, ``"30m"``, ``"auto"`` for as often as it costs
            little, a whole number of epochs, a callable ``(checkpointer, moment) -> bool``, or a
            list of those. ``None`` saves only where :meth:`save` is called and at the end.
        overhead_budget: With ``every="auto"``: the share of the time that saves may take; ``None``:
            0.01, or no limit if ``mean_time_between_failures`` is given.
        mean_time_between_failures: With ``every="auto"``: how often something ends the training,
            such as ``"6h"``. Saves come as often as makes them and lost work cost the least.
        keep: Retention policies; what at least one keeps, stays. Empty keeps everything.
        resume: ``"auto"`` goes on from the newest whole checkpoint or starts afresh; ``"must"``
            refuses to start afresh; ``"never"`` refuses a run that holds checkpoints.
        save_format: ``"milepost"``, or ``"torch"`` for one file per checkpoint.
        save_compression: Makes parts smaller while they are written: ``"zstd"`` or ``"lz4"``;
            ``"auto"``: where the place is slow enough for it. Of single files: ``"gzip"``,
            ``"bzip2"``, ``"lzma"``.
        save_name_format: Pattern for names, such as ``"{name}"`` or ``"ep{epoch}-ba{batch}"``.
        on_save_error: ``"raise"`` at the next chance, or ``"warn"`` and go on training.
        max_failed_saves: With ``"warn"``: how many saves in a row may fail before training stops.
        async_save: Whether :meth:`save` returns once the state is copied. Otherwise it waits.
        link_unchanged: Whether frozen weights that did not change share one file.
        handle_signals: Whether SIGTERM and SIGUSR1 save and end the loop.
        grace_s: Seconds from such a signal to the moment the process must be gone.
        strict: Whether a resume demands that state and objects fit exactly.
        sharding: Of several ranks: ``"auto"``, each writes what it holds; ``"consolidated"``,
            rank 0 writes whole tensors into files that any tool opens.
        rank_timeout_s: Of several ranks: how long one waits for another to come to the same save or
            start, in seconds.
        share_timeout_s: Of several ranks: how long the leader waits for the last one to write its
            share, in seconds.
        rank_check: Of several ranks: how tensors are compared that all of them should have alike:
            ``"sample"``, ``"full"`` for every byte, ``"none"``.
        local_cache: For a run in an object store: a folder on this machine where copies of the
            newest two checkpoints are kept, so that a resume here need not download them.
        load_chunk_bytes: For a run in an object store: how much one request of a resume asks for,
            in blocks of 8 MiB; eight are on their way at a time. With less than a block, 8 to
            64 MiB, by how much there is to read.
        load_progress_bar: Whether to show how far such a download has come.
        staging: When the state is copied: ``"eager"``, before a save returns; ``"overlap"``, what
            optimizers own while the next forward and backward pass run, and all else before the
            save returns; ``"auto"``, the latter for saves between two batches of :meth:`batches`,
            in a loop that writes to nothing of it but by the steps of optimizers.
        copy_check: How what is copied while training goes on is watched: by its version counters
            and ``"sample"``, some bytes of each tensor, ``"full"``, all bytes, or ``"none"``.
        staging_budget_bytes: How much memory the copy of the state may take on each rank, 32 MiB at
            least; ``None``: as much as it needs. A larger state is written while it is copied, and
            :meth:`save` returns when the last 8 MiB of it are copied.
        **objects: What to save, by name: modules, optimizers, schedulers, loaders, anything with
            ``state_dict`` and ``load_state_dict``, a :class:`Value`, a :class:`PerRank`, a
            :class:`Stage`, or a dict of such, which is saved with the members that it has then.

    Raises:
        UsageError: An option or object that makes no sense.
    """

    def __init__(  # noqa: PLR0913 - one for each thing a user can choose, all by keyword
        self,
        folder: AnyPlace,
        *,
        every: Any = None,
        overhead_budget: float | None = None,
        mean_time_between_failures: str | Time | None = None,
        keep: Sequence[KeepPolicy] | KeepPolicy = (),
        resume: Resume = "auto",
        save_format: str = "milepost",
        save_compression: str | None = None,
        save_name_format: str | None = None,
        on_save_error: str = "raise",
        max_failed_saves: int = 3,
        async_save: bool = True,
        link_unchanged: bool = True,
        handle_signals: bool = True,
        grace_s: float = 30.0,
        strict: bool = True,
        sharding: Literal["auto", "consolidated"] = "auto",
        rank_timeout_s: float = 45.0,
        share_timeout_s: float = 1800.0,
        rank_check: RankCheck = "sample",
        local_cache: str | os.PathLike[str] | None = None,
        load_chunk_bytes: int = 0,
        load_progress_bar: bool = False,
        staging: Staging = "eager",
        copy_check: CopyCheck = "sample",
        staging_budget_bytes: int | None = None,
        **objects: Any,
    ) -> None:
        options = WriterOptions(
            resume=resume,
            keep=_policies(keep),
            save_format=save_format,
            save_compression=save_compression,
            on_save_error=on_save_error,
            max_failed_saves=max_failed_saves,
            link_unchanged=link_unchanged,
            sharding=sharding,
            rank_timeout_s=rank_timeout_s,
            share_timeout_s=share_timeout_s,
            rank_check=rank_check,
            local_cache=local_cache,
            staging=staging,
            copy_check=copy_check,
            staging_budget_bytes=staging_budget_bytes,
        )
        place = settled(folder)
        self.folder = place if isinstance(place, str) else place.url
        self.timer = Timer()
        self._writer = RunWriter(place, options)
        self._tracked = Tracked(strict=strict)
        pacing = make_pacing(
            is_wanted=is_auto(every),
            option="every",
            clock=lambda: self.timer.clock_s,
            overhead_budget=overhead_budget,
            mean_time_between_failures=mean_time_between_failures,
        )
        self._schedule = Schedule(every, pacing=pacing)
        self._signals = StopSignals(grace_s=grace_s) if handle_signals else None
        self._loaders: dict[int, ResumableLoader] = {}
        self._hand = BatchInHand()
        self._resumption = Resumption(
            self._tracked,
            self._writer,
            self._hand,
            strict=strict,
            fetching=Fetching(load_chunk_bytes, is_bar_shown=load_progress_bar),
        )
        self._saves = Saves(
            self._tracked,
            self._writer,
            resumption=self._resumption,
            hand=self._hand,
            timer=self.timer,
            name_format=NameFormat(save_name_format) if save_name_format else None,
            is_async=async_save,
            loaders=self._loaders,
        )
        self._saves.pacing = pacing
        self._stopping = StopTogether(self._writer.team)
        self._clock_schedule: Schedule | None = None
        self._timed: TimedTogether | None = None
        self._is_rolled_back = False
        self._is_iterating = False
        self._total_epochs: int | None = None
        self._batch_at_open = 0
        self._is_open = False
        self._tracked.add("timer", self.timer)
        self.track(**objects)

    # -- tracking ------------------------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Track more objects by name; one that the resumed checkpoint holds is restored at once.

        Raises:
            DuplicateNameError: A name is taken.
            UsageError: An object that cannot be tracked.
            MismatchError: The stored state does not fit it.
        """
        if self._is_open:
            self._saves.wait_until_copied()  # what is restored now must not end in the last save
        for name, target in objects.items():
            try:
                self._tracked.add(name, self._trackable(name, target))
            except UsageError as error:
                meant = get_close_matches(name, _OPTIONS, n=1, cutoff=0.75)
                if meant and not self._is_open:
                    raise UsageError(
                        f"{name}= is no option, and its value cannot be tracked as an object.",
                        hint=f"Was {meant[0]}= meant?",
                    ) from error
                raise
            if self._is_open:
                self._writer.meet(partial(self._tracked.meet, items={name}))
            self._resumption.claim(name, target)
        if self._is_open:
            self._watch()
            self._resumption.claim_gradients()

    def leave_behind(self, *names: str) -> None:
        """Say that stored items of the resumed checkpoint are not wanted any more.

        Args:
            *names: Items; those that the checkpoint does not hold are ignored.
        """
        self._resumption.leave_behind(names)

    def _trackable(self, name: str, target: Any) -> Any:
        """Return what to track for an object: a loader becomes one that can be resumed.

        Iterables of other kinds are loaders only under a name that says so: a list of tensors is no
        loader, and its values would be lost.
        """
        known = isinstance(
            target,
            nn.Module | Optimizer | Value | PerRank | Stage | Mapping | tuple | ResumableLoader,
        )
        is_named_so = name == "loader" or name.endswith("_loader")
        is_loader = isinstance(target, DataLoader) or (
            not known
            and isinstance(target, Iterable)
            and (is_named_so or isinstance(target, Stateful))
        )
        if not is_loader or isinstance(target, str | bytes):
            return target
        if id(target) not in self._loaders:
            self._loaders[id(target)] = resumable(target)
        return self._loaders[id(target)]

    # -- opening and closing -------------------------------------------------------------------

    def open(self, *, origin: Checkpoint | None = None, team: Team | None = None) -> Self:
        """Open the run, restore what there is to resume from, and begin to watch for signals.

        Args:
            origin: Go on from this checkpoint of the run and not from its newest.
            team: The ranks, where they have found each other already. It is left at the end.
        """
        if self._is_open:
            return self
        self._writer.team = join_team() if team is None else team
        self._stopping = StopTogether(self._writer.team)
        self._follow_one_clock()
        self._writer.meet(self._tracked.meet)
        with self._writer.telling():
            self._watch()
        resumption = self._resumption
        self._writer.open(
            resumption.resume,
            check=resumption.check,
            origin=origin,
            covers=None if self._tracked.strict else resumption.covers,
        )
        if self.is_resumed and self._writer.team.rank == 0:
            at = self.timer.epoch, self.timer.batch
            _log.info("Going on from %s (epoch %d, batch %d).", self.resumed_from, *at)
        self._resumption.tell()
        self._is_open = True
        self._batch_at_open = self.timer.batch
        if self._signals is not None:
            self._signals.install()
        self.timer.start()
        if self._saves.pacing is not None:
            self.pace(self._saves.pacing)
        self._start_intervals()
        if self._schedule.intervals:
            self.prepare()
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight, give back signal handlers. Closing twice is no error.

        Args:
            timeout_s: How long to wait for the save, in seconds.

        Raises:
            CheckpointError: A save failed that nobody was told about yet.
            SaveFailedError: With ``on_save_error="warn"``: the newest save failed, and none comes
                after it.
        """
        if not self._is_open:
            return
        try:
            self._saves.wait_until_copied(timeout_s)
            self._writer.wait(timeout_s, is_end=True)
        finally:
            self._is_open = False
            self.timer.stop()
            self._hand.release()
            if self._signals is not None:
                self._signals.restore()
            self._writer.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            is_uncounted = self._is_uncounted()
            looked_at = self._keep_for_a_look() if is_uncounted else ""
            self.close()
            if self.stop_signal is not None:  # it came after the last look at it
                raise Preempted(
                    self.stop_signal, self._saves.last.name if self._saves.last else None
                )
            if is_uncounted:
                is_batch_counted = self.timer.batch > self._batch_at_open
                refuse_end(is_batch_counted=is_batch_counted, looked_at=looked_at)
            return
        # The error that ended the loop is the one to see; what fails now is told beside it.
        if self._is_open and not isinstance(error, Preempted | CheckpointError):
            self._tell_failure_of(self._saves.save_after_error, error)
        if not isinstance(error, Preempted):
            self._tell_failure_of(lambda: self.give_up(error), error)
        is_preempted = isinstance(error, Preempted)
        grace_s = self._deadline_s() if is_preempted else None
        self._tell_failure_of(lambda: self.close(grace_s), error)
        if self._saves.logged_error and isinstance(error, SystemExit) and not error.code:
            raise self._saves.logged_error  # the process must not end as if all were well

    def _tell_failure_of(self, work: Callable[[], object], error: BaseException) -> None:
        try:
            work()
        except Exception as second:  # noqa: BLE001 - told beside the error that matters
            _log.error("While ending after %s: %s", type(error).__name__, second)
            if hasattr(error, "add_note"):
                error.add_note(f"milepost: {second}")
            self._saves.logged_error = second

    def give_up(self, error: BaseException, *, patience_s: float | None = None) -> None:
        """Tell the other ranks that this one saves no more; alone, do nothing.

        A save that they begin fails at once then, and does not wait for this rank. One that is in
        flight is waited for first.

        Args:
            error: Why.
            patience_s: How long a rank that does not write its share is waited for, in seconds;
                ``None``: ``rank_timeout_s``.
        """
        self._writer.give_up(error, patience_s=patience_s)

    # -- state of the run ----------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """Return a fresh handle on the run."""
        return self._writer.run

    @property
    def is_resumed(self) -> bool:
        """Return whether the run goes on from a checkpoint."""
        return self._writer.resumed_from is not None

    @property
    def resumed_from(self) -> str | None:
        """Return the name of the checkpoint that the run goes on from."""
        return self._writer.resumed_from

    @property
    def resumed_is_final(self) -> bool:
        """Return whether the run goes on from a checkpoint made at the end of a training."""
        return self._resumption.is_final

    @property
    def load_report(self) -> LoadReport | None:
        """Return what the resume restored, or ``None`` after a fresh start."""
        return self._resumption.report

    @property
    def stop_signal(self) -> int | None:
        """Return the signal that asked us to end, or ``None``.

        A loop that looks here acts on it, so that :meth:`save` does not.
        """
        if self._signals is None:
            return None
        self._signals.is_looked_at = True
        return self._signals.received

    @property
    def grace_left_s(self) -> float:
        """Return the seconds left to save in after such a signal; infinite if nobody watches."""
        return float("inf") if self._signals is None else self._signals.seconds_left

    @property
    def last_save(self) -> PendingSave[Checkpoint] | None:
        """Return the handle of the newest save of this process."""
        return self._saves.last

    # -- the loop ------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left, beginning with the one that was interrupted.

        The end of the last one is always saved and marked final. A finished run yields nothing.

        Args:
            total: Epochs of the whole training.
        """
        self._require_open()
        self._resumption.settle(but={"loader"})  # batches() may track it
        self._total_epochs = total
        while self.timer.epoch < total:
            yield self.timer.epoch
            if self._is_rolled_back:
                self._is_rolled_back = False  # the epoch goes on from where the restore led
            else:
                self._end_epoch(is_last=self.timer.epoch + 1 >= total)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are left of an epoch.

        After each one it is counted, saved if a save is due, and the run ends if a signal asked for
        it. Leaving the loop with ``break`` ends the epoch; the batch in hand is counted if it was
        trained on.

        Args:
            loader: The loader; tracked as ``loader`` if it is not tracked yet.

        Raises:
            UsageError: The loader yields nothing at all, or another one is being iterated.
            Preempted: A signal asked us to end; the state is saved.
        """
        self._require_open()
        self._require_one_iteration()
        if id(loader) not in self._loaders:
            self._refuse_second_loader(loader)
            self.track(loader=loader)
        self._resumption.settle()
        own = self._loaders[id(loader)]
        self._look_at_second_pass()
        self._saves.after.end()
        self._saves.iterated, self._is_rolled_back = own, False
        own.set_epoch(self.timer.epoch)
        self.prepare()
        self._is_iterating = True
        try:
            for batch in own.iterate(self.take_rng()):
                self._hand.take(own, own.of_all_ranks(num_samples(batch)))
                yield batch
                if self._is_rolled_back:
                    return
                self._put_down()
        finally:
            self._is_iterating = False
            self._saves.wait_until_copied()  # what comes after the loop may write to anything
        if own.position == 0:
            raise UsageError(
                "The loader yielded no batch.",
                hint="Is the data set empty, or an iterator that can be used only once?",
            )
        self._saves.after.begin(
            own,
            models=self._tracked.models(),
            optimizers={item: part.optimizer for item, _, part in self._tracked.optimizers()},
            small=SmallState(self._tracked.small_parts(), is_timed=False),
            loaders=self._tracked.loaders(),
        )

    def step(self, *, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count one batch, save if a save is due, and end the run if a signal asked for it.

        :meth:`batches` calls it; call it yourself in loops of your own.

        Args:
            num_samples: Samples of the batch, on several ranks those of all of them: the ranks save
                at the same points only if they count alike.
            num_tokens: Tokens, in the same way.

        Raises:
            Preempted: A signal asked us to end; the state is saved.
        """
        self._count(num_samples, num_tokens, is_step_next=False)

    def _count(self, num_samples: int, num_tokens: int, *, is_step_next: bool) -> None:
        """Count one batch; see :meth:`step`."""
        if self._saves.iterated is None:
            self._saves.note_own_steps()
        self.take_rng()  # that of the resumed checkpoint is history now
        self.timer.on_batch_complete(num_samples, num_tokens)
        beat(self.timer.batch)
        if self._saves.pacing is not None:
            self._saves.pacing.end_batch()
        counters = self.timer.snapshot()
        name = None if self._timed is None else self._timed.look(counters)
        if not self._left_to_epoch_end(counters):
            due = self._schedule.due("batch", counters, self, "batch")
            name = name if due is None else due.name
            if name is not None:
                self.save(name, reason="interval", is_natural=True, is_step_next=is_step_next)
        if self._schedule.intervals or is_step_next:
            self.prepare()
        self.stop_if_asked()

    def _put_down(self) -> None:
        """Count the batch in hand, which the body is done with."""
        count = self._hand.num_samples
        self._hand.put_down()
        self._count(count or 0, 0, is_step_next=True)

    def stop_if_asked(self) -> None:
        """Save and end the process if a signal asked for it.

        Several ranks stop at the same batch, also those that got no signal.

        Raises:
            Preempted: With the exit code ``128 + signal number``.
        """
        number = self._stopping.look(self.timer.batch, self.stop_signal)
        if number is None:
            return
        name = self._saves.save_before_stop(self._deadline_s)
        if name is not None and self._writer.team.rank == 0:
            _log.info("%s", asked_to_end(number, name))
        raise Preempted(number, name)

    def log(self, **metrics: Any) -> None:
        """Note the newest metrics; they go into every checkpoint from now on.

        Args:
            **metrics: Numbers, or tensors of one element. A tensor is read when a save is made.
        """
        self.log_metrics(metrics)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Note metrics whose names are no identifiers, such as ``val/loss``."""
        self._saves.log(metrics)

    # -- saving --------------------------------------------------------------------------------

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
        """Save the state of everything tracked.

        In the body of :meth:`batches` call it after the optimizer's step: the batch in hand then
        counts as done. Called before anything was computed, it saves the state of the batch before.

        Args:
            name: Name of the checkpoint; by default from the progress: ``ep3``, ``ba35``. A name
                that is taken gets a suffix.
            metrics: Metrics of this checkpoint beside those that were logged.
            reason: Why; see ``Manifest.reason``.
            is_final: Whether training has ended.
            notes: What a resume from it cannot reproduce exactly.
            wait: Return only when it is committed.
            rng: State of the random generators to store in place of the present one.
            is_natural: Whether ``name`` comes from the progress, so that ``save_name_format``
                applies.
            is_step_next: Whether nothing will write to parameters, or to what optimizers keep,
                before an optimizer steps: with ``staging="auto"`` they are then copied meanwhile.

        Returns:
            The save on its way.

        Raises:
            UsageError: In the body of a loop over a loader that keeps its own position, before
                anything was computed.
            UnsupportedStateError: A value that cannot be stored; nothing was written.
            CheckpointError: An earlier save failed and ``on_save_error="raise"``.
            Preempted: A signal asked us to end, in a loop that uses neither :meth:`batches` nor
                :meth:`step`; the state is saved.
        """
        self._require_open()
        if self._tracked.refresh():
            self._watch()
        pending = self._saves.save(
            name,
            metrics=metrics,
            reason=reason,
            is_final=is_final,
            notes=notes,
            wait=wait,
            rng=rng,
            is_natural=is_natural,
            is_step_next=is_step_next,
        )
        if self._signals is not None and self._signals.is_unheeded:
            self.stop_if_asked()
        return pending

    def pace(self, pacing: Pacing) -> None:
        """Have what saves cost measured, for a loop that asks by itself when they are due.

        What the checkpoint knows that the run goes on from, is known from the beginning.
        """
        pacing.learn(self._resumption.interval)
        self._saves.pacing = pacing

    def save_diagnostic(
        self, folder: str, name: str, *, extra: Mapping[str, Any], wait: bool = True
    ) -> PendingSave[Checkpoint]:
        """Save the state beside the run, for a look at what went wrong; never resumed from.

        Args:
            folder: ``nan`` or ``failed``.
            name: Its name in that folder.
            extra: More items to store, such as the batch and the outputs.
            wait: Return only when it is committed.
        """
        self._require_open()
        return self._saves.save_diagnostic(folder, name, extra=extra, wait=wait)

    def prepare(self) -> None:
        """Have memory for the first save got in the background, as much as the state will take.

        :meth:`batches` calls it, and :meth:`open` where saves are due by an interval. A second call
        after a batch corrects the estimate, for then the optimizers have what they keep. Later
        ones, and any after a save, do nothing.
        """
        self._require_open()
        self._saves.prepare()

    def wait(self, timeout_s: float | None = None, *, is_end: bool = False) -> None:
        """Wait until the save in flight is committed.

        Args:
            timeout_s: How long to wait, in seconds.
            is_end: Whether no save will follow: then it is an error with ``on_save_error="warn"``
                too that the newest one failed.

        Raises:
            DeadlineError: It was not within ``timeout_s`` seconds.
            CheckpointError: It failed and ``on_save_error="raise"``.
            SaveFailedError: See ``is_end``.
        """
        self._writer.wait(timeout_s, is_end=is_end)

    # -- loading -------------------------------------------------------------------------------

    def restore(
        self,
        source: Place | Checkpoint | None = None,
        *,
        items: Iterable[str] | None = None,
        strict: bool | None = None,
        trust: bool = False,
    ) -> LoadReport:
        """Restore tracked objects from a checkpoint.

        In the body of :meth:`batches` this rolls the training back: the loop over the batches ends,
        and that over :meth:`epochs` goes on in the restored epoch.

        Args:
            source: Name of a checkpoint of this run, a path (with a slash, or the name of a
                ``.pt`` file), or a handle; by default the newest.
            items: Only these; ``None`` restores everything, random generators included.
            strict: Overrides the strictness given at construction.
            trust: Whether a ``.pt`` file may run code when it is opened.

        Raises:
            MissingError: There is no such checkpoint.
            MismatchError: It does not fit; nothing was changed then.
        """
        if self._is_open:
            self._writer.wait_for_writing(None)  # retention must not delete what is being read
        found = self._resumption.find(source, trust=trust)
        if items is None:
            self._hand.put_down()
        report = self._resumption.restore(found, items=items, strict=strict)
        if items is None:
            self._saves.after.end()
            self._is_rolled_back = self._saves.iterated is not None
        self._start_intervals()
        self._saves.saved_at = None
        return report

    def load_weights(
        self,
        source: Place | Checkpoint,
        model: nn.Module,
        *,
        strict: bool = False,
        item: str = "model",
        trust: bool = False,
    ) -> LoadReport:
        """Load only the weights of a model; see ``Checkpoint.load_weights``."""
        from .state.model import load_weights

        self._saves.wait_until_copied()
        found = self._resumption.find(source, trust=trust)
        return load_weights(found, item, model, strict=strict)

    def take_rng(self) -> Mapping[str, Any] | None:
        """Return the random state of the restored checkpoint, once.

        It was applied at the restore already. Whoever begins to iterate applies it again at the
        last moment, so that nothing drawn in between can matter.
        """
        return self._resumption.take_rng()

    # -- inside --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch what batches change."""
        parts = self._tracked.optimizers()
        self._saves.stray_note = self._tracked.stray_note()
        self._saves.transient = TransientBuffers(self._tracked.models())
        if self._saves.stray_note and self._is_open:
            _log.warning(self._saves.stray_note)
        # A rank that fails alone saves nothing, and must not ask what may talk to the others.
        is_alone = self._writer.team.world_size == 1
        self._hand.watch(
            optimizers=[part.optimizer for _, _, part in parts],
            models=self._tracked.models().values(),
            small=SmallState(self._tracked.small_parts(), is_timed=True) if is_alone else None,
        )

    def _end_epoch(self, *, is_last: bool) -> None:
        self._require_counted_batches()
        if self._hand.is_held and not self._hand.is_untouched:
            self.timer.on_batch_complete(self._hand.num_samples or 0)
        self._hand.put_down()
        self.take_rng()
        for loader in self._loaders.values():
            loader.end_epoch()
        self._saves.iterated = None
        self._saves.after.end()
        self.timer.on_epoch_complete()
        due = self._schedule.due("epoch", self.timer.snapshot(), self, "epoch")
        if is_last or due is not None:
            self.save(
                due.name if due else None,
                reason="interval" if due else "final",
                is_final=is_last,
                is_natural=True,
            )
        self.stop_if_asked()

    def _refuse_second_loader(self, loader: Iterable[Any]) -> None:
        if "loader" in self._tracked:
            raise UsageError(
                f"batches() was given a {type(loader).__qualname__}, and another object is tracked "
                "as 'loader'.",
                safe="Nothing was trained or saved.",
                hint="Pass the tracked loader itself, and wrap what comes out: "
                "tqdm(run.batches(loader)). A second loader is tracked under a name of its own.",
            )

    def _require_one_iteration(self) -> None:
        """Refuse to iterate a loader while another is: each batch of both would count."""
        if self._is_iterating:
            raise UsageError(
                "run.batches() is iterated while another run.batches() is: a step would count as "
                "two batches.",
                hint="Take one of the loaders from run.batches(), and have it yield what belongs "
                "together: a data set of pairs, or a loader that zips others and has a state_dict. "
                "A loader that is only evaluated is iterated by itself.",
            )

    def _require_counted_batches(self) -> None:
        """Refuse an epoch without batches where saves are due after some of them."""
        is_counted = self._saves.iterated is not None or self.timer.batch_in_epoch > 0
        if self._schedule.needs_batches and not is_counted:
            raise UsageError(
                "An epoch ended in which no batch was counted, and saves are due between batches.",
                hint="Iterate with run.batches(loader), or call run.step() after each batch. "
                'To save after epochs only use every="1ep".',
            )

    @property
    def _is_due_after_epochs_only(self) -> bool:
        """Return whether no save is ever due unless epochs are counted."""
        is_any = bool(self._schedule.intervals) and self._timed is None
        return is_any and not self._schedule.counts_batches

    def _look_at_second_pass(self) -> None:
        """Refuse, or note, that batches are taken once more and nobody has counted the epoch."""
        if not self._saves.after.is_begun or self._total_epochs is not None:
            return
        if self._is_due_after_epochs_only and self._saves.last is None:
            refuse_second_pass(looked_at=self._keep_for_a_look())
        if not self._saves.epochs_note:
            self._saves.epochs_note = NO_EPOCHS_NOTE
            _log.warning(NO_EPOCHS_NOTE)

    def _is_uncounted(self) -> bool:
        """Return whether it is certain that saves should have been due, and that none ever was."""
        is_wanted = bool(self._schedule.intervals) or self._timed is not None
        if not self._is_open or not is_wanted or self._total_epochs is not None:
            return False
        if self._saves.last is not None or self.timer.batch < self._batch_at_open:
            return False
        if self.timer.batch > self._batch_at_open:
            return self._is_due_after_epochs_only
        return self._hand.num_steps > 0

    def _keep_for_a_look(self) -> str:
        """Keep the state of a training that is not counted; return where."""
        if self._writer.team.world_size > 1:
            return ""
        return self.save_diagnostic("failed", f"ba{self.timer.batch}", extra={}).name

    def _left_to_epoch_end(self, counters: Mapping[str, Any]) -> bool:
        """Return whether this batch ends an epoch whose end will be saved anyway."""
        if self._total_epochs is None or self._saves.iterated is None:
            return False
        if counters["batch_in_epoch"] != self._saves.iterated.num_batches:
            return False
        after = {**counters, "epoch": counters["epoch"] + 1, "batch_in_epoch": 0}
        is_last = after["epoch"] >= self._total_epochs
        return is_last or self._schedule.epoch_would_be_due(after)

    def _follow_one_clock(self) -> None:
        """Have intervals of time follow the clock of rank 0, where there are several ranks."""
        team = self._writer.team
        if team.world_size > 1 and self._schedule.follows_clock:
            self._clock_schedule = self._schedule.take_clock()
        if self._clock_schedule is not None:
            self._timed = TimedTogether(team, self._clock_schedule)

    def _start_intervals(self) -> None:
        """Count intervals from here."""
        counters = self.timer.snapshot()
        self._schedule.start(counters)
        if self._timed is not None:
            self._timed.start(counters)
        if self._saves.pacing is not None:
            self._saves.pacing.start()

    def _deadline_s(self) -> float | None:
        """Return how long a save may take now, in seconds; ``None`` for as long as it takes."""
        return None if self._signals is None else self._signals.seconds_left

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(
                "The checkpointer is not open.",
                hint="Use it in a with block, or call open() first.",
            )


def _policies(keep: Any) -> tuple[KeepPolicy, ...]:
    """Return retention policies as they were given: one, or several."""
    policies = tuple(keep) if isinstance(keep, Iterable) else (keep,)
    for policy in policies:
        if isinstance(policy, type) or not isinstance(policy, KeepPolicy):
            raise UsageError(
                f"keep={keep!r} names no retention policy.",
                hint="Use KeepLast(3), or a list of policies.",
            )
    return policies


_OPTIONS = tuple(
    name
    for name, one in inspect.signature(Checkpointer).parameters.items()
    if one.kind is inspect.Parameter.KEYWORD_ONLY
)
