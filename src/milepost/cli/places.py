"""From what people type to a run or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..checkpoint import Checkpoint, Run, open_checkpoint, open_run, run_store
from ..errors import DamagedError, IncompleteError, MissingError
from ..format.layout import DIAGNOSTIC_FOLDERS, HIDDEN, LATEST
from ..runs.scan import Found, State
from ..visible import SUFFIXES

__all__ = ["Located", "locate", "locate_run", "path_of"]

_SUFFIXES = ("", *SUFFIXES.values())
_UNFINISHED = (State.INCOMPLETE, State.DELETING)


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint and what is known around it.

    Attributes:
        checkpoint: The handle.
        run: Its run; ``None`` for a folder that stands alone.
        found: What it is to its run; ``None`` for a folder that stands alone.
        is_by_run: Whether only the run was named, and its newest checkpoint was taken.
    """

    checkpoint: Checkpoint
    run: Run | None = None
    found: Found | None = None
    is_by_run: bool = False


def path_of(place: str) -> Path:
    """Return the local path that was meant: with ``~``, or as ``file:///``."""
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    return Path(place).expanduser()


def locate_run(place: str) -> Run:
    """Open a run given by its folder, or by its hidden folder of records.

    Raises:
        MissingError: There is none.
    """
    if "://" in place and not place.startswith("file://"):
        return open_run(place)  # says which kinds of place there are
    return open_run(path_of(place))


def locate(place: str, *, need_commit: bool = True) -> Located:
    """Find the checkpoint that was meant.

    Args:
        place: A run (its newest), ``RUN/NAME``, ``RUN/latest``, ``RUN/NAME.pt``, or the folder of
            a checkpoint that stands alone.
        need_commit: Whether attempts without a commit are refused.

    Raises:
        MissingError: There is no such checkpoint.
        IncompleteError: It has no commit, and one is needed.
    """
    if "://" in place and not place.startswith("file://"):
        open_run(place)
    path = path_of(place)
    own = run_store(path)
    if own is not None:
        return replace(_newest(Run(own), place), is_by_run=True)
    located = _locate_in_run(path)
    if located is None:
        return Located(open_checkpoint(path))
    if need_commit and located.found is not None and located.found.state in _UNFINISHED:
        raise IncompleteError(
            f"{place} is {located.found.state}: it holds files but no commit.",
            hint="It never counts; the next session of the run removes it.",
            name=located.found.name,
        )
    return located


def _newest(run: Run, place: str) -> Located:
    found = run.view.latest()
    if found is None:
        raise MissingError(
            f"The run {place} holds no checkpoint that counts.",
            hint=f"See what there is with: milepost ls --all {place}",
        )
    return Located(run.get(found.name), run, found)


def _locate_in_run(path: Path) -> Located | None:
    """Look in the run that a path leads into, or return ``None`` if it leads into none."""
    path = path.absolute()
    for folder, name in _splits(path):
        store = run_store(folder)
        if store is None:
            continue
        run = Run(store)
        try:
            run.refresh()
        except DamagedError:
            # The records of the run are damaged; a checkpoint in it can still be opened by itself.
            return None
        if name == LATEST:
            return _newest(run, str(folder))
        names = {found.name for found in run.view.found}
        for suffix in _SUFFIXES:
            stem = name.removesuffix(suffix)
            if name.endswith(suffix) and stem in names:
                return Located(run.get(stem), run, run.view.get(stem))
        run.view.get(name)  # raises, and says which names there are
    return None


def _splits(path: Path) -> list[tuple[Path, str]]:
    splits = [(path.parent, path.name)]
    if path.parent.name in DIAGNOSTIC_FOLDERS:
        splits.append((path.parent.parent, f"{path.parent.name}/{path.name}"))
    return [
        (folder.parent if folder.name == HIDDEN else folder, name)
        for folder, name in splits
        if name
    ]
