"""One session's hold on a run: resume, save, retention, and what to do when a save fails.

The order at the start is that of the session rule (see ``runs/sessions.py``): open a session, look
at the commits, restore the newest one that is whole, record it as the origin, sweep what dead
attempts left. Only then may anything be saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .checkpoint import Checkpoint, Run, run_store
from .engine.pending import PendingSave
from .engine.save import Saver, SaveRequest
from .engine.single import check_compression
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
    SaveFailedError,
    UsageError,
)
from .exit_check import unwatch, watch
from .format.layout import HIDDEN
from .format.manifest import Manifest
from .runs.keep import KeepPolicy, may_give_up
from .runs.manifests import ManifestCache
from .runs.prune import decide, delete_checkpoint, prune, sweep
from .runs.publish import point_latest
from .runs.scan import Found, RunView, State, scan
from .runs.sessions import Origin, Session, ensure_run, open_session, read_run, record_origin
from .runs.verify import newest_good
from .stores.base import Store
from .stores.prefix import PrefixStore
from .stores.url import open_store
from .tensors.pack import PackedItem
from .visible import VisibleFiles

__all__ = ["Resume", "RunWriter", "WriterOptions"]

_log = logging.getLogger("milepost")

KEPT_DIAGNOSTICS = 3
"""Diagnostic checkpoints of one kind that are kept, the newest ones."""

Resume = Literal["never", "auto", "must"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How a session treats its run.

    Attributes:
        resume: ``never`` refuses a run that holds checkpoints; ``auto`` goes on from the newest one
            that is whole, or starts afresh; ``must`` refuses to start afresh.
        keep: Retention; what at least one policy keeps, stays. Empty keeps everything.
        save_format: ``milepost``, or ``torch`` for one file per checkpoint.
        save_compression: For single files: gzip, bzip2, lzma, or empty.
        on_save_error: ``raise`` at the next chance, or ``warn`` and go on training.
        max_failed_saves: With ``warn``: how many saves in a row may fail.
        link_unchanged: Whether frozen weights that did not change share one file.
    """

    resume: Resume = "auto"
    keep: Sequence[KeepPolicy] = field(default_factory=tuple)
    save_format: str = "milepost"
    save_compression: str | None = None
    on_save_error: str = "raise"
    max_failed_saves: int = 3
    link_unchanged: bool = True

    def __post_init__(self) -> None:
        _require("resume", self.resume, ("never", "auto", "must"))
        _require("save_format", self.save_format, ("milepost", "torch"))
        _require("on_save_error", self.on_save_error, ("raise", "warn"))
        check_compression(self.save_compression, self.save_format)
        if self.max_failed_saves < 1:
            raise UsageError("max_failed_saves must be at least 1.")


Restore = Callable[[Checkpoint], None]


