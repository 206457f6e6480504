"""Runs below a place that is none itself.

A training puts its run into a folder of its own, a few levels below the one that people remember:
``runs/digits/rank_0/checkpoints``. Whoever names another one is told where it is. In a bucket each
look costs a request, so few folders are looked into on each level; nothing is read.
"""

from __future__ import annotations

from ..errors import AccessError, MissingError, StorageError
from ..format.layout import HIDDEN, MANIFEST, RUN, SESSIONS
from ..stores.base import Store

__all__ = ["missing_run", "runs_below"]

_NUM_LEVELS = 5
_NUM_FOLDERS = 8
_NUM_NAMED = 5


def runs_below(store: Store) -> list[str]:
    """Return the folders of runs below a place, as far as a short look finds them.

    Args:
        store: The place.
    """
    found: list[str] = []
    level = [""]
    for _ in range(_NUM_LEVELS):
        below: list[str] = []
        for folder in level:
            names = _folders(store, folder)
            if folder and _is_run(store, folder, names):
                found.append(folder)
                continue
            before = f"{folder}/" if folder else ""
            below += [before + name for name in names if not name.startswith(".")]
        level = below[:_NUM_FOLDERS]
    return found


def missing_run(store: Store, *, what: str = "", hint: str = "") -> MissingError:
    """Return the error that says that there is no run at a place, and where there is one.

    Args:
        store: The place.
        what: What happened, where more than a run was looked for.
        hint: What to do where nothing is found below it.

    Returns:
        The error; ``facts["below"]`` are the folders of the runs that were found.
    """
    place = store.url.removeprefix("file://").rstrip("/")
    below = runs_below(store)
    if len(below) == 1:
        hint = f"There is a run below it: {place}/{below[0]}."
    elif below:
        more = ", and more" if len(below) > _NUM_NAMED else ""
        hint = f"There are runs below it: {', '.join(below[:_NUM_NAMED])}{more}."
    elif _has(store, MANIFEST):
        hint = f"That is one checkpoint. See it with: milepost show {place}"
    hint = hint or "Check the path; a run is the folder that holds run.json."
    return MissingError(
        what or f"There is no run at {store.url}.", hint=hint, path=store.url, below=below
    )


def _is_run(store: Store, folder: str, names: list[str]) -> bool:
    if HIDDEN in names and _has(store, f"{folder}/{HIDDEN}/{RUN}"):
        return True
    return SESSIONS in names and _has(store, f"{folder}/{RUN}")


def _folders(store: Store, folder: str) -> list[str]:
    """Return the names of folders; none where one may not look, which is no answer to anything."""
    try:
        return list(store.folders(folder))
    except (AccessError, StorageError):
        return []


def _has(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except (MissingError, AccessError, StorageError):
        return False
    return True
