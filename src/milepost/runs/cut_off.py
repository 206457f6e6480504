"""Uploads that a process has begun in a run's folders and that nobody will end.

A large part is sent to S3 in pieces. Who is killed in between leaves them in the bucket: no listing
of objects shows them, and they cost what objects cost. An upload bears no name of who began it, so
that is told from the folder that it leads into. Whoever writes there holds its claim from before
the first piece until all have arrived. So the uploads are listed first, then the folder is looked
at, and what it shows by then decides:

    in the folder                       an upload to it is cut off if
    a claim without a commit            the session of the claim has certainly ended
    a claim that cannot be read         every other session has certainly ended
    a claim of files of others          never: those are not ours
    a commit that lists the file        nothing came for 24 hours: whoever wrote what was committed
                                        needs no upload any more, but somebody may be mending it
    nothing, and it would be a part     nothing came for 24 hours
    anything else                       never

Whether a session has certainly ended is the question that decides about attempts as well, see
``prune.py``; where nobody can say, nothing must have come for 24 hours, by the clock of the
service. The claims of copies are no session's, so they wait for that too. Own attempts are never
touched, and no other run's: their keys lie deeper, below a folder that holds no claim.

To end an upload that has just been completed is no error and does no harm.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import AccessError, CheckpointError, FormatError, MissingError
from ..format.canonical import load_record
from ..format.layout import ATTEMPT, DELETED, DIAGNOSTIC_FOLDERS, MANIFEST, SESSIONS
from ..stores.base import UNSEEN, BegunUpload, ShowingUploads, Store
from .folders import NOT_CHECKPOINTS, check_folder, file_key
from .identity import Identity
from .manifests import read_manifest
from .parallel import each
from .scan import RunView, State
from .sessions import Session, is_provably_dead, list_sessions

__all__ = [
    "CutOff",
    "end_cut_off",
    "find_cut_off",
    "sweep_uploads",
    "tell_of_unseen",
    "why_unseen",
]

_log = logging.getLogger("milepost")

UPLOAD_MAX_AGE_S = 24 * 3600.0
"""An upload of which nothing came for so long has no writer any more."""

_TICK_S = 1.0
"""Times of objects are often whole seconds."""

_PART = re.compile(r"[^/]+\.safetensors")
_USUAL_PARTS = ("model.safetensors", "optimizers.safetensors")
_MAX_ASKED = 32
"""Keys asked for one by one, of a service that shows uploads in no other way."""

_MAX_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CutOff:
    """Uploads to a run that have not ended.

    Attributes:
        dead: Those that nobody will end.
        others: Those that may go on, or are not ours.
    """

    dead: tuple[BegunUpload, ...] = ()
    others: tuple[BegunUpload, ...] = ()


def why_unseen(store: Store) -> str:
    """Return in plain words why the uploads at a place cannot be shown, and what becomes of them.

    Nothing is said of a place that shows them, or has none, such as a folder of this machine.
    """
    if store.traits.is_local:
        return ""
    return store.why_uploads_are_unseen() if isinstance(store, ShowingUploads) else UNSEEN


def find_cut_off(
    store: Store,
    view: RunView,
    *,
    session: Session | None = None,
    own_attempts: Collection[str] = (),
    identity: Identity | None = None,
) -> CutOff:
    """Return the uploads to a run that have not ended.

    By one request, and a few more for each folder that one leads into. Where they cannot be shown,
    there are none.

    Args:
        store: The run's store.
        view: The run.
        session: The session that asks, if it is one.
        own_attempts: Folders that this session is writing into now.
        identity: Who asks; the calling process by default.

    Raises:
        AccessError: They may not be listed.
        StorageError: The service does not list them, or cannot be reached.
    """
    if not isinstance(store, ShowingUploads) or store.traits.is_local or why_unseen(store):
        return CutOff()
    shown = store.begun_uploads()
    found = list(shown.found)
    if not shown.is_whole:
        found += _ask_one_by_one(store, view)
    folders: dict[str, list[BegunUpload]] = {}
    others: list[BegunUpload] = []
    for upload in found:
        folder = _folder_of(upload.key)
        if folder is None or folder in own_attempts:
            others.append(upload)
        else:
            folders.setdefault(folder, []).append(upload)
    if not folders:
        return CutOff(others=tuple(others))
    # After the listing: whoever has begun one of these by then is shown.
    judge = _Judge(store, session, identity, shown.now_s)
    dead: list[BegunUpload] = []
    for folder, uploads in folders.items():
        is_dead = judge.rule(folder)
        for upload in uploads:
            (dead if is_dead(upload) else others).append(upload)
    return CutOff(tuple(dead), tuple(others))


def end_cut_off(store: Store, dead: Sequence[BegunUpload]) -> dict[str, CheckpointError]:
    """End uploads that nobody will end.

    Returns:
        The keys of those that could not be ended, with the reason.
    """
    failed: dict[str, CheckpointError] = {}
    if isinstance(store, ShowingUploads):
        for upload in dead:
            try:
                store.end_upload(upload)
            except CheckpointError as error:
                failed[upload.key] = error
    return failed


def sweep_uploads(
    store: Store,
    view: RunView,
    session: Session,
    *,
    own_attempts: Collection[str] = (),
    identity: Identity | None = None,
) -> list[CheckpointError]:
    """End the uploads to a run that nobody will end; return what went wrong.

    A refused right to see them is no error: there may be such uploads, and they hurt no run.
    """
    if all(one.number == session.number for one in view.sessions):
        return []  # nobody was here before
    try:
        found = find_cut_off(
            store, view, session=session, own_attempts=own_attempts, identity=identity
        )
    except AccessError as error:
        _log.info("Whether uploads were cut off at %s is not known: %s", store.url, error)
        return []
    except CheckpointError as error:
        return [error]
    if found.dead:
        names = ", ".join(sorted({upload.key for upload in found.dead}))
        _log.info("Uploads to %s were cut off and are ended: %s", store.url, names)
    return list(end_cut_off(store, found.dead).values())


def tell_of_unseen(store: Store, name: str) -> None:
    """Say what may be left of an attempt where uploads cannot be seen."""
    why = why_unseen(store)
    if why:
        _log.info(
            "The process that wrote %s may have left an upload in %s that was never completed: %s.",
            name,
            store.url,
            why,
        )


class _Judge:
    """Decides by what is in a folder; see the table above."""

    def __init__(
        self,
        store: Store,
        session: Session | None,
        identity: Identity | None,
        now_s: float | None,
    ) -> None:
        self._store = store
        self._own = session.number if session is not None else 0
        sessions = [one for one in list_sessions(store) if one.number != self._own]
        self._is_over = {one.number: is_provably_dead(one, identity) for one in sessions}
        self._now_s = now_s
        self._oldest_s: float | None = None

    def rule(self, folder: str) -> _Rule:
        """Return what tells the dead uploads to a folder."""
        files = {entry.key[len(folder) + 1 :] for entry in self._store.list(folder)}
        if MANIFEST in files:
            return _Rule(self, self._committed(folder), is_over=False)
        if ATTEMPT in files and DELETED not in files:
            return self._claimed(folder)
        if files <= {DELETED}:
            return _Rule(self, None, is_over=False)
        return _Rule(self, frozenset(), is_over=False)

    def is_silent(self, upload: BegunUpload) -> bool:
        """Return whether nothing of an upload came for a day."""
        assert isinstance(self._store, ShowingUploads)
        now_s = self._now_s
        if now_s is None or now_s - upload.begun_s < UPLOAD_MAX_AGE_S:
            return False
        # No upload to a run is older than its first session. A service that says so is not to be
        # believed: there is one that says the same time of all.
        if upload.begun_s < self._first_session_s() - _TICK_S:
            return False
        return now_s - self._store.upload_written_s(upload) >= UPLOAD_MAX_AGE_S

    def _first_session_s(self) -> float:
        if self._oldest_s is None:
            entries = self._store.list(SESSIONS)
            self._oldest_s = min((one.modified_s for one in entries), default=float("inf"))
        return self._oldest_s

    def _are_all_over(self) -> bool:
        return all(self._is_over.values())

    def _committed(self, folder: str) -> frozenset[str]:
        try:
            return frozenset(entry.path for entry in read_manifest(self._store, folder).files)
        except (MissingError, FormatError):
            return frozenset()

    def _claimed(self, folder: str) -> _Rule:
        key = file_key(folder, ATTEMPT)
        try:
            fields = load_record(self._store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
        except MissingError:
            return _Rule(self, frozenset(), is_over=False)  # it goes on just now
        except FormatError:
            return _Rule(self, None, is_over=self._are_all_over())
        number = fields.get("session")
        if type(number) is not int:
            return _Rule(self, None, is_over=self._are_all_over())
        if fields.get("adopted") is True or (number == self._own and self._own):
            return _Rule(self, frozenset(), is_over=False)
        return _Rule(self, None, is_over=self._is_over.get(number, False), is_any=True)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is known of the uploads to one folder.

    Attributes:
        judge: Asks further.
        names: The files that may be meant; ``None`` for any that would be a part.
        is_over: Whether whoever could have begun them has certainly ended.
        is_any: Whether every file in the folder is of the same attempt, whatever its name.
    """

    judge: _Judge
    names: frozenset[str] | None
    is_over: bool
    is_any: bool = False

    def __call__(self, upload: BegunUpload) -> bool:
        folder = _folder_of(upload.key) or ""
        name = upload.key[len(folder) + 1 :]
        if self.names is not None:
            is_ours = name in self.names
        else:
            is_ours = self.is_any or _PART.fullmatch(name) is not None
        return is_ours and (self.is_over or self.judge.is_silent(upload))


