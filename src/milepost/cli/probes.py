"""Looks at a place: what it can do, and what is wrong there.

Every probe says ok, warn or fail, and what follows from it. Those that write do so in a hidden
folder of their own, which is removed afterwards.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..checkpoint import Run, run_store
from ..errors import CheckpointError, ExistsError, MissingError, UsageError
from ..frames.codec import load_codec
from ..runs.scan import State
from ..runs.sessions import Session, is_provably_dead
from ..stores.base import Store
from ..stores.local import LocalStore
from ..version import __version__
from .render import age_text, count_text, size_text

__all__ = ["Check", "nearest_folder", "probe_folder", "probe_run", "probe_versions"]

OK, WARN, FAIL = "ok", "warn", "fail"

_SLOW_FSYNC_S = 0.05
_MAX_SKEW_S = 2.0
_NUM_SYNCS = 5
_PACKAGES = ("torch", "numpy", "crc32c", "obstore", "blosc2", "safetensors", "typer", "rich")


@dataclass(frozen=True, slots=True)
class Check:
    """What one probe has found.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warn`` or ``fail``.
        text: What was found.
        hint: What follows from it.
    """

    name: str
    status: str
    text: str
    hint: str = ""


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        if path.parent == path:
            raise MissingError(f"There is no folder above {path}.", path=str(path))
        path = path.parent
    return path


def probe_versions() -> list[Check]:
    """Report the versions of what does the work."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {package: _version_of(package) for package in _PACKAGES}
    found = [f"milepost {__version__}", f"python {python}"]
    found += [f"{package} {version}" for package, version in versions.items() if version]
    checks = [Check("versions", OK, ", ".join(found))]
    if versions["torch"] is None:
        hint = "Looking at runs works; saving and loading tensors needs torch."
        checks.append(Check("torch", WARN, "not installed", hint))
    return checks


def probe_folder(folder: Path) -> list[Check]:
    """Try what a run needs of a folder that exists."""
    try:
        with _scratch(folder) as scratch:
            probes: tuple[Callable[[Path], Check], ...] = (
                _exclusive_create,
                _hard_links,
                _symlinks,
                _direct_io,
                _fsync,
                _clock,
            )
            written = Check("writable", OK, str(folder))
            return [written, *(_run_probe(probe, scratch) for probe in probes)]
    except OSError as error:
        hint = "Nothing can be saved here. Check the owner, the mode and the mount options."
        return [Check("writable", FAIL, f"{folder}: {error.strerror or error}", hint)]


def probe_run(place: Path | Store) -> list[Check]:
    """Look at the room there is, and at sessions and attempts of a run, if there is one."""
    folder = nearest_folder(place) if isinstance(place, Path) else None
    store = run_store(place)
    if store is None:
        return [*_space(folder, None), Check("run", OK, "there is no run here yet")]
    run = Run(store)
    try:
        latest = run.view.latest()
    except CheckpointError as error:
        return [*_space(folder, None), Check("run", FAIL, error.what, error.hint)]
    made = latest.manifest if latest is not None else None
    # Room is taken for the plain bytes before any of them is compressed.
    space = _space(folder, made.plain_bytes if made is not None else None)
    found = [*space, _newest(run), *_session(run), *_left_over(run)]
    if made is not None and made.is_compressed:
        try:
            load_codec(f"{made.name}, which is compressed,")
        except UsageError as error:
            hint = f"Nothing can be loaded from it here. {error.hint}"
            found.append(Check("compression", FAIL, error.what, hint))
    return found


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=".milepost-doctor-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def _run_probe(probe: Callable[[Path], Check], scratch: Path) -> Check:
    try:
        return probe(scratch)
    except (OSError, CheckpointError) as error:
        name = probe.__name__.strip("_").replace("_", " ")
        return Check(name, FAIL, str(error), "Saves to this place may fail in the same way.")


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _exclusive_create(scratch: Path) -> Check:
    store = LocalStore(scratch)
    store.put_new("once", b"1")
    try:
        store.put_new("once", b"2")
    except ExistsError:
        return Check("exclusive create", OK, "of two writers one wins")
    hint = "Two jobs could overwrite each other's commits. Use another file system."
    return Check("exclusive create", FAIL, "a file was created twice", hint)


def _hard_links(scratch: Path) -> Check:
    (scratch / "a").write_bytes(b"1")
    try:
        os.link(scratch / "a", scratch / "b")
    except OSError as error:
        hint = "Weights that do not change are written again with every save."
        return Check("hard links", WARN, f"refused: {error.strerror}", hint)
    return Check("hard links", OK, "unchanged weights can be shared")


def _symlinks(scratch: Path) -> Check:
    try:
        (scratch / "link").symlink_to("a")
    except OSError as error:
        hint = "The pointer to the newest checkpoint is a text file instead."
        return Check("symlinks", WARN, f"refused: {error.strerror}", hint)
    return Check("symlinks", OK, "latest can be followed")


