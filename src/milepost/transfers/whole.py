"""Copy a run to another place, and bring such a copy up to date.

The copy can be read at any moment, and resumed from, so it is made in this order:

    step                                              the copy, after a stop there
    run.json, sessions, pins, validations             a run with the checkpoints that it had
    each checkpoint, the newest first: see claims.py  with the checkpoints that were committed
    other files, then ``latest``                      the same
    deletions, if they were asked for                 without those: unpublished first, then removed

What is at the source is looked at first, and its records are listed after that: they hold whatever
a checkpoint that was seen depends on. A checkpoint that is read is held, so that retention waits;
one that was deleted meanwhile is left out.

A copy that was trained on has a session of its own. Nothing is copied to it any more: checkpoints
of two trainings do not make one run.

The records of sessions, pins and validations, ``nan/`` and ``failed/``, orphaned checkpoints and
the files of others in the run's folder are all copied. Attempts without a commit are not, nor is
what cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from ..checkpoint import Run, open_run
from ..errors import (
    CheckpointError,
    ExistsError,
    FormatError,
    InUseError,
    MissingError,
    UsageError,
)
from ..format.layout import (
    ATTEMPT,
    DELETED,
    HIDDEN,
    LATEST,
    MANIFEST,
    PINS,
    RUN,
    SESSIONS,
    VALIDATIONS,
    session_number,
)
from ..runs.folders import file_key
from ..runs.prune import delete_checkpoint
from ..runs.publish import give_up
from ..runs.readers import hold
from ..runs.scan import Found, RunView, State, scan
from ..stores.base import Entry, Store
from ..stores.prefix import PrefixStore
from ..stores.url import open_store
from ..visible import SUFFIXES, VisibleFiles
from .bring import Progress, Shared
from .claims import NO_SESSION, Commit
from .one import copy_folder, read_back
from .others import Other, misnamed, send_others
from .records import (
    put_same,
    refuse_ahead,
    refuse_file,
    refuse_inside,
    refuse_new_session,
    refuse_other_run,
)
from .reports import CopyReport, SyncReport
from .route import Route, find_route

__all__ = ["SyncPlan", "plan_sync", "sync_run"]

Place = str | os.PathLike[str]

_WHOLE = (State.COMMITTED, State.ORPHANED, State.DIAGNOSTIC)
_OF_ONE = (FormatError, MissingError, ExistsError, InUseError, UsageError)
"""Errors that say something about one checkpoint, and nothing about the next."""

_ORDER = ("request", "attempt", "verdict")


def sync_run(
    run: Run | Place | Store,
    to: Place | Store,
    *,
    delete: bool = False,
    verify: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> SyncReport:
    """Copy a run to another place, or bring its copy there up to date.

    What is there with the same commit is left alone. Files that several checkpoints share are sent
    once. See :func:`~milepost.copy_checkpoint` for what holds for each of them.

    Args:
        run: The run, its folder or its address.
        to: Where to: an empty place, or an earlier copy.
        delete: Whether checkpoints that the source does not have any more are deleted there, pinned
            ones excepted. Nothing else ever is.
        verify: Whether to read every checkpoint there, old and new, and compare every byte.
        num_threads: How many blocks of 8 MiB are under way at once; see there.
        progress: Called with the bytes of each block, by several threads.

    Returns:
        What was done. One checkpoint that cannot be copied does not stop the others; see
        ``errors``.

    Raises:
        MissingError: There is no run.
        ExistsError: There is something else at the place.
        FencedError: The copy was trained on, or a training has begun there.
        StorageError: A place does not do what it should.
    """
    plan = plan_sync(run, to, delete=delete)
    return plan.run(verify=verify, num_threads=num_threads, progress=progress)


def plan_sync(run: Run | Place | Store, to: Place | Store, *, delete: bool = False) -> SyncPlan:
    """Look at both places, and say what :func:`sync_run` would do."""
    source = Run(run.store) if isinstance(run, Run) else open_run(run)
    source.refresh()
    target = open_store(to)
    refuse_file(target)
    refuse_inside(source.store, target)
    is_hidden = source.store.url.endswith(f"/{HIDDEN}")
    records = PrefixStore(target, HIDDEN) if is_hidden else target
    given = (source.store if isinstance(run, Run) else run, to)
    route = find_route(source.store, records, given=given)
    # After the look at the checkpoints: see the beginning of this file.
    listed = {entry.key: entry for entry in source.store.list()}
    there = {entry.key: entry for entry in records.list()}
    refuse_other_run(source.view, target, records, there)
    refuse_ahead(route, listed, there)
    view = scan(records) if RUN in there else None
    shown = open_store(run) if is_hidden and not isinstance(run, Run) else None
    strange = misnamed(source.store)
    if shown is not None:
        own = f"{HIDDEN}/"
        strange |= {name: why for name, why in misnamed(shown).items() if not name.startswith(own)}
    return SyncPlan(
        route,
        target,
        source.view,
        view,
        listed,
        there,
        deletes=delete,
        shown=shown,
        misnamed=strange,
    )


@final
@dataclass(slots=True)
class SyncPlan:
    """What a copy of a run has to do.

    Attributes:
        route: Between the records of both.
        base: The store that people see; the records may be hidden in it.
        view: The source.
        target_view: The target; ``None`` if there is nothing yet.
        listed: The keys of the source.
        there: The keys of the target.
        deletes: Whether deletions are wanted.
        shown: What people see of the source, if its records are hidden in that.
        misnamed: Files at the source whose names not every place takes, with that reason.
    """

    route: Route
    base: Store
    view: RunView
    target_view: RunView | None
    listed: Mapping[str, Entry]
    there: Mapping[str, Entry]
    deletes: bool = False
    shown: Store | None = None
    misnamed: Mapping[str, str] = field(default_factory=dict)
    _errors: dict[str, CheckpointError] = field(default_factory=dict)

    @property
    def wanted(self) -> list[Found]:
        """Return the checkpoints of the source that are copied: newest first, by what they are."""
        newest_first = list(reversed(self.view.found))
        return [one for state in _WHOLE for one in newest_first if one.state is state]

    @property
    def missing(self) -> list[Found]:
        """Return those of them that are not there."""
        known = self._known()
        return [found for found in self.wanted if known.get(found.name) != found.write_id]

    @property
    def present(self) -> list[Found]:
        """Return those of them that are there."""
        known = self._known()
        return [found for found in self.wanted if known.get(found.name) == found.write_id]

    @property
    def doomed(self) -> list[Found]:
        """Return what is there, not pinned, and gone from the source, if that is to be deleted.

        What is damaged at the source is not gone from it: the copy may be all that is left of it.
        Where one checkpoint is, none is deleted, since nobody knows what else has come to harm.
        """
        if not self.deletes or self.target_view is None or not self.view.lineage():
            return []
        if any(found.state is State.DAMAGED for found in self.view.found):
            return []
        return [one for one in self.target_view.found if self._is_gone(one) and self._may_go(one)]

    def _is_gone(self, there: Found) -> bool:
        """Return whether the source has another whole one of this name, or nothing left of it."""
        for found in self.view.found:
            if found.name == there.name:
                return found.state in _WHOLE and found.write_id != there.write_id
        below = [key for key in self.listed if key.startswith(f"{there.name}/")]
        # Files that others have put there stay when a checkpoint is deleted.
        return all(_is_beside(key, there) for key in below)

    @property
    def skipped(self) -> dict[str, str]:
        """Return what is left out at the source, with the reason."""
        checkpoints = {
            found.name: str(found.error) if found.error else f"{found.state}: not counted"
            for found in self.view.found
            if found.state not in _WHOLE
        }
        return {**checkpoints, **self.misnamed}

    def run(
        self,
        *,
        verify: bool = False,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> SyncReport:
        """Carry it out; see :func:`sync_run`."""
        note = progress or (lambda _: None)
        deleted = self._delete([one for one in self.doomed if self._is_in_the_way(one)])
        num_records = self._send_records()
        shared = Shared()
        for found in self.present:
            if found.manifest is not None:
                shared.note(found.name, found.manifest)
        copied = self._copy(shared, num_threads=num_threads, verify=verify, progress=note)
        verified_bytes = sum(one.verified_bytes for one in copied)
        for found in self.present if verify else ():
            verified_bytes += self._verify(found, progress=note)
        num_records += self._send_others()
        self._point({one.name for one in copied})
        if not self._errors:  # what could not be copied may be there under an older name
            deleted += self._delete([one for one in self.doomed if one.name not in deleted])
        return SyncReport(
            self.base.url,
            copied=tuple(copied),
            present=tuple(found.name for found in self.present),
            skipped=self.skipped,
            deleted=tuple(deleted),
            num_records=num_records,
            verified_bytes=verified_bytes,
            errors=dict(self._errors),
        )

    def _known(self) -> dict[str, str | None]:
        view = self.target_view
        found = view.found if view is not None else ()
        return {one.name: one.write_id for one in found if one.state in _WHOLE}

    def _may_go(self, found: Found) -> bool:
        """Return whether a checkpoint at the target may be deleted: this run's, and not pinned."""
        if found.state is State.DELETING:
            return True
        if found.state is State.INCOMPLETE:
            return found.session == NO_SESSION  # begun by a copy of what is gone since
        manifest = found.manifest if found.state in _WHOLE and not found.is_pinned else None
        return manifest is not None and manifest.run_id == self.view.run.run_id

    def _is_in_the_way(self, found: Found) -> bool:
        """Return whether another attempt of this name is to be copied."""
        return any(one.name == found.name for one in self.wanted)

    def _send_records(self) -> int:
        """Send what checkpoints depend on, in the order that a reader may see it in."""
        route, sent = self.route, 0
        if RUN in self.listed and RUN not in self.there:
            sent += put_same(route, RUN)
        keys = [key for key in self.listed if key.startswith(f"{SESSIONS}/")]
        for key in sorted(keys, key=lambda key: (session_number(key) is None, key)):
            if key not in self.there:
                sent += put_same(route, key)
        pins = [Other(self.listed[key], key) for key in self.listed if key.startswith(f"{PINS}/")]
        sent += send_others(route, pins, dict(self.there))
        asked = [key for key in self.listed if key.startswith(f"{VALIDATIONS}/")]
        for kind in _ORDER:
            records = [key for key in asked if f".{kind}" in key and key not in self.there]
            sent += sum(put_same(route, key) for key in records)
        route.target.sync_folder(SESSIONS if keys else "")
        return sent

    def _copy(
        self, shared: Shared, *, num_threads: int | None, verify: bool, progress: Progress
    ) -> list[CopyReport]:
        """Copy what is missing. One that fails does not stop the others."""
        copied: list[CopyReport] = []
        for found in self.missing:
            try:
                refuse_new_session(self.route, self.listed)
                with hold(self.route.source, found.name):
                    commit = Commit.read(self.route.source, found.name)
                    if commit.manifest.write_id != found.write_id:
                        continue  # deleted since, and made anew: that is for the next time
                    report = copy_folder(
                        self.route,
                        found.name,
                        found.name,
                        commit,
                        shared=shared,
                        num_threads=num_threads,
                        progress=progress,
                    )
                    self._show(commit)
                if verify:
                    report = read_back(self.route.target, found.name, report, progress=progress)
            except _OF_ONE as error:
                if self._was_deleted(found):
                    give_up(self.route.target, found.name, write_id=found.write_id)
                else:
                    self._errors[found.name] = error
                continue
            shared.note(found.name, commit.manifest)
            copied.append(report)
        return copied

    def _was_deleted(self, found: Found) -> bool:
        try:
            self.route.source.head(file_key(found.name, MANIFEST))
        except MissingError:
            return True
        return False

    def _verify(self, found: Found, *, progress: Progress) -> int:
        report = CopyReport(found.name, f"{self.base.url}/{found.name}", False, 0)  # noqa: FBT003
        try:
            return read_back(
                self.route.target, found.name, report, progress=progress
            ).verified_bytes
        except _OF_ONE as error:
            self._errors[found.name] = error
            return 0

    def _show(self, commit: Commit) -> None:
        """Give a single file the name that people see."""
        if self.base is not self.route.target and "/" not in commit.manifest.name:
            VisibleFiles(self.base).show_missing(commit.manifest)

    def _send_others(self) -> int:
        """Send the files of the run's folder that are not Milepost's, and what is beside a commit.

        Those of an attempt, or of a checkpoint that is being deleted, are nothing of use elsewhere.
        """
        whole = {found.name: found for found in self.wanted if found.name not in self._errors}
        marked = {
            key.rpartition("/")[0]
            for key in self.listed
            if key.rpartition("/")[2] in (ATTEMPT, DELETED, MANIFEST)
        }
        others = []
        for key, entry in self.listed.items():
            folder = next((one for one in _folders_above(key) if one in marked), None)
            is_loose = folder is None and not _is_record(key)
            if is_loose or (folder in whole and _is_beside(key, whole[folder])):
                others.append(Other(entry, key))
        return send_others(self.route, others, dict(self.there)) + self._send_beside()

    def _send_beside(self) -> int:
        """Send what others have put beside hidden records. Names of our single files are made."""
        if self.shown is None:
            return 0
        names = {f"{one.name}{suffix}" for one in self.view.found for suffix in SUFFIXES.values()}
        others = [
            Other(entry, entry.key)
            for entry in self.shown.list()
            if not entry.key.startswith(f"{HIDDEN}/") and entry.key not in {*names, LATEST}
        ]
        return send_others(Route(self.shown, self.base), others)

    def _point(self, copied: Collection[str]) -> None:
        """Name the newest one for people."""
        latest = self.view.latest()
        there = {*copied, *(one.name for one in self.present)}
        if latest is not None and latest.name in there and self.base is self.route.target:
            self.base.point(LATEST, latest.name)

    def _delete(self, doomed: Sequence[Found]) -> list[str]:
        deleted = []
        for found in doomed:
            try:
                if self.base is not self.route.target:
                    VisibleFiles(self.base).hide([found.name])
                if found.state is State.INCOMPLETE:
                    give_up(self.route.target, found.name, write_id=found.write_id)
                else:
                    delete_checkpoint(self.route.target, found.name)
            except _OF_ONE as error:
                self._errors[found.name] = error
                continue
            deleted.append(found.name)
        return deleted


def _folders_above(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _is_record(key: str) -> bool:
    head = key.partition("/")[0]
    return key in (RUN, LATEST) or (head in (SESSIONS, PINS, VALIDATIONS) and "/" in key)


def _is_beside(key: str, found: Found) -> bool:
    path = key[len(found.name) + 1 :]
    if found.manifest is None or path in (ATTEMPT, DELETED, MANIFEST):
        return False
    return path not in {entry.path for entry in found.manifest.files}
