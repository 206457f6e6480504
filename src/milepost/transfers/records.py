"""What must hold of a place before a run is copied to it, and records that never change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..checkpoint import run_store
from ..errors import ExistsError, FencedError, MissingError, UsageError
from ..format.layout import HIDDEN, RUN, SESSIONS, session_number
from ..runs.scan import RunView
from ..runs.sessions import read_run
from ..stores.base import Entry, Store
from .route import Route

__all__ = [
    "put_same",
    "refuse_ahead",
    "refuse_file",
    "refuse_inside",
    "refuse_new_session",
    "refuse_other_run",
]

_NUM_READERS = 8
_MAX_RECORD_BYTES = 32 * 1024 * 1024


def refuse_file(target: Store) -> None:
    """Refuse to copy a run to where a file is."""
    path = target.local_path(RUN)
    folder = None if path is None else Path(path).parent
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ExistsError(
            f"{folder} is a file, and no folder for a run.",
            safe="It was not touched.",
            hint="Name a folder that is empty, not there yet, or a copy of the run.",
            path=str(folder),
        )


def refuse_inside(source: Store, target: Store) -> None:
    """Refuse to copy a run into itself."""
    here, there = (
        os.path.realpath(store.url.removeprefix("file://")) if store.traits.is_local else store.url
        for store in (source, target)
    )
    here = here.removesuffix(f"/{HIDDEN}")
    if there == here or there.startswith(f"{here}/"):
        raise UsageError(f"{target.url} is in the run itself.", hint="Name another place.")


def refuse_other_run(
    view: RunView, target: Store, records: Store, there: Mapping[str, Entry]
) -> None:
    """Refuse to mix two runs, or a run with the files of others."""
    if RUN in there:
        if read_run(records).run_id != view.run.run_id:
            raise ExistsError(
                f"Another run is at {target.url}.",
                safe="It was not touched.",
                hint="Name an empty place, or an earlier copy of this run.",
                path=target.url,
            )
        return
    if run_store(target) is not None or next(iter(target.list()), None) is not None:
        raise ExistsError(
            f"There are files at {target.url} that are no copy of this run.",
            safe="They were not touched.",
            hint="Name an empty place, or an earlier copy of this run.",
            path=target.url,
        )


def refuse_ahead(route: Route, listed: Mapping[str, Entry], there: Mapping[str, Entry]) -> None:
    """Refuse to write to a copy that was trained on."""
    keys = [key for key in there if key.startswith(f"{SESSIONS}/")]
    for key in sorted(keys, reverse=True):
        if key not in listed:
            _raise_ahead(route, _number_in(key))
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="milepost-copy") as pool:
        same = list(pool.map(lambda key: _is_same(route, key), keys))
    for key, is_same in zip(keys, same, strict=True):
        if not is_same:
            _raise_ahead(route, _number_in(key))


def refuse_new_session(route: Route, listed: Mapping[str, Entry]) -> None:
    """Stop as soon as a training has begun at the target."""
    keys = [entry.key for entry in route.target.list(SESSIONS) if entry.key not in listed]
    if keys:
        _raise_ahead(route, _number_in(keys[-1]))


def _number_in(key: str) -> int:
    return session_number(key.replace(".from", "")) or 0


def _raise_ahead(route: Route, number: int) -> None:
    raise FencedError(
        f"The copy at {route.target.url} was trained on: session {number} began there.",
        safe="Nothing more was changed there.",
        hint="Copy in the other direction, or to an empty place.",
        path=route.target.url,
        session=number,
    )


def _is_same(route: Route, key: str) -> bool:
    return _record(route.source, key) == _record(route.target, key)


def put_same(route: Route, key: str) -> int:
    """Create a record that never changes; return 1, or 0 if it is gone at the source."""
    try:
        data = _record(route.source, key)
    except MissingError:
        return 0
    try:
        route.target.put_new(key, data)
    except ExistsError:
        if _record(route.target, key) != data:
            raise
    return 1


def _record(store: Store, key: str) -> bytes:
    return store.get(key, max_bytes=_MAX_RECORD_BYTES)
