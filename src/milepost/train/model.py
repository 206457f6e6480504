"""One way to call the two kinds of model a trainer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import UsageError

__all__ = ["BatchModel", "LossModel", "PairModel", "adapt"]

Loss = torch.Tensor | Sequence[torch.Tensor]
_TARGET_KEYS = ("labels", "label", "targets", "target")


class BatchModel(Protocol):
    """How the loop sees a model."""

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the outputs for a batch."""

    def loss(self, model: torch.nn.Module, outputs: Any, batch: Any) -> Loss:
        """Return the loss, or several that are added up."""

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the outputs that metrics are computed from, in an evaluation."""

    def targets(self, batch: Any) -> Any:
        """Return what metrics compare the outputs with."""


class LossModel:
    """A module with ``forward(batch)`` and ``loss(outputs, batch)``.

    It may also have ``eval_forward(batch)``, the outputs for metrics, and ``targets(batch)``; by
    default the targets are the second of a pair, or the entry named ``labels`` or ``targets``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return ``model(batch)``."""
        return model(batch)

    def loss(self, model: torch.nn.Module, outputs: Any, batch: Any) -> Loss:  # noqa: ARG002
        """Return the module's own loss."""
        return self._module.loss(outputs, batch)  # type: ignore[operator,no-any-return]

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return ``eval_forward(batch)`` where the module has it, else ``model(batch)``."""
        own = getattr(self._module, "eval_forward", None)
        return model(batch) if own is None else own(batch)

    def targets(self, batch: Any) -> Any:
        """Return the targets of a batch.

        Raises:
            UsageError: The batch does not show which part of it the targets are.
        """
        own = getattr(self._module, "targets", None)
        if callable(own):
            return own(batch)
        if isinstance(batch, Mapping):
            for key in _TARGET_KEYS:
                if key in batch:
                    return batch[key]
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            return batch[1]
        raise UsageError(
            "Cannot tell the targets of a batch, which metrics need.",
            hint="Give the model a method targets(batch).",
        )


class PairModel:
    """Any module, with a loss function for batches ``(inputs, targets)``."""

    def __init__(self, loss_fn: Callable[[Any, Any], Loss]) -> None:
        self._loss_fn = loss_fn

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return ``model(inputs)``."""
        return model(_pair(batch)[0])

    def loss(self, model: torch.nn.Module, outputs: Any, batch: Any) -> Loss:  # noqa: ARG002
        """Return ``loss_fn(outputs, targets)``."""
        return self._loss_fn(outputs, _pair(batch)[1])

    def predict(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return ``model(inputs)``."""
        return self.forward(model, batch)

    def targets(self, batch: Any) -> Any:
        """Return the second of the pair."""
        return _pair(batch)[1]


def adapt(module: torch.nn.Module, *, loss_fn: Callable[[Any, Any], Loss] | None) -> BatchModel:
    """Return how to call a module.

    Args:
        module: The model, without the wrappers of distributed training.
        loss_fn: ``(outputs, targets) -> loss``. Given, it is used even if the module has a loss.

    Raises:
        UsageError: Neither a loss function nor a ``loss`` method.
    """
    if loss_fn is not None:
        return PairModel(loss_fn)
    if callable(getattr(module, "loss", None)):
        return LossModel(module)
    raise UsageError(
        f"{type(module).__name__} has no loss(outputs, batch), and no loss_fn was given.",
        hint="Pass Trainer(loss_fn=torch.nn.functional.cross_entropy), or give the model a loss.",
    )


def _pair(batch: Any) -> Any:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UsageError(
            f"With loss_fn a batch must be a pair (inputs, targets), not {type(batch).__name__}.",
            hint="Give the model forward(batch) and loss(outputs, batch) for other batches.",
        )
    return batch
