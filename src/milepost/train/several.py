"""One object, several or none, as users pass them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import UsageError

__all__ = ["as_list"]


def as_list(value: Any, *, name: str, method: str) -> list[Any]:
    """Return one object, several or ``None`` as a list.

    Args:
        value: An object, a list, tuple or iterator of such, or ``None``.
        name: What the argument is called, for the message.
        method: What each object must be able to do.

    Raises:
        UsageError: Something else, a class in place of an object of it for example.
    """
    if value is None:
        return []
    found = list(value) if isinstance(value, list | tuple | Iterator) else [value]
    for one in found:
        if isinstance(one, type):
            raise UsageError(
                f"{name} names the class {one.__qualname__}, where an object of it belongs.",
                hint=f"Write {one.__qualname__}(...).",
            )
        if not callable(getattr(one, method, None)):
            raise UsageError(
                f"{name} holds something of the type {type(one).__qualname__}, which has no "
                f"{method}().",
                hint="Give one object, or a list of them.",
            )
    return found
