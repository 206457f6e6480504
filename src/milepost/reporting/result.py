"""What came of a run that was reported to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, Place, open_run
from ..errors import MissingError, UsageError
from ..metrics import flatten, with_found
from ..runs.keep import Record
from ..runs.scan import Found, RunView, number_of, scan
from ..stores.base import Store
from .commit import nested_metrics
from .config import CheckpointConfig, ReportedCheckpointStatus, ranked_worst_first
from .history import config_of, read_history

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

__all__ = ["ReportedCheckpoint", "Result", "reported_checkpoints"]


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """A checkpoint that was reported.

    Attributes:
        checkpoint: The checkpoint.
        metrics: What was reported with it, and what its validation found.
        status: How far it has come.
    """

    checkpoint: Checkpoint
    metrics: Mapping[str, Any]
    status: ReportedCheckpointStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run.

    Attributes:
        checkpoint: The newest checkpoint, or ``None``.
        best_checkpoints: Those that are kept, each with its metrics, from the worst to the best by
            the metric of ``CheckpointConfig``, or from the oldest to the newest. Those whose
            validation is pending come first.
        metrics: What was reported last, with a checkpoint or without; ``None`` if nothing was.
        error: What ended the training, or ``None``.
        path: Where the run is.
        return_value: What the function returned on rank 0, where there was one.
    """

    checkpoint: Checkpoint | None = None
    best_checkpoints: list[tuple[Checkpoint, Mapping[str, Any]]] = field(default_factory=list)
    metrics: Mapping[str, Any] | None = None
    error: Any = None
    path: str = ""
    return_value: Any = None

    @classmethod
    def from_path(cls, path: Place | Store) -> Self:
        """Return the result of a run from its place. Error and return value are not kept there.

        Raises:
            MissingError: There is no run.
        """
        return cls.from_store(open_run(path).store)

    @classmethod
    def from_store(
        cls, store: Store, *, config: CheckpointConfig | None = None, **facts: Any
    ) -> Self:
        """Return the result of the run in a store.

        Args:
            store: The run's store.
            config: What ranks the checkpoints; by default what the run was written with.
            **facts: More fields.
        """
        path = store.url.removeprefix("file://")
        try:
            view = scan(store)
        except MissingError:
            return cls(path=path, **facts)
        if config is None:
            config = CheckpointConfig(**config_of(store))
        reported = {one.checkpoint.name: one for one in reported_checkpoints(store, view)}
        ranked = ranked_worst_first(
            _records(view, reported),
            config.checkpoint_score_attribute,
            config.checkpoint_score_order,
        )
        latest = view.latest()
        history = read_history(store)
        return cls(
            checkpoint=None if latest is None else _handle(store, latest),
            best_checkpoints=[
                (reported[one.name].checkpoint, reported[one.name].metrics) for one in ranked
            ],
            metrics=history[-1].metrics if history else None,
            path=path,
            **facts,
        )

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the kept checkpoint with the best value of a metric, or ``None`` if none has one.

        Args:
            metric: Its name; a nested one is ``val/loss``.
            mode: ``max`` or ``min``.
        """
        if mode not in ("max", "min"):
            raise UsageError(f"mode={mode!r} is not a way to compare.", hint="Use min or max.")
        records = [
            Record(str(place), place, metrics=flatten(metrics))
            for place, (_, metrics) in enumerate(self.best_checkpoints)
            if number_of(flatten(metrics).get(metric)) is not None
        ]
        ranked = ranked_worst_first(records, metric, mode)
        return self.best_checkpoints[ranked[-1].order][0] if ranked else None

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Return all that was reported as a table, a row a report.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise UsageError(
                "metrics_dataframe needs pandas, which is not installed.",
                hint="Install it with: pip install pandas.",
            ) from error
        rows = [
            {"session": one.session, "report": one.number, "time": one.at_s, **flatten(one.metrics)}
            for one in read_history(open_run(self.path).store)
        ]
        return pd.DataFrame(rows)


def reported_checkpoints(store: Store, view: RunView) -> list[ReportedCheckpoint]:
    """Return the reported checkpoints of a run that count, oldest first."""
    found = []
    for one in view.lineage():
        if one.manifest is not None and one.manifest.reason == "report":
            metrics, status = nested_metrics(one.manifest), ReportedCheckpointStatus.COMMITTED
            if one.validation is not None:
                metrics = with_found(metrics, one.validation.metrics)
                status = ReportedCheckpointStatus(one.validation.status.value)
            found.append(ReportedCheckpoint(_handle(store, one), metrics, status))
    return found


def _records(view: RunView, names: Mapping[str, Any]) -> list[Record]:
    return [
        Record(one.name, order, metrics={} if one.is_pending_validation else one.metrics)
        for order, one in enumerate(view.lineage())
        if one.name in names
    ]


def _handle(store: Store, found: Found) -> Checkpoint:
    return Checkpoint(store, found.name, state=found.state, validation=found.validation)
