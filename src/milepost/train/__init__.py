"""The trainer, and everything that listens to it or changes it."""

from __future__ import annotations

from ..progress.time import Time, TimeUnit
from ..progress.timer import Timer
from ..state.resumable_sampler import ResumableSampler
from .algorithm import Algorithm
from .algorithms import EMA
from .callback import Callback
from .callbacks import EarlyStop, RunDirectoryUploader
from .data import DataSpec
from .evaluator import Evaluator
from .events import Event
from .parallel import settle_gradients
from .precision import Precision
from .state import State
from .trainer import Trainer

__all__ = [
    "EMA",
    "Algorithm",
    "Callback",
    "DataSpec",
    "EarlyStop",
    "Evaluator",
    "Event",
    "Precision",
    "ResumableSampler",
    "RunDirectoryUploader",
    "State",
    "Time",
    "TimeUnit",
    "Timer",
    "Trainer",
    "settle_gradients",
]
