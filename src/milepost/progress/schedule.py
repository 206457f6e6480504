"""When a save is due, and what it is called.

A schedule is asked at two moments: after a batch and after an epoch. It compares the counters at
its last question with those now, so that every kind of interval is one rule: a multiple was passed.
Nothing here reads a clock or a disk; the interval ``"auto"`` asks a :class:`Pacing` that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from .pacing import Pacing
from .time import Time, TimeUnit

__all__ = ["Due", "Interval", "Moment", "Schedule", "check_given", "is_auto", "parse_intervals"]

Moment = Literal["batch", "epoch"]
Counters = Mapping[str, Any]


class Auto:
    """The interval that is found out while training goes on."""

    def __str__(self) -> str:
        return "auto"


AUTO = Auto()
Interval = Time | Auto | Callable[..., bool]

_COUNTER = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "wall_s",
}


@dataclass(frozen=True, slots=True)
class Due:
    """A save that is due.

    Attributes:
        name: What to call the checkpoint: ``ep3``, ``ba500``, ``sp1000``, ``tok65536``, ``sec60``.
        interval: The interval that asked for it, as text.
    """

    name: str
    interval: str


def parse_intervals(spec: Any) -> tuple[Interval, ...]:
    """Turn what users pass into intervals.

    Args:
        spec: ``None``, a :class:`Time`, text, ``"auto"``, a whole number of epochs, a callable, or
            a list of them.

    Raises:
        UsageError: Not a time, or not above zero.
    """
    if spec is None:
        return ()
    if isinstance(spec, Sequence) and not isinstance(spec, str | bytes):
        return tuple(interval for one in spec for interval in parse_intervals(one))
    if callable(spec):
        return (spec,)
    if spec == "auto" or isinstance(spec, Auto):
        return (AUTO,)
    interval = Time.of(spec)
    if interval.value <= 0:
        raise UsageError(f"The interval {interval} is not above zero.")
    if interval.unit is TimeUnit.DURATION and interval.value > 1:
        raise UsageError(f"The interval {interval} is longer than the whole training.")
    return (interval,)


def is_auto(spec: Any) -> bool:
    """Return whether an interval, or one of several, is found out while training goes on.

    Raises:
        UsageError: Not a time, or not above zero.
    """
    return any(isinstance(interval, Auto) for interval in parse_intervals(spec))


def check_given(spec: Any) -> None:
    """Refuse an interval that is found out: what is to happen then has no cost to measure.

    Raises:
        UsageError: ``"auto"``, or what is no interval at all.
    """
    if is_auto(spec):
        raise UsageError(
            'The interval "auto" is for saves only.',
            hint="Give an interval in epochs, batches, samples or tokens, or a time.",
        )


class Schedule:
    """Decide when saves are due.

    Args:
        spec: See :func:`parse_intervals`.
        max_duration: Length of the whole training, for intervals in ``dur``.
        steps_per_epoch: Batches of an epoch where known, for intervals in ``dur`` of a training
            whose length is given in epochs.
        pacing: Decides about the interval ``"auto"``.
    """

    def __init__(
        self,
        spec: Any,
        *,
        max_duration: Time | None = None,
        steps_per_epoch: int | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        self.intervals = parse_intervals(spec)
        self._pacing = pacing
        if pacing is None:
            check_given(self.intervals)
        self._max_duration = max_duration
        self._steps_per_epoch = steps_per_epoch
        self._last: Counters = {}
        if max_duration is None and any(
            isinstance(i, Time) and i.unit is TimeUnit.DURATION for i in self.intervals
        ):
            raise UsageError(
                "An interval in dur needs to know how long the whole training is.",
                hint="Give a maximum duration, or an interval in another unit.",
            )

    @property
    def counts_batches(self) -> bool:
        """Return whether any interval can fall between two epochs."""
        return any(not isinstance(i, Time) or i.unit is not TimeUnit.EPOCH for i in self.intervals)

    @property
    def needs_batches(self) -> bool:
        """Return whether any interval is never due unless batches are counted."""
        units = (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN)
        return any(
            isinstance(i, Auto) or (isinstance(i, Time) and i.unit in units) for i in self.intervals
        )

    @property
    def follows_clock(self) -> bool:
        """Return whether any interval is one of time, or found out by measuring time."""
        return any(_follows_clock(interval) for interval in self.intervals)

    def take_clock(self) -> Schedule:
        """Hand over the intervals of time to a schedule of their own, and have them no more."""
        timed = [interval for interval in self.intervals if _follows_clock(interval)]
        self.intervals = tuple(i for i in self.intervals if not _follows_clock(i))
        return Schedule(timed, pacing=self._pacing)

    def start(self, counters: Counters) -> None:
        """Begin from these counters, at the start of a run or after a resume."""
        self._last = dict(counters)

    def due(self, moment: Moment, counters: Counters, *call_args: Any) -> Due | None:
        """Return the save that is due at this moment, if any.

        When several intervals fall together the one in epochs names the checkpoint.

        Args:
            moment: ``"batch"`` or ``"epoch"``; intervals in epochs are due only after an epoch.
            counters: The timer's snapshot.
            *call_args: What callables get: the state and the event.
        """
        found: list[Due] = []
        for interval in self.intervals:
            if isinstance(interval, Time):
                if self._passed(interval, moment, counters):
                    found.append(Due(self._name(interval, moment, counters), str(interval)))
            elif isinstance(interval, Auto):
                assert self._pacing is not None
                if moment == "batch" and self._pacing.is_due():
                    found.append(Due(_natural_name(moment, counters), str(interval)))
            elif interval(*call_args):
                name = getattr(interval, "__name__", "callable")
                found.append(Due(_natural_name(moment, counters), name))
        self._last = dict(counters)
        found.sort(key=lambda due: not due.name.startswith("ep"))
        return found[0] if found else None

    def epoch_would_be_due(self, counters: Counters) -> bool:
        """Return whether an interval in epochs would be due, without counting it as asked.

        A save after the last batch of an epoch may be left to the one after the epoch.

        Args:
            counters: The counters as they will be after the epoch.
        """
        return any(
            isinstance(interval, Time)
            and interval.unit is TimeUnit.EPOCH
            and self._passed(interval, "epoch", counters)
            for interval in self.intervals
        )

    def _passed(self, interval: Time, moment: Moment, counters: Counters) -> bool:
        if interval.unit is TimeUnit.EPOCH and moment != "epoch":
            return False
        if interval.unit is TimeUnit.DURATION:
            step = interval.value
            before, now = self._fraction(self._last), self._fraction(counters)
        else:
            step = interval.value
            name = _COUNTER[interval.unit]
            before, now = self._last.get(name, 0), counters[name]
        # A multiple of 0.1 is rarely exact in floating point: 0.3 / 0.1 is 2.9999999999999996.
        return math.floor(now / step + 1e-9) > math.floor(before / step + 1e-9)

    def _fraction(self, counters: Counters) -> float:
        whole = self._max_duration
        assert whole is not None
        if not counters:
            return 0.0
        if whole.unit is TimeUnit.EPOCH and self._steps_per_epoch:
            batches = int(whole.value) * self._steps_per_epoch
            done = counters["epoch"] * self._steps_per_epoch + counters["batch_in_epoch"]
            return float(done / batches)
        return float(counters[_COUNTER[whole.unit]] / whole.value)

    @staticmethod
    def _name(interval: Time, moment: Moment, counters: Counters) -> str:
        if interval.unit is TimeUnit.DURATION or moment == "epoch":
            return _natural_name(moment, counters)
        value = counters[_COUNTER[interval.unit]]
        return f"{interval.unit}{int(value)}"


def _follows_clock(interval: Interval) -> bool:
    is_time = isinstance(interval, Time) and interval.unit is TimeUnit.SECOND
    return is_time or isinstance(interval, Auto)


def _natural_name(moment: Moment, counters: Counters) -> str:
    return f"ep{counters['epoch']}" if moment == "epoch" else f"ba{counters['batch']}"
