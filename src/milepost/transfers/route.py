"""Two places, and what the second one can do by itself.

Two addresses in one bucket are reached by one client, which asks the service to copy: no byte comes
here. The addresses must both come from the user's hand, so that both mean the client that the
environment describes; of two stores that were made elsewhere nobody knows.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import final
from urllib.parse import urlsplit

from ..errors import CheckpointError
from ..stores.base import Store
from ..stores.url import AnyPlace, is_address, open_store

__all__ = ["Route", "copies_by_itself", "find_route"]

_log = logging.getLogger("milepost")


@final
@dataclass(frozen=True, slots=True)
class Route:
    """From one store to another.

    Attributes:
        source: Where from.
        target: Where to.
        bucket: A store that begins above both, if there is one that copies by itself.
        source_prefix: Where the source begins in it.
        target_prefix: Where the target begins in it.
    """

    source: Store
    target: Store
    bucket: Store | None = None
    source_prefix: str = ""
    target_prefix: str = ""

    def copy_within(self, key: str, new_key: str) -> bool:
        """Have the bucket copy a file of the source into the target; return whether it did."""
        if self.bucket is None:
            return False
        try:
            self.bucket.link(f"{self.source_prefix}{key}", f"{self.target_prefix}{new_key}")
        except CheckpointError as error:
            # Too large for the service, or not allowed to read: the bytes go another way.
            _log.debug("%s is sent, since it could not be copied: %s", key, error)
            return False
        return True


def copies_by_itself(store: Store) -> bool:
    """Return whether a second key for bytes that are there costs no transfer from here."""
    return store.traits.hard_links or store.traits.copies_itself


def find_route(source: Store, target: Store, *, given: tuple[AnyPlace, AnyPlace]) -> Route:
    """Return the way between two stores.

    Args:
        source: Where from.
        target: Where to.
        given: What the user named them by.
    """
    texts = [os.fspath(place) for place in given if isinstance(place, str | os.PathLike)]
    if len(texts) < 2 or not all(map(is_address, texts)):
        return Route(source, target)
    roots = {_bucket(url) for url in (*texts, source.url, target.url)}
    root = roots.pop()
    if roots or not target.traits.copies_itself:
        return Route(source, target)
    prefixes = [f"{url[len(root) :].strip('/')}/".lstrip("/") for url in (source.url, target.url)]
    return Route(source, target, open_store(root), *prefixes)


def _bucket(address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"
