"""``milepost pin`` and ``unpin``: protect a checkpoint from retention."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import UsageError
from ...runs import pins
from ...stores.base import Store
from ..places import locate
from ..render import print_json

__all__ = ["pin", "unpin"]

Place = Annotated[str, typer.Argument(help="RUN/NAME.", metavar="RUN/NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print an object.")]


def pin(
    place: Place,
    *,
    note: Annotated[str, typer.Option(help="Why, for people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Protect a checkpoint: retention never deletes it."""
    store, name = _member(place)
    pins.pin(store, name, note)
    _say(name, note, is_pinned=True, as_json=as_json)


def unpin(place: Place, *, as_json: AsJson = False) -> None:
    """Let retention decide about a checkpoint again."""
    store, name = _member(place)
    was_pinned = pins.is_pinned(store, name)
    pins.unpin(store, name)
    if was_pinned or as_json:
        _say(name, "", is_pinned=False, as_json=as_json)
    else:
        print(f"{name} was not pinned.")


def _member(place: str) -> tuple[Store, str]:
    """Return the store of the run and the name in it."""
    located = locate(place)
    if located.run is None or located.found is None:
        raise UsageError(
            f"{place} is not in a run, so no retention threatens it.", hint="Give RUN/NAME."
        )
    name = located.found.name
    if located.is_by_run:
        raise UsageError(
            f"{place} is a run, not a checkpoint.",
            hint=f"Its newest one is {place.rstrip('/')}/{name}.",
        )
    return located.run.store, name


def _say(name: str, note: str, *, is_pinned: bool, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "is_pinned": is_pinned, "note": note})
    else:
        print(f"{name} is {'pinned' if is_pinned else 'no longer pinned'}.")
