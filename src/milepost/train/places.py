"""Where a training's checkpoints lie, and paths that name ranks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from ..errors import UsageError
from .state import global_rank

__all__ = ["fill_ranks", "run_directory", "save_location"]

_FIELD = re.compile(r"\{([A-Za-z_]+)\}")


def save_location(
    save_folder: str | os.PathLike[str] | None, *, run_name: str | None, resume: str
) -> str | None:
    """Return the folder of a run.

    Args:
        save_folder: What the user gave. An absolute path or a URI is used as it is; a relative one
            lies in ``./runs/<run_name or time>/rank_0/``. ``None``: nothing is saved.
        run_name: Name of the run.
        resume: ``"never"``, ``"auto"`` or ``"must"``.

    Raises:
        UsageError: A resume is wanted from a folder that would be a new one at each start.
    """
    if resume not in ("never", "auto", "must"):
        raise UsageError(f"resume={resume!r} is none of 'never', 'auto' and 'must'.")
    if save_folder is None:
        if resume == "must":
            raise UsageError("resume='must' needs a save_folder.")
        return None
    if not isinstance(save_folder, str | os.PathLike):
        raise UsageError(f"save_folder={save_folder!r} is no folder.", hint="Give text or a Path.")
    folder = os.fspath(save_folder)
    if "://" in folder or Path(folder).is_absolute():
        return folder
    if run_name is None:
        if resume != "never":
            raise UsageError(
                f"resume={resume!r} with the relative save_folder {folder!r} has nothing to go on "
                "with: without a run_name each start has a new folder.",
                hint="Give a run_name, or an absolute save_folder.",
            )
        run_name = time.strftime("%Y-%m-%dT%H-%M-%S") + f"-{os.getpid()}"
    if (
        not isinstance(run_name, str)
        or not run_name
        or run_name in (".", "..")
        or re.search(r"[/\\\0]", run_name)
    ):
        raise UsageError(f"run_name={run_name!r} cannot be the name of a folder.")
    return str(Path.cwd() / "runs" / run_name / "rank_0" / folder)


def run_directory(save_folder: str | os.PathLike[str] | None, location: str | None) -> str | None:
    """Return the folder that holds all that a training leaves on this machine, or ``None``.

    Args:
        save_folder: What the user gave. For a relative one it is ``./runs/<run_name or time>``,
            which the checkpoints, as those of rank 0, lie in. For an absolute one it is that.
        location: What :func:`save_location` made of it.
    """
    if save_folder is None or location is None or "://" in location:
        return None
    given = Path(save_folder)
    return location if given.is_absolute() else str(Path(location).parents[len(given.parts)])


def fill_ranks(path: str | os.PathLike[str]) -> str:
    """Return a path with ``{rank}``, ``{local_rank}`` and ``{node_rank}`` filled in.

    ``{RANK}`` and the others may be written in capitals.

    Raises:
        UsageError: Another name in braces.
    """
    values = {
        "rank": global_rank(),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "node_rank": int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))),
    }

    def fill(match: re.Match[str]) -> str:
        name = match[1].lower()
        if name not in values:
            raise UsageError(
                f"{match[0]} in {os.fspath(path)!r} is not known.",
                hint="Use {rank}, {local_rank} or {node_rank}.",
            )
        return str(values[name])

    return _FIELD.sub(fill, os.fspath(path))
