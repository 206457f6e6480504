"""Whether a checkpoint belongs into a run of its own name: what other branches wrote does not.

Two copies of one run that were both trained on have sessions of the same numbers, and which commits
count is told by number: the checkpoint of one would count in the other, as its newest. And a commit
of a session that a run knows nothing of makes it a damaged one. So a checkpoint comes into a run of
the same identity only if that run knows its session, and all that this one goes back to, by the
very same records. Where the checkpoint stands alone there are none to compare with; then what the
commits say of each other must fit.
"""

from __future__ import annotations

from ..checkpoint import Checkpoint, run_store
from ..errors import ExistsError, MissingError, UsageError
from ..format.layout import from_key, session_key
from ..format.manifest import Manifest
from ..runs.folders import is_diagnostic
from ..runs.scan import RunView, scan
from ..runs.sessions import Session, list_sessions, read_run
from ..stores.base import Store
from .claims import Commit, is_committed

__all__ = ["refuse_misplaced"]

_NO_ADDRESSES = ("memory:", "libcloud:")
"""Places that are not opened by their address alone."""

_MAX_RECORD_BYTES = 1024 * 1024


def refuse_misplaced(found: Checkpoint, records: Store, name: str, commit: Commit) -> None:
    """Refuse to copy a checkpoint into a run where it would be taken for something else.

    Args:
        found: The checkpoint.
        records: The run's store.
        name: What it would be called there.
        commit: Its commit.

    Raises:
        ExistsError: It would count twice, or was written on another branch of that run.
        UsageError: The run does not know the session that wrote it.
    """
    manifest = commit.manifest
    if _run_id(records) != manifest.run_id:
        return
    if name != manifest.name:
        raise ExistsError(
            f"{manifest.name} is a checkpoint of the run at {records.url} itself.",
            hint="It keeps its name there; copy it to a place of its own for another one.",
            name=name,
        )
    if is_committed(records, name, commit):
        return
    sessions = {one.number: one for one in list_sessions(records)}
    if not sessions:
        return  # a run that was put together by hand: all that is there counts
    if manifest.session not in sessions or not sessions[manifest.session].is_settled:
        raise UsageError(
            f"The run at {records.url} knows nothing of session {manifest.session}, which wrote "
            f"{manifest.name}.",
            hint="Bring it up to date with milepost sync. Or copy this one to a place of its own.",
            path=records.url,
            session=manifest.session,
        )
    source = _records_of(found)
    if source is None or _run_id(source) != manifest.run_id:
        if not _fits(manifest, scan(records), sessions[manifest.session]):
            _raise_other_branch(manifest, records)
    elif not _are_same(source, records, manifest.session, sessions):
        _raise_other_branch(manifest, records)


def _records_of(found: Checkpoint) -> Store | None:
    """Return the records of the run that a checkpoint is in, or ``None`` if it stands alone."""
    if found.folder:
        return run_store(found.store)
    above, _, name = found.store.url.removeprefix("file://").rpartition("/")
    if not name or not above or above.endswith("/") or above.startswith(_NO_ADDRESSES):
        return None
    return run_store(above)


def _run_id(records: Store) -> str | None:
    try:
        return read_run(records).run_id
    except MissingError:
        pass
    try:
        return scan(records).run.run_id  # as its commits say, where its record was lost
    except MissingError:
        return None


def _are_same(source: Store, target: Store, number: int, known: dict[int, Session]) -> bool:
    """Return whether two runs say the same of a session and of all that it goes back to."""
    while True:
        for key in (session_key(number), from_key(number)):
            if _record(source, key) != _record(target, key):
                return False
        origin = known[number].origin if number in known else None
        if origin is None:
            return True
        number = origin.session


def _record(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key, max_bytes=_MAX_RECORD_BYTES)
    except MissingError:
        return None


def _fits(manifest: Manifest, view: RunView, session: Session) -> bool:
    """Return whether a commit fits between those that a session has left."""
    commits = {
        one.manifest.attempt: one.manifest
        for one in view.found
        if one.manifest is not None
        and one.session == manifest.session
        and one.manifest.run_id == manifest.run_id
        and not is_diagnostic(one.name)
    }
    at = manifest.attempt
    if at in commits:
        return commits[at].write_id == manifest.write_id
    if at == 1:
        is_after = manifest.parent == (session.origin.name if session.origin else None)
    else:
        is_after = at - 1 not in commits or manifest.parent == commits[at - 1].name
    return is_after and (at + 1 not in commits or commits[at + 1].parent == manifest.name)


def _raise_other_branch(manifest: Manifest, records: Store) -> None:
    raise ExistsError(
        f"{manifest.name} was written on another branch of the run at {records.url}: both were "
        f"trained on as session {manifest.session}.",
        safe="Nothing was changed there.",
        hint="Copy it to a place of its own.",
        path=records.url,
        session=manifest.session,
    )
