"""Reading memory that may vanish meanwhile.

torch may move a storage to other memory and give back the old one while somebody copies it: a
tensor that is handed to another process moves into shared memory. To touch memory that was given
back would end the process. So the kernel is asked to copy, which says that there is none instead.

It is asked to write into this process rather than to read from it. Then the pages that it looks up
one by one are those of the destination, which are few and large in the arena, and the source is
read as the argument of any system call is: that takes half as long, and no longer than a copy by
the C library.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["can_peek", "peek"]

_log = logging.getLogger("milepost")

Bytes = npt.NDArray[np.uint8]


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def peek(address: int, into: Bytes) -> bool:
    """Copy memory of this process, and return whether there was any.

    Whether it still was what it had been is for the caller to find out, afterwards.

    Args:
        address: Where it is.
        into: Where it goes, without gaps; as many bytes are copied. Must stay mapped.

    Raises:
        OSError: The system does not do that; see :func:`can_peek`.
    """
    target, size = into.ctypes.data, into.nbytes
    at = 0
    while at < size:
        step = _ask(_kernel_copy(), address + at, target + at, size - at)
        if step == 0:
            return False
        at += step
    return True


@functools.cache
def can_peek() -> bool:
    """Return whether the system has such a copy, and this process may use it."""
    probe, found = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    try:
        is_copied = peek(probe.ctypes.data, found) and bool((probe == found).all())
    except OSError as error:
        _log.info("Everything is copied before a save returns: %s", error)
        return False
    return is_copied


def _ask(call: Any, source: int, target: int, num_bytes: int) -> int:
    """Have the kernel copy; return how many bytes it did, 0 where there are none."""
    of, to = _Span(source, num_bytes), _Span(target, num_bytes)
    done = int(call(os.getpid(), ctypes.byref(of), 1, ctypes.byref(to), 1, 0))
    if done >= 0:
        return done
    code = ctypes.get_errno()
    if code == errno.EFAULT:
        return 0
    raise OSError(code, f"process_vm_writev: {os.strerror(code)}")


@functools.cache
def _kernel_copy() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
    if call is None:
        raise OSError(errno.ENOSYS, "The system has no process_vm_writev.")
    spans = ctypes.POINTER(_Span)
    call.argtypes = [ctypes.c_int, spans, ctypes.c_ulong, spans, ctypes.c_ulong, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call
