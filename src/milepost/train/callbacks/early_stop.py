"""Stop when a metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import MissingError, UsageError
from ..callback import Callback
from ..metrics import scalar_metrics
from ..state import State

__all__ = ["EarlyStop"]


class EarlyStop(Callback):
    """End the training once a metric has not improved for some evaluations.

    Args:
        metric: ``"label/name"``, or the name alone where only one label has it.
        mode: Whether smaller (``"min"``) or larger (``"max"``) is better.
        patience_evals: Evaluations without an improvement that are still accepted.
        min_delta: How much better a value must be to count as an improvement.
    """

    def __init__(
        self,
        metric: str,
        *,
        mode: Literal["min", "max"],
        patience_evals: int = 1,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r} is neither 'min' nor 'max'.")
        self.metric = metric
        self.mode = mode
        self.patience_evals = patience_evals
        self.min_delta = min_delta
        self.best: float | None = None
        self.num_worse = 0

    def eval_end(self, state: State) -> None:
        """Compare the fresh value with the best so far. NaN is never better.

        Raises:
            MissingError: No metric of that name after an evaluation.
        """
        values = scalar_metrics(state.current_metrics)
        if self.metric not in values:
            raise MissingError(
                f"EarlyStop watches {self.metric!r}, which was not computed.",
                hint=f"Computed were: {', '.join(sorted(values)) or 'none'}.",
            )
        value = values[self.metric]
        if self._is_better(value):
            self.best, self.num_worse = value, 0
            return
        self.num_worse += 1
        if self.num_worse > self.patience_evals:
            state.stop_training()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored best value."""
        self.best, self.num_worse = state["best"], state["num_worse"]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta
