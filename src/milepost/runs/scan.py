"""What is in a run: every checkpoint with its state, and which of them count.

What counts is derived each time from what the store shows then; only the text of commits may be
remembered by the caller, see ``runs/manifests.py``. No part is ever read.

How the folders are looked at, and what that costs, is told in ``runs/survey.py``.

A listing is not taken at one moment. It shows every commit that was there when it began, and that
is all the session rule needs. Where it shows a commit without a mark of deletion, the checkpoint
was there at some time during the look. Everything else that it shows may be half of a step, such as
a rename that is a copy and a deletion: those folders are looked at on their own, in the order in
which records come and go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from ..errors import DamagedError, MissingError, StorageError, UsageError
from ..format.layout import DIAGNOSTIC_FOLDERS, from_key, session_key
from ..stores.base import Store
from .manifests import ManifestCache, read_manifest
from .sessions import RunRecord, Session, list_sessions, read_run
from .survey import Found, State, survey
from .validations import Validation, list_validations, validation_id

__all__ = ["Found", "RunView", "State", "number_of", "read_manifest", "scan"]

_LOOKS = 8


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it was at one moment.

    Attributes:
        run: Its identity.
        sessions: Every session, the oldest first.
        found: Every folder, by session and attempt.
        pins: Notes of the pins by checkpoint.
    """

    run: RunRecord
    sessions: tuple[Session, ...]
    found: tuple[Found, ...]
    pins: Mapping[str, str]

    def lineage(self) -> list[Found]:
        """Return the checkpoints that count, the oldest first."""
        return [found for found in self.found if found.state is State.COMMITTED]

    def latest(self) -> Found | None:
        """Return the newest checkpoint that counts, or ``None``."""
        return next(reversed(self.lineage()), None)

    def get(self, name: str) -> Found:
        """Return the checkpoint of a name, whatever its state.

        Raises:
            MissingError: There is none; the message lists the names there are.
        """
        for found in self.found:
            if found.name == name:
                return found
        names = [found.name for found in self.found]
        known = ", ".join(names[-20:]) if names else "none"
        raise MissingError(
            f"There is no checkpoint {name!r} in this run. There are: {known}.",
            name=name,
            names=names,
        )

    def best(self, metric: str, mode: str = "min") -> Found | None:
        """Return the checkpoint with the best value of a metric, or ``None`` if none has one.

        Only checkpoints that count, and whose validation is not pending, are compared. A missing
        value and NaN never win; of equal values the newer checkpoint does.

        Raises:
            UsageError: The mode is neither ``min`` nor ``max``.
        """
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r} is not a way to compare.", hint="Use min or max.")
        best, best_value = None, 0.0
        for found in self.lineage():
            value = number_of(found.metrics.get(metric))
            if value is None or found.is_pending_validation:
                continue
            is_better = value <= best_value if mode == "min" else value >= best_value
            if best is None or is_better:
                best, best_value = found, value
        return best


