"""One training's part in a run: what is tracked, what it went on from, opening and closing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoint import Checkpoint, Run, open_checkpoint, open_source, run_store
from ..engine.signals import StopSignals
from ..errors import MismatchError, MissingError, Preempted, UsageError
from ..fetching import Fetching
from ..state.loader import ResumableLoader
from ..state.objects import FromLeader, PerRank, Value
from ..stores.provider import ObjectStoreProviderHparams
from .algorithm import Algorithm
from .callback import Callback
from .group import Group
from .loading import (
    ObjectStore,
    Place,
    check_place,
    open_place,
    restore_all,
    restore_weights,
    the_newest,
)
from .metrics import Metrics
from .places import fill_ranks
from .state import SERIALIZED_ATTRIBUTES, State

if TYPE_CHECKING:
    from ..checkpointer import Checkpointer

__all__ = ["Session", "tracked_items"]

_log = logging.getLogger(__name__)
_NONE_S = 0.1
_SHARE_S = 3600.0
"""Longer than a share may take to be written."""
RANK_CALLBACKS = "rank_callbacks"
"""The item of the callbacks whose state each rank saves for itself."""
_OPTIONAL = frozenset({"loader", "trainer", "rank_zero_seed", "current_metrics"})


def tracked_items(
    state: State, *, loader: ResumableLoader, metrics: Metrics, group: Group
) -> dict[str, Any]:
    """Return what a training saves, in the layout that readers of a checkpoint see.

    Args:
        state: The training; its ``serialized_attributes`` choose.
        loader: Saved as ``loader``: the position in the data.
        metrics: Training metrics, saved in the middle of an epoch with ``trainer``.
        group: The ranks.
    """
    items: dict[str, Any] = {}
    for attribute in state.serialized_attributes:
        if attribute == "model":
            items[attribute] = state.bare_model
        elif attribute == "timer":
            items[attribute] = state.timer
        elif attribute == "algorithms":
            items[attribute] = _with_state(state.named(attribute))
        elif attribute == "callbacks":
            named = _with_state(state.named(attribute))
            own = {name: one for name, one in named.items() if state.is_ranks_own(one)}
            shared = {name: one for name, one in named.items() if name not in own}
            # What callbacks see differs from rank to rank; rank 0's is that of the training.
            items[attribute] = FromLeader(shared)
            if own:
                items[RANK_CALLBACKS] = PerRank(own)
        elif attribute in ("optimizers", "schedulers", "scaler"):
            items[attribute] = state.named(attribute)
        else:
            items[attribute] = _attribute(state, attribute)
    items["loader"] = loader
    # Each rank has its own: random generators in an evaluation cut off, metrics of its batches.
    items["trainer"] = PerRank(
        Value(
            lambda: {
                "pending_eval": state.pending_eval,
                "stopped_for": state.stopped_for,
                "train_metrics": metrics.state_dict(),
                "num_ranks": group.world_size,
            },
            lambda value: _set_trainer(state, metrics, value, group),
        )
    )
    return items


class Session:
    """Open a run for a training and restore what it goes on from.

    Args:
        state: The training.
        loader: Its loader.
        metrics: Its training metrics.
        group: The ranks.
        folder: The run; ``None``: nothing is saved.
        resume: ``"never"``, ``"auto"`` or ``"must"``.
        grace_s: Seconds from a signal to the moment the state must be safe.
        run_options: Passed on to :class:`Checkpointer`.

    Attributes:
        checkpointer: The run, once loaded; ``None``: nothing is saved.
        signals: Listened to during ``fit``; ``None`` when nothing is saved.
        is_restored: Whether a checkpoint was restored in full.
    """

    def __init__(
        self,
        state: State,
        *,
        loader: ResumableLoader,
        metrics: Metrics,
        group: Group,
        folder: str | None,
        resume: Literal["never", "auto", "must"],
        grace_s: float,
        run_options: Mapping[str, Any],
    ) -> None:
        if folder is None and run_options.get("local_cache") is not None:
            raise UsageError("local_cache= needs a save_folder in an object store.")
        self._state = state
        self._loader = loader
        self._metrics = metrics
        self._group = group
        self._folder = folder
        self._resume = resume
        self._run_options = dict(run_options)
        self._rng: Mapping[str, Any] | None = None
        self.is_restored = False
        self.checkpointer: Checkpointer | None = None
        self.signals = None if folder is None else StopSignals(grace_s=grace_s)

    def load(
        self,
        path_format: Place | None,
        *,
        object_store: ObjectStore | ObjectStoreProviderHparams | None,
        weights_only: bool,
        strict: bool,
        fetching: Fetching,
    ) -> None:
        """Restore the newest checkpoint of the run, or else what ``path_format`` names.

        Args:
            path_format: Where the first start goes on from, as a path with ranks in braces or as a
                handle; ``None``: from the beginning.
            object_store: Where that is downloaded from.
            weights_only: Load only the model's weights from there.
            strict: Whether their names must match exactly.
            fetching: How that comes from a bucket.

        Raises:
            MismatchError: The checkpoint does not fit.
            MissingError: There is none, and there must be.
            UsageError: ``path_format`` can name no checkpoint.
        """
        path_format = check_place(path_format)
        if isinstance(path_format, str | os.PathLike) and not self._group.is_alone:
            # One checkpoint is that of all ranks.
            named = path_format
            path_format = self._group.lead("name the checkpoint", lambda: fill_ranks(named))
        if object_store is not None and path_format is None:
            raise UsageError("load_object_store without load_path_format names no object.")
        with _ways_of_a_trainer(weights_only=weights_only):
            if self._folder is not None:
                origin = None
                if self._resume == "never" and path_format is not None and object_store is None:
                    # Naming a checkpoint of this run is the wish to go on from it.
                    origin = None if weights_only else self._find_origin(path_format)
                self._open_run(origin)
            if self.is_restored:
                assert self.checkpointer is not None
                if path_format is not None and self._resume != "never" and self._group.rank == 0:
                    _log.info(
                        "Going on from %s of this run, not from %s.",
                        self.checkpointer.resumed_from,
                        path_format,
                    )
            elif path_format is not None:
                with open_place(path_format, object_store=object_store, fetching=fetching) as place:
                    self._restore(
                        place, weights_only=weights_only, strict=strict, fetching=fetching
                    )
        if self.is_restored:
            self._settle()

    def begin_fit(self) -> None:
        """Install the signal handlers."""
        if self.signals is not None:
            self.signals.received = None
            self.signals.install()

    def end_fit(
        self, error: BaseException | None, *, is_rank_gone: Callable[[BaseException], bool]
    ) -> None:
        """Wait for saves on their way, and take the signal handlers back.

        Args:
            error: What ended the training before its time.
            is_rank_gone: Returns whether a rank has died, which nobody must wait for.

        Raises:
            CheckpointError: A save failed that nobody was told about yet.
        """
        is_preempted = isinstance(error, Preempted)
        try:
            if self.checkpointer is not None:
                if error is not None and not is_preempted:
                    patience_s = _NONE_S if is_rank_gone(error) else _SHARE_S
                    self.checkpointer.give_up(error, patience_s=patience_s)
                self.checkpointer.wait(is_end=error is None)
        finally:
            if self.signals is not None and is_preempted and not self._group.is_alone:
                self.signals.end_heeded()
            elif self.signals is not None:
                self.signals.restore()

    def close(self) -> None:
        """Leave the run: nothing can be saved any more."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def take_rng(self) -> Mapping[str, Any] | None:
        """Return the random generators of the checkpoint, once; then ``None``."""
        if self.checkpointer is not None and self._rng is None:
            return self.checkpointer.take_rng()
        rng, self._rng = self._rng, None
        return rng

    def _open_run(self, origin: Checkpoint | None) -> None:
        from ..checkpointer import Checkpointer

        assert self._folder is not None
        checkpointer = Checkpointer(
            self._folder,
            resume=self._resume,
            handle_signals=False,  # fit installs the handlers, and takes them back
            strict=True,
            **self._run_options,
        )
        self._state.timer = checkpointer.timer
        items = self._items()
        del items["timer"]
        checkpointer.track(**items)
        checkpointer.open(origin=origin, team=self._group.team)
        checkpointer.leave_behind(*(set(SERIALIZED_ATTRIBUTES) - items.keys()))
        checkpointer.timer.stop()  # only training counts
        self.checkpointer = checkpointer
        self.is_restored = checkpointer.is_resumed

    def _find_origin(self, named: Place) -> Checkpoint | None:
        """Return the checkpoint of this very run that a place names, if it names one."""
        assert self._folder is not None
        store = run_store(self._folder)
        if store is None:
            return None
        try:
            if isinstance(named, Checkpoint | Run):
                found = the_newest(named)
            else:
                found = open_checkpoint(fill_ranks(named))
        except MissingError:
            return None
        if found.url != f"{store.url}/{found.manifest.name}":
            return None
        return Checkpoint(store, found.manifest.name)

    def _items(self) -> dict[str, Any]:
        items = tracked_items(
            self._state, loader=self._loader, metrics=self._metrics, group=self._group
        )
        items.setdefault("timer", self._state.timer)
        return items

    def _restore(
        self, place: str | Checkpoint, *, weights_only: bool, strict: bool, fetching: Fetching
    ) -> None:
        if weights_only:
            model = self._state.bare_model
            restore_weights(place, model, strict=strict, fetching=fetching)
            return
        items = self._items()
        # Files of other makers lack what only this trainer keeps, and may hold what this state no
        # longer serializes.
        stored = set(open_source(place).trees)
        lacking = _OPTIONAL & (items.keys() - stored)
        removed = stored & (set(SERIALIZED_ATTRIBUTES) - items.keys())
        wanted = {name: target for name, target in items.items() if name not in lacking}
        chosen = sorted({*wanted, "rng"}) if lacking or removed else None
        if self.checkpointer is None:
            report, self._rng = restore_all(
                place, wanted, items=chosen, rank=self._group.rank, fetching=fetching
            )
        else:
            report = self.checkpointer.restore(place, items=chosen)
        if self._group.rank == 0:
            _log.info("%s", report.summary())
        self.is_restored = True

    def _settle(self) -> None:
        """Make a training that was stopped early stay stopped, unless it was made longer."""
        state = self._state
        if state.stopped_for == str(state.max_duration):
            state.stop_training()
        else:
            state.stopped_for = None


