"""What each folder of a run is: a checkpoint, an attempt, half deleted, damaged, or not ours.

Three ways lead to the same answer, and each asks as little as the place allows:

- On a file system the names of the folders are listed, and two or three small calls are made for
  each, whatever else is in it: folders of others may hold millions of files, or refuse to be
  listed.
- Whoever remembers commits, as a process does that saves, lists the whole run: that shows which of
  them are still what was read, and every mark of deletion. Only what is not remembered is read.
- Whoever remembers nothing lists the names of the folders, a thousand by one request, and reads the
  commit of each. How many files a checkpoint has does not matter.

The last way looks for a mark of deletion only where it finds no commit. A deletion in two steps,
where a rename is a copy and then a removal, is therefore seen once the commit is gone; until then
all of the checkpoint is there. Who deletes must see it from the first step on, and takes the second
way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import (
    CheckpointError,
    FormatError,
    MissingError,
    StorageError,
    UsageError,
)
from ..format.canonical import load_record
from ..format.layout import (
    ATTEMPT,
    DELETED,
    DIAGNOSTIC_FOLDERS,
    MANIFEST,
    PINS,
    VALIDATIONS,
    check_name,
)
from ..format.manifest import Manifest
from ..format.numbers import is_count
from ..stores.base import Entry, Store
from .damage import raise_unreachable
from .folders import NOT_CHECKPOINTS, file_key, is_diagnostic
from .linked import warn_of_links
from .manifests import ManifestCache, read_manifest
from .parallel import each
from .pins import list_pins
from .validations import Validation

__all__ = ["Found", "State", "Survey", "survey"]

_MAX_RECORD_BYTES = 1024 * 1024


class State(str, Enum):
    """What a folder of a run is.

    ``COMMITTED`` counts. ``ORPHANED`` is whole, but the run went on from before it. ``INCOMPLETE``
    was claimed and never committed. ``DAMAGED`` has a commit that cannot be read. ``DELETING`` is
    no longer a checkpoint, its files are being removed. ``DIAGNOSTIC`` shows what went wrong and
    is never resumed from.
    """

    COMMITTED = "committed"
    ORPHANED = "orphaned"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    DELETING = "deleting"
    DIAGNOSTIC = "diagnostic"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Found:
    """One folder of a run.

    Attributes:
        name: Its folder: ``ep3``, or ``nan/ba37``.
        state: What it is.
        manifest: The commit, if it can be read.
        error: Why it cannot be read.
        is_pinned: Whether retention must leave it alone.
        size_bytes: Sum of its files: as committed, or as found where there is no commit.
        modified_s: When its newest file was written, by the store's clock; 0 where there is a
            commit, which says itself when it was made.
        session: Number of the session that wrote it, if known.
        attempt: Number of the attempt within the session, if known.
        write_id: Identity of the attempt, if known.
        validation: What is known of its validation, if one was asked for.
    """

    name: str
    state: State
    manifest: Manifest | None
    error: CheckpointError | None
    is_pinned: bool
    size_bytes: int
    modified_s: float
    session: int | None = None
    attempt: int | None = None
    write_id: str | None = None
    validation: Validation | None = None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the commit, and over them those that its validation has found."""
        logged = {} if self.manifest is None else self.manifest.metrics
        return logged if self.validation is None else {**logged, **self.validation.metrics}

    @property
    def is_pending_validation(self) -> bool:
        """Return whether its metrics are still being computed."""
        return self.validation is not None and self.validation.is_pending

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Return what folders of a run are sorted by, the unknown ones last."""
        if self.session is None or self.attempt is None:
            return (1, 0, 0, self.name)
        return (0, self.session, self.attempt, self.name)


@dataclass(frozen=True, slots=True)
class Survey:
    """What was seen of a run.

    Attributes:
        found: Every folder that is ours.
        pins: The notes of the pins by name.
        has_validations: Whether there may be records of validations: a listing of the folders has
            not shown that there are none.
    """

    found: list[Found]
    pins: dict[str, str]
    has_validations: bool


def survey(
    store: Store, cache: ManifestCache | None, *, notes: ManifestCache | None = None
) -> Survey:
    """Look at every folder of a run.

    Args:
        store: The run's store.
        cache: What the caller remembers of it; ``None`` if nothing, also not for the next time.
        notes: Where the commits that are read without a cache are noted.
    """
    listed: Mapping[str, Entry | None]
    if store.traits.is_local or cache is None:
        top = store.folders()
        names = _candidates(store, top)
        warn_of_links(store)
        listed = dict.fromkeys(names)
        has_pins = store.traits.is_local or PINS in top
        has_validations = store.traits.is_local or VALIDATIONS in top
    else:
        listed = _list_commits(store)
        names, has_pins, has_validations = list(listed), True, True
    pins = list_pins(store) if has_pins else {}
    is_brief = cache is None and not store.traits.is_local
    known = cache or ManifestCache()

    def look(name: str) -> Found | None:
        if is_brief:
            return _look_briefly(store, name, pins, notes)
        return _look(store, name, pins, known, listed[name])

    found = [one for one in each(store, look, names) if one is not None]
    known.forget_others(set(names))
    return Survey(found, pins, has_validations)


def _list_commits(store: Store) -> dict[str, Entry | None]:
    """Return the folders to look at, with their commit where a listing has shown that it counts."""
    shown: dict[str, dict[str, Entry]] = {}
    for entry in store.list():
        folder, _, file = entry.key.rpartition("/")
        if file in (MANIFEST, DELETED, ATTEMPT) and _may_hold(folder):
            shown.setdefault(folder, {})[file] = entry
    return {
        folder: None if DELETED in files else files.get(MANIFEST) for folder, files in shown.items()
    }


def _may_hold(folder: str) -> bool:
    """Return whether a folder may be that of a checkpoint, by its path."""
    if is_diagnostic(folder):
        return _may_name(folder.partition("/")[2])
    return folder not in NOT_CHECKPOINTS and _may_name(folder)


def _candidates(store: Store, top: Sequence[str]) -> list[str]:
    names = []
    for name in top:
        if name in DIAGNOSTIC_FOLDERS:
            names += [f"{name}/{below}" for below in store.folders(name) if _may_name(below)]
        elif name not in NOT_CHECKPOINTS and _may_name(name):
            names.append(name)
    return names


def _may_name(name: str) -> bool:
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def _look(
    store: Store, name: str, pins: Mapping[str, str], cache: ManifestCache, listed: Entry | None
) -> Found | None:
    """Return what a folder is, or ``None`` if it is not ours or is gone."""
    try:
        entry = listed or store.head(file_key(name, MANIFEST))
        manifest = cache.read(store, name, entry)
    except MissingError:
        return _look_uncommitted(store, name, is_pinned=name in pins)
    except (FormatError, StorageError) as error:
        return _damaged(store, name, error, is_pinned=name in pins)
    is_deleting = listed is None and _is_there(store, file_key(name, DELETED))
    return _with_commit(name, manifest, is_pinned=name in pins, is_deleting=is_deleting)


def _look_briefly(
    store: Store, name: str, pins: Mapping[str, str], notes: ManifestCache | None
) -> Found | None:
    """Do the same by a single request, where there is a commit."""
    try:
        manifest = read_manifest(store, name)
    except MissingError:
        return _look_uncommitted(store, name, is_pinned=name in pins)
    except (FormatError, StorageError) as error:
        return _damaged(store, name, error, is_pinned=name in pins)
    if notes is not None:
        notes.note(name, manifest)
    return _with_commit(name, manifest, is_pinned=name in pins, is_deleting=False)


def _with_commit(name: str, manifest: Manifest, *, is_pinned: bool, is_deleting: bool) -> Found:
    return Found(
        name,
        State.DELETING if is_deleting else State.COMMITTED,
        manifest,
        None,
        is_pinned,
        manifest.size_bytes,
        0.0,
        manifest.session,
        manifest.attempt,
        manifest.write_id,
    )


def _damaged(store: Store, name: str, error: CheckpointError, *, is_pinned: bool) -> Found:
    raise_unreachable(store, error)
    size_bytes, modified_s = _measure(store, name)
    claim = _read_claim(store, name)
    return Found(name, State.DAMAGED, None, error, is_pinned, size_bytes, modified_s, *claim)


def _look_uncommitted(store: Store, name: str, *, is_pinned: bool) -> Found | None:
    is_deleting = _is_there(store, file_key(name, DELETED))
    if not is_deleting and not _is_there(store, file_key(name, ATTEMPT)):
        return None
    size_bytes, modified_s = _measure(store, name)
    state = State.DELETING if is_deleting else State.INCOMPLETE
    claim = _read_claim(store, name)
    return Found(name, state, None, None, is_pinned, size_bytes, modified_s, *claim)


def _read_claim(store: Store, name: str) -> tuple[int | None, int | None, str | None]:
    """Return session, attempt and write id of a claim, or nothing if it cannot be read."""
    key = file_key(name, ATTEMPT)
    try:
        fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    except (MissingError, FormatError, StorageError) as error:
        raise_unreachable(store, error)
        return None, None, None
    session, attempt, write_id = (fields.get(k) for k in ("session", "attempt", "write_id"))
    is_known = is_count(session) and is_count(attempt)
    return (
        session if is_known else None,
        attempt if is_known else None,
        write_id if isinstance(write_id, str) else None,
    )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except MissingError:
        return False
    return True


def _measure(store: Store, name: str) -> tuple[int, float]:
    entries = list(store.list(name))
    return (
        sum(entry.size_bytes for entry in entries),
        max((entry.modified_s for entry in entries), default=0.0),
    )