def number_of(value: Any) -> float | None:
    """Return a metric as a number, or ``None`` if it is missing, NaN or no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # of more digits than a float has
        return None
    return None if math.isnan(number) else number


def scan(
    store: Store, cache: ManifestCache | None = None, *, notes: ManifestCache | None = None
) -> RunView:
    """Look at a run.

    Folders that Milepost did not make are left out. Checkpoint folders without a ``run.json``
    beside them (copied by hand) make a run too.

    Args:
        store: The run's store.
        cache: What the caller remembers of it from earlier looks. By default nothing: that is for
            those who look once, and delete nothing.
        notes: Without a cache: where the commits that are read are noted for the next look.

    Raises:
        MissingError: There is no run and no checkpoint.
        DamagedError: The record that says which commits count is missing or cannot be read.
        StorageError: The place cannot be reached. What it holds is not known then, and nothing of
            it is taken for damaged.
    """
    for _ in range(_LOOKS):
        view, unknown = _look_once(store, cache, notes)
        if not unknown:
            return view
        # A session that settled and published while we looked is as yet unknown to us. One that
        # published had settled before: if its record is not there now, it is lost.
        known = {one.number for one in list_sessions(store) if one.is_settled}
        for number in sorted(unknown - known):
            _refuse_unknown_origin(number, view)
    raise StorageError(
        f"The run at {store.url} changed hands {_LOOKS} times while it was looked at.",
        hint="Find the processes that write to this run and stop all but one.",
        path=store.url,
    )


def _look_once(
    store: Store, cache: ManifestCache | None, notes: ManifestCache | None
) -> tuple[RunView, set[int]]:
    """Return a run, and the sessions that published and of which it is not known from where."""
    # The order matters for a session that looks for what to go on from: see runs/sessions.py.
    sessions = tuple(list_sessions(store, None if cache is None else cache.sessions))
    seen = survey(store, cache, notes=notes)
    found, pins = seen.found, seen.pins
    if seen.has_validations:
        # After the commits, so that one whose verdict is read has been seen.
        found = _with_validations(
            found, list_validations(store, None if cache is None else cache.verdicts)
        )
    try:
        run = read_run(store)
    except MissingError:
        committed = [one.manifest for one in found if one.manifest]
        if not committed:
            raise
        run = RunRecord(committed[-1].run_id, "milepost")
    members = _members(run, sessions, found)
    marked = (_mark(one, members) for one in found)
    view = RunView(run, sessions, tuple(sorted(marked, key=lambda one: one.order)), pins)
    settled = {one.number for one in sessions if one.is_settled}
    published = {one.session for one in _commits(run, found) if one.session is not None}
    return view, published - settled if sessions else set()


def _with_validations(
    found: Sequence[Found], validations: Mapping[tuple[str, str], Validation]
) -> list[Found]:
    if not validations:
        return list(found)
    return [
        replace(one, validation=validations.get((one.name, validation_id(one.write_id or ""))))
        for one in found
    ]


def _mark(found: Found, members: set[str]) -> Found:
    """Return a committed folder as what it is to this run."""
    if found.state is not State.COMMITTED or found.name in members:
        return found
    is_apart = found.name.partition("/")[0] in DIAGNOSTIC_FOLDERS
    state = State.DIAGNOSTIC if is_apart else State.ORPHANED
    return replace(found, state=state)


def _commits(run: RunRecord, found: Sequence[Found]) -> list[Found]:
    """Return the commits of a run itself, without diagnostic ones and copies from other runs."""
    return [
        one
        for one in found
        if one.state is State.COMMITTED
        and one.name.partition("/")[0] not in DIAGNOSTIC_FOLDERS
        and one.manifest is not None
        and one.manifest.run_id == run.run_id
    ]


def _members(run: RunRecord, sessions: Sequence[Session], found: Sequence[Found]) -> set[str]:
    """Return the names on the lineage."""
    if not sessions:
        return {
            one.name
            for one in found
            if one.state is State.COMMITTED and one.name.partition("/")[0] not in DIAGNOSTIC_FOLDERS
        }
    commits = _commits(run, found)
    by_number = {session.number: session for session in sessions}
    settled = [session for session in sessions if session.is_settled]
    members: set[str] = set()
    number, limit = (settled[-1].number, math.inf) if settled else (0, 0.0)
    while number:
        members |= {
            one.name
            for one in commits
            if one.session == number and one.attempt is not None and one.attempt <= limit
        }
        origin = by_number[number].origin if number in by_number else None
        number, limit = (origin.session, origin.attempt) if origin else (0, 0.0)
    return members


def _refuse_unknown_origin(number: int, view: RunView) -> None:
    """Refuse to guess: a session that published went on from something."""
    wrote = [one.name for one in view.found if one.session == number and one.manifest]
    key, why = from_key(number), ""
    for session in view.sessions:
        if session.number == number:
            why = session.problem or f"{key} is missing."
    if not why:
        key = session_key(number)
        why = f"{key} is missing."
    raise DamagedError(
        f"It is not known what session {number} went on from, which wrote {', '.join(wrote[-5:])}: "
        f"{why}",
        safe="Every checkpoint is still there and can be loaded from its folder.",
        hint="Restore the record from a copy of the run, or start a new run from the folder of one "
        "checkpoint. One that was copied here from another place can be taken out again.",
        path=key,
        session=number,
    )
