"""Tell whoever launched this process that it is getting on.

A launcher names a folder in ``MILEPOST_LAUNCH_DIR``, the number of the attempt in
``MILEPOST_ATTEMPT`` and the rank in ``RANK``. Each rank keeps two small files there, and the
launcher reads them; nobody waits for anybody:

    attempt-1/rank-0.beat     rewritten at most every 0.1 s; when it was written is what counts,
                              and its text is the number of batches done, or nothing if not known
    attempt-1/rank-0.commit   JSON: the newest acknowledged checkpoint

Without a launcher every function returns at once. A file that cannot be written is logged and
never ends a training.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Commit", "beat", "flush_beat", "note_commit", "read_batch", "read_commit"]

_INTERVAL_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """An acknowledged checkpoint.

    Attributes:
        name: Its name.
        batch: Number of batches it holds, or ``None`` if not known.
        at_s: When it was noted, in seconds since 1970.
    """

    name: str
    batch: int | None
    at_s: float


class _Pulse:
    """What this process has told so far."""

    next_s = 0.0
    batch: int | None = None
    is_told = True
    has_failed = False


_pulse = _Pulse()


def beat(batch: int | None = None) -> None:
    """Note that the training is getting on.

    Call it as often as you like: most calls only look at the clock.

    Args:
        batch: Number of batches done in the whole training. With it the launcher can say how many
            were lost when a worker dies.
    """
    _pulse.batch = batch
    now_s = time.monotonic()
    if now_s < _pulse.next_s:
        _pulse.is_told = False
        return
    _pulse.next_s = now_s + _INTERVAL_S
    _write_beat()


def flush_beat() -> None:
    """Write the last beat if it came too soon after the one before it."""
    if not _pulse.is_told:
        _write_beat()


def note_commit(name: str, batch: int | None = None) -> None:
    """Note the newest acknowledged checkpoint.

    A launcher restarts a training that fails again and again only while it makes new checkpoints.

    Args:
        name: Name of the checkpoint.
        batch: Number of batches it holds, counted as for ``beat``.
    """
    path = _path("commit")
    if path is None:
        return
    text = json.dumps({"name": name, "batch": batch, "at_s": time.time()})
    _replace(path, text)


def read_commit(path: Path) -> Commit | None:
    """Return what ``note_commit`` wrote to ``path``, or ``None`` if it wrote nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Commit(found["name"], found["batch"], found["at_s"])


def read_batch(path: Path) -> int | None:
    """Return the number of batches in a file that ``beat`` wrote, or ``None`` if not known."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return int(text) if text else None


def _path(kind: str) -> Path | None:
    folder = os.environ.get("MILEPOST_LAUNCH_DIR")
    if not folder:
        return None
    attempt, rank = os.environ.get("MILEPOST_ATTEMPT", "1"), os.environ.get("RANK", "0")
    return Path(folder, f"attempt-{attempt}", f"rank-{rank}.{kind}")


def _write_beat() -> None:
    path = _path("beat")
    if path is not None:
        _replace(path, "" if _pulse.batch is None else str(_pulse.batch))
    _pulse.is_told = True


def _replace(path: Path, text: str) -> None:
    # Renamed into place, so that a reader never meets half a file.
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        if not _pulse.has_failed:
            _pulse.has_failed = True
            _log.warning("The launcher cannot be told that this process is getting on: %s", error)
