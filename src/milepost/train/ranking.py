"""Metrics that the arguments of a training name: whether there are such, and were meant."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from ..naming import NameFormat
from ..runs.keep import KeepBest

__all__ = ["check_metrics_named"]

_log = logging.getLogger(__name__)

_BATCH_LOSS = "loss"


def check_metrics_named(
    metrics: Collection[str], *, name_format: str | None, policies: Iterable[object]
) -> None:
    """Refuse names of checkpoints with a metric that is none; warn of retention by such.

    Args:
        metrics: Every metric that the checkpoints can have.
        name_format: What they are called, if it is the user's choice.
        policies: Retention.

    Raises:
        UsageError: ``name_format`` names another metric.
    """
    if name_format:
        NameFormat(name_format).check_metrics(metrics)
    for metric in dict.fromkeys(one.metric for one in policies if isinstance(one, KeepBest)):
        if metric not in metrics:
            meant = get_close_matches(metric, metrics, n=1)
            _log.warning(
                "keep= ranks by %r, which no checkpoint of this training has: every one is kept. "
                "%sThe metrics are: %s.",
                metric,
                f"Was {meant[0]!r} meant? " if meant else "",
                ", ".join(metrics),
            )
        elif metric == _BATCH_LOSS and len(metrics) > 1:
            _log.warning(
                "keep= ranks by 'loss', the loss of one training batch, and there are evaluations. "
                "To rank by one of these name it: %s.",
                ", ".join(name for name in metrics if name != _BATCH_LOSS),
            )
