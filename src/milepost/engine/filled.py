"""How far the memory of a save was filled, from its start on, and who waits for that.

One thread fills, whichever it is; others require what they need of it, and end it when the save has
failed. Who fills looks after each piece whether it is still wanted, so that whoever ends it waits
for one piece at most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ..errors import CheckpointError, DeadlineError
from .sums import Sums

__all__ = ["Filled"]

_SLICE_S = 1.0
"""How often who waits looks whether there still is a thread that fills."""
_STALLED_S = 600.0
"""How long one waits while not a single piece is copied."""


class _NotWantedError(Exception):
    """Leads the thread that fills out of what it is at, for ``Filled.stop``."""


class Filled:
    """How far memory was filled.

    Args:
        start_bytes: Up to where it is already.
        end_bytes: Where the state ends in it.
        sums: Where the thread that fills leaves checksums, as far as it has the time.

    Attributes:
        sums: The same.
        num_bytes: Bytes that are copied after the save has returned.
        copy_s: Seconds that it took.
        waited_s: Seconds that the training waited for it.
    """

    num_bytes = 0

    def __init__(self, *, start_bytes: int, end_bytes: int, sums: Sums) -> None:
        self.sums = sums
        self.copy_s = 0.0
        self.waited_s = 0.0
        self._end_bytes = end_bytes
        self._changed = threading.Condition()
        self._reached_bytes = start_bytes
        self._wanted_bytes = start_bytes
        self._is_over = start_bytes >= end_bytes
        self._error: BaseException | None = None
        self._stopped: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._begins = threading.Lock()  # taken, for good, by who has the right to say it is over
        self._pid = os.getpid()

    @property
    def is_late(self) -> bool:
        """Return whether it was begun to go on after the save has returned."""
        return self.num_bytes > 0

    def stop(self, error: BaseException) -> None:
        """Go on no further, and wait until nothing is written to the memory any more.

        For a save that has failed. What is there already stays what it is.

        Args:
            error: Why; what whoever needs the rest is told.

        Raises:
            DeadlineError: The thread that fills is stuck in a piece.
        """
        with self._changed:
            if self._is_over:
                return
            self._stopped = self._stopped or error
            self._changed.notify_all()
        is_ours = self._thread is threading.current_thread()
        if is_ours or self._begins.acquire(blocking=False):
            self._end(error)  # nobody was at it, or not yet, and nobody copies any more
        self._wait(None)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end. What went wrong is told by the save.

        Args:
            timeout_s: How long to wait, in seconds; ``None`` for as long as it goes on.

        Raises:
            DeadlineError: It did not end in time, or is stuck.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no thread that could end it, and no save that needs it
        if not self._is_over:
            started_s = time.perf_counter()
            self._wait(timeout_s)
            self.waited_s += time.perf_counter() - started_s

    def require(self, stop_bytes: int | None = None) -> None:
        """Wait until everything below a place in the memory is there.

        Args:
            stop_bytes: The place; ``None`` for all of the state.

        Raises:
            BaseException: What ended it before.
        """
        stop = self._end_bytes if stop_bytes is None else stop_bytes
        self._want(stop)
        self._wait_for(lambda: self._is_over or self._reached_bytes >= stop, None)
        if self._error is not None:
            raise self._error

    def confirm(self) -> None:
        """Wait for the end, and make sure that it was a good one.

        Raises:
            BaseException: What ended it before all was there.
        """
        self._wait(None)
        if self._error is not None:
            raise self._error

    def _fill_here(self, fill: Callable[[], None]) -> None:
        """Have the calling thread fill the memory. Does nothing if the save has failed already.

        Args:
            fill: Fills all of it, and says how far it has come. If the save fails meanwhile, this
                returns, and who waits for the save is told.

        Raises:
            BaseException: What went wrong; whoever waits for the memory gets it too.
        """
        self._thread = threading.current_thread()  # first: an interrupt may come at any moment
        if not self._begins.acquire(blocking=False):
            return
        started_s = time.perf_counter()
        try:
            fill()
        except _NotWantedError:
            self._end(self._stopped)
        except BaseException as error:
            self._end(error)
            raise
        else:
            self.copy_s = time.perf_counter() - started_s
            self._end(None)

    def _reach(self, stop_bytes: int) -> None:
        with self._changed:
            self._reached_bytes = stop_bytes
            self._changed.notify_all()
        self._require_wanted()

    def _want(self, stop_bytes: int) -> None:
        with self._changed:
            self._wanted_bytes = max(self._wanted_bytes, stop_bytes)

    @property
    def _is_ahead(self) -> bool:
        """Return whether nobody waits, so that there is time to take checksums."""
        return self._reached_bytes > self._wanted_bytes

    def _require_wanted(self) -> None:
        if self._stopped is not None:
            raise _NotWantedError

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = error
            self._is_over = True
            self._reached_bytes = self._end_bytes
            self._changed.notify_all()

    def _wait(self, timeout_s: float | None) -> None:
        self._wait_for(lambda: self._is_over, timeout_s)

    def _wait_for(self, is_there: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for something, for as long as it goes on.

        Args:
            is_there: Whether it is there.
            timeout_s: How long to wait at most, in seconds.

        Raises:
            DeadlineError: It did not come in time, or nothing at all was copied for a long time.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        reached_bytes, stalled_s = -1, 0.0
        with self._changed:
            while not is_there():
                slice_s = _SLICE_S if until_s is None else min(_SLICE_S, until_s - time.monotonic())
                if slice_s <= 0:
                    raise _not_copied(f"within {timeout_s:g} s")
                # A process that was held meanwhile has not waited: slices count, not the clock.
                stalled_s = stalled_s + slice_s if self._reached_bytes == reached_bytes else 0.0
                reached_bytes = self._reached_bytes
                if stalled_s > _STALLED_S:
                    raise _not_copied(f"and nothing more of it for {_STALLED_S:g} s")
                if not self._changed.wait(slice_s) and self._is_lost:
                    self._end(
                        CheckpointError(
                            "The thread that copies the state ended before the state was copied.",
                            safe="Nothing was committed; earlier checkpoints are intact.",
                        )
                    )

    @property
    def _is_lost(self) -> bool:
        """Return whether nobody is left who could end it."""
        thread = self._thread
        return thread is not None and thread.ident is not None and not thread.is_alive()


def _not_copied(how: str) -> DeadlineError:
    return DeadlineError(
        f"The state was not copied {how}.",
        safe="The copy goes on; earlier checkpoints are intact.",
        hint="Change nothing of the state before the copy is done.",
    )
