"""The state of a training: everything that algorithms and callbacks see and may change."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..progress.time import Time, TimeUnit
from ..progress.timer import Timer
from ..state.objects import PerRank
from .algorithm import Algorithm
from .callback import Callback
from .evaluator import Evaluator
from .names import name_all
from .parallel import device_of, is_deepspeed
from .precision import Precision
from .several import as_list

__all__ = ["SERIALIZED_ATTRIBUTES", "State", "global_rank"]

_log = logging.getLogger(__name__)

SERIALIZED_ATTRIBUTES = (
    "model",
    "optimizers",
    "schedulers",
    "algorithms",
    "callbacks",
    "scaler",
    "timer",
    "rank_zero_seed",
    "current_metrics",
)


def global_rank() -> int:
    """Return the rank of this process: of torch.distributed, else ``RANK``, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class State:
    """What a training consists of at this moment.

    The trainer makes it; algorithms and callbacks get it at every event.

    Args:
        model: The model, wrapped for distributed training or not.
        max_duration: How long to train; see the attribute.
        rank_zero_seed: Seed of rank 0. Rank r uses this plus r.
        train_dataloader: The user's loader.
        evaluators: What is evaluated, and when.
        grad_accum: Microbatches per batch. At least 1.
        precision: See :class:`Precision`.
        optimizers: One or several.
        schedulers: Learning rate schedulers of torch's kind, none to several.
        scaler: A gradient scaler, or ``None``.
        algorithms: In the order in which they are applied.
        callbacks: In the order in which they are called.
        steps_per_epoch: Batches that make an epoch; ``None``: all the loader has.

    Attributes:
        batch: The batch on the device; between ``BEFORE_FORWARD`` and ``AFTER_BACKWARD`` the
            microbatch.
        batch_num_samples: Samples of the batch that came from the loader last, on this rank.
        batch_num_tokens: Its tokens, on this rank.
        loss: The last microbatch's loss; at ``BATCH_END`` the whole batch's, detached: of several
            ranks the mean, the same on every rank.
        outputs: What the model's forward pass returned last.
        current_metrics: Label -> metric name -> value. Training metrics are under ``"train"``.
        timer: Counts epochs, batches, samples, tokens and seconds; samples and tokens of all ranks.
        serialized_attributes: Names of the attributes that are saved and restored. Remove one (in
            an ``init`` callback, so that it counts for the restore too) to leave it out.
        pending_eval: An evaluation that was cut off and is done first when the training goes on.
        stopped_for: The maximum duration that :meth:`stop_training` cut short, as text.
        run_directory: The folder of this machine that holds what the training leaves behind, or
            ``None``. See :func:`~milepost.train.places.run_directory`.
    """

    def __init__(  # noqa: PLR0913 - one for each attribute, all by keyword
        self,
        model: torch.nn.Module,
        *,
        max_duration: str | int | Time,
        rank_zero_seed: int,
        train_dataloader: Iterable[Any],
        evaluators: Sequence[Evaluator] = (),
        grad_accum: int = 1,
        precision: Precision | str = Precision.FP32,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        schedulers: Any = (),
        scaler: Any = None,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        callbacks: Callback | Sequence[Callback] = (),
        steps_per_epoch: int | None = None,
    ) -> None:
        self.model = model
        self.rank_zero_seed = rank_zero_seed
        self.train_dataloader = train_dataloader
        self.evaluators = list(evaluators)
        self.grad_accum = _at_least_one(grad_accum, "grad_accum")
        self.scaler = scaler
        self.timer = Timer()
        self.batch: Any = None
        self.batch_num_samples = 0
        self.batch_num_tokens = 0
        self.loss: torch.Tensor | Sequence[torch.Tensor] | None = None
        self.outputs: Any = None
        self.current_metrics: dict[str, dict[str, Any]] = {}
        self.serialized_attributes = list(SERIALIZED_ATTRIBUTES)
        self.pending_eval: dict[str, Any] | None = None
        self.stopped_for: str | None = None
        self.run_directory: str | None = None
        self._steps_per_epoch: int | None = None
        self.precision = Precision.of(precision)
        self.max_duration = max_duration
        self.steps_per_epoch = steps_per_epoch
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[Any] = []
        self._algorithms: list[Algorithm] = []
        self._callbacks: list[Callback] = []
        self._ranks_own: set[int] = set()
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.algorithms = algorithms
        self.callbacks = callbacks

    @property
    def seed(self) -> int:
        """Return the seed of this rank."""
        return self.rank_zero_seed + global_rank()

    @property
    def device(self) -> torch.device:
        """Return where the model's parameters are."""
        return device_of(self.model)

    @property
    def max_duration(self) -> Time:
        """The length of the whole training, not of one ``fit``.

        Set it from a :class:`Time`, text, or a whole number of epochs.

        Raises:
            UsageError: When set to a fraction (``dur``) or to something below zero.
        """
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: str | int | Time) -> None:
        duration = Time.of(value)
        if duration.unit is TimeUnit.DURATION:
            raise UsageError(
                f"max_duration={duration} is a fraction of itself.",
                hint="Use epochs, batches, samples, tokens or a clock time.",
            )
        if duration.value < 0:
            raise UsageError(f"max_duration={duration} is below zero.")
        self._max_duration = duration

    def get_elapsed_duration(self) -> Time:
        """Return how much of the training has passed: ``0.0dur`` at the start, ``1.0dur`` done."""
        if self.max_duration.value == 0:
            return Time(1.0, TimeUnit.DURATION)
        return self.timer.get(self.max_duration.unit) / self.max_duration

    def stop_training(self) -> None:
        """End the training after this batch, with its evaluation and its checkpoint.

        The maximum duration becomes what has passed. A training stopped this way counts as
        finished when it is resumed with the maximum duration it had.
        """
        unit = self.max_duration.unit
        if self.stopped_for is None:
            self.stopped_for = str(self.max_duration)
        if unit is TimeUnit.EPOCH and self.timer.batch_in_epoch:
            unit = TimeUnit.BATCH
        self.max_duration = self.timer.get(unit)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches that make an epoch; ``None`` when neither the user nor the loader tells.

        Setting more than the loader has warns, since the epoch then ends with the loader.
        """
        length = loader_length(self.train_dataloader)
        if self._steps_per_epoch is None:
            return length
        return self._steps_per_epoch if length is None else min(self._steps_per_epoch, length)

    @steps_per_epoch.setter
    def steps_per_epoch(self, value: int | None) -> None:
        if value is not None:
            _at_least_one(value, "steps_per_epoch")
            length = loader_length(self.train_dataloader)
            if length is not None and value > length:
                warnings.warn(
                    f"steps_per_epoch={value} is more than the {length} batches of the training "
                    f"loader; an epoch will have {length}.",
                    stacklevel=2,
                )
        self._steps_per_epoch = value

    @property
    def precision(self) -> Precision:
        """The numerical precision of the forward pass and the loss."""
        return self._precision

    @precision.setter
    def precision(self, value: Precision | str) -> None:
        self._precision = Precision.of(value)

    @property
    def precision_context(self) -> AbstractContextManager[Any]:
        """Return a new context that computes in the training's precision."""
        return self.precision.context(self.device.type)

    @property
    def batch_pair(self) -> Any:
        """Return the batch, when it is a pair ``(inputs, targets)``.

        Raises:
            UsageError: It is something else.
        """
        if isinstance(self.batch, list | tuple) and len(self.batch) == 2:
            return self.batch
        raise UsageError(f"The batch is a {type(self.batch).__name__}, not a pair.")

    @property
    def batch_dict(self) -> Mapping[str, Any]:
        """Return the batch, when it is a dict.

        Raises:
            UsageError: It is something else.
        """
        if isinstance(self.batch, Mapping):
            return self.batch
        raise UsageError(f"The batch is a {type(self.batch).__name__}, not a dict.")

    @property
    def is_model_ddp(self) -> bool:
        """Return whether the model is wrapped in ``DistributedDataParallel``."""
        return isinstance(self.model, DistributedDataParallel)

    @property
    def is_model_deepspeed(self) -> bool:
        """Return whether the model is a DeepSpeed engine. Never imports DeepSpeed itself."""
        return is_deepspeed(self.model)

    @property
    def deepspeed_model(self) -> Any:
        """Return the model, when it is a DeepSpeed engine.

        Raises:
            UsageError: It is not.
        """
        if self.is_model_deepspeed:
            return self.model
        raise UsageError(f"The model is a {type(self.model).__name__}, not a DeepSpeed engine.")

    @property
    def bare_model(self) -> torch.nn.Module:
        """Return the model without the wrapper of ``DistributedDataParallel``."""
        return self.model.module if self.is_model_ddp else self.model  # type: ignore[return-value]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers. Setting takes one or several, and keeps the list itself."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, value: Any) -> None:
        self._optimizers[:] = as_list(value, name="optimizers", method="step")

    @property
    def schedulers(self) -> list[Any]:
        """The learning rate schedulers. Setting takes one or several."""
        return self._schedulers

    @schedulers.setter
    def schedulers(self, value: Any) -> None:
        self._schedulers[:] = as_list(value, name="schedulers", method="step")

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms. Setting takes one or several."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, value: Any) -> None:
        self._algorithms[:] = as_list(value, name="algorithms", method="run_event")

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks. Setting takes one or several, each as it is or as ``PerRank(it)``."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, value: Any) -> None:
        given = list(value) if isinstance(value, list | tuple | Iterator) else [value]
        bare = [one.target if isinstance(one, PerRank) else one for one in given]
        found = as_list(None if value is None else bare, name="callbacks", method="run_event")
        self._ranks_own = {id(one.target) for one in given if isinstance(one, PerRank)}
        self._callbacks[:] = found

    def is_ranks_own(self, callback: Callback) -> bool:
        """Return whether each rank saves the state of a callback for itself."""
        return id(callback) in self._ranks_own

    def named(self, attribute: str) -> dict[str, Any]:
        """Return the objects of ``optimizers``, ``callbacks``, ... by their unique names.

        Raises:
            DuplicateNameError: Two carry one name of their own.
        """
        held = as_list(getattr(self, attribute), name=attribute, method="state_dict")
        return name_all(held, kind=attribute.rstrip("s"))

    def state_dict(self) -> dict[str, Any]:
        """Return the serialized attributes as the checkpoint shows them to a reader."""
        state: dict[str, Any] = {}
        for attribute in self.serialized_attributes:
            if attribute == "model":
                state[attribute] = self.bare_model.state_dict()
            elif attribute == "timer":
                state[attribute] = self.timer.state_dict()
            elif attribute in _NAMED:
                state[attribute] = {n: o.state_dict() for n, o in self.named(attribute).items()}
            else:
                state[attribute] = getattr(self, attribute)
        return state

    def load_model_state(self, state_dict: Mapping[str, Any], *, strict: bool = False) -> None:
        """Load the weights of ``state_dict["model"]``; what does not match is logged.

        Args:
            state_dict: As :meth:`state_dict` returns it.
            strict: Raise when the names do not match exactly.
        """
        weights = dict(state_dict["model"])
        if weights and all(name.startswith("module.") for name in weights):
            weights = {name.removeprefix("module."): value for name, value in weights.items()}
        missing, unexpected = self.bare_model.load_state_dict(weights, strict=strict)
        if missing:
            _log.warning("Not in the checkpoint: %s", ", ".join(missing))
        if unexpected:
            _log.warning("In the checkpoint, but not in the model: %s", ", ".join(unexpected))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = False) -> None:
        """Load what :meth:`state_dict` returned, as far as it is in ``serialized_attributes``.

        Args:
            state: Attribute -> value. Objects that are not in it keep their state, with a warning.
            strict: For the model's weights; see :meth:`load_model_state`.
        """
        for attribute, value in state.items():
            if attribute not in self.serialized_attributes:
                continue
            if attribute == "model":
                self.load_model_state(state, strict=strict)
            elif attribute == "timer":
                self.timer.load_state_dict(value)
            elif attribute in _NAMED:
                for name, one in self.named(attribute).items():
                    if name in value:
                        one.load_state_dict(value[name])
                    else:
                        warnings.warn(f"No state of {attribute} {name!r}.", stacklevel=2)
            else:
                setattr(self, attribute, value)


_NAMED = frozenset({"optimizers", "schedulers", "algorithms", "callbacks", "scaler"})


def loader_length(loader: Any) -> int | None:
    """Return the number of batches a loader has, where it tells."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _at_least_one(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}={value!r} is not a whole number above zero.")
    return value
