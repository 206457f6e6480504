"""Blocks from several threads, in the order in which an upload takes them.

An upload reads from one end to the other; the threads of the engine bring blocks nearly in order.
Whoever brings the next block hands it over and waits until it was copied, so that no more than a
block for each thread is held here. Whoever is early waits for a moment, and then leaves a copy:
threads that wait for each other would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ..errors import DeadlineError, StorageError, UsageError

__all__ = ["BlockFeed"]

_EARLY_S = 0.2


class BlockFeed:
    """Hands blocks of one object from the threads that write it to the thread that uploads it.

    Args:
        key: The object, for messages.
        size_bytes: Its size.
        timeout_s: How long a block may wait to be taken.
    """

    def __init__(self, key: str, size_bytes: int, *, timeout_s: float) -> None:
        self._key = key
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._state = threading.Condition()
        self._next = 0
        self._early: dict[int, memoryview | bytes] = {}
        self._error: BaseException | None = None
        self._is_stopped = False

    def put(self, offset: int, data: memoryview) -> None:
        """Hand over a block; return when it was taken, or a copy was left.

        Raises:
            UsageError: The block does not belong to the object.
            DeadlineError: The upload did not take it in time.
            Exception: What ended the upload.
        """
        if data.nbytes == 0:
            return
        with self._state:
            if self._is_stopped or not self._next <= offset <= self._size_bytes - data.nbytes:
                self._raise_error()
                raise UsageError(
                    f"{self._key}: a block was written past the end, twice or after closing."
                )
            if offset != self._next:
                self._state.wait_for(lambda: self._next == offset or self._is_over(), _EARLY_S)
            self._raise_error()
            is_copy = offset != self._next
            self._early[offset] = bytes(data) if is_copy else data
            self._state.notify_all()
            if is_copy:
                return
            taken = self._state.wait_for(
                lambda: self._next > offset or self._is_over(), self._timeout_s
            )
            self._raise_error()
            if not taken:
                self._early.pop(offset, None)
                raise DeadlineError(
                    f"The upload of {self._key} took no block for {self._timeout_s:g} s.",
                    safe="Nothing of it is visible; earlier checkpoints are intact.",
                    hint="The place is too slow or does not answer.",
                    path=self._key,
                )

    def __iter__(self) -> Iterator[bytes]:
        """Yield copies of the blocks in order, until all of the object was given.

        Raises:
            StorageError: The feed was stopped, or a block did not come in time.
        """
        while True:
            with self._state:
                if self._next == self._size_bytes:
                    return
                came = self._state.wait_for(
                    lambda: self._next in self._early or self._is_over(), self._timeout_s
                )
                if self._is_over():
                    raise StorageError(
                        f"The upload of {self._key} was given up.", operation="upload"
                    )
                if not came:
                    raise DeadlineError(
                        f"No block of {self._key} came for {self._timeout_s:g} s.", path=self._key
                    )
                # A copy: clients hold what they are given until it has been sent, which may be long
                # after they have asked for the next, and by then the block is its thread's again.
                piece = bytes(self._early.pop(self._next))
                self._next += len(piece)
                self._state.notify_all()
            yield piece

    def stop(self) -> None:
        """End the upload from outside."""
        with self._state:
            self._is_stopped = True
            self._state.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say what ended the upload; whoever brings a block gets it raised."""
        with self._state:
            self._error = self._error or error
            self._state.notify_all()

    @property
    def missing_bytes(self) -> int:
        """Return how much has not been brought yet. A copy that was left counts as brought."""
        with self._state:
            return self._size_bytes - self._next - sum(len(one) for one in self._early.values())

    def _is_over(self) -> bool:
        return self._is_stopped or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
