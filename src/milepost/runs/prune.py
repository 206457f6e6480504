"""Retention and sweeping: decide, unpublish, delete; and finish what others began.

A checkpoint is deleted in this order, and a stop in between leaves what the right column says:

    step                                    in the folder                    a reader sees
    rename manifest.json to deleted.json    deleted.json, parts, attempt     deleting, not counted
    look whether it is pinned by now        the same                         deleting
    delete every file of the manifest       deleted.json, some parts, ...    deleting
    sync the folder                         deleted.json, attempt.json       deleting
    delete attempt.json                     deleted.json                     deleting
    delete deleted.json                     nothing                          nothing

The intent stands in the store from the first step to the last, so that any later session finishes
the work without knowing who began it. At no moment is there a commit whose files are missing.

What is never deleted: the newest checkpoint on the lineage, pinned ones, those whose folder
somebody reads (see ``runs/readers.py``), those that the caller protects, orphaned and diagnostic
ones, and anything that Milepost did not make: a file of someone else's in the folder stays, and the
folder with it, which then is no checkpoint. Before the first deletion the newest checkpoint is
looked at; if it is not whole, the newest whole one stays too.

A pin may come between the last look at it and the rename. So there is another look after the
rename, and after a stop whoever finishes the deletion takes it: where there is a pin and every file
is still in place, ``deleted.json`` becomes the manifest again. A pin that comes later finds no
manifest, and is not reported as set. Where files are gone already, the deletion goes on: only then
no pin was reported, or it was set on purpose over a deletion by force. Of two that finish the same
deletion one may look before the pin came and the other after; then ``erase`` sees before its next
file that ``deleted.json`` is gone, and ends, and the one that put the manifest back looks once more
whether all is there. What remains is a stop between one look of ``erase`` and the deletion after
it.

What a decision was made from may be out of date when it is carried out, by a moment or by an hour.
So with each deletion it is asked again, of the store and not of the view, whether a newer session
owns the run (once, before the first), whether the checkpoint is pinned by now, and whether the
commit in the folder is still that of the attempt that was meant. A session that made the decision
from its own look, as it does after each save, needs no second look at the whole run: the newest
checkpoint can only have changed by its own doing, or by that of a newer session.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..errors import (
    CheckpointError,
    ExistsError,
    IncompleteError,
    MissingError,
    UsageError,
)
from ..format.layout import ATTEMPT, DELETED, MANIFEST, session_key
from ..stores.base import Store
from .cut_off import sweep_uploads, tell_of_unseen
from .erase import TEMPORARY_MAX_AGE_S, condemn, erase, read_write_id
from .folders import check_folder, file_key
from .identity import Identity
from .keep import KeepPolicy, Record, keep_any
from .manifests import ManifestCache
from .pins import is_pinned
from .publish import give_up
from .putting_back import put_back
from .readers import shut_out
from .scan import Found, RunView, State, scan
from .sessions import Session, check_not_fenced, is_provably_dead
from .validations import delete_validation, list_validations, validation_id
from .verify import newest_good

__all__ = ["Decision", "PruneReport", "decide", "delete_checkpoint", "prune", "sweep"]

_log = logging.getLogger("milepost")

ATTEMPT_MAX_AGE_S = 24 * 3600.0
"""An attempt that nothing was written to for so long has no writer any more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What retention makes of one checkpoint.

    Attributes:
        name: The checkpoint.
        keep: Whether it stays.
        reason: Why, in plain words.
        has_begun: Whether its deletion has begun: it is no checkpoint, and ``prune`` finishes it.
        write_id: The attempt that wrote it, so that a newer one of the same name is left alone;
            ``None`` for whichever there is.
    """

    name: str
    keep: bool
    reason: str
    has_begun: bool = False
    write_id: str | None = None


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a round of retention did.

    Attributes:
        deleted: Names that are gone.
        freed_bytes: Sum of the sizes of their files. Bytes shared with others stay on the disk.
        errors: Names that could not be deleted, or were spared after all, with the reason.
    """

    deleted: tuple[str, ...] = ()
    freed_bytes: int = 0
    errors: dict[str, CheckpointError] = field(default_factory=dict)


