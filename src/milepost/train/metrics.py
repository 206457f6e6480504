"""Metrics over the batches of an epoch or an evaluation, with a state that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DuplicateNameError, UsageError
from .parallel import device_of

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

__all__ = ["Metrics", "scalar_metrics", "training_metrics"]


class Metrics:
    """A set of torchmetrics under their names.

    Args:
        metrics: A metric, a collection, or several metrics; copied, so that the caller's own and
            other evaluators' never mix. A metric's name is its class, as torchmetrics does it.

    Raises:
        DuplicateNameError: Two of one class; use a ``MetricCollection`` with names.
        UsageError: Something that is no metric.
    """

    def __init__(self, metrics: Metric | MetricCollection | Iterable[Metric] | None) -> None:
        self._metrics: dict[str, Metric] = copy.deepcopy(_by_name(metrics))
        for metric in self._metrics.values():
            metric.persistent(mode=True)

    def __len__(self) -> int:
        return len(self._metrics)

    @property
    def names(self) -> list[str]:
        """Return the names of the metrics."""
        return list(self._metrics)

    def reset(self, device: torch.device) -> None:
        """Begin anew, on a device."""
        for metric in self._metrics.values():
            metric.to(device)
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one batch."""
        for metric in self._metrics.values():
            metric.update(outputs, targets)

    def compute(self) -> dict[str, Any]:
        """Return name -> value over all batches counted, detached."""
        return {name: _detached(metric.compute()) for name, metric in self._metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted so far."""
        return {
            name: {
                "updates": metric.update_count,
                "states": {
                    key: [v.detach() for v in value] if isinstance(value, list) else value.detach()
                    for key, value in _states(metric).items()
                },
            }
            for name, metric in self._metrics.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from :meth:`state_dict`. Metrics that are not in it begin anew."""
        for name, metric in self._metrics.items():
            metric.reset()
            stored = state.get(name)
            if stored is None:
                continue
            for key, value in stored["states"].items():
                if key in metric._defaults:  # noqa: SLF001 - the one list of a metric's states
                    setattr(metric, key, _copied(value, metric.device))
            # compute() warns of a metric that was never updated, and this one was.
            metric._update_count = stored["updates"]  # noqa: SLF001


def training_metrics(model: Any, *, wanted: bool, given: Any) -> Metrics:
    """Return the metrics of a training itself, on the device of its model.

    Args:
        model: Asked for ``metrics(train=True)`` where none are given.
        wanted: Whether there shall be any.
        given: What the user gave.

    Raises:
        UsageError: They are wanted, and there are none.
    """
    if not wanted:
        return Metrics(None)
    if given is None and callable(getattr(model, "metrics", None)):
        given = model.metrics(train=True)
    metrics = Metrics(given)
    if not len(metrics):
        raise UsageError(
            "compute_training_metrics=True, but there are none.",
            hint="Pass train_metrics, or give the model metrics(train=True).",
        )
    metrics.reset(device_of(model))
    return metrics


def scalar_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the single numbers among the metrics, for ranking checkpoints.

    Args:
        metrics: Label -> name -> value.

    Returns:
        ``"label/name"`` -> number, and ``"name"`` alone where only one label has it.
    """
    flat: dict[str, float] = {}
    bare: dict[str, list[float]] = {}
    for label, values in metrics.items():
        for name, value in values.items():
            number = _number(value)
            if number is not None:
                flat[f"{label}/{name}"] = number
                bare.setdefault(name, []).append(number)
    unique = {name: found[0] for name, found in bare.items() if len(found) == 1}
    return {**unique, **flat}


def _by_name(metrics: Metric | MetricCollection | Iterable[Metric] | None) -> dict[str, Metric]:
    if metrics is None:
        return {}
    # Only now: it takes a second or two, and most of what it loads with it nobody here uses.
    from torchmetrics import Metric, MetricCollection

    if isinstance(metrics, Metric):
        metrics = [metrics]
    if isinstance(metrics, MetricCollection):
        return dict(metrics.items(keep_base=False, copy_state=False))
    given = list(metrics) if isinstance(metrics, Iterable) else [metrics]
    named: dict[str, Metric] = {}
    for metric in given:
        if not isinstance(metric, Metric):
            raise UsageError(f"{metric!r} is not a torchmetrics Metric.")
        name = type(metric).__name__
        if name in named:
            raise DuplicateNameError(
                f"Two metrics are named {name!r}.",
                hint="Give them names: MetricCollection({'top1': ..., 'top5': ...}).",
                name=name,
            )
        named[name] = metric
    return named


def _states(metric: Metric) -> dict[str, Any]:
    return {key: getattr(metric, key) for key in metric._defaults}  # noqa: SLF001


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return [one.to(device, copy=True) for one in value]
    return value.to(device, copy=True)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
        return float(value.item()) if is_number else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
