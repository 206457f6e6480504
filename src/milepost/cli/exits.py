"""Exit codes of every verb, and how an error is told.

Data goes to stdout; errors and questions go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum

from ..errors import (
    AccessError,
    CheckpointError,
    ExistsError,
    FormatError,
    IncompleteError,
    InUseError,
    LaunchFailedError,
    MismatchError,
    MissingError,
    NewerFormatError,
    UnsupportedStateError,
    UsageError,
)
from .escaped import escaped_lines
from .words import command_for, in_options

__all__ = ["CODES_TEXT", "Exit", "exit_of", "tell"]


class Exit(IntEnum):
    """What a process of ours ends with."""

    OK = 0
    DAMAGED = 1
    FAILED = 1
    USAGE = 2
    MISSING = 3
    ACCESS = 4
    INCOMPLETE = 5
    STORAGE = 6
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


CODES_TEXT = (
    "Exit codes: 0 fine, 1 damaged or different, 2 wrong usage, 3 not there, 4 access refused, "
    "5 incomplete, 6 another error, of the storage or of the program."
)

_CODES: tuple[tuple[type[CheckpointError], Exit], ...] = (
    (IncompleteError, Exit.INCOMPLETE),
    (NewerFormatError, Exit.STORAGE),
    (FormatError, Exit.DAMAGED),
    (MismatchError, Exit.DAMAGED),
    (UsageError, Exit.USAGE),
    (UnsupportedStateError, Exit.USAGE),
    (ExistsError, Exit.USAGE),
    (InUseError, Exit.USAGE),
    (MissingError, Exit.MISSING),
    (LaunchFailedError, Exit.FAILED),
    (AccessError, Exit.ACCESS),
)


def exit_of(error: CheckpointError) -> Exit:
    """Return the exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.STORAGE)


def tell(
    error: CheckpointError,
    *,
    options: Mapping[str, str] | None = None,
    typed: Sequence[str] = (),
) -> None:
    """Say on stderr what happened, what is safe, and what to do next, each on a line.

    Args:
        error: What happened.
        options: The options of the verb by the names of their parameters, to be named by.
        typed: The verb and what followed it, to say what to type instead.
    """
    red, plain = ("\033[31m", "\033[0m") if _has_colour() else ("", "")
    lines = [f"{red}error:{plain} {escaped_lines(error.what)}"]
    lines += [f" safe: {escaped_lines(error.safe)}"] if error.safe else []
    lines += [f" hint: {escaped_lines(error.hint)}"] if error.hint else []
    text = in_options("\n".join(lines), options or {})
    command = command_for(error, typed)
    print(text + (f"\n  try: {command}" if command else ""), file=sys.stderr)


def _has_colour() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