def decide(
    view: RunView,
    policies: Sequence[KeepPolicy],
    *,
    protect: Collection[str] = (),
    pending: Collection[str] = (),
) -> list[Decision]:
    """Say for every folder of a run whether it stays, and why.

    Only checkpoints on the lineage are ever given up.

    Args:
        view: The run.
        policies: What at least one of them keeps, stays. Without any, everything does.
        protect: Names in use: being uploaded, read, or resumed from.
        pending: Names whose validation is not finished, beside those that the run itself says so
            of: neither ranked nor deleted.
    """
    pending = {*pending, *(one.name for one in view.found if one.is_pending_validation)}
    lineage = view.lineage()
    records = [
        Record(
            found.name,
            order,
            found.manifest.created_s,
            found.manifest.time,
            found.metrics,
            is_pending_validation=found.name in pending,
        )
        for order, found in enumerate(lineage)
        if found.manifest is not None
    ]
    kept = keep_any(policies, records)
    latest = lineage[-1].name if lineage else ""
    decisions = []
    for found in view.found:
        reasons = []
        if found.state is not State.COMMITTED:
            reasons.append(f"{found.state}: not counted")
        elif found.name == latest:
            reasons.append("the newest")
        if found.is_pinned:
            reasons.append("pinned")
        if found.name in protect:
            reasons.append("in use")
        if found.name in pending:
            reasons.append("waits for its validation")
        if found.name in kept:
            reasons.append(kept[found.name])
        if not policies and not reasons:
            reasons.append("there is no policy")
        reason = "; ".join(reasons) or "kept by no policy"
        has_begun = found.state is State.DELETING
        decisions.append(Decision(found.name, bool(reasons), reason, has_begun, found.write_id))
    return decisions


def prune(
    store: Store,
    decisions: Sequence[Decision],
    *,
    session: Session | None = None,
    view: RunView | None = None,
) -> PruneReport:
    """Delete what was given up, after looking again that it may go.

    One that cannot be deleted does not stop the others. Deletions that others began are finished.

    Args:
        store: The run's store.
        decisions: From :func:`decide`.
        session: The session that deletes, if it is one; a fenced one must not.
        view: What the decisions were made from, if the session itself looked just now: it is not
            looked at the run again then. By default it is.

    Raises:
        FencedError: A newer session owns the run. Nothing was deleted.
    """
    victims = {decision.name: decision.write_id for decision in decisions if not decision.keep}
    if not victims and not any(decision.has_begun for decision in decisions):
        return PruneReport()
    if session is not None:
        check_not_fenced(store, session)
    view = view or scan(store, ManifestCache())  # see runs/survey.py: who deletes looks closely
    spared = _must_stay(store, view) if victims else {}
    deleted: list[str] = []
    errors: dict[str, CheckpointError] = {}
    freed_bytes = 0
    for found in view.found:
        name = found.name
        has_begun = found.state is State.DELETING
        if not has_begun and (found.state is not State.COMMITTED or name not in victims):
            continue
        if not has_begun and victims[name] not in (None, found.write_id):
            continue  # another one by now
        if not has_begun and name in spared:
            errors[name] = UsageError(f"{name} was not deleted: it is {spared[name]}.", name=name)
            continue
        try:
            if has_begun:
                _delete_rest(store, name)
            elif not _delete(store, name, write_id=found.write_id):
                continue  # another process deleted it, and perhaps made a new one of that name
        except CheckpointError as error:
            errors[name] = error
            continue
        deleted.append(name)
        freed_bytes += found.size_bytes
    return PruneReport(tuple(deleted), freed_bytes, errors)


def delete_checkpoint(store: Store, name: str, *, force: bool = False) -> None:
    """Delete one checkpoint; one that is half deleted, or gone, is no error.

    Files in its folder that Milepost did not make stay.

    Args:
        store: The run's store.
        name: The checkpoint's folder.
        force: Delete it although it is pinned.

    Raises:
        UsageError: It is pinned, perhaps since a moment ago.
        InUseError: It is being read.
        IncompleteError: The folder is an attempt that was never committed.
    """
    check_folder(name)
    _refuse_pinned(store, name, force=force)
    try:
        write_id = read_write_id(store, file_key(name, MANIFEST))
    except MissingError:
        keys = {entry.key for entry in store.list(name)}
        if file_key(name, DELETED) in keys:
            _delete_rest(store, name, force=force)
        elif file_key(name, ATTEMPT) in keys:
            raise IncompleteError(
                f"{name} holds no checkpoint, but files of an attempt at one.",
                hint="They are swept once it is certain that their writer has ended.",
                name=name,
            ) from None
        return
    _delete(store, name, write_id=write_id, force=force)