def _folder_of(key: str) -> str | None:
    """Return the folder of a checkpoint that a key lies in, or ``None`` if it cannot be one."""
    head, slash, rest = key.partition("/")
    folder = head
    if head in DIAGNOSTIC_FOLDERS:
        below, slash, rest = rest.partition("/")
        folder = f"{head}/{below}"
    if not slash or not rest or head in NOT_CHECKPOINTS:
        return None
    try:
        return check_folder(folder)
    except CheckpointError:
        return None


def _ask_one_by_one(store: Store, view: RunView) -> list[BegunUpload]:
    """Ask for the parts that attempts may have left, by the names that parts have in this run."""
    attempts = [one.name for one in view.found if one.state is State.INCOMPLETE]
    made = [one.manifest for one in reversed(view.found) if one.manifest is not None]
    known = [entry.path for manifest in made[:1] for entry in manifest.files]
    parts = [name for name in known if _PART.fullmatch(name)] or list(_USUAL_PARTS)
    keys = [file_key(name, part) for name in attempts for part in parts][:_MAX_ASKED]

    def ask(key: str) -> list[BegunUpload]:
        assert isinstance(store, ShowingUploads)
        return [one for one in store.begun_uploads(key).found if one.key == key]

    return [one for shown in each(store, ask, keys) for one in shown]
