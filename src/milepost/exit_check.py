"""The last look: a process whose last save failed, and that never asked, must not end well.

Threads that write are no daemons, so the interpreter waits for them before it runs this check. An
exit status can be changed then in one way only: by leaving at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol

__all__ = ["unwatch", "watch"]


class _Writer(Protocol):
    def unreported_errors(self) -> list[BaseException]:
        """Return errors of saves that nobody was told about yet."""


_open: weakref.WeakSet[_Writer] = weakref.WeakSet()


def watch(writer: _Writer) -> None:
    """Make the process fail at its end if this writer has errors that nobody was told about."""
    if not _open:
        atexit.unregister(_check)
        atexit.register(_check)
    _open.add(writer)


def unwatch(writer: _Writer) -> None:
    """Stop watching: the writer was closed, and its errors were raised."""
    _open.discard(writer)


def _check() -> None:
    errors = [error for writer in list(_open) for error in writer.unreported_errors()]
    if not errors:
        return
    for error in errors:
        sys.stderr.write(f"milepost: a save failed and nobody was told: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
