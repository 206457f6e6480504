"""From what people type to a run or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import Checkpoint, Run, open_checkpoint, open_run, run_store
from ..errors import DamagedError, IncompleteError, MissingError, UsageError
from ..format.layout import DIAGNOSTIC_FOLDERS, HIDDEN, LATEST
from ..runs.scan import Found, State
from ..stores.url import is_address, path_at, trimmed
from ..visible import SUFFIXES

__all__ = ["Located", "locate", "locate_run", "path_of", "target_of"]

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

    def called(self, place: str) -> str:
        """Return what to call it in a text: as it was typed, with its name where that lacks it.

        Args:
            place: What it was found by.
        """
        place = place.rstrip("/")
        name = self.checkpoint.name
        if self.is_by_run:
            return f"{place}/{name}"
        above, _, last = place.rpartition("/")
        return f"{above}/{name}" if above and last == LATEST else place


def path_of(place: str) -> Path:
    """Return the local path that was meant: with ``~``, or as ``file:///``.

    Raises:
        UsageError: It is the address of a store, or a folder of another machine.
    """
    if is_address(place):
        raise UsageError(
            f"{place} is not on this machine.",
            safe="Nothing was written.",
            hint="Name a folder or a file here, and copy it there by other means.",
        )
    return path_at(place)


def target_of(place: str) -> Path | str:
    """Return the local path or the address that was meant.

    Raises:
        UsageError: An address without a bucket, or a folder of another machine.
    """
    return trimmed(place) if is_address(place) else path_of(place).absolute()


def locate_run(place: str) -> Run:
    """Open a run given by its folder, or by its hidden folder of records.

    Raises:
        MissingError: There is none.
    """
    return open_run(target_of(place))


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
    target = target_of(place)
    own = run_store(target)
    if own is not None:
        return replace(_newest(Run(own), place), is_by_run=True)
    located = _locate_in_run(target)
    if located is None:
        return Located(open_checkpoint(target))
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


def _locate_in_run(target: Path | str) -> Located | None:
    """Look in the run that a place leads into, or return ``None`` if it leads into none."""
    for folder, name in _splits(target):
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


def _splits(target: Path | str) -> list[tuple[Path | str, str]]:
    """Return the ways to read a place as that of a run and the name of a checkpoint in it."""
    above, name = _split(target)
    splits = [(above, name)]
    far, middle = _split(above)
    if middle in DIAGNOSTIC_FOLDERS:
        splits.append((far, f"{middle}/{name}"))
    return [
        (_split(folder)[0] if _split(folder)[1] == HIDDEN else folder, name)
        for folder, name in splits
        if name
    ]


def _split(target: Path | str) -> tuple[Path | str, str]:
    if isinstance(target, Path):
        return target.parent, target.name
    above, _, name = target.rpartition("/")
    # "s3://bucket" has nothing above it.
    return (above, name) if not above.endswith(":/") else (target, "")
