"""The last look: a process whose last save failed, and that never asked, must not end well.

Threads that write are no daemons, so the interpreter waits for them before it runs this check. An
exit status can be changed then in one way only: by leaving at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import Protocol

__all__ = ["unwatch", "watch"]


class _Save(Protocol):
    name: str

    @property
    def unreported_error(self) -> BaseException | None:
        """Return the error of a save that nobody was told about yet."""


# The lists are held and not their owners: a writer that was dropped without being closed must be
# looked at too, and must not hold on to its memory for that.
_open: list[tuple[Sequence[_Save], bool]] = []


def watch(saves: Sequence[_Save], *, is_fatal: bool) -> None:
    """Look at these saves when the process ends.

    Args:
        saves: The list that their writer keeps up to date: the saves whose end it has not seen.
        is_fatal: Whether an error among them makes the process fail, or is only told.
    """
    if not _open:
        atexit.unregister(_check)
        atexit.register(_check)
    _open.append((saves, is_fatal))


def unwatch(saves: Sequence[_Save]) -> None:
    """Stop watching: the writer was closed, and its errors were raised."""
    _open[:] = [entry for entry in _open if entry[0] is not saves]


def _check() -> None:
    has_failed = False
    for saves, is_fatal in _open:
        for save in saves:
            error = save.unreported_error
            if error is not None:
                sys.stderr.write(f"milepost: the save of {save.name} failed: {error}\n")
                has_failed = has_failed or is_fatal
    if has_failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
