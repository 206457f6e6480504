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

An attempt that failed is given up by ``abandon``:

    step                               in the folder                      a reader sees
    rename attempt.json, if it is      deleted.json, parts                deleting, not counted
    that of the attempt, to deleted.json
    delete every part                  deleted.json, some parts           deleting
    delete deleted.json                nothing                            nothing

Whoever is late, because a newer session has swept the attempt and taken the folder for one of its
own, finds another claim there and touches nothing; see ``runs/erase.py``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
from ..format.canonical import dump_record
from ..format.layout import ATTEMPT, DELETED, LATEST, MANIFEST, session_key
from ..format.manifest import FORMAT_VERSION, Manifest
from ..stores.base import Store
from .erase import condemn, erase, read_write_id
from .folders import candidates, check_folder, file_key
from .manifests import read_manifest
from .sessions import Session, check_not_fenced, read_run

__all__ = ["Claim", "abandon", "adopt", "claim", "point_latest", "publish", "withdraw"]


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
    _check_home(store, session)
    fields = _claim_fields(session, attempt, clock())
    write_id = fields["write_id"]
    tried = candidates(name, session.number, attempt)
    for folder in tried:
        if next(iter(store.list(folder)), None) is not None:
            continue
        claimed = file_key(folder, ATTEMPT)
        if not _put_claim(store, folder, fields):
            continue
        try:
            is_shared = any(entry.key != claimed for entry in store.list(folder))
        except CheckpointError:
            store.delete(claimed)  # nobody would know that it was ours
            raise
        if is_shared:
            # Since the first look another attempt came and is just being removed again.
            store.delete(claimed)
            continue
        return Claim(folder, session.number, attempt, write_id)
    raise ExistsError(
        f"The folders {', '.join(tried)} at {store.url} are all taken.",
        safe="They were not touched.",
        hint="Save under another name.",
        path=store.url,
        name=name,
    )


def adopt(
    store: Store,
    session: Session,
    folder: str,
    attempt: int,
    *,
    clock: Callable[[], float] = time.time,
) -> Claim:
    """Take a folder with files that somebody else has written, to commit them where they are.

    Should it never be committed, the claim goes and the files stay: they are not ours.

    Args:
        store: The run's store.
        session: The settled session.
        folder: The folder.
        attempt: Number of the attempt; grows with every save of the session.
        clock: Returns the seconds since 1970.

    Raises:
        UsageError: The name cannot name a checkpoint, or the session is not settled.
        ExistsError: The folder holds a checkpoint, or belongs to another attempt.
    """
    check_folder(folder)
    _require_settled(session)
    _check_home(store, session)
    fields = {**_claim_fields(session, attempt, clock()), "adopted": True}
    held = Claim(folder, session.number, attempt, fields["write_id"])
    taken = ExistsError(
        f"{folder} at {store.url} is a checkpoint already, or an attempt at one.",
        safe="It was not touched.",
        hint="Write into a folder with a name of its own.",
        path=store.url,
        name=folder,
    )
    if any(_is_there(store, folder, file) for file in (MANIFEST, DELETED)):
        raise taken
    if not _put_claim(store, folder, fields):
        raise taken
    return held


def _put_claim(store: Store, folder: str, fields: Mapping[str, Any]) -> bool:
    """Create a claim; return ``False`` if there is another's.

    An answer that got lost is replaced by a look at what is there: a claim that nobody knows to be
    his would stand until the process has ended.
    """
    try:
        store.put_new(file_key(folder, ATTEMPT), dump_record(fields))
    except ExistsError:
        return bool(_claimed_by(store, folder) == fields["write_id"])
    except (StorageError, DeadlineError):
        if _claimed_by(store, folder) != fields["write_id"]:
            raise
    return True


def _claim_fields(session: Session, attempt: int, started_s: float) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "session": session.number,
        "attempt": attempt,
        "write_id": secrets.token_hex(16),
        "host": session.host,
        "pid": session.pid,
        "started_s": started_s,
    }


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
    _check_home(store, session)
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


