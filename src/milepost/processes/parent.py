"""Ending with whoever started this process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1


def end_with_parent(pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies.

    A keeper does the same for the whole process group. This one covers the moment before the
    keeper has heard of the group, and a keeper that was killed itself. The kernel takes the thread
    that started this process for the parent: it must not end before the process does.

    Args:
        pid: The parent, as it was told; if that is not the parent any more, this process ends.
    """
    if sys.platform != "linux":
        return
    set_option: Any = ctypes.CDLL(None, use_errno=True).prctl
    if set_option(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != pid:
        os._exit(1)  # it died before we asked
