"""Page-aligned memory for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

__all__ = ["HUGE_PAGE_BYTES", "advise", "ask_for_huge_pages", "page_memory"]

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18  # Linux 4.14


def page_memory(num_bytes: int) -> mmap.mmap:
    """Return private, page-aligned memory, readable up to the next page border.

    A forked child (the worker of a loader) has zeros there: direct I/O into pages that a fork
    shares may end in the wrong copy, and the parent would have to copy every page once more. To
    leave the memory out of the child altogether would be wrong: something else could come to lie
    there, and be unmapped when the child lets go of what it knows of its parent's memory.

    What is large comes in huge pages where the system grants them. A request to a disk names its
    memory piece by piece, and a device takes only so many pieces at a time: of small pages a block
    needs 2,048 and is taken apart into several requests. A virtual disk was seen to read 2.5 times
    as fast into huge ones.

    Args:
        num_bytes: How much; at least one byte is mapped.
    """
    size = max(num_bytes, 1)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        advise(mapping, _MADV_WIPEONFORK)
    if size >= HUGE_PAGE_BYTES:
        advise(mapping, getattr(mmap, "MADV_HUGEPAGE", None))
    return mapping


def advise(mapping: mmap.mmap, advice: int | None) -> None:
    """Tell the kernel how memory will be used, where it understands that."""
    if advice is None:
        return
    try:
        mapping.madvise(advice)
    except OSError:
        # Only advice: a kernel that does not know it does the same, slower or with less care.
        return


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Have memory that was never touched come in huge pages, as far as whole ones fit in.

    To fill fresh memory takes several times as long in small pages, for each is cleared and mapped
    by itself. Advice, as in :func:`advise`.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
    madvise = _madvise()
    if length > 0 and madvise is not None:
        madvise(first, length, _MADV_HUGEPAGE)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
