"""From what people write to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from ..errors import UsageError
from .base import Store
from .local import LocalStore

__all__ = ["is_address", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"})


def is_address(place: str) -> bool:
    """Return whether a text is the address of a store that is no folder of this machine."""
    scheme = _SCHEME.match(place)
    return scheme is not None and scheme[1].lower() != "file"


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a place.

    Args:
        place: A folder, ``file:///folder``, ``s3://bucket/prefix`` (or ``gs``, ``az``, ``abfss``;
            credentials come from the environment), or a store, which is returned as it is.

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
    if name in _BUCKETS:
        if urlsplit(text).password is not None:
            raise UsageError(
                f"An address {name}://... holds a secret.",
                hint="Addresses end up in records and logs. Give secrets by the environment.",
            )
        from .cloud import CloudStore

        return CloudStore(text)
    raise UsageError(
        f"Cannot open the place {name}://...: there is no kind of store called {name!r}.",
        hint="Use a folder, file:///folder, s3://bucket/prefix, gs://..., az://..., or pass a "
        "Store of your own.",
        scheme=name,
    )
