"""The commit: claim a folder, write into it, publish the manifest.

A checkpoint's folder goes through these states; the right column is what a stop leaves behind.

    step                               in the folder                      a reader sees
    claim: create attempt.json, excl.  attempt.json                       incomplete, not counted
    parts written and synced           attempt.json, parts                incomplete, not counted
    publish: check sizes, sync folder  the same, names durable            incomplete, not counted
    publish: create manifest, excl.    attempt.json, parts, manifest      committed
    publish: no newer session          the same                           committed, acknowledged
    publish: a newer session           the same                           see below

The manifest is created in one step and exclusively, when everything it names is durable: so a
reader sees a whole checkpoint or none, and of two writers one wins. A stop before it leaves an
incomplete folder that the next session sweeps. A stop after it leaves a checkpoint that counts
although nobody was told; the next session goes on from it.

When a newer session took over, the manifest may already be there. It is not acknowledged. If the
new session saw it before it chose what to go on from, it counts; otherwise it is off the lineage
and listed as orphaned. Either way it is whole, and the fenced writer deletes nothing.

An attempt that failed is removed by ``abandon``: parts first, ``attempt.json`` last, so that a stop
in between leaves an incomplete folder and not files that nobody knows.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import (
    CheckpointError,
    DamagedError,
    DeadlineError,
    ExistsError,
    FormatError,
    IncompleteError,
    MissingError,
    StorageError,
    UsageError,
)
from ..format.canonical import dump_record, load_record
from ..format.layout import ATTEMPT, LATEST, MANIFEST
from ..format.manifest import FORMAT_VERSION, Manifest
from ..stores.base import Store
from .folders import candidates, check_folder, file_key
from .scan import read_manifest
from .sessions import Session, check_not_fenced

__all__ = ["Claim", "abandon", "claim", "point_latest", "publish"]

_MAX_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder that one attempt may write into.

    Attributes:
        folder: The folder; the manifest's ``name``.
        session: Number of the session.
        attempt: Number of the attempt.
        write_id: Random identity of the attempt; the manifest's ``write_id``.
    """

    folder: str
    session: int
    attempt: int
    write_id: str


def claim(
    store: Store,
    session: Session,
    name: str,
    attempt: int,
    *,
    clock: Callable[[], float] = time.time,
) -> Claim:
    """Take a folder for one attempt at saving a checkpoint.

    The folder is ``name`` if nothing is there, else ``name-s<session>``, else
    ``name-s<session>a<attempt>``.

    Args:
        store: The run's store.
        session: The settled session.
        name: The wanted name; ``nan/<name>`` for a diagnostic checkpoint.
        attempt: Number of the attempt; grows with every save of the session.
        clock: Returns the seconds since 1970.

    Raises:
        UsageError: The name cannot name a checkpoint, or the session is not settled.
        ExistsError: All three folders are taken.
    """
    check_folder(name)
    _require_settled(session)
    write_id = secrets.token_hex(16)
    fields = {
        "format": FORMAT_VERSION,
        "session": session.number,
        "attempt": attempt,
        "write_id": write_id,
        "host": session.host,
        "pid": session.pid,
        "started_s": clock(),
    }
    tried = candidates(name, session.number, attempt)
    for folder in tried:
        if next(iter(store.list(folder)), None) is not None:
            continue
        try:
            store.put_new(file_key(folder, ATTEMPT), dump_record(fields))
        except ExistsError:
            if _claimed_by(store, folder) != write_id:
                continue
        return Claim(folder, session.number, attempt, write_id)
    raise ExistsError(
        f"The folders {', '.join(tried)} at {store.url} are all taken.",
        safe="They were not touched.",
        hint="Save under another name.",
        path=store.url,
        name=name,
    )


