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
it. Nothing is committed before the copy is settled.
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

from ..errors import DeadlineError, StateChangedError
from ..format.digest import BLOCK_BYTES, crc32c
from ..staging import CopyCheck
from ..state.batch_in_hand import version_of

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
        live: Its bytes.
        place: Where they go: bytes of the arena.
        start_bytes: Where that is in the arena.
        version: Its version counter at the moment of the save.
        check: How its bytes are compared with what was copied.
        shift: Says where samples are taken.
        mark: What its bytes were like at that moment; see :func:`_mark`.
    """

    name: str
    tensor: Tensor
    live: Bytes
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
        live = tensor.view(-1).view(torch.uint8).numpy()
        mark = _mark(live, check, shift)
        return cls(name, tensor, live, place, start_bytes, version_of(tensor), check, shift, mark)

    @property
    def is_written_to(self) -> bool:
        """Return whether somebody wrote to it since."""
        return version_of(self.tensor) != self.version


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
        self.num_bytes = sum(one.live.nbytes for one in tensors)
        self.copy_s = 0.0
        self.waited_s = 0.0
        self._tensors = tensors
        self._end_bytes = end_bytes
        self._changed = threading.Condition()
        self._reached_bytes = tensors[0].start_bytes if tensors else end_bytes
        self._is_over = not tensors
        self._is_settled = not tensors
        self._error: BaseException | None = None
        self._pid = os.getpid()

    @property
    def is_late(self) -> bool:
        """Return whether it was begun to go on after the save has returned."""
        return self.num_bytes > 0

    def start(self) -> None:
        """Copy in a thread of its own, if there is anything left to copy."""
        if self._is_over:
            return
        try:
            threading.Thread(target=self._run, name="milepost-copy").start()
        except BaseException as error:
            self._end(error)
            raise

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end, and look for the last time whether somebody else wrote.

        To be called by the thread that trains, before it changes anything. What went wrong is told
        by the save.

        Args:
            timeout_s: How long to wait, in seconds; ``None`` for as long as it takes.

        Raises:
            DeadlineError: It did not end in time.
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
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._reached_bytes >= stop)
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
        started_s = time.perf_counter()
        try:
            for one in self._tensors:
                self._copy(one)
        except BaseException as error:  # noqa: BLE001 - raised by the save
            self._end(error)
        else:
            self.copy_s = time.perf_counter() - started_s
            self._end(None)

    def _copy(self, one: LateTensor) -> None:
        """Copy one tensor in pieces, each of which ends where a block of the arena does."""
        at, size = 0, one.live.nbytes
        while at < size:
            stop = min(size, at + BLOCK_BYTES - (one.start_bytes + at) % BLOCK_BYTES)
            np.copyto(one.place[at:stop], one.live[at:stop])
            if one.is_written_to:
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

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = error
            self._is_over = True
            self._reached_bytes = self._end_bytes
            self._changed.notify_all()

    def _wait(self, timeout_s: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, timeout_s):
                raise DeadlineError(
                    f"The state was not copied within {timeout_s:g} s.",
                    safe="The copy goes on; earlier checkpoints are intact.",
                    hint="Change nothing of the state before the copy is done.",
                )

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
        hint="Find what writes to it there (a hook, a clipping of weights, weights swapped in), "
        "have it wait with PendingSave.wait_until_copied(), or copy at once: "
        'staging="eager".',
        names=list(names),
    )
