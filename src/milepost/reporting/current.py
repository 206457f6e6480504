"""The functions that training code calls, wherever it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..checkpoint import Checkpoint
from ..engine.pending import PendingSave
from ..errors import UsageError
from ..stores.url import settled
from ..validation.config import ValidationConfig, ValidationTaskConfig
from .config import CheckpointConfig, CheckpointConsistencyMode, CheckpointUploadMode
from .context import TrainContext, ranks_here
from .result import ReportedCheckpoint
from .session import Reports, in_use
from .upload import UploadFn

__all__ = [
    "MEET",
    "REPORTS",
    "REPORTS_PID",
    "close_current",
    "environment_of_reports",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "report",
]

REPORTS = "MILEPOST_REPORTS"
"""Environment variable of a launched worker: where its run is and what was configured, as JSON."""

MEET = "MILEPOST_MEET"
"""Environment variable of a launched worker: where rank 0 listens for reports, ``host:port``."""

REPORTS_PID = "MILEPOST_REPORTS_PID"
"""Environment variable: the process that it is meant for, which has set this one itself."""


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    *,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> PendingSave[Checkpoint] | None:
    """Report metrics, and perhaps a checkpoint, to the run.

    Every rank reports equally often; a report that raises counts. Metrics alone never wait for
    anything. A checkpoint may come from one rank or several; their files lie in one folder
    afterwards. It is committed when every rank has made this report and all files are safely
    written.

    Args:
        metrics: Numbers, text and None by name, perhaps nested; tensors and NumPy scalars of one
            element count as numbers. Those of rank 0 are kept.
        checkpoint: The folder with this rank's files: ``Checkpoint.from_directory(folder)``.
        checkpoint_dir_name: Name of the checkpoint in the run; that of the lowest rank that gives
            one holds. One that is taken gets a suffix. By default ``report-1`` and so on.
        checkpoint_upload_mode: ``SYNC`` returns when it is committed, ``ASYNC`` at once. A rank has
            one upload on its way at a time: a report with a checkpoint waits for the one before.
            ``NO_UPLOAD`` commits a folder right in the run, where it is.
        delete_local_checkpoint_after_upload: Whether to delete the reported folder once the
            checkpoint is committed. Default: only with ``ASYNC``.
        checkpoint_upload_fn: Called with the checkpoint and its name in the run, in place of the
            upload: writes it there, and returns it as a :class:`Checkpoint`. The same on all ranks.
        validation: Whether to validate it, in a process of its own, once it is committed: ``True``,
            or with arguments and a timeout of its own. The lowest rank with files says so.

    Returns:
        The handle of a checkpoint on its way, done already but with ``ASYNC``; ``None`` without a
        checkpoint.

    Raises:
        UsageError: A metric, file or option that makes no sense; or nothing is reported to here.
        MismatchError: Files of one name differ between ranks.
        RankFailedError: Another rank failed to make this report.
        DeadlineError: Another rank did not make it in time.
        CheckpointError: It was not committed; with ``ASYNC``, the one before was not.
    """
    return _current("report()").report(
        metrics,
        checkpoint,
        checkpoint_dir_name=checkpoint_dir_name,
        checkpoint_upload_mode=checkpoint_upload_mode,
        delete_local_checkpoint_after_upload=delete_local_checkpoint_after_upload,
        checkpoint_upload_fn=checkpoint_upload_fn,
        validation=validation,
    )


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint, the same one on every rank that has made as many reports.

    At the start it is the one that the run goes on from. After report n it is the newest one that
    was committed up to report n; where that is not known yet, it is waited for.

    Returns:
        The checkpoint; ``None`` if there is none.

    Raises:
        DeadlineError: Some rank did not come to the same report in time.
        UsageError: Nothing is reported to here.
    """
    return _current("get_checkpoint()").get_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return the reported checkpoints that the run has kept, oldest first.

    Args:
        consistency_mode: ``COMMITTED`` waits until it is known what came of this rank's reports;
            ``VALIDATED`` also until no validation is pending.
        timeout_s: How long to wait, in seconds.

    Raises:
        DeadlineError: It was not known in time.
        UsageError: Nothing is reported to here.
    """
    return _current("get_all_reported_checkpoints()").get_all_reported_checkpoints(
        consistency_mode, timeout_s
    )


def get_context() -> TrainContext:
    """Return who this worker is and where its run is. Opens nothing."""
    if in_use.items:
        return in_use.items[-1].context
    settings = _settings()
    return ranks_here("" if settings is None else str(settings["place"]))


def environment_of_reports(
    place: str,
    config: CheckpointConfig,
    validation: ValidationConfig | None,
    *,
    local_cache: str | os.PathLike[str] | None = None,
) -> str:
    """Return what a launcher sets for its workers, so that they can report."""
    settings = {
        "place": place,
        "config": config.to_json(),
        "validation": None if validation is None else validation.to_json(),
        "local_cache": None if local_cache is None else str(settled(local_cache)),
    }
    return json.dumps(settings)


def close_current(*, is_well: bool, value: Any = None) -> None:
    """Close what a launched worker reported to, if it did; see ``Reports.close``.

    Raises:
        CheckpointError: A report failed that nobody was told about yet.
    """
    while in_use.items:
        in_use.items.pop().close(is_well=is_well, value=value)


def _current(asked: str) -> Reports:
    if not in_use.items:
        settings = _settings()
        if settings is None:
            raise UsageError(
                f"{asked} was called where nothing is reported to.",
                hint='Call it in a function that milepost.launch runs, or in a "with '
                'milepost.Reports(folder):" block.',
            )
        validation = settings["validation"]
        host, _, port = os.environ.get(MEET, "").rpartition(":")
        in_use.push(
            Reports(
                settings["place"],
                checkpoint_config=CheckpointConfig(**settings["config"]),
                validation=(None if validation is None else ValidationConfig.from_json(validation)),
                if_finished="continue",  # the launcher has looked
                local_cache=settings["local_cache"],
                meet=(host, int(port)) if host else None,
            )
        )
    return in_use.items[-1].open()


def _settings() -> dict[str, Any] | None:
    """Return what the launcher of this very process has set, if one has."""
    text = os.environ.get(REPORTS)
    if not text or os.environ.get(REPORTS_PID) != str(os.getpid()):
        return None
    found: dict[str, Any] = json.loads(text)
    return found
