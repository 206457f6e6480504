"""From what people write to a store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import UsageError
from .address import trimmed
from .base import Store
from .local import LocalStore
from .posix import expanded
from .prefix import PrefixStore
from .provider import ObjectStoreProvider, ObjectStoreProviderHparams

__all__ = ["AnyPlace", "folder_of", "is_address", "open_store", "path_at", "settled", "trimmed"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"})


def is_address(place: str) -> bool:
    """Return whether a text is the address of a store that is no folder of this machine."""
    scheme = _SCHEME.match(place)
    return scheme is not None and scheme[1].lower() != "file"


def path_at(place: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder here, named by its path or ``file:///path``.

    Raises:
        UsageError: It is one of another machine.
    """
    text = os.fspath(place)
    return Path(folder_of(text)) if _SCHEME.match(text) else expanded(text)


def folder_of(text: str) -> str:
    """Return the absolute path of a folder on this machine, named by its path or ``file:///path``.

    Raises:
        UsageError: It is empty, or a folder of another machine.
    """
    if not text:
        raise UsageError(f"{text!r} is not a place for a run.", hint="Give a folder.")
    if _SCHEME.match(text):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(
                f"{text!r} names another machine.", hint="Write file:///folder, with 3 slashes."
            )
        text = unquote(parts.path)
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111


AnyPlace = str | os.PathLike[str] | Store | ObjectStoreProvider | ObjectStoreProviderHparams
"""What users name the place of a run by."""


def settled(place: AnyPlace) -> str | Store:
    """Return a place that stays the same when the working directory changes.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(place, str | os.PathLike):
        return open_store(place)
    text = os.fspath(place)
    if not isinstance(text, str):
        raise UsageError(f"{text!r} is not a place for a run.", hint="Give a folder.")
    return trimmed(text) if is_address(text) else folder_of(text)


def open_store(place: AnyPlace) -> Store:
    """Return the store at a place.

    Args:
        place: A folder, ``file:///folder``, ``s3://bucket/prefix`` (or ``gs``, ``az``, ``abfss``;
            credentials come from the environment), ``libcloud://provider/container/prefix``
            (``LIBCLOUD_KEY``, ``LIBCLOUD_SECRET``), a provider, or a store, which is returned as it
            is.

    Raises:
        UsageError: An empty place, an address without a bucket, or a place of a kind that this
            version cannot open.
    """
    if isinstance(place, ObjectStoreProviderHparams):
        place = place.initialize_object()
    if isinstance(place, ObjectStoreProvider):
        return place.store
    return place if isinstance(place, Store) else _open_named(os.fspath(place))


def _open_named(text: str) -> Store:
    if not isinstance(text, str) or not text:
        raise UsageError(f"{text!r} is not a place for a run.", hint="Give a folder.")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalStore(text)
    name = scheme[1].lower()
    if name == "file":
        return LocalStore(folder_of(text))
    if name in _BUCKETS:
        if urlsplit(text).password is not None:
            raise UsageError(
                f"An address {name}://... holds a secret.",
                hint="Addresses end up in records and logs. Give secrets by the environment.",
            )
        from .cloud import CloudStore

        return CloudStore(trimmed(text))
    if name == "libcloud":
        return _open_libcloud(text)
    raise UsageError(
        f"Cannot open the place {name}://...: there is no kind of store called {name!r}.",
        hint="Use a folder, file:///folder, s3://bucket/prefix, gs://..., az://..., or pass a "
        "Store of your own.",
        scheme=name,
    )


def _open_libcloud(address: str) -> Store:
    provider, _, rest = trimmed(address).partition("://")[2].partition("/")
    container, _, prefix = rest.partition("/")
    names = ("LIBCLOUD_KEY", "LIBCLOUD_SECRET")
    key, secret = (name if os.environ.get(name) else None for name in names)
    store = ObjectStoreProviderHparams(
        provider=provider, container=container, key_environ=key, secret_environ=secret
    ).initialize_object()
    return PrefixStore(store.store, prefix) if prefix else store.store
