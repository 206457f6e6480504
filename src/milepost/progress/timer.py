"""The timer: how far a training run has come.

One object counts epochs, batches, samples, tokens and seconds, over the whole run and within the
epoch. Everything that names, schedules or resumes reads it, and nobody else counts.
"""

from __future__ import annotations

import time as _clock
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UsageError
from .time import Time, TimeUnit

__all__ = ["Timer"]

_COUNTERS = (
    "epoch",
    "batch",
    "sample",
    "token",
    "batch_in_epoch",
    "sample_in_epoch",
    "token_in_epoch",
)


class Timer:
    """Count the progress of a training run.

    ``epoch`` is the number of finished epochs, so it is also the index of the one in progress.
    Seconds are those during which the run trained, over all its processes.

    Args:
        clock: Returns seconds that never go back. Tests pass their own.

    Examples:
        >>> timer = Timer()
        >>> timer.on_batch_complete(num_samples=32)
        >>> timer < "10ba"
        True
    """

    def __init__(self, *, clock: Callable[[], float] = _clock.monotonic) -> None:
        self._clock = clock
        self._started_s: float | None = None
        self._earlier_s = 0.0
        self._held_s: float | None = None
        self.epoch = 0
        self.batch = 0
        self.sample = 0
        self.token = 0
        self.batch_in_epoch = 0
        self.sample_in_epoch = 0
        self.token_in_epoch = 0

    @property
    def wall_s(self) -> float:
        """Return the seconds trained so far, in this process and in earlier ones."""
        return self.clock_s if self._held_s is None else self._held_s

    @property
    def clock_s(self) -> float:
        """Return what this process's clock says of :attr:`wall_s`, also while that is held."""
        running = 0.0 if self._started_s is None else self._clock() - self._started_s
        return self._earlier_s + running

    def hold(self, wall_s: float | None) -> None:
        """Say that so many seconds were trained, until the next call; ``None``: ask the clock.

        Of several ranks each has a clock of its own; what is due by the clock must be due on all
        ranks at once.
        """
        self._held_s = wall_s

    def start(self) -> None:
        """Begin to count seconds. Calling it again changes nothing."""
        if self._started_s is None:
            self._started_s = self._clock()

    def stop(self) -> None:
        """Stop counting seconds."""
        self._earlier_s, self._started_s = self.wall_s, None

    def on_batch_complete(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count one batch that was trained on."""
        self.batch += 1
        self.batch_in_epoch += 1
        self.sample += num_samples
        self.sample_in_epoch += num_samples
        self.token += num_tokens
        self.token_in_epoch += num_tokens

    def on_epoch_complete(self) -> None:
        """Count one finished epoch."""
        self.epoch += 1
        self.batch_in_epoch = self.sample_in_epoch = self.token_in_epoch = 0

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the progress in a unit.

        Raises:
            UsageError: For ``dur``, which needs to know the whole; see ``State``.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise UsageError("A timer alone cannot tell which fraction of the whole has passed.")
        counts = {
            TimeUnit.EPOCH: self.epoch,
            TimeUnit.BATCH: self.batch,
            TimeUnit.SAMPLE: self.sample,
            TimeUnit.TOKEN: self.token,
            TimeUnit.SECOND: self.wall_s,
        }
        return Time(counts[unit], unit)

    def snapshot(self) -> dict[str, int | float]:
        """Return every counter by name."""
        return {**{name: getattr(self, name) for name in _COUNTERS}, "wall_s": self.wall_s}

    def state_dict(self) -> dict[str, int | float]:
        """Return what a checkpoint stores."""
        return self.snapshot()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from stored counters."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        self._earlier_s = float(state.get("wall_s", 0.0))
        if self._held_s is not None:
            self._held_s = self._earlier_s
        if self._started_s is not None:
            self._started_s = self._clock()

    def _compare(self, other: Time | str) -> tuple[Time, Time]:
        other = Time.of(other)
        return self.get(other.unit), other

    def __lt__(self, other: Time | str) -> bool:
        mine, theirs = self._compare(other)
        return mine < theirs

    def __le__(self, other: Time | str) -> bool:
        mine, theirs = self._compare(other)
        return mine <= theirs

    def __gt__(self, other: Time | str) -> bool:
        mine, theirs = self._compare(other)
        return mine > theirs

    def __ge__(self, other: Time | str) -> bool:
        mine, theirs = self._compare(other)
        return mine >= theirs

    def __repr__(self) -> str:
        return f"Timer(epoch={self.epoch}, batch={self.batch}, sample={self.sample})"
