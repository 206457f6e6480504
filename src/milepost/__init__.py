"""Checkpoints for PyTorch training: safe, fast, and resumed bit for bit.

The names below are loaded when they are first used, so that ``import milepost`` stays light: it
loads no torch, starts no thread and installs no signal handler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Run, open_run
    from .checkpointer import Checkpointer, PerRank, Stage, Value
    from .consolidating import consolidate
    from .engine.pending import PendingSave
    from .errors import (
        AccessError,
        CheckpointError,
        DamagedError,
        DeadlineError,
        DuplicateNameError,
        ExistsError,
        FencedError,
        FormatError,
        IncompleteError,
        InUseError,
        LaunchFailedError,
        MismatchError,
        MissingError,
        NewerFormatError,
        NodeLostError,
        NonFiniteLossError,
        NoSpaceError,
        Preempted,
        RankFailedError,
        SaveFailedError,
        StateChangedError,
        StorageError,
        UnsupportedStateError,
        UsageError,
    )
    from .format.tree import register_codec
    from .importing import import_checkpoint
    from .launch import FailureConfig, LaunchResult, RunConfig, ScalingConfig, launch
    from .progress.time import Time, TimeUnit
    from .progress.timer import Timer
    from .reporting import (
        CheckpointConfig,
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
        Reports,
        Result,
        TrainContext,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        report,
    )
    from .runs.keep import KeepAll, KeepBest, KeepEvery, KeepLast, KeepWithin
    from .state.report import LoadReport
    from .stores import ObjectStoreProvider, ObjectStoreProviderHparams, open_store
    from .train import (
        Algorithm,
        Callback,
        DataSpec,
        Evaluator,
        Event,
        Precision,
        State,
        Trainer,
    )
    from .transfers.one import copy_checkpoint
    from .transfers.reports import CopyReport, SyncReport
    from .transfers.whole import sync_run
    from .validation.config import ValidationConfig, ValidationTaskConfig

__all__ = [
    "AccessError",
    "Algorithm",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointError",
    "CheckpointUploadMode",
    "Checkpointer",
    "CopyReport",
    "DamagedError",
    "DataSpec",
    "DeadlineError",
    "DuplicateNameError",
    "Evaluator",
    "Event",
    "ExistsError",
    "FailureConfig",
    "FencedError",
    "FormatError",
    "InUseError",
    "IncompleteError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepWithin",
    "LaunchFailedError",
    "LaunchResult",
    "LoadReport",
    "MismatchError",
    "MissingError",
    "NewerFormatError",
    "NoSpaceError",
    "NodeLostError",
    "NonFiniteLossError",
    "ObjectStoreProvider",
    "ObjectStoreProviderHparams",
    "PendingSave",
    "PerRank",
    "Precision",
    "Preempted",
    "RankFailedError",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Reports",
    "Result",
    "Run",
    "RunConfig",
    "SaveFailedError",
    "ScalingConfig",
    "Stage",
    "State",
    "StateChangedError",
    "StorageError",
    "SyncReport",
    "Time",
    "TimeUnit",
    "Timer",
    "TrainContext",
    "Trainer",
    "UnsupportedStateError",
    "UsageError",
    "ValidationConfig",
    "ValidationTaskConfig",
    "Value",
    "__version__",
    "consolidate",
    "copy_checkpoint",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "import_checkpoint",
    "launch",
    "open_run",
    "open_store",
    "register_codec",
    "report",
    "sync_run",
]

_NAMES_OF_MODULES = {
    "checkpoint": "Checkpoint Run open_run",
    "checkpointer": "Checkpointer PerRank Stage Value",
    "engine.pending": "PendingSave",
    "errors": "AccessError CheckpointError DamagedError DeadlineError DuplicateNameError "
    "ExistsError FencedError FormatError InUseError IncompleteError LaunchFailedError "
    "MismatchError MissingError NewerFormatError NoSpaceError NodeLostError NonFiniteLossError "
    "Preempted RankFailedError SaveFailedError StateChangedError StorageError "
    "UnsupportedStateError UsageError",
    "format.tree": "register_codec",
    "consolidating": "consolidate",
    "importing": "import_checkpoint",
    "launch": "FailureConfig LaunchResult RunConfig ScalingConfig launch",
    "progress.time": "Time TimeUnit",
    "progress.timer": "Timer",
    "reporting": "CheckpointConfig CheckpointConsistencyMode CheckpointUploadMode "
    "ReportedCheckpoint ReportedCheckpointStatus Reports Result TrainContext "
    "get_all_reported_checkpoints get_checkpoint get_context report",
    "runs.keep": "KeepAll KeepBest KeepEvery KeepLast KeepWithin",
    "state.report": "LoadReport",
    "stores": "ObjectStoreProvider ObjectStoreProviderHparams open_store",
    "transfers.one": "copy_checkpoint",
    "transfers.reports": "CopyReport SyncReport",
    "transfers.whole": "sync_run",
    "validation.config": "ValidationConfig ValidationTaskConfig",
    "train": "Algorithm Callback DataSpec Evaluator Event Precision State Trainer",
}
_MODULE_OF_NAME = {
    name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value  # so that the next use costs a plain lookup
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
