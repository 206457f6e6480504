"""Policies of retention: which checkpoints to keep, and why. Pure functions of records.

A policy names what it keeps; what no policy keeps may go. No policy reads a clock or a store, and
none depends on the order in which it is given the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

from ..errors import UsageError
from ..progress.time import Time, TimeUnit
from .scan import number_of

__all__ = [
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepWithin",
    "Record",
    "keep_any",
    "may_give_up",
]

_COUNTERS: Mapping[TimeUnit, str] = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "wall_s",
}


@dataclass(frozen=True, slots=True)
class Record:
    """What a policy knows of one checkpoint.

    Attributes:
        name: Its name.
        order: Its place on the lineage; a newer checkpoint has a higher one.
        created_s: Seconds since 1970 by the writer's clock.
        time: Progress counters by name.
        metrics: Numbers by name.
        is_pending_validation: Whether its metrics are still being computed: it is not ranked then.
    """

    name: str
    order: int
    created_s: float = 0.0
    time: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_pending_validation: bool = False


@runtime_checkable
class KeepPolicy(Protocol):
    """Says which checkpoints to keep."""

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return the names to keep, each with the reason in plain words."""


@final
@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest ``count`` checkpoints.

    Raises:
        UsageError: ``count`` is not a whole number of at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.count)

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return the newest ones."""
        newest = _ordered(records)[-self.count :]
        return {record.name: f"one of the last {self.count}" for record in newest}


@final
@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the ``count`` checkpoints with the best value of a metric.

    A missing value or NaN never takes the place of a number; of equal values the newer checkpoint
    is kept. Where all values are NaN, none is kept by this policy. Where no checkpoint has a metric
    of that name at all, every one is kept: a mistyped name must not delete anything.

    Args:
        count: How many.
        metric: Name of the metric.
        mode: ``min`` or ``max``.

    Raises:
        UsageError: An argument makes no sense.
    """

    count: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.count)
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"KeepBest: {self.metric!r} is not the name of a metric.")
        if self.mode not in ("min", "max"):
            raise UsageError(f"KeepBest: mode={self.mode!r}.", hint="Use min or max.")

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return the best ones."""
        sign = 1.0 if self.mode == "min" else -1.0
        if not any(self.metric in record.metrics for record in records):
            reason = f"no checkpoint has a metric {self.metric!r}"
            return {record.name: reason for record in records}
        scored = []
        for record in records:
            value = number_of(record.metrics.get(self.metric))
            if value is not None and not record.is_pending_validation:
                scored.append((sign * value, -record.order, record.name, value))
        scored.sort()
        return {
            name: f"number {place} of the best {self.count} by {self.metric} ({value:g})"
            for place, (_, _, name, value) in enumerate(scored[: self.count], start=1)
        }


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepEvery:
    """Keep the first checkpoint at or after each multiple of an interval.

    Args:
        interval: Such as ``"5ep"``, ``"1000ba"``, ``"1e9tok"`` or ``"6h"`` of training.

    Raises:
        UsageError: Not a time, not above zero, or a fraction of the whole training.
    """

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        time = Time.of(interval)
        if time.unit not in _COUNTERS or time.value <= 0:
            raise UsageError(
                f"KeepEvery({interval!r}): there are no multiples of that.",
                hint="Use an interval above zero in ep, ba, sp, tok or sec.",
            )
        object.__setattr__(self, "interval", time)

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return the first at or after each multiple."""
        kept, reached = {}, 0
        for record in _ordered(records):
            value = record.time.get(_COUNTERS[self.interval.unit])
            value = value.value if isinstance(value, Time) else value
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                continue
            multiple = int(value // self.interval.value)
            if multiple > reached:
                kept[record.name] = f"the first at or after {multiple} x {self.interval}"
                reached = multiple
        return kept


@final
@dataclass(frozen=True, slots=True, init=False)
class KeepWithin:
    """Keep the checkpoints made within a duration before the newest one.

    Args:
        duration: Such as ``"24h"`` or ``"1h30m"``.

    Raises:
        UsageError: Not a duration on the wall clock, or not above zero.
    """

    duration: Time

    def __init__(self, duration: str | Time) -> None:
        time = Time.of(duration)
        if time.unit is not TimeUnit.SECOND or time.value <= 0:
            raise UsageError(
                f"KeepWithin({duration!r}) is not a duration.", hint='Use text such as "24h".'
            )
        object.__setattr__(self, "duration", time)

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return those that are young enough, the newest always."""
        ordered = _ordered(records)
        if not ordered:
            return {}
        oldest_s = ordered[-1].created_s - self.duration.value
        reason = f"made within {self.duration} before the newest"
        return {record.name: reason for record in ordered if record.created_s >= oldest_s}


@final
@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep every checkpoint."""

    def keep(self, records: Sequence[Record]) -> Mapping[str, str]:
        """Return all of them."""
        return {record.name: "all are kept" for record in records}


def keep_any(policies: Sequence[KeepPolicy], records: Sequence[Record]) -> dict[str, str]:
    """Return what at least one policy keeps, with all the reasons."""
    reasons: dict[str, list[str]] = {}
    for policy in policies:
        for name, reason in policy.keep(records).items():
            reasons.setdefault(name, []).append(reason)
    return {name: "; ".join(texts) for name, texts in reasons.items()}


def may_give_up(policies: Sequence[KeepPolicy]) -> bool:
    """Return whether there can be a checkpoint that no policy keeps: if not, none is looked for."""
    return bool(policies) and not any(isinstance(policy, KeepAll) for policy in policies)


def _check_count(policy: str, count: object) -> None:
    if type(count) is not int or count < 1:
        raise UsageError(
            f"{policy}({count!r}): the count is not a whole number of at least 1.",
            hint="Use KeepAll() to keep every checkpoint.",
        )


def _ordered(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.order)
