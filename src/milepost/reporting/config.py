"""What is asked of reports: what is kept, how long ranks wait, and what a failed upload means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, final

from ..errors import UsageError
from ..options import check_count, check_seconds, longest_wait_s
from ..runs.keep import KeepPolicy, Record
from ..runs.scan import number_of

__all__ = [
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "KeepReported",
    "ReportedCheckpointStatus",
]


class CheckpointUploadMode(str, Enum):
    """How the files of a reported checkpoint get to the run.

    ``SYNC`` returns once the checkpoint is committed. ``ASYNC`` returns at once, and the upload
    goes on in the background. ``NO_UPLOAD`` commits a folder that was written into the run already.
    """

    SYNC = "sync"
    ASYNC = "async"
    NO_UPLOAD = "no_upload"


class CheckpointConsistencyMode(str, Enum):
    """What :func:`get_all_reported_checkpoints` waits for.

    ``COMMITTED``: that what was reported so far is committed, or has failed. ``VALIDATED``: that no
    validation is pending either.
    """

    COMMITTED = "committed"
    VALIDATED = "validated"


class ReportedCheckpointStatus(str, Enum):
    """How far a reported checkpoint has come.

    ``COMMITTED``: no validation was asked for.
    """

    COMMITTED = "committed"
    PENDING_VALIDATION = "pending_validation"
    VALIDATED = "validated"
    VALIDATION_TIMEOUT = "validation_timeout"
    VALIDATION_FAILED = "validation_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Which reported checkpoints are kept, and what holds for all reports of a run.

    The newest checkpoint, pinned ones and those that wait for their validation are kept whatever
    this says.

    Attributes:
        num_to_keep: How many; ``None`` keeps all.
        checkpoint_score_attribute: The metric that says which ones; a nested one is ``val/loss``.
            ``None`` keeps the newest.
        checkpoint_score_order: ``max`` or ``min``.
        on_save_error: ``raise`` what went wrong with a report, or ``warn`` and train on.
        max_failed_saves: With ``warn``: how many reports in a row may fail.
        report_timeout_s: How long ranks wait for the others to come to the same report, in seconds.
        upload_timeout_s: How long the upload of one checkpoint may take, in seconds.
        validation_timeout_s: How long the end of the run waits for verdicts, in seconds. What has
            none then is taken up at the next start.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    on_save_error: str = "raise"
    max_failed_saves: int = 3
    report_timeout_s: float = 600.0
    upload_timeout_s: float = 3600.0
    validation_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and (
            type(self.num_to_keep) is not int or self.num_to_keep < 1
        ):
            raise UsageError(
                f"num_to_keep={self.num_to_keep!r} is not a whole number of at least 1.",
                hint="Leave it out to keep every checkpoint.",
            )
        attribute = self.checkpoint_score_attribute
        if attribute is not None and (not isinstance(attribute, str) or not attribute):
            raise UsageError(f"{attribute!r} is not the name of a metric.")
        for name, allowed in (
            ("checkpoint_score_order", ("max", "min")),
            ("on_save_error", ("raise", "warn")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise UsageError(f"{name}={value!r} is not known.", hint=f"Use {listed}.")
        check_count("max_failed_saves", self.max_failed_saves, least=1)
        for name in ("report_timeout_s", "upload_timeout_s", "validation_timeout_s"):
            check_seconds(name, getattr(self, name))
            object.__setattr__(self, name, longest_wait_s(getattr(self, name)))

    def policies(self) -> tuple[KeepPolicy, ...]:
        """Return the policies of retention that it means."""
        if self.num_to_keep is None:
            return ()
        return (
            KeepReported(
                self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True)
class KeepReported:
    """Keep the best ``count`` checkpoints, those without a score after those with one.

    NaN is no score. Of equal scores the newer one is better, and so it is among those without. One
    whose validation is pending is not ranked. Where no checkpoint has a metric of that name at all,
    every one is kept: a mistyped name must not delete anything.

    Args:
        count: How many.
        metric: Name of the metric; ``None`` ranks by age alone.
        mode: ``max`` or ``min``.
    """

    count: int
    metric: str | None
    mode: str

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return the best ones."""
        metric = self.metric
        if metric is not None and not any(metric in record.metrics for record in records):
            reason = f"no checkpoint has a metric {metric!r}"
            return {record.name: reason for record in records}
        ranked = ranked_worst_first(
            [record for record in records if not record.is_pending_validation],
            metric,
            self.mode,
        )
        by = "age" if metric is None else metric
        best = reversed(ranked[-self.count :])
        return {
            record.name: f"number {place} of the best {self.count} by {by}"
            for place, record in enumerate(best, start=1)
        }


def ranked_worst_first(records: Sequence[Record], metric: str | None, mode: str) -> list[Record]:
    """Return records in the order of their scores, those without one first, older before newer."""
    sign = 1.0 if mode == "max" else -1.0

    def key(record: Record) -> tuple[bool, float, int]:
        score = None if metric is None else number_of(record.metrics.get(metric))
        return (False, 0.0, record.order) if score is None else (True, sign * score, record.order)

    return sorted(records, key=key)
