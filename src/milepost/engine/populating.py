"""Getting the pages of memory before anybody needs them.

The first touch of fresh memory costs several times what a copy into it costs later. A thread asks
the kernel for the pages instead. That writes nothing, so that whoever has data already need not
wait for it.

The kernel holds the lock of the process's memory meanwhile, and an allocation of the training waits
for it: so one huge page is asked for at a time, and the thread steps back where there is more work
than there are cores. It does not step back all the way: a thread that hardly ever runs would keep
the lock while it waits for its turn.

It begins at the end: a save that comes too early begins to copy at the front, and the two of them
meet somewhere in the middle.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from typing import Any

from ..stores.pages import HUGE_PAGE_BYTES

__all__ = ["Populating"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_NICENESS = 10
"""About a tenth of a core that the training would use, all of one that it would not."""


class Populating:
    """Asks for the pages of one mapping, in a thread.

    Args:
        memory: The mapping; it stays as long as the thread runs.
        address: Where it begins.
    """

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory = memory
        self._address = address
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None

    def ask(self, start: int, stop: int) -> None:
        """Have the pages of a range got as well, before those that were asked for earlier."""
        with self._lock:
            self._ranges.append((start, min(stop, len(self._memory))))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run,
                    name="milepost-arena",
                    daemon=True,  # an end of the process need not wait for it
                )
                self._thread.start()

    def stop(self) -> None:
        """Ask for nothing more."""
        with self._lock:
            self._ranges.clear()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything that was asked for is there; return whether it is."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        _step_back()
        call = _madvise()
        while (piece := self._next()) is not None:
            start, stop = piece
            if call(self._address + start, stop - start, _MADV_POPULATE_WRITE):
                self.stop()  # an older kernel: the first copy gets them, as it would have anyway

    def _next(self) -> tuple[int, int] | None:
        """Return the last piece of what is left to ask for; ``None`` ends the thread."""
        with self._lock:
            while self._ranges:
                start, stop = self._ranges.pop()
                at = max(start, (stop - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
                if start < at:
                    self._ranges.append((start, at))
                if at < stop:
                    return at, stop
            self._thread = None
            return None


def _step_back() -> None:
    """Let other threads run first; on Linux that can be said of one thread."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(usual, _NICENESS))
    except OSError:
        return  # a sandbox that forbids it: the thread is as important as any other then


@functools.cache
def _madvise() -> Any:
    # By the C library: the call of Python holds the interpreter lock for all of its time.
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
