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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StateChangedError
from ..format.digest import crc32c
from ..staging import CopyCheck
from ..state.marks import version_of
from ..tensors.memory import host_bytes
from .filled import Filled
from .peek import peek
from .sums import HOT_BYTES, Sums

__all__ = ["Copy", "LateTensor"]

_RUNS = 8
_RUN_BYTES = 64
_STRIDE_BYTES = 7919 * _RUN_BYTES
"""How far apart the samples of one save and of the next are."""
_SHOWN = 8

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


class Copy(Filled):
    """The copy of one state into the arena, as far as it has come, by a thread of its own.

    Args:
        tensors: What is still to be copied, in the order of the arena; everything else is there.
        end_bytes: Where the state ends in the arena.
        sums: Where to leave checksums.
    """

    def __init__(self, tensors: Sequence[LateTensor], *, end_bytes: int, sums: Sums) -> None:
        super().__init__(
            start_bytes=tensors[0].start_bytes if tensors else end_bytes,
            end_bytes=end_bytes,
            sums=sums,
        )
        self.num_bytes = sum(one.num_bytes for one in tensors)
        self._tensors = tensors
        self._is_over = not tensors  # also where they are empty
        self._is_settled = not tensors

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
        super().stop(error)
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
        super().settle(timeout_s)
        if os.getpid() == self._pid:
            self._look()

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
        """Copy one tensor in pieces, each of which ends where a block does."""
        at, size = 0, one.num_bytes
        while at < size:
            stop = min(size, self.sums.end_of_block(one.start_bytes + at) - one.start_bytes)
            if not self._copy_piece(one, at, stop) or one.is_written_to:
                raise _state_changed([one.name])
            at = stop
            if at < size:
                self._reach(one.start_bytes + at)
        if _mark(one.place, one.check, one.shift) != one.mark:
            raise _state_changed([one.name])
        self._reach(one.start_bytes + size)

    def _copy_piece(self, one: LateTensor, start: int, stop: int) -> bool:
        """Copy some bytes of a tensor, and return whether there were any."""
        if not self._is_ahead:
            return peek(one.address + start, one.place[start:stop])
        for at in range(start, stop, HOT_BYTES):
            hot = min(stop, at + HOT_BYTES)
            if not peek(one.address + at, one.place[at:hot]):
                return False
            self.sums.take(one.start_bytes + hot)
        return True

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