class RunWriter:
    """Resumes from a run and writes to it.

    Args:
        place: Folder or store of the run.
        options: See :class:`WriterOptions`.
    """

    def __init__(self, place: str | Store, options: WriterOptions) -> None:
        self.options = options
        self._base = open_store(place)
        is_hidden = options.save_format == "torch"
        self._visible = VisibleFiles(self._base)
        self.store: Store = PrefixStore(self._base, HIDDEN) if is_hidden else self._base
        self.session: Session | None = None
        self.resumed_from: str | None = None
        self.notes: list[str] = []
        self.protected: set[str] = set()
        self._saver: Saver[Checkpoint] | None = None
        self._unsettled: list[PendingSave[Checkpoint]] = []
        self._manifests = ManifestCache()
        self._num_failed = 0

    @property
    def run(self) -> Run:
        """Return a fresh handle on the run."""
        return Run(self.store)

    def open(self, restore: Restore, *, check: Restore, origin: Checkpoint | None = None) -> None:
        """Begin a session.

        Args:
            restore: Restores the live objects from a checkpoint; called with older and older ones
                as long as it raises an error about damage.
            check: Compares a checkpoint with the live objects. Called before the session is
                opened, so that a start that cannot succeed does not fence a run that is well.
            origin: Go on from this checkpoint of the run instead of the newest; later ones are then
                off the lineage.

        Raises:
            ExistsError: ``resume="never"`` and the run holds checkpoints.
            MissingError: ``resume="must"`` and it holds none.
            DamagedError: It holds checkpoints, and none of them is whole.
            MismatchError: The newest one does not fit the live objects.
        """
        self._check_layout()
        view = self._look()
        if origin is None:
            self._check_resume(view)
            self._check_fit(view, check)
        else:
            check(origin)
        record = ensure_run(
            self.store,
            layout=self.options.save_format,
            run_id=None if view is None else view.run.run_id,
        )
        session = open_session(self.store, record)
        self._manifests = ManifestCache()  # what to go on from is chosen by what is there now
        view = scan(self.store, self._manifests)
        found = self._restore(view, restore, origin)
        came_from = None
        if found is not None and found.manifest is not None:
            made = found.manifest
            came_from = Origin(made.name, made.session, made.attempt)
            self.resumed_from = made.name
        self.session = record_origin(self.store, session, came_from)
        self._sweep(self.session)
        self._saver = Saver(
            self.store,
            self.session,
            layout=self.options.save_format,
            compression=check_compression(self.options.save_compression, self.options.save_format),
            link_unchanged=self.options.link_unchanged,
            on_commit=self._after_commit,
        )
        if self.options.save_format == "torch":
            newest = scan(self.store, self._manifests).latest()
            if newest is not None and newest.manifest is not None:
                self._visible.show_missing(newest.manifest)
        watch(self._unsettled, is_fatal=self.options.on_save_error == "raise")

    def close(self) -> None:
        """Leave the run. A save that is still in flight goes on, and is looked at when it ends."""
        if not self._unsettled:
            unwatch(self._unsettled)
        self._saver = None  # it refers back to us, and holds memory of the size of the state

    def save(self, items: Sequence[PackedItem], request: SaveRequest) -> PendingSave[Checkpoint]:
        """Save a state; see ``Saver.save``. Errors of earlier saves come out here."""
        if self._saver is None:
            raise UsageError("The run is not open.", hint="Use it in a with block, or call open().")
        self.settle()
        pending = self._saver.save(items, request)
        self._unsettled.append(pending)
        return pending

    def settle(self) -> None:
        """Act on saves that have ended since the last call, as ``on_save_error`` says.

        Raises:
            CheckpointError: With ``raise``: the error of the first save that failed.
            SaveFailedError: With ``warn``: too many saves in a row failed.
        """
        first: BaseException | None = None
        while self._unsettled and self._unsettled[0].done():
            pending = self._unsettled.pop(0)
            error = pending.unreported_error
            if error is None:
                self._num_failed = 0 if pending.exception() is None else self._num_failed
                continue
            pending.exception()
            self._num_failed += 1
            is_fatal = self.options.on_save_error == "raise" or isinstance(error, FencedError)
            if is_fatal and first is None:
                first = error
            else:
                _log.warning("The save of %s failed: %s", pending.name, error)
            if not is_fatal and self._num_failed > self.options.max_failed_saves:
                first = first or self._too_many(pending.name, error)
        if first is not None:
            raise first

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight and act on how it ended.

        Raises:
            DeadlineError: It did not end in time.
        """
        for pending in list(self._unsettled):
            pending.check_done(timeout_s)
        self.settle()

    def wait_for_writing(self, timeout_s: float | None) -> None:
        """Wait until nothing is being written, whatever came of it.

        Raises:
            DeadlineError: It did not end in time.
        """
        for pending in list(self._unsettled):
            pending.check_done(timeout_s)

    def _too_many(self, name: str, error: BaseException) -> SaveFailedError:
        failed = SaveFailedError(
            f"{self._num_failed} saves in a row failed; the last one was {name}.",
            safe="Checkpoints that were committed before are intact.",
            hint=f"The place is {self.store.url}.",
        )
        failed.__cause__ = error
        return failed

    def _look(self) -> RunView | None:
        try:
            return scan(self.store)
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
                hint='Resume with resume="auto", or choose another folder.',
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

    def _check_fit(self, view: RunView | None, check: Restore) -> None:
        newest = None if view is None else view.latest()
        if newest is None:
            return
        try:
            check(Checkpoint(self.store, newest.name, state=newest.state))
        except NewerFormatError:
            raise
        except (FormatError, MissingError) as error:
            # Damage is dealt with when the session is open: an older one is taken then.
            _log.info("%s could not be compared: %s", newest.name, error)

    def _restore(self, view: RunView, restore: Restore, origin: Checkpoint | None) -> Found | None:
        """Restore the newest checkpoint that is whole, and return it."""
        if origin is not None:
            restore(origin)
            return view.get(origin.manifest.name)
        for one in view.found:
            if isinstance(one.error, NewerFormatError):
                raise one.error
        passed_over: list[str] = []
        skipped: set[str] = set()
        while True:
            rest = _without(view, skipped)
            found, reports = newest_good(self.store, rest)
            passed_over += [
                f"{report.name}: {'; '.join(p.text for p in report.problems)}" for report in reports
            ]
            skipped |= {report.name for report in reports}
            if found is None:
                break
            try:
                restore(Checkpoint(self.store, found.name, state=found.state))
            except NewerFormatError:
                raise
            except (FormatError, MissingError) as error:
                # Damage shows only when the bytes are read. An older one is restored over it.
                passed_over.append(f"{found.name}: {error}")
                skipped.add(found.name)
                continue
            self._report_passed_over(passed_over, found.name)
            return found
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

    def _report_passed_over(self, passed_over: list[str], used: str) -> None:
        if passed_over:
            listed = "\n  ".join(passed_over)
            note = f"Damaged checkpoints were passed over; going on from {used}:\n  {listed}"
            _log.warning(note)
            self.notes.append(note)

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
        if removed:
            _log.info("Removed leftovers of dead attempts: %s", ", ".join(removed))

    def _after_commit(self, manifest: Manifest) -> Checkpoint:
        """Show the new checkpoint to people and apply retention. Runs in the background thread."""
        checkpoint = Checkpoint(self.store, manifest.name, state=State.COMMITTED)
        self._manifests.forget(manifest.name)
        if "/" in manifest.name:
            self._prune_diagnostics(manifest.name.partition("/")[0])
            return checkpoint
        if self.options.save_format == "torch":
            self._show(manifest)
        else:
            problem = point_latest(self.store, manifest.name)
            if problem is not None:
                _log.info("The pointer to the newest checkpoint was not updated: %s", problem)
        if may_give_up(self.options.keep):
            self._prune()
        return checkpoint

    def _prune(self) -> None:
        try:
            view = scan(self.store, self._manifests)
            decisions = decide(view, self.options.keep, protect=frozenset(self.protected))
            if self.options.save_format == "torch":
                # Before the checkpoints go: a stop in between leaves no name without a checkpoint.
                self._visible.hide(one.name for one in decisions if not one.keep)
            report = prune(self.store, decisions, session=self.session, view=view)
        except FencedError:
            raise
        except CheckpointError as error:
            _log.warning("Retention failed and will be tried again after the next save: %s", error)
            return
        for name, reason in report.errors.items():
            _log.warning("The checkpoint %s was to be deleted and was not: %s", name, reason)

    def _show(self, manifest: Manifest) -> None:
        try:
            self._visible.show(manifest)
        except CheckpointError as error:
            _log.warning("%s is committed, but not visible: %s", manifest.name, error)

    def _prune_diagnostics(self, folder: str) -> None:
        """Keep the newest few diagnostic checkpoints of a kind; a crash loop must end somewhere."""
        try:
            view = scan(self.store, self._manifests)
            found = [f for f in view.found if f.name.startswith(f"{folder}/")]
            whole = [f for f in found if f.state is State.DIAGNOSTIC and not f.is_pinned]
            for old in whole[:-KEPT_DIAGNOSTICS]:
                delete_checkpoint(self.store, old.name)
        except CheckpointError as error:
            _log.warning("Old checkpoints in %s/ were not removed: %s", folder, error)


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