def sweep(
    store: Store,
    session: Session,
    *,
    own_attempts: Collection[str] = (),
    identity: Identity | None = None,
    cache: ManifestCache | None = None,
) -> list[str]:
    """Finish deletions and remove attempts that nobody will finish.

    Call it after :func:`~milepost.runs.record_origin`. An attempt of another session goes only if
    it is certain that its process has ended, or if nothing was written to it for 24 hours by the
    clock of the store.

    Args:
        store: The run's store.
        session: The session that sweeps.
        own_attempts: Folders that this session is writing into now.
        identity: Who sweeps; the calling process by default.
        cache: What the caller remembers of the run.

    Returns:
        The folders and temporary files that are gone.

    Raises:
        FencedError: A newer session owns the run. Nothing was deleted.
        CheckpointError: The first of the deletions that failed; the others were tried.
    """
    check_not_fenced(store, session)
    # Before the look at the run: whatever is asked about a checkpoint is asked after its commit.
    asked = list_validations(store)
    view = scan(store, cache or ManifestCache())
    errors: list[CheckpointError] = []
    removed: list[str] = []
    # Before the attempts: their claims tell whose the uploads are.
    errors += sweep_uploads(store, view, session, own_attempts=own_attempts, identity=identity)
    for found in view.found:
        is_attempt = found.state is State.INCOMPLETE and found.name not in own_attempts
        try:
            if found.state is State.DELETING:
                if not _finish_deletion(store, found.name):
                    continue
            elif is_attempt and _is_over(store, view, found, session, identity):
                _give_up_wholly(store, found)
                tell_of_unseen(store, found.name)
            else:
                continue
            removed.append(found.name)
        except CheckpointError as error:
            errors.append(error)
    _forget_validations(store, view, asked, errors)
    hook = getattr(store, "sweep_temporary", None)
    if callable(hook):
        try:
            removed += hook(TEMPORARY_MAX_AGE_S)
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return removed


def _must_stay(store: Store, view: RunView) -> dict[str, str]:
    """Return what stays whatever was decided before: the newest, and the newest whole one."""
    latest = view.latest()
    if latest is None:
        return {}
    stays = {latest.name: "the newest checkpoint"}
    good, _ = newest_good(store, view)
    if good is None:
        reason = "one of several that are all damaged"
        return {found.name: reason for found in view.lineage()}
    if good.name != latest.name:
        stays[good.name] = "the newest checkpoint that is whole"
    return stays


def _refuse_pinned(store: Store, name: str, *, force: bool) -> None:
    if not force and is_pinned(store, name):
        raise _pinned(name)


def _pinned(name: str) -> UsageError:
    return UsageError(f"{name} is pinned and was not deleted.", hint="Unpin it first.", name=name)


def _delete(store: Store, name: str, *, write_id: str | None, force: bool = False) -> bool:
    """Delete the checkpoint of one attempt; return ``False`` if it is no longer in the folder."""
    _refuse_pinned(store, name, force=force)
    try:
        with shut_out(store, name):
            is_marked = condemn(store, file_key(name, MANIFEST), write_id=write_id)
    except MissingError:
        return False  # gone, or another process is deleting it
    except ExistsError:
        # A stop in the middle of a rename in two steps has left both, and what follows removes
        # the manifest first.
        is_marked = True
    if is_marked:
        _delete_rest(store, name, force=force)
    return is_marked


def _delete_rest(store: Store, name: str, *, force: bool = False) -> None:
    if not _finish_deletion(store, name, force=force):
        raise _pinned(name)


def _finish_deletion(store: Store, name: str, *, force: bool = False) -> bool:
    """Remove what is left of a checkpoint; return ``False`` if it was put back for a pin."""
    if not force and is_pinned(store, name) and put_back(store, name):
        _log.warning("%s is pinned: its deletion, which had only begun, was taken back.", name)
        return False
    try:
        write_id = read_write_id(store, file_key(name, DELETED))
    except MissingError:
        write_id = None
    if write_id is not None:
        delete_validation(store, name, write_id)
    failed = erase(store, name)
    if failed:
        raise next(iter(failed.values()))
    return True


def _forget_validations(
    store: Store,
    view: RunView,
    asked: Collection[tuple[str, str]],
    errors: list[CheckpointError],
) -> None:
    """Delete the records of checkpoints that are gone: a verdict may come after the deletion."""
    there = {(one.name, validation_id(one.write_id)) for one in view.found if one.write_id}
    unknown = {one.name for one in view.found if not one.write_id}
    for name, number_id in asked:
        if (name, number_id) in there or name in unknown:
            continue
        try:
            delete_validation(store, name, number_id)
        except CheckpointError as error:
            errors.append(error)


def _give_up_wholly(store: Store, found: Found) -> None:
    left = give_up(store, found.name, write_id=found.write_id)
    if left:
        raise IncompleteError(
            f"{len(left)} files of the attempt in {found.name} could not be deleted.",
            hint="Check the owner and the mode of the folder.",
            name=found.name,
            files=left,
        )


def _is_over(
    store: Store, view: RunView, found: Found, session: Session, identity: Identity | None
) -> bool:
    """Return whether nobody will finish an attempt."""
    if found.session == session.number:
        return True
    others = [one for one in view.sessions if one.number != session.number]
    if found.session is not None:
        others = [one for one in others if one.number == found.session]
    # A claim that cannot be read may be any session's: all of them must have ended.
    is_known = bool(others) or found.session is None
    if is_known and all(is_provably_dead(one, identity) for one in others):
        return True
    # Both times are by the clock of the store, whatever the clocks of the writers say.
    now_s = store.head(session_key(session.number)).modified_s
    return now_s - found.modified_s >= ATTEMPT_MAX_AGE_S
