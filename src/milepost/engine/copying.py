"""A copy of the state that may go on while the training computes.

    the training's thread                    the thread that copies
    note version counters and samples
    start it                            ->   copy piece by piece, in the order of the files
    forward, backward                        look at the counter after each piece
    settle: wait for the end                 compare the samples with what was copied
    look at the counters once more
    optimizer.step()

What is copied late is what an optimizer owns (see ``state/owned.py``), which nothing but its step
should change. If something else does, the save fails and says what was changed: a writer that moves
the version counter of a tensor is always found, also when it came too late to do harm, so that it
does not depend on who was faster. One that goes around the counter is found where the samples show
it. A storage that is moved to other memory meanwhile, as when a model is handed to another process,
is found by its address; see ``peek.py`` for why that ends no process. Nothing is committed before
the copy is settled.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, DeadlineError, StateChangedError
from ..format.digest import BLOCK_BYTES, crc32c
from ..staging import CopyCheck
from ..state.batch_in_hand import version_of
from ..tensors.memory import host_bytes
from .peek import peek

__all__ = ["Copy", "LateTensor"]

_RUNS = 8
_RUN_BYTES = 64
_STRIDE_BYTES = 7919 * _RUN_BYTES
"""How far apart the samples of one save and of the next are."""
_SHOWN = 8
_SLICE_S = 1.0
"""How often who waits looks whether there still is a thread that copies."""
_STALLED_S = 600.0
"""How long one waits while not a single piece is copied."""

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LateTensor:
    """A tensor that is copied after the save has returned.

    Attributes:
        name: Its name, for messages.
        tensor: The live tensor.
        storage: Its storage at that moment, which it may be taken out of.
        memory: Address and size of the memory of the storage.
        address: Where the bytes of the tensor begin.
        place: Where they go: bytes of the arena.
        start_bytes: Where that is in the arena.
        version: Its version counter at the moment of the save.
        check: How its bytes are compared with what was copied.
        shift: Says where samples are taken.
        mark: What its bytes were like at that moment; see :func:`_mark`.
    """

    name: str
    tensor: Tensor
    storage: torch.UntypedStorage
    memory: tuple[int, int]
    address: int
    place: Bytes
    start_bytes: int
    version: int
    check: CopyCheck
    shift: int
    mark: bytes

    @classmethod
    def of(
        cls,
        name: str,
        tensor: Tensor,
        *,
        place: Bytes,
        start_bytes: int,
        check: CopyCheck,
        shift: int,
    ) -> LateTensor:
        """Note what a tensor is like now.

        Args:
            name: Its name.
            tensor: A contiguous tensor on the host.
            place: Where its bytes go.
            start_bytes: Where that is in the arena.
            check: What to note beside its version counter.
            shift: Where to take samples: elsewhere in each save.
        """
        storage = tensor.untyped_storage()
        return cls(
            name=name,
            tensor=tensor,
            storage=storage,
            memory=_memory(storage),
            address=tensor.data_ptr(),
            place=place,
            start_bytes=start_bytes,
            version=version_of(tensor),
            check=check,
            shift=shift,
            mark=_mark(host_bytes(tensor), check, shift),
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.place.nbytes

    @property
    def is_in_place(self) -> bool:
        """Return whether the storage has the memory that it had."""
        return _memory(self.storage) == self.memory

    @property
    def is_written_to(self) -> bool:
        """Return whether somebody wrote to it since, or moved it to where others may write."""
        return version_of(self.tensor) != self.version or not self.is_in_place


class Copy:
    """The copy of one state into the arena, as far as it has come.

    Args:
        tensors: What is still to be copied, in the order of the arena; everything else is there.
        end_bytes: Where the state ends in the arena.

    Attributes:
        copy_s: Seconds that it took.
        waited_s: Seconds that the training waited for it.
    """

    def __init__(self, tensors: Sequence[LateTensor], *, end_bytes: int) -> None:
        self.num_bytes = sum(one.num_bytes for one in tensors)
        self.copy_s = 0.0
        self.waited_s = 0.0
        self._tensors = tensors
        self._end_bytes = end_bytes
        self._changed = threading.Condition()
        self._reached_bytes = tensors[0].start_bytes if tensors else end_bytes
        self._is_over = not tensors
        self._is_settled = not tensors
        self._error: BaseException | None = None
        self._stopped: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._begins = threading.Lock()  # taken, for good, by who has the right to say it is over
        self._pid = os.getpid()

    @property
    def is_late(self) -> bool:
        """Return whether it was begun to go on after the save has returned."""
        return self.num_bytes > 0

    def start(self) -> None:
        """Copy in a thread of its own, if there is anything left to copy."""
        if self._is_over:
            return
        self._thread = threading.Thread(target=self._run, name="milepost-copy")
        try:
            self._thread.start()
        except BaseException as error:
            self.stop(error)  # an interrupt may come when the thread is on its way already
            raise

    def stop(self, error: BaseException) -> None:
        """Go on no further, and wait until the thread writes to the arena no more.

        For a save that has failed. One that is copied already stays what it is.

        Args:
            error: Why; what whoever needs the copy is told.

        Raises:
            DeadlineError: The thread is stuck in a piece.
        """
        with self._changed:
            if self._is_over:
                return
            self._stopped = self._stopped or error
        if self._begins.acquire(blocking=False):
            self._end(error)  # it was not started, or not yet, and copies nothing any more
        self._wait(None)
        with self._changed:
            self._is_settled, self._tensors = True, ()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end, and look for the last time whether somebody else wrote.

        To be called by the thread that trains, before it changes anything. What went wrong is told
        by the save.

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
        self._look()

    def require(self, stop_bytes: int | None = None) -> None:
        """Wait until everything below a place in the arena is there.

        Args:
            stop_bytes: The place; ``None`` for all of the state.

        Raises:
            BaseException: What ended the copy before.
        """
        stop = self._end_bytes if stop_bytes is None else stop_bytes
        self._wait_for(lambda: self._is_over or self._reached_bytes >= stop, None)
        if self._error is not None:
            raise self._error

    def confirm(self) -> None:
        """Make sure that what was copied is the state at the moment of the save.

        Raises:
            StateChangedError: Somebody else than an optimizer has changed it.
        """
        self._wait(None)
        self._look()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if not self._begins.acquire(blocking=False):
            return  # it was stopped before it began
        started_s = time.perf_counter()
        try:
            self._require_wanted()
            for one in self._tensors:
                self._copy(one)
        except BaseException as error:  # noqa: BLE001 - raised by the save
            self._end(self._stopped or error)
        else:
            self.copy_s = time.perf_counter() - started_s
            self._end(None)

    def _copy(self, one: LateTensor) -> None:
        """Copy one tensor in pieces, each of which ends where a block of the arena does."""
        at, size = 0, one.num_bytes
        while at < size:
            stop = min(size, at + BLOCK_BYTES - (one.start_bytes + at) % BLOCK_BYTES)
            if not peek(one.address + at, one.place[at:stop]) or one.is_written_to:
                raise _state_changed([one.name])
            at = stop
            if at < size:
                self._reach(one.start_bytes + at)
        if _mark(one.place, one.check, one.shift) != one.mark:
            raise _state_changed([one.name])
        self._reach(one.start_bytes + size)

    def _reach(self, stop_bytes: int) -> None:
        with self._changed:
            self._reached_bytes = stop_bytes
            self._changed.notify_all()
        self._require_wanted()

    def _require_wanted(self) -> None:
        if self._stopped is not None:
            raise _StoppedError

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = error
            self._is_over = True
            self._reached_bytes = self._end_bytes
            self._changed.notify_all()

    def _wait(self, timeout_s: float | None) -> None:
        self._wait_for(lambda: self._is_over, timeout_s)

    def _wait_for(self, is_there: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for something, for as long as the copy goes on.

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

    def _look(self) -> None:
        """Look at all counters, once, and let go of the tensors."""
        with self._changed:
            if self._is_settled:
                return
            self._is_settled = True
            names = [one.name for one in self._tensors if one.is_written_to]
            if names and self._error is None:
                self._error = _state_changed(names)
            self._tensors = ()


def _memory(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _mark(data: Bytes, check: CopyCheck, shift: int) -> bytes:
    """Return what tells bytes from others: runs of them, or a checksum of all."""
    if check == "full":
        return crc32c(data.data).to_bytes(4, "little")
    if check == "none":
        return b""
    step = max(_RUN_BYTES, data.nbytes // _RUNS)
    start = shift * _STRIDE_BYTES % step
    return b"".join(data[at : at + _RUN_BYTES].tobytes() for at in range(start, data.nbytes, step))


class _StoppedError(Exception):
    """Leads the thread that copies out of what it is at, for ``Copy.stop``."""


def _not_copied(how: str) -> DeadlineError:
    return DeadlineError(
        f"The state was not copied {how}.",
        safe="The copy goes on; earlier checkpoints are intact.",
        hint="Change nothing of the state before the copy is done.",
    )


def _state_changed(names: Sequence[str]) -> StateChangedError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return StateChangedError(
        f"{', '.join(names[:_SHOWN])}{more} changed between the save and the next step of an "
        "optimizer, while the state was being copied.",
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint="Find what writes to it there (a hook, a clipping of weights, weights swapped in) or "
        "hands it to another process, have it wait with PendingSave.wait_until_copied(), or copy "
        'at once: staging="eager".',
        names=list(names),
    )
