"""A pause of Python's search for garbage while a large table is built.

The search is set off by the number of new objects and looks at all that live: building hundreds of
thousands of objects that stay, such as the table of 100,000 tensors, takes twice the time with it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collecting"]

_lock = threading.Lock()
_num_inside = 0
_was_on = False


@contextmanager
def no_collecting() -> Iterator[None]:
    """Collect no garbage meanwhile, in no thread; afterwards as before.

    To be held while objects are made, and not while something is waited for.
    """
    global _num_inside, _was_on  # noqa: PLW0603 - it is a switch of the whole process
    with _lock:
        if not _num_inside:
            _was_on = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            if _num_inside:
                _num_inside -= 1
                if not _num_inside and _was_on:
                    gc.enable()


def _go_on_in_child() -> None:
    """Collect as before in a forked child, where no thread is left that would say so."""
    global _num_inside  # noqa: PLW0603 - as above
    if _num_inside and _was_on:
        gc.enable()
    _num_inside = 0
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_go_on_in_child
)
