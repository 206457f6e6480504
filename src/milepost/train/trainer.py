"""The trainer: a training with its checkpoints, assembled from the pieces of this package."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import finalize

import torch

from ..display import training_bar
from ..errors import NonFiniteLossError, Preempted, UsageError
from ..fetching import Fetching
from ..progress.pacing import make_pacing
from ..progress.schedule import is_auto
from ..progress.time import Time
from ..runs.keep import KeepPolicy
from ..staging import CopyCheck, Staging
from ..state.dealt_loader import resumable
from ..stores.provider import ObjectStoreProviderHparams
from .alarm import Alarm
from .algorithm import Algorithm
from .callback import Callback
from .dispatch import Dispatch
from .earlier import find_earlier
from .evaluating import Evaluation, EvaluationCutOff
from .evaluator import as_evaluators, metric_names
from .events import Event
from .group import Group
from .loading import ObjectStore, Place
from .loop import Loop
from .metrics import training_metrics
from .model import Loss, adapt
from .non_finite import NonFinite
from .notes import close_all
from .parallel import Parallel, check_choices, device_of, prepare, wrap
from .places import run_directory, save_location
from .precision import Precision, choose_scaler
from .ranking import check_metrics_named
from .saving import Saving
from .seeding import choose_seed, make_deterministic, reseed, seed_everything
from .session import Session
from .several import as_list
from .sharing import agree_on_length, num_alike, share_evaluations, share_training
from .showing import num_batches, show, text_beside
from .state import State
from .step import TrainStep
from .stopping import Stopping
from .tally import Tally

if TYPE_CHECKING:
    from .evaluator import MetricSpec

__all__ = ["Trainer"]


class Trainer:
    """Train a model, save it while it trains, and go on exactly where a run stopped.

    Args:
        model: A module with ``forward(batch)`` and ``loss(outputs, batch)``, or any module plus
            ``loss_fn`` for batches ``(inputs, targets)``.
        train_dataloader: Any iterable of batches, a :class:`DataSpec`, or its arguments as a dict.
        optimizers: One or several, over the model's parameters.
        max_duration: Length of the whole training: ``"90ep"``, ``"1e6tok"``, ``"24h"``, or a whole
            number of epochs. Not restored, so that a training can be made longer.
        loss_fn: ``(outputs, targets) -> loss``.
        eval_dataloader: A loader, an :class:`Evaluator`, or several evaluators.
        eval_metrics: Metrics for a bare ``eval_dataloader``.
        eval_interval: When a bare ``eval_dataloader`` is evaluated.
        schedulers: Learning rate schedulers of torch.
        step_schedulers_every: After each ``"batch"`` or each ``"epoch"``.
        precision: ``"fp32"``, ``"amp"`` or ``"amp_fp16"``, ``"amp_bf16"``. Not restored.
        scaler: A gradient scaler. ``None``: one is made if the precision needs it.
        grad_accum: Microbatches per batch.
        algorithms: Changes to the training, such as :class:`EMA`.
        callbacks: What else to do at its events.
        steps_per_epoch: Batches that make an epoch; ``None``: all the loader has.
        seed: Of rank 0; rank r uses this plus r. ``None``: a random one, saved with the run.
        deterministic_mode: Make torch use deterministic kernels, in the whole process.
        compute_training_metrics: Compute metrics over each training epoch.
        train_metrics: Which; ``None``: those of ``model.metrics(train=True)``.
        progress_bar: Show the progress on standard error.
        device: Where to move the model; ``None``: it stays where it is.
        parallel: Of several ranks: ``"ddp"`` wraps a plain model in ``DistributedDataParallel``;
            ``None`` leaves it alone. A model that is wrapped or sharded is taken as it is.
        group_timeout_s: Of several ranks: how long one waits for another in the training.
        rank_timeout_s: How long one waits for another to come to the same save or start.
        run_name: Name of the run, for a relative ``save_folder``.
        save_folder: Where to save. Relative: in ``./runs/<run_name or time>/rank_0/``. ``None``:
            nothing is saved.
        save_interval: When: ``"1ep"``, ``"500ba"``, ``"0.1dur"``, ``"30m"``, ``"auto"`` for as
            often as it costs little, a whole number of epochs, a callable ``(state, event) ->
            bool``, or several. The end is always saved.
        overhead_budget: With ``"auto"``: the share of the time that saves may take; ``None``: 0.01,
            or no limit if ``mean_time_between_failures`` is given.
        mean_time_between_failures: With ``"auto"``: how often something ends the training, such as
            ``"6h"``. Saves come as often as makes them and lost work cost the least.
        save_compression: ``"zstd"`` or ``"lz4"`` makes parts smaller while they are written,
            ``"auto"`` where the place is slow enough for it; ``"gzip"``, ``"bzip2"`` or ``"lzma"``
            single-file checkpoints.
        save_format: ``"milepost"``, or ``"torch"`` for one ``.pt`` file per checkpoint.
        sharding: Of several ranks: ``"auto"``, each writes what it holds; ``"consolidated"``,
            rank 0 writes whole tensors into files that any tool opens.
        save_name_format: Names such as ``"ep{epoch}-ba{batch}"``; ``None``: ``ep3``, ``ba500``.
        keep: Which checkpoints to keep: a policy such as ``KeepLast(3)``, or several; empty: all.
        on_save_error: ``"raise"`` or ``"warn"``, when a save fails in the background.
        max_failed_saves: With ``"warn"``: how many saves in a row may fail.
        local_cache: For a ``save_folder`` in an object store: a folder on this machine where copies
            of the newest two checkpoints are kept, so that a resume here need not download them.
        staging: When the state is copied for a save: ``"eager"``, before training goes on;
            ``"overlap"``, what optimizers own while the next forward and backward pass run;
            ``"auto"``, the latter for saves that are made because they are due.
        copy_check: How what is copied while training goes on is watched: by its version counters
            and ``"sample"``, some bytes of each tensor, ``"full"``, all bytes, or ``"none"``.
        staging_budget_bytes: How much memory the copy of the state may take on each rank, 32 MiB at
            least; ``None``: as much as it needs. A larger state is written while it is copied.
        grace_s: Seconds within which the state must be safe after SIGTERM or SIGUSR1.
        resume: ``"never"``; ``"auto"``: from the newest checkpoint of the run, if there is one;
            ``"must"``: an error if there is none.
        load_path_format: A checkpoint, a run (its newest) or a ``.pt`` file to go on from, as a
            handle or a path; ``{rank}``, ``{local_rank}`` and ``{node_rank}`` are filled in.
        load_object_store: Where ``load_path_format`` is downloaded from: an
            :class:`ObjectStoreProvider`, or what makes one.
        load_weights_only: Load the weights and nothing else: a new training begins on them.
        load_strict: Whether the names of these weights must match exactly.
        load_chunk_size: Bytes of one piece of a download. Of a checkpoint folder in a bucket pieces
            are 8 MiB, and as many as fit into this are asked for at once; with less than that
            8 to 64 MiB, by how much there is to read.
        load_progress_bar: Show a download that is not small, of a resume as well.

    Attributes:
        state: Everything the training consists of.

    Raises:
        UsageError: Arguments that make no sense, alone or together.
        ExistsError: ``resume="never"`` and the folder holds checkpoints.
        MissingError: No checkpoint where one must be.
        MismatchError: The checkpoint does not fit; everything that does not is listed.
    """

    def __init__(  # noqa: PLR0913 - one name for each thing a user can choose, all by keyword
        self,
        *,
        model: torch.nn.Module,
        train_dataloader: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_duration: str | int | Time,
        loss_fn: Callable[[Any, Any], Loss] | None = None,
        eval_dataloader: Any = None,
        eval_metrics: MetricSpec = None,
        eval_interval: Any = "1ep",
        schedulers: Any = None,
        step_schedulers_every: Literal["batch", "epoch"] = "epoch",
        precision: Precision | str = Precision.FP32,
        scaler: Any = None,
        grad_accum: int = 1,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        callbacks: Callback | Sequence[Callback] = (),
        steps_per_epoch: int | None = None,
        seed: int | None = None,
        deterministic_mode: bool = False,
        compute_training_metrics: bool = False,
        train_metrics: MetricSpec = None,
        progress_bar: bool = True,
        device: torch.device | str | None = None,
        parallel: Parallel = "ddp",
        group_timeout_s: float = 600.0,
        rank_timeout_s: float = 45.0,
        run_name: str | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        save_interval: Any = "1ep",
        overhead_budget: float | None = None,
        mean_time_between_failures: str | Time | None = None,
        save_compression: str | None = "",
        save_format: Literal["milepost", "torch"] = "milepost",
        sharding: Literal["auto", "consolidated"] = "auto",
        save_name_format: str | None = None,
        keep: KeepPolicy | Sequence[KeepPolicy] | None = (),
        on_save_error: Literal["raise", "warn"] = "raise",
        max_failed_saves: int = 3,
        local_cache: str | os.PathLike[str] | None = None,
        staging: Staging = "auto",
        copy_check: CopyCheck = "sample",
        staging_budget_bytes: int | None = None,
        grace_s: float = 30.0,
        resume: Literal["never", "auto", "must"] = "never",
        load_path_format: Place | None = None,
        load_object_store: ObjectStore | ObjectStoreProviderHparams | None = None,
        load_weights_only: bool = False,
        load_strict: bool = False,
        load_chunk_size: int = 1_048_576,
        load_progress_bar: bool = True,
    ) -> None:
        check_choices(parallel, step_schedulers_every)
        pacing = make_pacing(
            is_wanted=is_auto(save_interval),
            option="save_interval",
            clock=lambda: self.state.timer.clock_s,
            overhead_budget=overhead_budget,
            mean_time_between_failures=mean_time_between_failures,
        )
        make_deterministic(is_wanted=deterministic_mode)
        if device is not None:
            model.to(device)
        group = self._group = Group.join(device_of(model), timeout_s=group_timeout_s)
        self._end = finalize(self, group.leave)  # at the end of the process at the latest
        folder = group.lead(
            "choose a folder",
            lambda: save_location(save_folder, run_name=run_name, resume=resume),
        )
        layout = prepare(model, group)
        chosen = group.lead("choose a seed", lambda: choose_seed(seed))
        data = share_training(
            train_dataloader,
            group=group,
            layout=layout,
            seed=chosen,
            earlier=partial(
                find_earlier,
                None if load_object_store is not None or load_weights_only else load_path_format,
                folder=folder,
                resume=resume,
                local_cache=local_cache,
                group=group,
            ),
        )
        self._loader = resumable(data.dataloader)
        self.state = State(
            model,
            max_duration=max_duration,
            rank_zero_seed=chosen,
            train_dataloader=data.dataloader,
            grad_accum=grad_accum,
            precision=precision,
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=scaler,
            algorithms=algorithms,
            callbacks=callbacks,
            steps_per_epoch=steps_per_epoch,
        )
        state = self.state
        state.run_directory = run_directory(save_folder, folder)
        _check_optimizers(state.optimizers)
        state.scaler = choose_scaler(state.precision, state.device, given=scaler)
        state.evaluators = as_evaluators(
            eval_dataloader,
            model=state.bare_model,
            metrics=eval_metrics,
            eval_interval=eval_interval,
        )
        share_evaluations(state.evaluators, group=group, layout=layout)
        how = adapt(state.bare_model, loss_fn=loss_fn)
        seed_everything(state.rank_zero_seed)
        self._dispatch = Dispatch(state)
        self._dispatch.run(Event.INIT)
        reseed(state.seed, rank=group.rank)
        policies = as_list(keep, name="keep", method="keep")
        check_metrics_named(
            metric_names(state.evaluators),
            name_format=save_name_format,
            policies=policies if folder is not None and group.rank == 0 else (),
        )
        metrics = training_metrics(
            state.bare_model, wanted=compute_training_metrics, given=train_metrics
        )
        self._session = Session(
            state,
            loader=self._loader,
            metrics=metrics,
            group=group,
            folder=folder,
            resume=resume,
            grace_s=grace_s,
            run_options={
                "keep": policies,
                "save_format": save_format,
                "sharding": sharding,
                "save_compression": save_compression or None,
                "save_name_format": save_name_format,
                "on_save_error": on_save_error,
                "max_failed_saves": max_failed_saves,
                "local_cache": local_cache,
                "load_chunk_bytes": load_chunk_size,
                "load_progress_bar": load_progress_bar,
                "rank_timeout_s": rank_timeout_s,
                "staging": staging,
                "copy_check": copy_check,
                "staging_budget_bytes": staging_budget_bytes,
            },
        )
        self._session.load(
            load_path_format,
            object_store=load_object_store,
            weights_only=load_weights_only,
            strict=load_strict,
            fetching=Fetching(load_chunk_size, is_bar_shown=load_progress_bar and group.rank == 0),
        )
        state.model = wrap(state.model, parallel, group)
        self._alarm = Alarm(group)
        self._stopping = Stopping(group, self._session.signals)
        self._saving = Saving(
            state,
            loader=self._loader,
            checkpointer=self._session.checkpointer,
            interval=save_interval,
            pacing=pacing,
            stopping=self._stopping,
            is_alone=group.is_alone,
        )
        self._evaluation = Evaluation(
            state,
            model=how,
            dispatch=self._dispatch,
            group=group,
            stopping=self._stopping,
        )
        self._saving.evaluation = self._evaluation
        self._loop = Loop(
            state,
            data=data,
            loader=self._loader,
            dispatch=self._dispatch,
            step=TrainStep(
                state,
                model=how,
                data=data,
                dispatch=self._dispatch,
                metrics=metrics,
                tally=Tally(
                    group,
                    signal_number=lambda: self._stopping.received,
                    is_save_due=lambda: pacing is not None and pacing.look(),
                    num_alike=num_alike(data.dataloader, group),
                ),
                on_non_finite=NonFinite(
                    state, checkpointer=self._session.checkpointer, group=group
                ).refuse,
                on_step=self._saving.unmark,
            ),
            evaluation=self._evaluation,
            saving=self._saving,
            metrics=metrics,
            group=group,
            stopping=self._stopping,
            asks_for_batches=agree_on_length(state, group),
            steps_schedulers_per_batch=step_schedulers_every == "batch",
        )
        self._is_bar_shown = progress_bar and group.rank == 0
        if self._session.is_restored:
            self._dispatch.after_load()

    def fit(self, duration: str | int | Time | None = None) -> None:
        """Train until ``max_duration``, from wherever the training stands.

        A training that has come that far already does nothing and succeeds.

        Args:
            duration: Train for this much more, whatever ``max_duration`` was.

        Raises:
            NonFiniteLossError: The loss became NaN or infinite; a diagnostic checkpoint says more.
            Preempted: SIGTERM or SIGUSR1 came; the state is safe. The process ends with 143 or 138.
            SaveFailedError: More saves in a row failed than is allowed.
            FencedError: Another process goes on with the same run.
        """
        if duration is not None:
            more = Time.of(duration)
            self.state.max_duration = self.state.timer.get(more.unit) + more
        with self._training():
            self._dispatch.run(Event.FIT_START)
            self._loop.begin(self._session.take_rng())
            while not self._loop.is_finished:
                self._loop.run_epoch()
            self._dispatch.run(Event.FIT_END)

    def eval(self) -> dict[str, dict[str, Any]]:
        """Run every evaluator now, outside the training's schedule.

        Returns:
            Label -> metric name -> value, of the evaluators.
        """
        return {
            evaluator.label: self._evaluation.run_one(evaluator)
            for evaluator in self.state.evaluators
        }

    def save_checkpoint(self, name: str | None = None) -> Any:
        """Save the training now.

        Args:
            name: Of the checkpoint; ``None``: ``ba500``, or ``ep3`` between two epochs.

        Returns:
            A ``PendingSave``; the training may go on.

        Raises:
            UsageError: There is no save folder, or a batch is being trained on.
        """
        return self._saving.save_now(name)

    def close(self) -> None:
        """Leave the run, so that nothing more is saved. ``fit`` waits for its saves by itself.

        Of several ranks each leaves the others too, and a process group that the trainer has made.
        """
        self._session.close()
        self._end()

    @property
    def checkpoint_folder(self) -> str | None:
        """Return the folder of the run, or ``None`` when nothing is saved."""
        return self._saving.checkpoint_folder

    @property
    def checkpoint_saver(self) -> Saving:
        """Return what saves the training; its ``checkpoint_folder`` is the folder of the run."""
        return self._saving

    @property
    def saved_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints of this trainer that are there, oldest first.

        Those on their way are among them, those that ``keep`` has deleted are not.
        """
        return self._saving.saved_names

    @property
    def is_resumed(self) -> bool:
        """Return whether a checkpoint was restored in full."""
        return self._session.is_restored

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Surround the loop: signals, errors, progress, and the end of everything."""
        error: BaseException | None = None
        timer = self.state.timer
        self._session.begin_fit()
        self._stopping.begin()
        self._alarm.listen()
        timer.hold(None if self._group.is_alone else timer.wall_s)
        timer.start()
        try:
            with training_bar(
                total=num_batches(self.state),
                done=timer.batch,
                text=text_beside(self.state, self._saving),
                is_shown=self._is_bar_shown,
            ) as bar:
                self._loop.on_batch = lambda: show(bar, self.state, self._saving)
                try:
                    yield
                    self._saving.wait()
                except EvaluationCutOff:
                    self._saving.stop()
                finally:
                    show(bar, self.state, self._saving)
        except (Preempted, NonFiniteLossError, GeneratorExit) as raised:
            error = raised
            raise
        except BaseException as raised:  # noqa: BLE001 - raised again, or what led to it
            error = self._alarm.report(raised)
            self._group.give_up(error)
            self._saving.rescue(raised)
            raise error  # noqa: B904 - with its cause, or the very one that was raised
        finally:
            timer.stop()
            leave = partial(self._session.end_fit, error, is_rank_gone=self._alarm.is_rank_gone)
            close_all((self._dispatch.close, leave, self._alarm.stop), error)


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse to train without an optimizer, or with one that computes the loss by itself."""
    if not optimizers:
        raise UsageError("A training needs an optimizer.")
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"The step of {type(optimizer).__qualname__} needs a closure, and the Trainer "
                "computes each batch once.",
                hint="Write the loop yourself, with milepost.Checkpointer.",
            )
