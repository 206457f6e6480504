"""How many workers a machine has room for: what somebody says, or its processors."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError, storage_error

__all__ = ["SLOTS", "num_processors", "slots_of"]

SLOTS = "MILEPOST_SLOTS"
"""The variable that says it: a number, or a file with a number in it."""


def slots_of(text: str) -> int | None:
    """Return how many workers there may be; ``None`` if the text is empty.

    Args:
        text: A number, or the path of a file that holds one. The file is read each time, so
            whoever gives machines and takes them away can write there how many are left.

    Raises:
        UsageError: It is neither.
        CheckpointError: The file cannot be read.
    """
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    try:
        found = Path(text).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise storage_error(error, operation="read", path=text) from error
    if not found.isdecimal():
        raise UsageError(
            f"{text} holds no number of workers: {found[:40]!r}.",
            hint=f"{SLOTS} is a number from 0 on, or a file that holds one.",
            path=text,
        )
    return int(found)


def num_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
