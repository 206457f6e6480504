"""A long range of an object as it comes; what breaks off is asked for again from there.

One request for many blocks costs a service little more than one for a single block, and holds no
more memory here than what came last. In return it may break off in the middle, by an error of the
line or at the end of its time: then the rest is another request. It may also end before the range
does as if it were whole, which what stands between a service and its clients is known to do. That
is no sign of a short object: the rest is asked for too, but not for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ..errors import StorageError
from ..format.digest import BLOCK_BYTES

__all__ = ["Begun", "resumed"]

_log = logging.getLogger("milepost")

_SHORT_ANSWERS = 6
"""Beside one for each block that came: some services never answer with much at once."""

Begun = tuple[bytes, Iterator[bytes]]
"""The first bytes of an answer, or none if it has none, and what brings the others."""


def resumed(
    begin: Callable[[int], Begun],
    *,
    start: int,
    stop: int,
    errors: tuple[type[Exception], ...],
    name: str,
    pause: Callable[[int], None],
) -> Iterator[memoryview]:
    """Yield a range of bytes, which the object has, in pieces.

    Args:
        begin: Asks for the bytes from one on, until that was answered.
        start: The first byte.
        stop: The byte after the last.
        errors: What an answer raises that breaks off.
        name: The object, for messages.
        pause: Waits before what is missing is asked for; takes how many answers brought little.

    Raises:
        StorageError: Time and again an answer ended before the range did.
        CheckpointError: What ``begin`` has raised.
    """
    first, num_short = start, 0
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
                if start == stop:
                    return
                num_short += 1
                num_vain = num_short - (start - first) // BLOCK_BYTES
                if num_vain > _SHORT_ANSWERS:
                    raise StorageError(
                        f"Could not read {name}: {num_short} answers ended before what was asked "
                        f"for, the last at byte {start:,}.",
                        safe="Earlier checkpoints are intact.",
                        hint="The place may be unwell; try again later.",
                        operation="read",
                        path=name,
                        status=None,
                        code=None,
                        tries=num_short,
                    )
                _log.debug("An answer for %s ended at byte %d of %d.", name, start, stop)
                if num_vain > 0:
                    pause(num_vain)
    finally:
        # Not later, with the frames that an error refers to: by then this may be a forked child,
        # where no client may be dropped.
        others = None
