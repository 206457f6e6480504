"""Pins: checkpoints that retention must leave alone.

The key alone protects; what stands in it is for people. So a pin that cannot be read protects too.

Whoever pins writes the pin first and looks at the commit then. Whoever deletes unpublishes the
commit first and looks at the pins then, see ``runs/prune.py``. So of the two at least one sees the
other: a pin that was reported as set has its checkpoint. What was found deleted keeps its pin, for
it may be that of somebody else, whom it was reported to; and a deletion that has not gone far is
taken back for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import FormatError, MissingError, StorageError
from ..format.canonical import dump_record, load_record
from ..format.layout import MANIFEST, PINS, pin_key
from ..format.manifest import FORMAT_VERSION
from ..stores.base import Store
from .damage import raise_unreachable
from .folders import check_folder, file_key
from .parallel import each

__all__ = ["is_pinned", "list_pins", "pin", "unpin"]

UNREADABLE = "(this pin cannot be read; it counts)"


def pin(store: Store, name: str, note: str = "", *, clock: Callable[[], float] = time.time) -> None:
    """Protect a checkpoint from retention; pinning it again replaces the note.

    Raises:
        MissingError: There is no such checkpoint, or it was deleted at the same moment.
    """
    check_folder(name)
    commit = file_key(name, MANIFEST)
    try:
        store.head(commit)
    except MissingError as error:
        raise MissingError(
            f"There is no checkpoint {name} at {store.url} to pin.", path=store.url, name=name
        ) from error
    fields = {"format": FORMAT_VERSION, "name": name, "note": note, "created_s": clock()}
    store.put(pin_key(name), dump_record(fields))
    try:
        store.head(commit)
    except MissingError as error:
        raise MissingError(
            f"{name} was being deleted when it was pinned.",
            safe="The pin stays, and a deletion that has only begun is taken back for it.",
            hint="Look whether it is still there: pin it once more.",
            path=store.url,
            name=name,
        ) from error


def unpin(store: Store, name: str) -> None:
    """Let retention decide about a checkpoint again. One that is not pinned is no error."""
    store.delete(pin_key(check_folder(name)))


def is_pinned(store: Store, name: str) -> bool:
    """Return whether a checkpoint is pinned. An error of the store is raised, never "no"."""
    try:
        store.head(pin_key(name))
    except MissingError:
        return False
    return True


def list_pins(store: Store) -> dict[str, str]:
    """Return the notes of all pins by the names they protect."""
    keys = [entry.key for entry in store.list(PINS)]
    notes = each(store, lambda key: _read_note(store, key), keys)
    return {
        key[len(PINS) + 1 :].removesuffix(".json"): note
        for key, note in zip(keys, notes, strict=True)
        if note is not None
    }


def _read_note(store: Store, key: str) -> str | None:
    try:
        fields = load_record(store.get(key, max_bytes=1024 * 1024), where=key)
    except MissingError:
        return None  # unpinned since the listing
    except (FormatError, StorageError) as error:
        raise_unreachable(store, error)
        return UNREADABLE
    return str(fields.get("note", ""))
