"""Blocks from several threads, in the order in which an upload takes them.

An upload reads from one end to the other; the threads of the engine bring blocks nearly in order.
A block that stays as it is until the upload has ended is referred to, and its thread goes on at
once. Any other is copied when the upload asks for it: whoever brings it waits for that, and whoever
is early for his turn, so that no more than a block for each thread is held here. Only if nobody
brings the block whose turn it is, a copy is left: threads that wait for each other would wait for
ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import DeadlineError, StorageError, UsageError
from ..format.digest import BLOCK_BYTES
from .lent import LentBlocks

__all__ = ["BlockFeed"]

_EARLY_S = 0.2


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes that were brought.

    Attributes:
        data: They.
        is_lasting: Whether they stay as they are until the upload has ended.
    """

    data: memoryview
    is_lasting: bool


class BlockFeed:
    """Hands blocks of one object from the threads that write it to the thread that uploads it.

    Args:
        key: The object, for messages.
        size_bytes: Its size, or more than that until :meth:`end` tells.
        timeout_s: How long a block may wait to be taken.
    """

    def __init__(self, key: str, size_bytes: int, *, timeout_s: float) -> None:
        self._key = key
        self._size_bytes = size_bytes
        self._timeout_s = timeout_s
        self._state = threading.Condition()
        self._next = 0
        self._brought: dict[int, _Block] = {}
        self._taken: dict[int, _Block] = {}
        self._are_all_lasting = True
        self._error: BaseException | None = None
        self._is_stopped = False

    def put(self, offset: int, data: memoryview, *, is_lasting: bool = False) -> None:
        """Hand over a block; return when it is not needed any more, or at once if it lasts.

        Args:
            offset: Where it belongs.
            data: Its bytes.
            is_lasting: Whether they stay as they are until the upload has ended.

        Raises:
            UsageError: The block does not belong to the object.
            DeadlineError: The upload did not take it in time.
            Exception: What ended the upload.
        """
        if data.nbytes == 0:
            return
        with self._state:
            is_ours = self._next <= offset <= self._size_bytes - data.nbytes
            if self._is_stopped or not is_ours or offset in self._brought:
                self._raise_error()
                raise UsageError(
                    f"{self._key}: a block was written past the end, twice or after closing."
                )
            is_copy = False
            if not is_lasting:
                self._are_all_lasting = False
                self._taken.clear()
                self._wait_for_turn(offset)
                is_copy = offset != self._next
            self._raise_error()
            is_kept = is_lasting or is_copy
            self._brought[offset] = _Block(memoryview(bytes(data)) if is_copy else data, is_kept)
            self._state.notify_all()
            if not is_kept:
                self._wait_until_taken(offset)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the blocks in order, until all of the object was given.

        Raises:
            StorageError: The feed was stopped, or a block did not come in time.
        """
        copies = LentBlocks(BLOCK_BYTES)
        while True:
            with self._state:
                came = self._state.wait_for(
                    lambda: self._next in self._brought or self._is_over() or self._has_all(),
                    self._timeout_s,
                )
                if self._has_all():
                    return
                self._check_going_on()
                if not came:
                    raise DeadlineError(
                        f"No block of {self._key} came for {self._timeout_s:g} s.", path=self._key
                    )
                block = self._brought[self._next]
            # A copy: clients hold what they are given until it has been sent, which may be long
            # after they have asked for the next, and by then the block is its thread's again.
            piece = block.data if block.is_lasting else copies.copy(block.data)
            with self._state:
                self._check_going_on()  # else its thread may have filled it anew meanwhile
                del self._brought[self._next]
                if self._are_all_lasting:
                    self._taken[self._next] = block
                self._next += len(piece)
                self._state.notify_all()
            yield piece

    def begins_lasting(self) -> bool:
        """Wait for the first block; return whether it stays as it is until the upload has ended."""
        with self._state:
            self._state.wait_for(
                lambda: self._brought or not self._are_all_lasting or self._is_over(),
                self._timeout_s,
            )
            return self._are_all_lasting and bool(self._brought)

    @property
    def size_bytes(self) -> int:
        """Return the size of the object, as far as it is known."""
        with self._state:
            return self._size_bytes

    def end(self, size_bytes: int) -> None:
        """Say how many bytes the object came to, after the last block was brought."""
        with self._state:
            self._size_bytes = size_bytes
            self._state.notify_all()

    def begin_again(self) -> bool:
        """Let the next upload begin with the first block, if every block so far is still there.

        No upload may be under way.
        """
        with self._state:
            if not self._are_all_lasting or self._is_over():
                return False
            self._brought.update(self._taken)
            self._taken.clear()
            self._next = 0
            return True

    def let_go(self) -> None:
        """Keep no block any more that was taken: the upload does not begin again."""
        with self._state:
            self._are_all_lasting = False
            self._taken.clear()

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
        """Return how much has not been brought yet."""
        with self._state:
            brought_bytes = sum(len(block.data) for block in self._brought.values())
            return self._size_bytes - self._next - brought_bytes

    def wait_until_sent(self) -> None:
        """Return when the upload has taken the last block, or has ended.

        Raises:
            DeadlineError: It took none for too long.
        """
        with self._state:
            while self._next < self._size_bytes and not self._is_over():
                if not self._state.wait_for(partial(self._went_on, self._next), self._timeout_s):
                    raise self._too_slow()

    def _wait_for_turn(self, offset: int) -> None:
        """Return when a block is the next one, or nobody brings the one that is."""
        while self._next != offset and not self._is_over():
            if self._next in self._brought:
                if not self._state.wait_for(partial(self._went_on, self._next), self._timeout_s):
                    raise self._too_slow()
            elif not self._state.wait_for(partial(self._has_or_past, self._next), _EARLY_S):
                return

    def _went_on(self, at: int) -> bool:
        return self._next != at or self._is_over()

    def _has_or_past(self, at: int) -> bool:
        return at in self._brought or self._went_on(at)

    def _wait_until_taken(self, offset: int) -> None:
        taken = self._state.wait_for(
            lambda: self._next > offset or self._is_over(), self._timeout_s
        )
        self._raise_error()
        if not taken:
            self._is_stopped = True  # it may be being copied at this moment
            self._state.notify_all()
            raise self._too_slow()

    def _too_slow(self) -> DeadlineError:
        return DeadlineError(
            f"The upload of {self._key} took no block for {self._timeout_s:g} s.",
            safe="Nothing of it is visible; earlier checkpoints are intact.",
            hint="The place is too slow or does not answer.",
            path=self._key,
        )

    def _check_going_on(self) -> None:
        if self._is_over():
            raise StorageError(f"The upload of {self._key} was given up.", operation="upload")

    def _has_all(self) -> bool:
        return self._next == self._size_bytes

    def _is_over(self) -> bool:
        return self._is_stopped or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
