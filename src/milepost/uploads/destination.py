"""Where uploads go to, as this process and as another one opens it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, final

from ..errors import FormatError, MissingError, UsageError
from ..format.layout import check_key
from ..stores.base import Store
from ..stores.provider import ObjectStoreProvider, ObjectStoreProviderHparams
from ..stores.url import AnyPlace, open_store, settled

__all__ = ["Destination", "open_recipe"]

_MAX_RECORD_BYTES = 64 * 1024 * 1024


@final
class Destination:
    """An object store that files are uploaded to.

    Args:
        place: A provider, what makes one, an address, or a store.

    Attributes:
        store: The store, opened.

    Raises:
        UsageError: It is none of these.
        StorageError: There is no such container.
    """

    def __init__(self, place: AnyPlace) -> None:
        self._provider: ObjectStoreProvider | None = None
        self._recipe: dict[str, Any] | None = None
        if isinstance(place, ObjectStoreProviderHparams):
            place = place.initialize_object()
        if isinstance(place, ObjectStoreProvider):
            self._provider = place
            if place.hparams is not None:
                self._recipe = {"hparams": asdict(place.hparams)}
            self.store: Store = place.store
        elif isinstance(place, str | os.PathLike):
            named = settled(place)
            self._recipe = {"place": named}
            self.store = open_store(named)
        else:
            self.store = open_store(place)

    def __repr__(self) -> str:
        return f"Destination({self.store.url!r})"

    def uri(self, key: str) -> str:
        """Return the address of an object."""
        if self._provider is not None:
            return self._provider.get_uri(key)
        return f"{self.store.url}/{key}"

    @property
    def can_copy(self) -> bool:
        """Return whether the store copies objects by itself, without sending their bytes here."""
        return self.store.traits.hard_links or self.store.traits.copies_itself

    def recipe(self) -> str:
        """Return what another process opens the same place by. No secret is in it.

        Raises:
            UsageError: It cannot be named without its secrets.
        """
        hint = (
            "Give an ObjectStoreProviderHparams or an address, which name the variables of the "
            "environment that hold the secrets, or use_procs=False."
        )
        if self._recipe is None:
            raise UsageError(
                f"Another process could open {self.store.url} only with the secrets of this one.",
                hint=hint,
            )
        try:
            return json.dumps(self._recipe)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"The options of {self.store.url} cannot be handed to another process.", hint=hint
            ) from error

    def read(self, key: str) -> bytes | None:
        """Return a small object, or ``None`` if there is none."""
        try:
            return self.store.get(key, max_bytes=_MAX_RECORD_BYTES)
        except MissingError:
            return None

    def can_hold(self, key: str) -> bool:
        """Return whether a key may be the name of an object."""
        try:
            check_key(key, where=self.store.url)
        except FormatError:
            return False
        return True


def open_recipe(recipe: Mapping[str, Any]) -> Store:
    """Open what :meth:`Destination.recipe` wrote down; in another process."""
    if "hparams" in recipe:
        return open_store(ObjectStoreProviderHparams(**recipe["hparams"]))
    return open_store(recipe["place"])