def publish(store: Store, session: Session, manifest: Manifest) -> None:
    """Commit a checkpoint whose files are all written and durable.

    Returning is the acknowledgement: the checkpoint survives a power cut and counts. After any
    error it must be taken as not saved; after ``FencedError`` and ``StorageError`` the manifest may
    be there all the same, and whether it counts then is seen by a new scan.

    Args:
        store: The run's store.
        session: The settled session that writes.
        manifest: The commit. Its ``name`` and ``write_id`` are those of the claim.

    Raises:
        UsageError: The manifest belongs to another session or run.
        IncompleteError: A file, or the claim of the folder, is missing.
        DamagedError: A file has another size than the manifest says.
        ExistsError: Another attempt has committed in this folder.
        FencedError: A newer session owns the run.
    """
    _require_settled(session)
    if (manifest.session, manifest.run_id) != (session.number, session.run_id):
        raise UsageError(f"The manifest of {manifest.name} is not one of this session.")
    folder = check_folder(manifest.name)
    check_not_fenced(store, session)
    if _claimed_by(store, folder) != manifest.write_id:
        raise IncompleteError(
            f"The folder {folder} at {store.url} is no longer claimed by this attempt.",
            safe="Earlier checkpoints are untouched.",
            hint="Save again.",
            path=folder,
        )
    _check_files(store, folder, manifest)
    store.sync_folder(folder)
    _put_manifest(store, folder, manifest)
    check_not_fenced(store, session)


def abandon(store: Store, claim_folder: str) -> list[str]:
    """Delete the files of an attempt that will never be published.

    Returns:
        The keys that could not be deleted. The claim stays as long as one of them does, so that a
        later session tries again.

    Raises:
        UsageError: There is a commit in the folder.
    """
    check_folder(claim_folder)
    claimed = file_key(claim_folder, ATTEMPT)
    keys = [entry.key for entry in store.list(claim_folder)]
    if file_key(claim_folder, MANIFEST) in keys:
        raise UsageError(
            f"{claim_folder} holds a committed checkpoint and is not an attempt to abandon.",
            hint="Delete the checkpoint by its name if you mean to.",
            name=claim_folder,
        )
    left = [key for key in keys if key != claimed and not _delete(store, key)]
    if claimed in keys and (left or not _delete(store, claimed)):
        left.append(claimed)
    return left


def point_latest(store: Store, name: str) -> CheckpointError | None:
    """Name the newest checkpoint for people, in ``latest``. Nothing else ever reads it.

    Returns:
        What went wrong, for the caller to log: no save fails because of a hint.
    """
    try:
        store.point(LATEST, name)
    except CheckpointError as error:
        return error
    return None


def _require_settled(session: Session) -> None:
    if not session.is_settled:
        raise UsageError(
            f"Session {session.number} has not recorded what it goes on from.",
            hint="Call record_origin first and use the session that it returns.",
        )


def _check_files(store: Store, folder: str, manifest: Manifest) -> None:
    for entry in manifest.files:
        key = file_key(folder, entry.path)
        try:
            found = store.head(key).size_bytes
        except MissingError as error:
            raise IncompleteError(
                f"{key} is missing, so {folder} was not committed.",
                safe="Earlier checkpoints are untouched.",
                path=key,
            ) from error
        if found != entry.size_bytes:
            raise DamagedError(
                f"{key} has {found:,} bytes and not {entry.size_bytes:,}, so {folder} was not "
                "committed.",
                safe="Earlier checkpoints are untouched.",
                path=key,
                expected=entry.size_bytes,
                found=found,
            )


def _put_manifest(store: Store, folder: str, manifest: Manifest) -> None:
    """Create the manifest; an answer that got lost is replaced by a look at what is there."""
    try:
        store.put_new(file_key(folder, MANIFEST), manifest.to_bytes())
    except ExistsError:
        if not _is_ours(store, folder, manifest):
            raise
    except (StorageError, DeadlineError) as error:
        # After a failed sync the manifest may be there and yet be lost in a power cut: that must
        # not be acknowledged.
        if error.facts.get("operation") == "fsync" or not _is_ours(store, folder, manifest):
            raise


def _is_ours(store: Store, folder: str, manifest: Manifest) -> bool:
    try:
        return read_manifest(store, folder).write_id == manifest.write_id
    except (MissingError, FormatError):
        return False


def _claimed_by(store: Store, folder: str) -> str | None:
    key = file_key(folder, ATTEMPT)
    try:
        fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    except (MissingError, FormatError):
        return None
    write_id = fields.get("write_id")
    return write_id if isinstance(write_id, str) else None


def _delete(store: Store, key: str) -> bool:
    try:
        store.delete(key)
    except CheckpointError:
        return False
    return True
