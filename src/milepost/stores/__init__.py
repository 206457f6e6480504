"""Bytes by key: the store protocol and the places that implement it."""

from __future__ import annotations

from .base import Entry, Reader, Store, Traits, Writer
from .local import LocalStore
from .memory import MemoryStore
from .prefix import PrefixStore
from .provider import ObjectStoreProvider, ObjectStoreProviderHparams
from .url import open_store

__all__ = [
    "Entry",
    "LocalStore",
    "MemoryStore",
    "ObjectStoreProvider",
    "ObjectStoreProviderHparams",
    "PrefixStore",
    "Reader",
    "Store",
    "Traits",
    "Writer",
    "open_store",
]