def abandon(store: Store, held: Claim | str) -> list[str]:
    """Delete the files of an attempt that will never be published.

    Args:
        store: The run's store.
        held: The claim. If the folder belongs to another attempt by now, nothing is touched. A
            folder alone stands for whatever claim is in it: only for callers who know that
            there can be no other.

    Returns:
        The keys that could not be deleted. The folder stays marked as long as there are any, so
        that a later session tries again.

    Raises:
        UsageError: There is a commit in the folder.
    """
    if isinstance(held, Claim):
        return give_up(store, held.folder, write_id=held.write_id)
    for file in (ATTEMPT, DELETED):
        try:
            write_id = read_write_id(store, file_key(check_folder(held), file))
        except MissingError:
            continue
        return give_up(store, held, write_id=write_id)
    return []


def give_up(store: Store, folder: str, *, write_id: str | None) -> list[str]:
    """Delete the files of one attempt; see :func:`abandon`.

    Args:
        store: The run's store.
        folder: The folder.
        write_id: The attempt; ``None`` for one whose claim cannot be read.
    """
    claimed, deleted = (file_key(check_folder(folder), file) for file in (ATTEMPT, DELETED))
    # In this order: a newer attempt has another claim before it has a manifest.
    if _is_there(store, folder, MANIFEST) and _write_id_of(store, claimed) == (write_id,):
        raise UsageError(
            f"{folder} holds a committed checkpoint and is not an attempt to abandon.",
            hint="Delete the checkpoint by its name if you mean to.",
            name=folder,
        )
    try:
        is_marked = condemn(store, claimed, write_id=write_id)
    except ExistsError:  # a stop in the middle of a rename in two steps has left both
        is_marked = False
    # It may have been given up before, and not wholly removed.
    if not is_marked and _write_id_of(store, deleted) != (write_id,):
        return []
    failed = erase(store, folder)
    return list(dict.fromkeys((*failed, deleted))) if failed else []


def withdraw(store: Store, held: Claim, paths: Iterable[str]) -> list[str]:
    """Delete what one of several writers wrote too late: the attempt was given up meanwhile.

    While the claim is there, whoever made it removes everything. Once it is gone nobody can take
    the folder, which is not empty; so what is deleted here belongs to no other attempt.

    Args:
        store: The run's store.
        held: The claim of the attempt.
        paths: What this writer wrote, relative to the folder.

    Returns:
        The keys that were deleted.
    """
    if _claimed_by(store, held.folder) is not None or _is_there(store, held.folder, MANIFEST):
        return []
    keys = [file_key(held.folder, path) for path in paths]
    for key in keys:
        store.delete(key)
    return keys


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


def _check_home(store: Store, session: Session) -> None:
    """Refuse to write where the run is no more: its folder was moved, deleted or put elsewhere.

    A checkpoint there would be acknowledged, and no resume would ever find it.
    """
    try:
        is_home = read_run(store).run_id == session.run_id
        store.head(session_key(session.number))
    except MissingError:
        is_home = False
    if not is_home:
        raise IncompleteError(
            f"The run that session {session.number} writes to is no longer at {store.url}.",
            safe="Checkpoints that were committed are where the folder was taken to.",
            hint="Put the folder back, or stop and resume from where it is now.",
            path=store.url,
        )


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


def _write_id_of(store: Store, key: str) -> tuple[str | None] | None:
    """Return the write id of a record, in brackets, since a torn one has none; or ``None``."""
    try:
        return (read_write_id(store, key),)
    except MissingError:
        return None


def _is_there(store: Store, folder: str, file: str) -> bool:
    try:
        store.head(file_key(folder, file))
    except MissingError:
        return False
    return True


def _claimed_by(store: Store, folder: str) -> str | None:
    try:
        return read_write_id(store, file_key(folder, ATTEMPT))
    except MissingError:
        return None
