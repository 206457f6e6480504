"""A validation that waits for its verdict, and those that an earlier life has left."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CheckpointError, FormatError, MissingError, UsageError
from ..format.layout import RUN
from ..format.manifest import Manifest
from ..runs.manifests import read_manifest
from ..runs.validations import (
    Request,
    delete_validation,
    list_validations,
    read_request,
    validation_id,
)
from ..stores.base import Store
from ..stores.url import open_store

__all__ = ["Item", "pending_items", "place_of", "too_often"]

_log = logging.getLogger("milepost")


@dataclass(slots=True)
class Item:
    """A validation without a verdict.

    Attributes:
        name: The checkpoint.
        write_id: Its write id.
        request: What was asked for.
        num_attempts: How many processes were started for it that were not stopped from outside.
        last_number: Number of the last attempt.
    """

    name: str
    write_id: str
    request: Request
    num_attempts: int = 0
    last_number: int = 0


def too_often(item: Item) -> str:
    """Say that its process has died too often."""
    times = "once" if item.num_attempts == 1 else f"{item.num_attempts} times"
    return f"Its process was started {times} and brought no answer."


def pending_items(store: Store) -> Iterator[tuple[Item, CheckpointError | None]]:
    """Yield what is pending on record, the oldest checkpoint first.

    Each comes with the error that keeps its request from being read, if there is one. Records of
    checkpoints that are gone are deleted.
    """
    found: list[tuple[tuple[int, int], Item]] = []
    for one in list_validations(store).values():
        manifest = _manifest_of(store, one.name, one.id) if one.is_pending else None
        if manifest is not None:
            numbers = one.num_attempts, one.last_number
            item = Item(one.name, manifest.write_id, Request(), *numbers)
            found.append(((manifest.session, manifest.attempt), item))
    for _, item in sorted(found, key=lambda pair: pair[0]):
        try:
            item.request = read_request(store, item.name, item.write_id)
        except (FormatError, MissingError) as error:
            yield item, error
        else:
            yield item, None


def _manifest_of(store: Store, name: str, number_id: str) -> Manifest | None:
    """Return the commit that records belong to; if it is gone, they go too."""
    try:
        manifest = read_manifest(store, name)
    except MissingError:
        manifest = None
    except FormatError as error:
        _log.warning("%s is not validated: %s", name, error)
        return None
    if manifest is not None and validation_id(manifest.write_id) == number_id:
        return manifest
    delete_validation(store, name, number_id)
    return None


def place_of(store: Store) -> str:
    """Return how another process opens a store.

    Raises:
        UsageError: It cannot.
    """
    path = store.local_path(RUN)
    if path is not None:
        return path.rpartition("/")[0]
    try:
        open_store(store.url)
    except UsageError as error:
        raise UsageError(
            f"Validations run in processes of their own, which cannot open {store.url}.",
            hint="Use a store that open_store opens by its URL.",
            path=store.url,
        ) from error
    return store.url
