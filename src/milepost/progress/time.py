"""Time: a number with a unit of training progress.

Units: ``ep`` epochs, ``ba`` batches, ``sp`` samples, ``tok`` tokens, ``dur`` a fraction of the
whole training, ``sec`` seconds of training on the wall clock. Text forms: ``"3ep"``, ``"1e6tok"``,
``"1_000ba"``, ``"0.1dur"``, ``"90m"``, ``"24h"``, ``"1h30m"``, ``"1d12h"``.

Nothing is ever rounded in silence: an operation whose exact result is not a whole count raises.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import total_ordering

from ..errors import UsageError

__all__ = ["Time", "TimeUnit"]


class TimeUnit(str, Enum):
    """What a :class:`Time` counts."""

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"  # noqa: S105 - a unit, not a password
    DURATION = "dur"
    SECOND = "sec"

    def __str__(self) -> str:
        return self.value


_COUNTS = frozenset({TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN})
_LARGEST = 2**63  # more than any training counts; keeps a slip such as 1e999999tok harmless
_LONGEST_TEXT = 64
_NUMBER = r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[-+]?\d{1,3})?"
_SIMPLE = re.compile(rf"\s*({_NUMBER})\s*(ep|ba|sp|tok|dur|sec)\s*", re.IGNORECASE)
_CLOCK = re.compile(r"\s*(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?\s*", re.IGNORECASE)


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Time:
    """A number of epochs, batches, samples, tokens or seconds, or a fraction of the whole.

    Args:
        value: A whole number for counts; any number for ``dur`` and ``sec``.
        unit: A :class:`TimeUnit` or its text.

    Raises:
        UsageError: A fraction of a count, or an unknown unit.

    Examples:
        >>> Time("1h30m")
        Time(5400, 'sec')
        >>> Time(4, "ba") + "2ba"
        Time(6, 'ba')
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: int | float | str, unit: TimeUnit | str | None = None) -> None:
        if isinstance(value, str):
            if unit is not None:
                raise UsageError(f"Time({value!r}, {unit!r}): text already carries its unit.")
            value, unit = _parse(value)
        if unit is None:
            raise UsageError(f"Time({value!r}) needs a unit: {', '.join(map(str, TimeUnit))}.")
        try:
            known = TimeUnit(unit)
        except ValueError as error:
            raise UsageError(
                f"{unit!r} is not a unit of time; use one of {', '.join(map(str, TimeUnit))}."
            ) from error
        object.__setattr__(self, "value", _number(value, known))
        object.__setattr__(self, "unit", known)

    @classmethod
    def from_timestring(cls, text: str) -> Time:
        """Parse a time string."""
        return cls(text)

    @classmethod
    def of(cls, value: Time | str | int, *, int_unit: TimeUnit = TimeUnit.EPOCH) -> Time:
        """Return a :class:`Time` from what users pass: itself, text, or a whole number."""
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(value, int_unit)
        raise UsageError(f"{value!r} is not a time.", hint='Use text such as "10ba" or "1h30m".')

    def to_timestring(self) -> str:
        """Return the text form, which parses back to the same time."""
        return f"{self.value}{self.unit}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value!r}, {self.unit.value!r})"

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Time | str | int | float):
            return NotImplemented
        try:
            return bool(self.value == self._same(other).value)
        except UsageError:  # another unit, or no time at all: not equal, and no reason to raise
            return False

    def __lt__(self, other: Time | str | int | float) -> bool:
        return bool(self.value < self._same(other).value)

    def __add__(self, other: Time | str | int | float) -> Time:
        return Time(self.value + self._same(other).value, self.unit)

    __radd__ = __add__

    def __sub__(self, other: Time | str | int | float) -> Time:
        return Time(self.value - self._same(other).value, self.unit)

    def __rsub__(self, other: Time | str | int | float) -> Time:
        return Time(self._same(other).value - self.value, self.unit)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __mul__(self, factor: int | float | Time) -> Time:
        if isinstance(factor, Time):
            if factor.unit is TimeUnit.DURATION:
                return self * factor.value
            if self.unit is TimeUnit.DURATION:
                return factor * self.value
            raise UsageError(f"{self} times {factor} has no meaning.")
        exact = Fraction(self.value) * _fraction(factor)
        return Time(_exact(exact, self, "*", factor), self.unit)

    __rmul__ = __mul__

    def __truediv__(self, divisor: int | float | Time | str) -> Time:
        if isinstance(divisor, Time | str):
            other = self._same(divisor)
            return Time(float(Fraction(self.value) / Fraction(other.value)), TimeUnit.DURATION)
        exact = Fraction(self.value) / _fraction(divisor)
        return Time(_exact(exact, self, "/", divisor), self.unit)

    def __mod__(self, other: Time | str | int | float) -> Time:
        return Time(self.value % self._same(other).value, self.unit)

    def _same(self, other: Time | str | int | float) -> Time:
        """Return ``other`` in the unit of this time."""
        if isinstance(other, str):
            other = Time(other)
        if not isinstance(other, Time):
            return Time(other, self.unit)
        if other.unit is not self.unit:
            raise UsageError(f"{self} and {other} have different units.")
        return other


def _number(value: object, unit: TimeUnit) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{value!r} is not a number of {unit}.")
    if abs(value) > _LARGEST or math.isnan(value):
        raise UsageError(f"{value!r} is not a number of {unit}.")
    if unit in _COUNTS:
        if value != int(value):
            raise UsageError(f"{value}{unit} is not a whole number of {unit}.")
        return int(value)
    if unit is TimeUnit.DURATION:
        return float(value)
    return int(value) if value == int(value) else float(value)


def _fraction(number: int | float) -> Fraction:
    """Return the number as it is written: 0.1 is one tenth, not the nearest binary fraction."""
    try:
        return Fraction(str(number))
    except ValueError as error:
        raise UsageError(f"{number!r} is not a number to multiply or divide by.") from error


def _exact(value: Fraction, left: Time, sign: str, right: object) -> int | float:
    if left.unit in _COUNTS and value.denominator != 1:
        raise UsageError(
            f"{left} {sign} {right} is {float(value)}, not a whole number of {left.unit}.",
            hint="Round it yourself, in the direction you want.",
        )
    return int(value) if value.denominator == 1 else float(value)


def _parse(text: str) -> tuple[int | float, TimeUnit]:
    simple = _SIMPLE.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if simple:
        number, unit = simple[1].replace("_", ""), TimeUnit(simple[2].lower())
        exact = Fraction(number)
        if abs(exact) > _LARGEST:
            raise UsageError(f"{text!r} is more than a time can be.")
        return (int(exact) if exact.denominator == 1 else float(exact)), unit
    clock = _CLOCK.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if clock and any(clock.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds, TimeUnit.SECOND
    raise UsageError(
        f"{text[:_LONGEST_TEXT]!r} is not a time.",
        hint='Use a number with ep, ba, sp, tok, dur or sec, or a clock time such as "1h30m".',
    )
