"""Retention and sweeping: decide, unpublish, delete; and finish what others began.

A checkpoint is deleted in this order, and a stop in between leaves what the right column says:

    step                                    in the folder                    a reader sees
    rename manifest.json to deleted.json    deleted.json, parts, attempt     deleting, not counted
    delete every part                       deleted.json, some parts, ...    deleting
    sync the folder                         deleted.json, attempt.json       deleting
    delete attempt.json                     deleted.json                     deleting
    delete deleted.json                     nothing                          nothing

The intent stands in the store from the first step to the last, so that any later session finishes
the work without knowing who began it. At no moment is there a commit whose files are missing.

What is never deleted: the newest checkpoint on the lineage, pinned ones, those that the caller
protects, orphaned and diagnostic ones, and anything that Milepost did not make. Before the first
deletion the newest checkpoint is looked at; if it is not whole, the newest whole one stays too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ..errors import (
    CheckpointError,
    ExistsError,
    IncompleteError,
    MissingError,
    UsageError,
)
from ..format.layout import ATTEMPT, DELETED, MANIFEST
from ..stores.base import Store
from .folders import check_folder, file_key
from .identity import Identity
from .keep import KeepPolicy, Record, keep_any
from .pins import is_pinned
from .publish import abandon
from .scan import Found, RunView, State, scan
from .sessions import Session, check_not_fenced, is_provably_dead
from .verify import newest_good

__all__ = ["Decision", "PruneReport", "decide", "delete_checkpoint", "prune", "sweep"]

TEMPORARY_MAX_AGE_S = 3600.0
"""Temporary files of a store that are older than this have no writer any more."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What retention makes of one checkpoint.

    Attributes:
        name: The checkpoint.
        keep: Whether it stays.
        reason: Why, in plain words.
    """

    name: str
    keep: bool
    reason: str


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
        pending: Names whose validation is not finished: neither ranked nor deleted.
    """
    lineage = view.lineage()
    records = [
        Record(
            found.name,
            order,
            found.manifest.created_s,
            found.manifest.time,
            found.manifest.metrics,
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
        decisions.append(Decision(found.name, bool(reasons), reason))
    return decisions


def prune(
    store: Store, decisions: Sequence[Decision], *, session: Session | None = None
) -> PruneReport:
    """Delete what was given up, after looking again that it may go.

    One that cannot be deleted does not stop the others.

    Args:
        store: The run's store.
        decisions: From :func:`decide`.
        session: The session that deletes, if it is one; a fenced one must not.

    Raises:
        FencedError: A newer session owns the run. Nothing was deleted.
    """
    victims = [decision.name for decision in decisions if not decision.keep]
    if not victims:
        return PruneReport()
    if session is not None:
        check_not_fenced(store, session)
    view = scan(store)
    spared = _must_stay(store, view)
    by_name = {found.name: found for found in view.found}
    deleted: list[str] = []
    errors: dict[str, CheckpointError] = {}
    freed_bytes = 0
    for name in victims:
        found = by_name.get(name)
        if found is None or found.state not in (State.COMMITTED, State.DELETING):
            continue  # another process deleted it, or it went off the lineage since
        if name in spared:
            errors[name] = UsageError(f"{name} was not deleted: it is {spared[name]}.", name=name)
            continue
        try:
            delete_checkpoint(store, name)
        except CheckpointError as error:
            errors[name] = error
            continue
        deleted.append(name)
        freed_bytes += found.size_bytes
    return PruneReport(tuple(deleted), freed_bytes, errors)


def delete_checkpoint(store: Store, name: str, *, force: bool = False) -> None:
    """Delete one checkpoint; one that is half deleted, or gone, is no error.

    Args:
        store: The run's store.
        name: The checkpoint's folder.
        force: Delete it although it is pinned.

    Raises:
        UsageError: It is pinned.
        IncompleteError: The folder is an attempt that was never committed.
    """
    check_folder(name)
    manifest, deleted = file_key(name, MANIFEST), file_key(name, DELETED)
    if not force and is_pinned(store, name):
        raise UsageError(
            f"{name} is pinned and was not deleted.", hint="Unpin it first.", name=name
        )
    try:
        store.rename(manifest, deleted)
    except ExistsError:
        # A stop in the middle of a rename in two steps has left both.
        store.delete(manifest)
    except MissingError:
        keys = {entry.key for entry in store.list(name)}
        if not keys:
            return
        if deleted not in keys:
            raise IncompleteError(
                f"{name} holds no checkpoint, but files of an attempt at one.",
                hint="They are swept once it is certain that their writer has ended.",
                name=name,
            ) from None
    _delete_files(store, name)


def sweep(
    store: Store,
    session: Session,
    *,
    own_attempts: Collection[str] = (),
    identity: Identity | None = None,
) -> list[str]:
    """Finish deletions and remove attempts that nobody will finish.

    Call it after :func:`~milepost.runs.record_origin`. An attempt of another session goes only if
    it is certain that its process has ended.

    Args:
        store: The run's store.
        session: The session that sweeps.
        own_attempts: Folders that this session is writing into now.
        identity: Who sweeps; the calling process by default.

    Returns:
        The folders and temporary files that are gone.

    Raises:
        FencedError: A newer session owns the run. Nothing was deleted.
        CheckpointError: The first of the deletions that failed; the others were tried.
    """
    check_not_fenced(store, session)
    view = scan(store)
    errors: list[CheckpointError] = []
    removed: list[str] = []
    for found in view.found:
        if found.state is State.DELETING:
            action: Callable[[Store, str], object] = _finish_deletion
        elif found.state is State.INCOMPLETE and found.name not in own_attempts:
            if not _is_over(view, found, session, identity):
                continue
            action = _abandon_wholly
        else:
            continue
        try:
            action(store, found.name)
            removed.append(found.name)
        except CheckpointError as error:
            errors.append(error)
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


def _delete_files(store: Store, name: str) -> None:
    claimed, deleted = file_key(name, ATTEMPT), file_key(name, DELETED)
    for entry in list(store.list(name)):
        if entry.key not in (claimed, deleted):
            store.delete(entry.key)
    try:
        # The order of the last two must hold after a power cut as well.
        store.sync_folder(name)
        store.delete(claimed)
        store.sync_folder(name)
    except MissingError:
        return  # another process has finished the same deletion
    store.delete(deleted)


def _finish_deletion(store: Store, name: str) -> None:
    delete_checkpoint(store, name, force=True)


def _abandon_wholly(store: Store, name: str) -> None:
    left = abandon(store, name)
    if left:
        raise IncompleteError(
            f"{len(left)} files of the attempt in {name} could not be deleted.",
            hint="Check the owner and the mode of the folder.",
            name=name,
            files=left,
        )


def _is_over(view: RunView, found: Found, session: Session, identity: Identity | None) -> bool:
    """Return whether it is certain that nobody will finish an attempt."""
    if found.session == session.number:
        return True
    others = [one for one in view.sessions if one.number != session.number]
    if found.session is not None:
        others = [one for one in others if one.number == found.session]
        if not others:
            return False
    # A claim that cannot be read may be any session's: all of them must have ended.
    return all(is_provably_dead(one, identity) for one in others)
