"""Whether bytes of a file are in the page cache, found out without bringing them there.

To try to read them without waiting would be the obvious way, but the attempt begins to read ahead
what is not there (seen on Linux 6.18): what is then read past the cache is read twice, and is taken
for cached the next time. So the pages are mapped, and the kernel is asked which are there.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

__all__ = ["is_resident", "may_ask"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENOUGH = 0.9
_LOWEST_BIT = bytes(value & 1 for value in range(256))
"""The others are reserved."""

_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value


def may_ask(status: os.stat_result, path: str) -> bool:
    """Return whether the kernel tells us the truth about a file.

    Of files that belong to others and that we may not write, it says that all of it is there.
    """
    return status.st_uid == os.geteuid() or os.access(path, os.W_OK)


def is_resident(fd: int, offset: int, length: int) -> bool:
    """Return whether nearly all of a range is in the page cache.

    Args:
        fd: The file, open for reading.
        offset: The first byte.
        length: How many bytes; at least one.
    """
    length += offset % _PAGE_BYTES
    offset -= offset % _PAGE_BYTES
    libc = _libc()
    if libc is None:
        return False
    address = libc.mmap(None, length, _PROT_READ, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        return False
    try:
        found = ctypes.create_string_buffer(-(-length // _PAGE_BYTES))
        if libc.mincore(address, length, found) != 0:
            return False
    finally:
        libc.munmap(address, length)
    return found.raw.translate(_LOWEST_BIT).count(1) >= _ENOUGH * len(found)


@lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library, or ``None`` where it cannot be asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc
