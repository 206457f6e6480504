"""A long range of an object as it comes; what breaks off is asked for again from there.

One request for many blocks costs a service little more than one for a single block, and holds no
more memory here than what came last. In return it may break off in the middle, by an error of the
line or at the end of its time: then the rest is another request. Each answer brings some bytes, or
is tried again as any other, so that a range comes to an end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

__all__ = ["Begun", "resumed"]

_log = logging.getLogger("milepost")

Begun = tuple[bytes, Iterator[bytes]]
"""The first bytes of an answer, or none if it has none, and what brings the others."""


def resumed(
    begin: Callable[[int], Begun],
    *,
    start: int,
    stop: int,
    errors: tuple[type[Exception], ...],
    name: str,
) -> Iterator[memoryview]:
    """Yield a range of bytes in pieces; fewer where the object ends.

    Args:
        begin: Asks for the bytes from one on, until that was answered with some of them.
        start: The first byte.
        stop: The byte after the last.
        errors: What an answer raises that breaks off.
        name: The object, for messages.

    Raises:
        CheckpointError: What ``begin`` has raised.
    """
    others: Iterator[bytes] | None = None
    try:
        while start < stop:
            piece, others = begin(start)
            while piece:
                start += len(piece)
                yield memoryview(piece)
                try:
                    piece = next(others, b"")
                except errors as error:
                    _log.debug("%s broke off at byte %d: %s.", name, start, type(error).__name__)
                    break
            else:
                return
    finally:
        # Not later, with the frames that an error refers to: by then this may be a forked child,
        # where no client may be dropped.
        others = None
