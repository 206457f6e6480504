"""From what people write to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from ..errors import UsageError
from .base import Store
from .local import LocalStore

__all__ = ["open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OBJECT_STORES = frozenset({"s3", "gs", "az", "abfs", "abfss", "libcloud", "r2", "http", "https"})


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a place.

    Args:
        place: A folder, ``file:///folder``, or a store, which is returned as it is.

    Raises:
        UsageError: An empty place, or one of a kind that this version cannot open.
    """
    if isinstance(place, Store):
        return place
    text = os.fspath(place)
    if not isinstance(text, str) or not text:
        raise UsageError(f"{place!r} is not a place for a run.", hint="Give a folder.")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalStore(text)
    name = scheme[1].lower()
    if name == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(
                f"{text!r} names another machine.", hint="Write file:///folder, with 3 slashes."
            )
        return LocalStore(unquote(parts.path))
    reason = (
        "object stores are not available in this version"
        if name in _OBJECT_STORES
        else f"there is no kind of store called {name!r}"
    )
    raise UsageError(
        f"Cannot open the place {name}://...: {reason}.",
        hint="Use a folder, file:///folder, or pass a Store of your own.",
        scheme=name,
    )
