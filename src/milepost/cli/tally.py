"""Bytes of several threads, counted on one bar."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..display import Bar

__all__ = ["tally"]


def tally(bar: Bar) -> Callable[[int], None]:
    """Return what adds bytes to a bar, from any thread."""
    lock = threading.Lock()
    done_bytes = 0

    def add(num_bytes: int) -> None:
        nonlocal done_bytes
        with lock:
            done_bytes += num_bytes
            bar.update(done_bytes)

    return add
