"""Opening a run: look, compare, take a session, go back to the newest checkpoint that is whole.

The order is that of the session rule (see ``runs/sessions.py``): open a session, look at the
commits, restore the newest one that is whole, record it as the origin, sweep what dead attempts
left. Only then may anything be saved.

Of several ranks the leader looks and decides, and every rank compares and restores. All of them go
on from the same checkpoint, or none does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .checkpoint import Checkpoint, run_store
from .errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    FencedError,
    FormatError,
    IncompleteError,
    MismatchError,
    MissingError,
    NewerFormatError,
    UsageError,
)
from .format.digest import BLOCK_BYTES
from .format.layout import session_key
from .options import check_count, check_seconds, longest_wait_s
from .ranks.solo import Deadlines, RankCheck, Team
from .runs.keep import KeepPolicy
from .runs.manifests import ManifestCache
from .runs.prune import sweep
from .runs.scan import Found, RunView, State, scan
from .runs.sessions import Origin, Session, ensure_run, open_session, read_run, record_origin
from .runs.verify import Level, newest_good
from .staging import CopyCheck, Staging
from .stores.base import Store
from .stores.prefix import PrefixStore
from .visible import check_compression

__all__ = ["Covers", "Opened", "Opening", "Restore", "Resume", "WriterOptions"]

_log = logging.getLogger("milepost")

_MAX_SKEW_S = 60.0
"""How far the clocks of a service may be apart: commits of the last minute are read again."""

MIN_BUDGET_BYTES = 4 * BLOCK_BYTES
"""What the smallest ring of blocks takes; see ``engine/streaming.py``."""

Resume = Literal["never", "auto", "must"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How a session treats its run.

    Attributes:
        resume: ``never`` refuses a run that holds checkpoints; ``auto`` goes on from the newest one
            that is whole, or starts afresh; ``must`` refuses to start afresh.
        keep: Retention; what at least one policy keeps, stays. Empty keeps everything.
        save_format: ``milepost``, or ``torch`` for one file per checkpoint.
        save_compression: Of parts: zstd, lz4 or auto; of single files: gzip, bzip2, lzma; or empty.
        on_save_error: ``raise`` at the next chance, or ``warn`` and go on training.
        max_failed_saves: With ``warn``: how many saves in a row may fail.
        link_unchanged: Whether frozen weights that did not change share one file.
        sharding: Of several ranks: ``auto``, each writes what it holds; ``consolidated``, rank 0
            writes whole tensors.
        rank_timeout_s: Of several ranks: how long one waits for another to come to the same save or
            start, in seconds.
        share_timeout_s: Of several ranks: how long the leader waits for the last one to write its
            share, in seconds.
        rank_check: Of several ranks: ``sample``, ``full`` or ``none``.
        local_cache: Folder on this machine for copies of the newest checkpoints of a run in an
            object store; ``None`` keeps none.
        staging: ``eager`` copies the state before a save returns; ``overlap`` copies what
            optimizers own while the next forward and backward pass run; ``auto`` does so where
            nothing else can come between.
        copy_check: How what is copied while training goes on is watched: ``sample``, ``full`` or
            ``none``.
        staging_budget_bytes: How much memory the copy of a state may take on a rank; ``None``: as
            much as it needs. A larger state is written while it is copied, block by block.
    """

    resume: Resume = "auto"
    keep: Sequence[KeepPolicy] = field(default_factory=tuple)
    save_format: str = "milepost"
    save_compression: str | None = None
    on_save_error: str = "raise"
    max_failed_saves: int = 3
    link_unchanged: bool = True
    sharding: str = "auto"
    rank_timeout_s: float = 45.0
    share_timeout_s: float = 1800.0
    rank_check: RankCheck = "sample"
    local_cache: str | os.PathLike[str] | None = None
    staging: Staging = "eager"
    copy_check: CopyCheck = "sample"
    staging_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        _require("resume", self.resume, ("never", "auto", "must"))
        _require("save_format", self.save_format, ("milepost", "torch"))
        _require("sharding", self.sharding, ("auto", "consolidated"))
        _require("on_save_error", self.on_save_error, ("raise", "warn"))
        _require("rank_check", self.rank_check, ("sample", "full", "none"))
        _require("staging", self.staging, ("auto", "overlap", "eager"))
        _require("copy_check", self.copy_check, ("sample", "full", "none"))
        check_compression(self.save_compression, self.save_format)
        self._check_budget()
        check_count("max_failed_saves", self.max_failed_saves, least=1)
        for name in ("rank_timeout_s", "share_timeout_s"):
            check_seconds(name, getattr(self, name))

    def _check_budget(self) -> None:
        """Refuse a budget that nothing can be streamed through, or what cannot be streamed."""
        budget = self.staging_budget_bytes
        check_count("staging_budget_bytes", budget, least=0, may_be_none=True)
        if budget is None:
            return
        if budget < MIN_BUDGET_BYTES:
            raise UsageError(
                f"staging_budget_bytes={budget!r} is too little: blocks of 8 MiB go through that "
                "memory, of which one is copied, two are written and one is ready.",
                hint=f"Give {MIN_BUDGET_BYTES} (32 MiB) or more; 1 GiB is plenty.",
            )
        whole = {"save_format": self.save_format, "sharding": self.sharding}
        for name, value in whole.items():
            if value in ("torch", "consolidated"):
                raise UsageError(
                    f"staging_budget_bytes cannot be kept with {name}={value!r}: what is written "
                    "then is made of the whole copy.",
                    hint="Leave out one of the two. What was streamed becomes such files later, "
                    "with: milepost export, or milepost consolidate.",
                )

    @property
    def deadlines(self) -> Deadlines:
        """Return how long ranks wait for each other."""
        meet_s, write_s = map(longest_wait_s, (self.rank_timeout_s, self.share_timeout_s))
        return Deadlines(meet_s=meet_s, write_s=write_s)


