"""Page-aligned memory for direct I/O."""

from __future__ import annotations

import mmap

__all__ = ["advise", "page_memory"]


def page_memory(num_bytes: int) -> mmap.mmap:
    """Return private, page-aligned memory, readable up to the next page border.

    A forked child (the worker of a loader) does not get it: direct I/O into pages that a fork
    shares may end in the wrong copy, and the parent would have to copy every page once more.

    Args:
        num_bytes: How much; at least one byte is mapped.
    """
    size = max(num_bytes, 1)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(mapping, getattr(mmap, "MADV_DONTFORK", None))
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