def _direct_io(scratch: Path) -> Check:
    hint = "Saves go through the page cache: slower, and they push other data out of it."
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return Check("direct i/o", WARN, "not known to this system", hint)
    try:
        descriptor = os.open(scratch / "direct", os.O_WRONLY | os.O_CREAT | flag, 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.write(descriptor, page)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Check("direct i/o", WARN, f"refused: {error.strerror}", hint)
    return Check("direct i/o", OK, "blocks bypass the page cache")


def _fsync(scratch: Path) -> Check:
    seconds = []
    with (scratch / "synced").open("wb", buffering=0) as file:
        for _ in range(_NUM_SYNCS):
            file.write(b"\0" * 4096)
            started_s = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started_s)
    median_s = statistics.median(seconds)
    text = f"{median_s * 1000:.1f} ms, the median of {_NUM_SYNCS}"
    if median_s <= _SLOW_FSYNC_S:
        return Check("fsync", OK, text)
    return Check("fsync", WARN, text, "Every file of a save waits so long; save less often.")


def _clock(scratch: Path) -> Check:
    before_s = time.time()
    (scratch / "now").write_bytes(b"")
    after_s = time.time()
    stamp_s = (scratch / "now").stat().st_mtime
    skew_s = max(before_s - stamp_s, stamp_s - after_s, 0.0)
    if skew_s <= _MAX_SKEW_S:
        return Check("clock", OK, "agrees with that of the file system")
    hint = "Ages are shown wrong, and fresh files may be taken for old ones. Set the clocks."
    return Check("clock", WARN, f"{skew_s:.0f} s away from that of the file system", hint)


def _space(folder: Path | None, newest_bytes: int | None) -> list[Check]:
    """Look at the room on a disk; a bucket has no end."""
    if folder is None:
        return []
    free_bytes = shutil.disk_usage(folder).free
    text = f"{size_text(free_bytes)} free"
    if newest_bytes:
        text += f", the newest checkpoint takes {size_text(newest_bytes)}"
    if newest_bytes and free_bytes < newest_bytes:
        hint = "The next save will fail. Prune, or free some space."
        return [Check("space", FAIL, text, hint)]
    if newest_bytes and free_bytes < 2 * newest_bytes:
        hint = "There is room for one more. Prune, or free some space."
        return [Check("space", WARN, text, hint)]
    return [Check("space", OK, text)]


def _newest(run: Run) -> Check:
    latest = run.latest()
    total = len(run.view.lineage())
    if latest is None:
        return Check("newest", WARN, "no checkpoint counts", "A job would start afresh.")
    report = latest.verify("quick")
    made = age_text(latest.manifest.created_s)
    text = f"{latest.name}, of {count_text(total, 'checkpoint')}, made {made}"
    if report.is_good:
        return Check("newest", OK, f"{text}; records and sizes match")
    hint = "A job goes on from the newest one that is whole. See milepost verify --all."
    return Check("newest", FAIL, f"{text}: {report.problems[0].text}", hint)


def _session(run: Run) -> list[Check]:
    sessions = run.view.sessions
    if not sessions:
        return []
    last: Session = sessions[-1]
    text = f"{last.number} on {last.host}, process {last.pid}, began {age_text(last.started_s)}"
    if last.problem:
        return [Check("session", FAIL, f"{last.number}: {last.problem}", "Restore it from a copy.")]
    if is_provably_dead(last):
        return [Check("session", OK, f"{text}, has ended")]
    return [Check("session", OK, f"{text}, may still be running")]


def _left_over(run: Run) -> list[Check]:
    checks = []
    sessions = {session.number: session for session in run.view.sessions}
    for state, name in ((State.INCOMPLETE, "attempts"), (State.DELETING, "deletions")):
        found = [one for one in run.view.found if one.state is state]
        if not found:
            continue
        owners = [sessions[one.session] for one in found if one.session in sessions]
        is_over = len(owners) == len(found) and all(map(is_provably_dead, owners))
        num_bytes = sum(one.size_bytes for one in found)
        names = ", ".join(one.name for one in found[:5]) + (" ..." if len(found) > 5 else "")
        hint = "The next session of the run removes them."
        if state is State.INCOMPLETE and not is_over:
            hint = "They may be saves that are going on; they are removed once that is ruled out."
        text = f"{len(found)} unfinished: {names} ({size_text(num_bytes)})"
        checks.append(Check(name, WARN, text, hint))
    damaged = [one.name for one in run.view.found if one.state is State.DAMAGED]
    if damaged:
        hint = "They never count. See milepost verify --all."
        checks.append(Check("commits", FAIL, f"cannot be read: {', '.join(damaged[:5])}", hint))
    return checks