Restore = Callable[[Checkpoint], None]
Covers = Callable[[Checkpoint, Checkpoint], bool]


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is open.

    Attributes:
        session: The session, settled.
        resumed_from: Name of the checkpoint that was restored, or ``None`` after a fresh start.
        notes: What a user should know about it.
    """

    session: Session
    resumed_from: str | None
    notes: tuple[str, ...]


class Opening:
    """Opens a run on every rank.

    Args:
        base: The place of the run.
        store: The store with its records.
        options: How a session treats its run.
        team: The ranks.
        manifests: Remembers what is read of the run.
        source: Where checkpoints are restored from, if not from ``store``: the same with copies.
    """

    def __init__(
        self,
        base: Store,
        store: Store,
        options: WriterOptions,
        team: Team,
        manifests: ManifestCache,
        *,
        source: Store | None = None,
    ) -> None:
        self.store = store
        self._source = source or store
        self.options = options
        self._base = base
        self._team = team
        self._manifests = manifests
        self._notes: list[str] = []
        self._view: RunView | None = None
        self._looked_s = 0.0

    def open(
        self,
        restore: Restore,
        *,
        check: Restore,
        origin: Checkpoint | None,
        covers: Covers | None = None,
    ) -> Opened:
        """Begin a session; see ``RunWriter.open``."""
        team, deadlines = self._team, self.options.deadlines
        # Whoever fails before this is known at once, and not when the leader has looked and waits.
        team.collect("come to the run", lambda: None, timeout_s=deadlines.meet_s)
        first = team.lead(
            "look at the run", lambda: self._look_first(origin), timeout_s=deadlines.meet_s
        )
        team.collect(
            "compare its objects with the checkpoint",
            lambda: self._check_fit(first, check, origin),
            timeout_s=deadlines.write_s,
        )
        session = _session(
            team.lead("open a session", self._open_session, timeout_s=deadlines.meet_s)
        )
        team.collect("see the run", lambda: self._see(session), timeout_s=deadlines.meet_s)
        name = self._restore(restore, origin, covers)
        settled = team.lead(
            "begin", lambda: self._settle(session, name), timeout_s=deadlines.write_s
        )
        return Opened(_session(settled), name, tuple(self._notes))

    def _look_first(self, origin: Checkpoint | None) -> dict[str, Any] | None:
        """Look at the run before it is taken; return the newest checkpoint."""
        self._check_layout()
        view = self._view = self._look()
        if origin is not None:
            return None
        self._check_resume(view)
        newest = None if view is None else view.latest()
        return None if newest is None else {"name": newest.name, "state": str(newest.state)}

    def _open_session(self) -> dict[str, Any]:
        view = self._view
        record = ensure_run(
            self.store,
            layout=self.options.save_format,
            run_id=None if view is None else view.run.run_id,
        )
        session = open_session(self.store, record)
        self._manifests.clear()  # what to go on from is chosen by what is there now
        if not self.store.traits.is_local:
            self._manifests.trust_noted(self._looked_from_s(session))
        self._view = scan(self.store, self._manifests)
        return asdict(session)

    def _looked_from_s(self, session: Session) -> float:
        """Return a time before the first look, by the clock of the store."""
        try:
            opened_s = self.store.head(session_key(session.number)).modified_s
        except MissingError:
            return 0.0  # said when all ranks look for it
        return opened_s - (time.monotonic() - self._looked_s) - _MAX_SKEW_S

    def _see(self, session: Session) -> None:
        """Make sure that this rank sees the very place that the leader writes to."""
        try:
            self.store.head(session_key(session.number))
        except MissingError as error:
            raise UsageError(
                f"{self.store.url} is not the same place on every rank: this one does not see "
                f"session {session.number}, which rank 0 has just opened there.",
                safe="No checkpoint was touched.",
                hint="Use a folder that all machines share.",
                path=self.store.url,
            ) from error

    def _settle(self, session: Session, name: str | None) -> dict[str, Any]:
        origin = None
        if name is not None:
            assert self._view is not None
            made = self._view.get(name).manifest
            assert made is not None
            origin = Origin(made.name, made.session, made.attempt)
        settled = record_origin(self.store, session, origin)
        self._sweep(settled)
        return asdict(settled)

    def _look(self) -> RunView | None:
        self._looked_s = time.monotonic()
        try:
            return scan(self.store, notes=self._manifests)
        except MissingError:
            return None

    def _check_layout(self) -> None:
        """Refuse to mix single files and folders in one run."""
        existing = run_store(self._base)
        if existing is None:
            return
        try:
            layout = read_run(existing).layout
        except MissingError:  # only its run.json is lost
            layout = "torch" if isinstance(existing, PrefixStore) else "milepost"
        if layout != self.options.save_format:
            raise UsageError(
                f"The run at {self._base.url} was written with save_format={layout!r}.",
                safe="It was not touched.",
                hint=f"Go on with save_format={layout!r}, or choose another folder.",
            )

    def _check_resume(self, view: RunView | None) -> None:
        found = [] if view is None else _countable(view)
        if self.options.resume == "never" and found:
            names = ", ".join(one.name for one in found[-5:])
            raise ExistsError(
                f"The run at {self._base.url} holds checkpoints already: {names}.",
                safe="They were not touched.",
                hint='Choose another folder; a training goes on with them with resume="auto".',
                path=self._base.url,
            )
        if found and view is not None and not view.sessions:
            raise IncompleteError(
                f"The run at {self._base.url} holds checkpoints, but not the records in sessions/ "
                "that say which of them count.",
                safe="Nothing was changed.",
                hint="Copy sessions/ here too; or start a new run in another folder and go on from "
                "one checkpoint by its path.",
                path=self._base.url,
            )
        if self.options.resume == "must" and not found:
            raise MissingError(
                f'There is nothing to resume from at {self._base.url}, but resume="must".',
                hint='Use resume="auto" for the first start.',
                path=self._base.url,
            )

    def _check_fit(
        self, newest: dict[str, Any] | None, check: Restore, origin: Checkpoint | None
    ) -> None:
        if origin is not None:
            check(origin)
            return
        if newest is None:
            return
        try:
            check(self._checkpoint(newest))
        except NewerFormatError:
            raise
        except (FormatError, MissingError) as error:
            # Damage is dealt with when the session is open: an older one is taken then.
            _log.info("%s could not be compared: %s", newest["name"], error)

    def _restore(
        self, restore: Restore, origin: Checkpoint | None, covers: Covers | None
    ) -> str | None:
        """Restore the newest checkpoint that is whole, on every rank, and return its name."""
        passed_over: list[str] = []
        skipped: set[str] = set()
        while True:
            chosen = self._team.lead(
                "choose a checkpoint",
                lambda: self._choose(skipped, passed_over, origin, covers),
                timeout_s=self.options.deadlines.write_s,
            )
            if chosen is None:
                return None
            # Damage shows only when the bytes are read. An older one is restored over it; what
            # that would not overwrite was looked at before.
            damage = self._team.collect(
                "restore the checkpoint",
                lambda: self._try_restore(chosen, restore, origin),  # noqa: B023 - called at once
                timeout_s=self.options.deadlines.write_s,
            )
            found = next((text for text in damage if text), None)
            if found is None:
                self._report_passed_over(chosen["passed_over"], chosen["name"])
                return str(chosen["name"])
            passed_over[:] = [*chosen["passed_over"], f"{chosen['name']}: {found}"]
            skipped.add(chosen["name"])

    def _choose(
        self,
        skipped: set[str],
        passed_over: list[str],
        origin: Checkpoint | None,
        covers: Covers | None,
    ) -> dict[str, Any] | None:
        """Return the newest checkpoint that is whole, but for those that turned out damaged."""
        view = self._view
        assert view is not None
        if origin is not None:
            return {"name": origin.manifest.name, "state": None, "passed_over": []}
        for one in view.found:
            if isinstance(one.error, NewerFormatError):
                raise one.error
        found, reports = newest_good(self.store, _without(view, skipped))
        if found is not None and covers is not None:
            bad = {report.name for report in reports}
            older, _ = newest_good(self.store, _without(view, {*skipped, *bad, found.name}))
            if older is not None and not covers(self._handle(found), self._handle(older)):
                left = _without(view, skipped)
                found, reports = newest_good(self.store, left, level=Level.FULL)
        passed_over += [
            f"{report.name}: {'; '.join(p.text for p in report.problems)}" for report in reports
        ]
        skipped |= {report.name for report in reports}
        if found is not None:
            return {"name": found.name, "state": str(found.state), "passed_over": passed_over}
        if passed_over:
            listed = "\n  ".join(passed_over)
            raise DamagedError(
                f"No checkpoint of {self.store.url} is whole:\n  {listed}\n",
                safe="Nothing was deleted or overwritten.",
                hint="Look at them with: milepost verify --all. To begin anew choose another "
                "folder.",
                path=self.store.url,
            )
        self._check_orphans(view)
        self._check_only_attempts(view)
        return None

    def _try_restore(
        self, chosen: dict[str, Any], restore: Restore, origin: Checkpoint | None
    ) -> str:
        """Restore a checkpoint; return what is damaged of it, else nothing."""
        if origin is not None:
            restore(origin)
            return ""
        try:
            restore(self._checkpoint(chosen))
        except NewerFormatError:
            raise
        except (FormatError, MissingError) as error:
            return str(error)
        return ""

    def _handle(self, found: Found) -> Checkpoint:
        return self._checkpoint({"name": found.name, "state": str(found.state)})

    def _checkpoint(self, chosen: dict[str, Any]) -> Checkpoint:
        return Checkpoint(self._source, chosen["name"], state=State(chosen["state"]))

    def _report_passed_over(self, passed_over: list[str], used: str) -> None:
        if passed_over:
            listed = "\n  ".join(passed_over)
            note = f"Damaged checkpoints were passed over; going on from {used}:\n  {listed}"
            _log.warning(note)
            self._notes.append(note)

    def _check_orphans(self, view: RunView) -> None:
        """Never leave whole checkpoints behind in silence."""
        orphans = [found for found in view.found if found.state is State.ORPHANED]
        if not orphans:
            return
        names = ", ".join(found.name for found in orphans[-5:])
        strangers = [
            one for one in orphans if one.manifest and one.manifest.run_id != view.run.run_id
        ]
        if strangers:
            raise MismatchError(
                f"The checkpoints at {self.store.url} ({names}) belong to another run than the "
                "run.json beside them.",
                safe="They are whole, and nothing was deleted or overwritten.",
                hint="Put back the run.json that belongs to them, or remove it: it is written anew "
                "from what the checkpoints say. To begin anew choose another folder.",
                path=self.store.url,
            )
        if self.options.resume == "must":
            raise MissingError(
                f"No checkpoint of {self.store.url} counts; there are only some that the run did "
                f"not go on from: {names}.",
                safe="They are whole and can be loaded by name.",
                hint="To go on from one of them name it: load_path_format, or restore(NAME).",
                path=self.store.url,
            )
        _log.warning(
            "The run at %s starts from the beginning although it holds %s, which it did not go on "
            "from before either.",
            self.store.url,
            names,
        )

    def _check_only_attempts(self, view: RunView) -> None:
        """Start afresh beside attempts only if it is certain that none of them was a checkpoint."""
        attempts = [one for one in view.found if one.state is State.INCOMPLETE]
        if not attempts:
            return
        known = {session.number for session in view.sessions}
        names = ", ".join(one.name for one in attempts)
        if all(one.session in known for one in attempts):
            _log.warning(
                "The run at %s holds attempts that were never committed (%s) and no checkpoint: "
                "it starts from the beginning.",
                self.store.url,
                names,
            )
            return
        raise IncompleteError(
            f"The run at {self.store.url} holds only incomplete checkpoints: {names}.",
            safe="Nothing was deleted or overwritten.",
            hint="If they were copied here, copy the missing files (manifest.json last) and try "
            "again. To begin anew choose another folder.",
            path=self.store.url,
        )

    def _sweep(self, session: Session) -> None:
        try:
            removed = sweep(self.store, session, cache=self._manifests)
        except FencedError:
            raise
        except CheckpointError as error:
            _log.warning("Leftovers of dead attempts could not be removed: %s", error)
            return
        except Exception:  # noqa: BLE001 - recorded
            # Housekeeping, by more libraries than the saves need: the training starts without.
            _log.exception("Leftovers of dead attempts could not be removed.")
            return
        if removed:
            _log.info("Removed leftovers of dead attempts: %s", ", ".join(removed))


def _session(fields: Any) -> Session:
    origin = fields["origin"]
    return Session(**{**fields, "origin": None if origin is None else Origin(**origin)})


def _countable(view: RunView) -> list[Found]:
    """Return what a fresh start would ignore: anything that is or was meant to be a checkpoint."""
    states = (State.COMMITTED, State.ORPHANED, State.DAMAGED)
    return [found for found in view.found if found.state in states]


def _without(view: RunView, names: Collection[str]) -> RunView:
    return RunView(
        view.run,
        view.sessions,
        tuple(found for found in view.found if found.name not in names),
        view.pins,
    )


def _require(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise UsageError(f"{name}={value!r} is not known.", hint=f"Use one of {listed}.")
