"""Numbers that records carry, within what can be computed with.

JSON has no bounds: a whole number of a record may have hundreds of digits, which no float takes,
and a tagged float may be NaN. Records that we write hold neither, so who finds one refuses the
record where it is read, and nothing further on needs to expect it.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

__all__ = ["LARGEST_COUNT", "is_count", "is_finite", "is_moment", "takes_float"]

LARGEST_COUNT = 2**63
"""More than anything that is counted: batches, tokens, bytes, sessions."""

_FIRST_MOMENT_S = -62_135_596_800.0
_LAST_MOMENT_S = 253_402_300_799.0
"""The years 1 and 9999: what dates are written of."""


def is_count(value: Any, *, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is a whole number that something can be counted by."""
    return type(value) is int and least <= value <= LARGEST_COUNT


def is_moment(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number of seconds since 1970 that is a date."""
    return type(value) in (int, float) and _FIRST_MOMENT_S <= value <= _LAST_MOMENT_S


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that a counter of progress can have, or no number."""
    if type(value) is int or type(value) is float:
        return math.isfinite(value) if type(value) is float else abs(value) <= LARGEST_COUNT
    return True


def takes_float(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, NaN included, or no number."""
    if type(value) is not int:
        return True
    try:
        float(value)
    except OverflowError:
        return False
    return True
