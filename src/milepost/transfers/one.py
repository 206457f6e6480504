"""Copy one checkpoint to a place of its own, or into a run."""

from __future__ import annotations

import os
from dataclasses import replace

from ..checkpoint import Checkpoint, open_checkpoint, run_store
from ..errors import DamagedError, MissingError, UsageError
from ..format.layout import ATTEMPT, DELETED, HIDDEN, LATEST, MANIFEST
from ..runs.folders import check_folder, file_key
from ..runs.verify import Level
from ..runs.verify import verify as compare
from ..stores.base import Store
from ..stores.url import is_address, open_store, path_at, trimmed
from .branches import refuse_misplaced
from .bring import Progress, Shared, bring
from .claims import Commit, claim_copy, is_committed
from .others import Other, misnamed, send_others
from .reports import CopyReport
from .route import Route, find_route

__all__ = ["beside", "copy_checkpoint", "copy_folder", "read_back"]

_NUM_THREADS = 4
_NUM_STREAMS = 8
"""One stream from or to a service is slower than the line."""

Place = str | os.PathLike[str]


def copy_checkpoint(
    checkpoint: Checkpoint | Place,
    to: Place | Store,
    *,
    verify: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a checkpoint from any place to any other.

    Its files come first, each block compared with its checksum before it is written, and its commit
    last: a copy that was stopped is no checkpoint, and the next try goes on from it. What users
    have put beside its files, and its metadata, are copied too.

    Args:
        checkpoint: A checkpoint, its folder or address, or a run, of which its newest one is taken.
        to: The folder or address of the copy. Where other files are already, and where the name
            ends in a slash, the copy goes below it under the checkpoint's own name.
        verify: Whether to read the copy back and compare every byte.
        num_threads: How many blocks of 8 MiB are under way at once, in as much memory; by default
            4 between folders, and 8 from or to a bucket.
        progress: Called with the bytes of each block, by several threads.

    Raises:
        MissingError: There is no such checkpoint, or a file of it is missing.
        ExistsError: There is something else, or the run there is another branch of its own.
        UsageError: A place without a bucket; or the run there knows nothing of the session that
            wrote it.
        InUseError: Another process is copying there.
        DamagedError: Bytes that do not match their checksum. What was copied before stays for the
            next try; it is no checkpoint.
    """
    found = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    note = progress or (lambda _: None)
    with found.held():
        commit = Commit.read(found.store, found.folder)
        store, folder = _destination(found, to, commit)
        given = (checkpoint if not isinstance(checkpoint, Checkpoint) else found.store, to)
        route = find_route(found.store, store, given=given)
        report = copy_folder(
            route, found.folder, folder, commit, num_threads=num_threads, progress=note
        )
        if not report.is_new:
            send_others(route, beside(found.store, found.folder, folder, commit))
        report = replace(report, skipped=misnamed(found.store, found.folder))
    return read_back(route.target, folder, report, progress=note) if verify else report


def copy_folder(
    route: Route,
    source_folder: str,
    folder: str,
    commit: Commit,
    *,
    shared: Shared | None = None,
    num_threads: int | None = None,
    progress: Progress,
) -> CopyReport:
    """Copy a checkpoint's folder, if it is not there yet."""
    manifest = commit.manifest
    url = f"{route.target.url}/{folder}".rstrip("/")
    if is_committed(route.target, folder, commit):
        return CopyReport(manifest.name, url, is_new=False, num_files=len(manifest.files))
    with claim_copy(route.target, folder, commit) as claim:
        report = bring(
            route,
            source_folder,
            claim,
            shared=shared or Shared(),
            num_threads=num_threads or _threads_for(route),
            progress=progress,
        )
        send_others(route, beside(route.source, source_folder, folder, commit))
        claim.publish()
    return report


def _threads_for(route: Route) -> int:
    is_here = route.source.traits.is_local and route.target.traits.is_local
    return _NUM_THREADS if is_here else _NUM_STREAMS


def read_back(store: Store, folder: str, report: CopyReport, *, progress: Progress) -> CopyReport:
    """Compare every byte of a copy with its checksums.

    Raises:
        DamagedError: One does not match.
    """
    found = compare(store, folder, Level.FULL, progress=progress)
    if not found.is_good:
        raise DamagedError(
            f"The copy at {report.url} is not what was sent: {found.problems[0].text}",
            safe="The source was not touched.",
            hint="Delete the copy, and look what is wrong with the place.",
            path=found.problems[0].path,
        )
    return replace(report, verified_bytes=found.checked_bytes)


def beside(source: Store, source_folder: str, folder: str, commit: Commit) -> list[Other]:
    """Return what users have put into a checkpoint's folder, their metadata included."""
    known = {ATTEMPT, DELETED, MANIFEST, *(entry.path for entry in commit.manifest.files)}
    start = len(source_folder) + 1 if source_folder else 0
    return [
        Other(entry, file_key(folder, entry.key[start:]))
        for entry in source.list(source_folder)
        if entry.key[start:] not in known
    ]


def _destination(found: Checkpoint, to: Place | Store, commit: Commit) -> tuple[Store, str]:
    """Return where the copy goes: a store, and the folder in it."""
    if isinstance(to, Store):
        return (to, "") if _is_free(to) else _below(found, to, commit)
    text = os.fspath(to)
    is_below = text.endswith("/")
    text = trimmed(text) if is_address(text) else str(path_at(text).absolute())
    store = open_store(text)
    if is_below or not _is_free(store):
        return _below(found, store, commit)
    above, _, name = text.rpartition("/")
    if above and not above.endswith(":/") and not above.endswith("//"):
        _check_member(found, above, name, commit)
    return store, ""


def _below(found: Checkpoint, store: Store, commit: Commit) -> tuple[Store, str]:
    """Return the folder below a place; in a run, that of the checkpoint's own name."""
    records = run_store(store)
    own = commit.manifest.name
    if records is None:
        _refuse_checkpoint(store)
        name = own if found.name == LATEST else found.name
        return store, check_folder(name.rpartition("/")[2])
    if records.url.endswith(f"/{HIDDEN}"):
        raise UsageError(
            f"The run at {store.url} shows single files.",
            hint="Copy the checkpoint to a place of its own, or the whole run with milepost sync.",
        )
    name = check_folder(own.rpartition("/")[2])
    refuse_misplaced(found, records, name, commit)
    return records, name


def _is_free(store: Store) -> bool:
    """Return whether a place is empty, or the folder of one checkpoint, begun or whole.

    Whether that is this one is seen when it is claimed.
    """
    if run_store(store) is not None:
        return False
    if any(_is_there(store, record) for record in (MANIFEST, ATTEMPT)):
        return True
    return next(iter(store.list()), None) is None


def _check_member(found: Checkpoint, above: str, name: str, commit: Commit) -> None:
    """Refuse a name in a run that is none, and a checkpoint that is not for this run."""
    records = run_store(above)
    if records is None:
        _refuse_checkpoint(open_store(above))
        return
    if name == LATEST or records.url.endswith(f"/{HIDDEN}"):
        raise UsageError(
            f"{above}/{name} is no place for a checkpoint.",
            hint=f"Name the run: {above}/",
        )
    check_folder(name)
    refuse_misplaced(found, records, name, commit)


def _refuse_checkpoint(store: Store) -> None:
    """Refuse to put a checkpoint among the files of another one, begun or whole."""
    if any(_is_there(store, record) for record in (MANIFEST, ATTEMPT)):
        raise UsageError(
            f"{store.url} is the folder of a checkpoint.",
            safe="It was not touched.",
            hint="Name another place for the copy.",
            path=store.url,
        )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except MissingError:
        return False
    return True
