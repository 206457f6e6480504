"""Workers that are brought back without a hand.

The package and its main function share a name. ``milepost.launch`` is the function once it was
used, and this module after ``import milepost.launch``; so the module can be called as well.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .attempt import AttemptResult
from .config import RunConfig, ScalingConfig
from .failures import WorkerFailure
from .policy import Ending, FailureConfig
from .ray import RayEngine
from .recovery import launch
from .result import LaunchResult

__all__ = [
    "AttemptResult",
    "Ending",
    "FailureConfig",
    "LaunchResult",
    "RayEngine",
    "RunConfig",
    "ScalingConfig",
    "WorkerFailure",
    "launch",
]


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> LaunchResult:
        return launch(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
