"""Reports: metrics and checkpoints of the user's own files, from one worker or many."""

from __future__ import annotations

from .config import (
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpointStatus,
)
from .context import TrainContext
from .current import get_all_reported_checkpoints, get_checkpoint, get_context, report
from .result import ReportedCheckpoint, Result
from .session import Reports

__all__ = [
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Reports",
    "Result",
    "TrainContext",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "report",
]