@contextmanager
def _ways_of_a_trainer(*, weights_only: bool) -> Iterator[None]:
    """Have an error that says what a strict load did not take name what a Trainer can do."""
    try:
        yield
    except MismatchError as error:
        if error.facts.get("is_lenient_enough"):
            error.hint = (
                "Build the model as it was, or take what fits with load_strict=False."
                if weights_only
                else "Build the objects as they were; or, in another save_folder, take the weights "
                "alone: load_path_format with load_weights_only=True."
            )
        raise


def _attribute(state: State, name: str) -> Value:
    if not hasattr(state, name):
        raise UsageError(f"serialized_attributes names {name!r}, which the state does not have.")
    return Value(lambda: getattr(state, name), lambda value: setattr(state, name, value))


def _set_trainer(state: State, metrics: Metrics, value: Mapping[str, Any], group: Group) -> None:
    state.pending_eval = value["pending_eval"]
    state.stopped_for = value["stopped_for"]
    is_same = value.get("num_ranks", 1) == group.world_size
    if not is_same and any(one["updates"] for one in value["train_metrics"].values()):
        _log.warning(
            "The training metrics of this epoch begin anew: another number of ranks counted them."
        )
    metrics.load_state_dict(value["train_metrics"] if is_same else {})


def _with_state(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in named.items() if _has_state(one)}


def _has_state(listener: object) -> bool:
    """Return whether a listener keeps a state: it has a ``state_dict`` of its own."""
    own = type(listener).state_dict  # type: ignore[attr-defined]
    return own is not Callback.state_dict and own is not Algorithm.state_dict
