"""What is evaluated during a training, on which data, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import DataLoader

from ..errors import DuplicateNameError, UsageError
from ..progress.schedule import check_given
from ..progress.time import Time
from .data import DataSpec
from .metrics import Metrics

if TYPE_CHECKING:
    import torch
    from torchmetrics import Metric, MetricCollection

    MetricSpec: TypeAlias = Metric | MetricCollection | Sequence[Metric] | None

__all__ = ["Evaluator", "as_evaluators", "metric_names"]

TRAIN_LABEL = "train"
LOSS = "Loss"
"""Name of the mean loss, which is computed where an evaluator has no metrics."""


class Evaluator:
    """Evaluate the model on some data, under a label.

    Args:
        label: Key of the results in ``state.current_metrics``.
        dataloader: The data: a loader, a :class:`DataSpec` or its arguments as a dict.
        metrics: A torchmetrics metric, a collection, or several. They are copied. ``None``: the
            mean loss, as ``"Loss"``.
        eval_interval: When: ``"1ep"``, ``"500ba"``, a whole number of epochs, a callable
            ``(state, event) -> bool``, or several. ``None``: only when asked with ``eval()``.
        subset_num_batches: At most so many batches of the loader.
    """

    def __init__(
        self,
        label: str,
        dataloader: DataSpec | Mapping[str, Any] | Iterable[Any],
        *,
        metrics: MetricSpec = None,
        eval_interval: str | int | Time | Callable[..., bool] | Sequence[Any] | None = "1ep",
        subset_num_batches: int | None = None,
    ) -> None:
        if label == TRAIN_LABEL:
            raise UsageError(f"The label {label!r} belongs to the training metrics.")
        if subset_num_batches is not None and subset_num_batches < 1:
            raise UsageError(f"subset_num_batches={subset_num_batches} is not above zero.")
        check_given(eval_interval)
        self.label = label
        self.data = DataSpec.of(dataloader)
        self.metrics = Metrics(metrics)
        self.eval_interval = eval_interval
        self.subset_num_batches = subset_num_batches

    def __repr__(self) -> str:
        return f"Evaluator({self.label!r})"


def as_evaluators(
    given: Any, *, model: torch.nn.Module, metrics: MetricSpec, eval_interval: Any
) -> list[Evaluator]:
    """Return evaluators from what users pass as ``eval_dataloader``.

    Args:
        given: ``None``, an :class:`Evaluator`, several, or a bare loader, which gets the label
            ``"eval"``.
        model: Asked for ``metrics(train=False)`` when a bare loader comes without metrics.
        metrics: For a bare loader.
        eval_interval: For a bare loader.

    Raises:
        DuplicateNameError: Two evaluators with one label.
        UsageError: Several loaders that are not all evaluators.
    """
    if given is None:
        return []
    several = isinstance(given, list | tuple | set) and any(
        isinstance(one, Evaluator | DataLoader | DataSpec) for one in given
    )
    if not several and not isinstance(given, Evaluator):
        if metrics is None and callable(getattr(model, "metrics", None)):
            metrics = model.metrics(train=False)  # type: ignore[operator]
        return [Evaluator("eval", given, metrics=metrics, eval_interval=eval_interval)]
    if isinstance(given, set):
        raise UsageError("A set of evaluators has no order.", hint="Give them in a list.")
    evaluators = list(given) if several else [given]
    labels: set[str] = set()
    for evaluator in evaluators:
        if not isinstance(evaluator, Evaluator):
            raise UsageError(
                "eval_dataloader holds several loaders, and not all of them are evaluators.",
                hint="Give each loader a label: Evaluator('test', loader).",
            )
        if evaluator.label in labels:
            raise DuplicateNameError(
                f"Two evaluators have the label {evaluator.label!r}.", name=evaluator.label
            )
        labels.add(evaluator.label)
    return evaluators


def metric_names(evaluators: Iterable[Evaluator]) -> list[str]:
    """Return the names of all metrics that checkpoints of a training can have.

    Args:
        evaluators: Those of the training.
    """
    names = {"loss": None}
    for evaluator in evaluators:
        for name in evaluator.metrics.names or [LOSS]:
            names |= {name: None, f"{evaluator.label}/{name}": None}
    return list(names)
