"""Numbers that users give, checked where they come in, and waits that the system takes.

An option that is no number must not be found out by the thread that computes with it, in the middle
of a training.
"""

from __future__ import annotations

import math
import threading
from numbers import Integral, Real
from typing import Any

from .errors import UsageError

__all__ = ["LONGEST_WAIT_S", "check_count", "check_seconds", "longest_wait_s", "wait_s"]

LONGEST_WAIT_S = 2_000_000.0
"""Longest wait for other processes, 23 days: calls of the system count milliseconds in 31 bits."""


def check_seconds(
    name: str, value: Any, *, is_zero_fine: bool = False, may_be_none: bool = False
) -> None:
    """Refuse what is no duration. Infinity is one: there is no limit then.

    Args:
        name: Name of the option.
        value: What was given.
        is_zero_fine: Whether 0 makes sense.
        may_be_none: Whether ``None`` makes sense.

    Raises:
        UsageError: It is none.
    """
    if value is None and may_be_none:
        return
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if is_number and (value > 0 or (is_zero_fine and value == 0)):
        return
    wanted = "a number of seconds of at least 0" if is_zero_fine else "a number of seconds above 0"
    raise UsageError(f"{name}={value!r} is not {wanted}.", name=name)


def check_count(name: str, value: Any, *, least: int, may_be_none: bool = False) -> None:
    """Refuse what is no whole number of at least ``least``.

    Raises:
        UsageError: It is none.
    """
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name}={value!r} is not a whole number of at least {least}.", name=name)


def wait_s(timeout_s: Any) -> float | None:
    """Return a user's timeout as what the locks of Python take: no infinity, and not too much.

    Raises:
        UsageError: It is no number of seconds.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        raise UsageError(
            f"timeout_s={timeout_s!r} is not a number of seconds.",
            hint="Give None to wait for as long as it takes.",
        )
    return min(float(timeout_s), threading.TIMEOUT_MAX)


def longest_wait_s(timeout_s: float) -> float:
    """Return how long to wait for other processes, where the user has set a limit."""
    return float(min(timeout_s, LONGEST_WAIT_S))
