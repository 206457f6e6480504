"""One session's hold on a run: save, retention, and what to do when a save fails.

How a run is opened stands in ``opening.py``. Of several ranks every one has a writer; only the
leader's points to the newest checkpoint and deletes old ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from .checkpoint import Checkpoint, Run
from .copies.cached import CachedStore
from .copies.kept import KeptCopies, check_remote
from .engine.pending import PendingSave
from .engine.save import Saver, SaveRequest
from .errors import (
    CheckpointError,
    FencedError,
    InUseError,
    SaveFailedError,
    StateChangedError,
    UsageError,
)
from .exit_check import unwatch, watch
from .format.layout import HIDDEN
from .format.manifest import Manifest
from .liveness import note_commit
from .opening import Covers, Opening, Restore, WriterOptions
from .ranks.solo import Solo, Team
from .runs.costs import cost_text, size_text
from .runs.keep import may_give_up
from .runs.manifests import ManifestCache
from .runs.prune import decide, delete_checkpoint, prune
from .runs.publish import point_latest
from .runs.scan import State, read_manifest, scan
from .runs.sessions import Session
from .runs.unranked import Unranked
from .staging import BY_HAND, EAGER_ASKED, LAST_SAVE, SEVERAL_RANKS, WRITTEN_TO
from .state.owned import Late
from .state.sizes import Sizes
from .stores.base import Store
from .stores.prefix import PrefixStore
from .stores.url import open_store
from .tensors.pack import PackedItem
from .visible import VisibleFiles, check_compression

__all__ = ["RunWriter"]

_log = logging.getLogger("milepost")

KEPT_DIAGNOSTICS = 3
"""Diagnostic checkpoints of one kind that are kept, the newest ones."""


_LEAVE_TIMEOUT_S = 10.0


class RunWriter:
    """Resumes from a run and writes to it.

    Args:
        place: Folder or store of the run.
        options: See :class:`WriterOptions`.

    Attributes:
        team: The ranks that write the run together; at first this process alone.
    """

    def __init__(self, place: str | Store, options: WriterOptions) -> None:
        self.options = options
        self.team: Team = Solo()
        self._base = open_store(place)
        is_hidden = options.save_format == "torch"
        self._visible = VisibleFiles(self._base)
        self.store: Store = PrefixStore(self._base, HIDDEN) if is_hidden else self._base
        self._cached: CachedStore | None = None
        if options.local_cache is not None:
            check_remote(self.store)
            self._cached = CachedStore(self.store, KeptCopies(options.local_cache))
        self.session: Session | None = None
        self.resumed_from: str | None = None
        self.notes: list[str] = []
        self.protected: set[str] = set()
        self._saver: Saver[Checkpoint] | None = None
        self._unsettled: list[PendingSave[Checkpoint]] = []
        self._manifests = ManifestCache()
        self._unranked = Unranked(options.keep)
        self._num_failed = 0
        self._only_warned: tuple[str, BaseException] | None = None
        self._is_wary = False
        self._told_reason = ""

    @property
    def run(self) -> Run:
        """Return a fresh handle on the run."""
        return Run(self.store)

    @property
    def source(self) -> Run:
        """Return a handle on the run whose checkpoints are read from copies where there are any."""
        return self.run if self._cached is None else Run(self._cached)

    def meet(self, tell: Callable[..., None]) -> None:
        """Have this rank and the others tell each other something; on an error leave them.

        Args:
            tell: Called with the team and ``timeout_s``.
        """
        try:
            tell(self.team, timeout_s=self.options.deadlines.meet_s)
        except BaseException:
            if self._saver is None:
                self._leave()
            raise

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error that this one has before the run is open; leave them."""
        try:
            yield
        except BaseException as error:
            self.team.give_up(error)
            self._leave()
            raise

    def open(
        self,
        restore: Restore,
        *,
        check: Restore,
        origin: Checkpoint | None = None,
        covers: Covers | None = None,
    ) -> None:
        """Begin a session.

        Args:
            restore: Restores the live objects from a checkpoint; called with older and older ones
                as long as it raises an error about damage.
            check: Compares a checkpoint with the live objects. Called before the session is
                opened, so that a start that cannot succeed does not fence a run that is well.
            origin: Go on from this checkpoint of the run instead of the newest; later ones are then
                off the lineage.
            covers: Tells of two checkpoints whether the second overwrites all that the first
                changes. Where it does not, every byte of the first is checked before it is
                restored. ``None`` if it always does.

        Raises:
            ExistsError: ``resume="never"`` and the run holds checkpoints.
            MissingError: ``resume="must"`` and it holds none.
            DamagedError: It holds checkpoints, and none of them is whole.
            MismatchError: The newest one does not fit the live objects.
        """
        opening = Opening(
            self._base,
            self.store,
            self.options,
            self.team,
            self._manifests,
            source=self._cached,
        )
        try:
            opened = opening.open(restore, check=check, origin=origin, covers=covers)
        except BaseException:
            self._leave()
            raise
        self.session, self.resumed_from = opened.session, opened.resumed_from
        self.notes += opened.notes
        if self._cached is not None:
            self._cached.begin(self.session.run_id)
            self._tell_source(self._cached)
        self._saver = Saver(
            self._cached or self.store,
            self.session,
            layout=self.options.save_format,
            compression=check_compression(self.options.save_compression, self.options.save_format),
            link_unchanged=self.options.link_unchanged,
            on_commit=self._after_commit,
            team=self.team,
            sharding=self.options.sharding,
            deadlines=self.options.deadlines,
            rank_check=self.options.rank_check,
            copy_check=self.options.copy_check,
            budget_bytes=self.options.staging_budget_bytes,
        )
        if self.options.save_format == "torch" and self.team.rank == 0:
            newest = scan(self.store, self._manifests).latest()
            if newest is not None and newest.manifest is not None:
                self._visible.show_missing(newest.manifest)
        watch(self._unsettled, is_fatal=self.options.on_save_error == "raise")

    def close(self) -> None:
        """Leave the run. A save that is still in flight goes on, and is looked at when it ends."""
        if not self._unsettled:
            unwatch(self._unsettled)
            self._leave()
            if self._cached is not None:
                self._cached.close()
        if self._saver is not None:
            self._saver.close()
        self._saver = None  # it refers back to us, and holds memory of the size of the state

    def _tell_source(self, cached: CachedStore) -> None:
        if self.resumed_from is not None:
            _log.info(
                "Of %s %s were read from copies on this machine, and %s from %s.",
                self.resumed_from,
                size_text(cached.local_bytes),
                size_text(cached.remote_bytes),
                self.store.url,
            )

    def _leave(self) -> None:
        self.team.leave(timeout_s=min(_LEAVE_TIMEOUT_S, self.options.rank_timeout_s))

    def prepare(self, sizes: Sizes) -> None:
        """Have memory got ahead of the first save; see ``Saver.prepare``."""
        if self._saver is not None:
            self._saver.prepare(sizes)

    def eager_reason(self, *, is_step_next: bool, is_waited_for: bool) -> str:
        """Return why everything must be copied before a save returns.

        Empty if what optimizers own may be copied later.

        Args:
            is_step_next: Whether nothing can come between the save and the next step of an
                optimizer but a forward and a backward pass.
            is_waited_for: Whether nothing at all comes before it is committed.
        """
        if self.options.staging == "eager":
            return EAGER_ASKED
        if self.options.staging == "overlap":
            return ""
        if not (is_step_next or is_waited_for):
            return BY_HAND
        if self.team.world_size > 1:
            return SEVERAL_RANKS
        return WRITTEN_TO if self._is_wary else ""

    def save(
        self,
        items: Sequence[PackedItem],
        request: SaveRequest,
        *,
        owned: Late | None = None,
        eager_reason: str = "",
        is_waited_for: bool = False,
        capture_s: float = 0.0,
    ) -> PendingSave[Checkpoint]:
        """Save a state; see ``Saver.save``. Errors of earlier saves come out here."""
        if self._saver is None:
            raise UsageError("The run is not open.", hint="Use it in a with block, or call open().")
        self.settle()
        started_s = time.perf_counter()
        self._saver.wait_until_free()
        waited_s = time.perf_counter() - started_s
        self.settle()  # how the save before has ended may say what may be copied late
        if self._is_wary and owned is not None:
            owned, eager_reason = None, WRITTEN_TO
        try:
            pending = self._saver.save(
                items,
                request,
                owned=owned,
                eager_reason=eager_reason,
                is_waited_for=is_waited_for,
                capture_s=capture_s,
                waited_s=waited_s,
            )
        except BaseException:
            begun = self._saver.in_flight
            if begun is not None and begun not in self._unsettled:  # its thread still is at it
                self._unsettled.append(begun)
            raise
        self._unsettled.append(pending)
        if self.team.rank == 0:
            pending.when_done(partial(self._log_cost, pending))
        return pending

    def fail(self, name: str, error: BaseException) -> None:
        """Tell the other ranks that this one has no state to save."""
        if self._saver is not None:
            self._saver.fail(name, error)

    def give_up(self, error: BaseException, *, patience_s: float | None = None) -> None:
        """Tell the other ranks that this one saves no more; see ``Saver.give_up``."""
        if self._saver is not None:
            self._saver.give_up(error, patience_s=patience_s)

    def settle(self) -> None:
        """Act on saves that have ended since the last call, as ``on_save_error`` says.

        Raises:
            CheckpointError: With ``raise``: the error of the first save that failed.
            SaveFailedError: With ``warn``: too many saves in a row failed.
        """
        first: BaseException | None = None
        while self._unsettled and self._unsettled[0].done():
            pending = self._unsettled.pop(0)
            is_told, error = pending.was_reported, pending.exception()
            if self.options.staging == "auto" and isinstance(error, StateChangedError):
                self._be_wary(pending.name, error, is_told=is_told)
                continue
            if error is None:
                self._note_success()
            if error is None or is_told:
                continue
            self._num_failed += 1
            self._only_warned = None
            is_fatal = self.options.on_save_error == "raise" or isinstance(error, FencedError)
            if is_fatal and first is None:
                first = error
            else:
                _log.warning("The save of %s failed: %s", pending.name, error)
                self._only_warned = None if "/" in pending.name else (pending.name, error)
            if not is_fatal and self._num_failed > self.options.max_failed_saves:
                first = first or self._too_many(pending.name, error)
        if first is not None:
            self._only_warned = None
            raise first

    def _be_wary(self, name: str, error: StateChangedError, *, is_told: bool) -> None:
        """Copy at once from now on: something writes to the state where nothing should."""
        self._is_wary = True
        if not is_told:
            self._only_warned = (name, error)
        _log.warning(
            "The save of %s failed, and from now on the whole state is copied before a save "
            "returns: %s",
            name,
            error,
        )

    def wait(self, timeout_s: float | None = None, *, is_end: bool = False) -> None:
        """Wait for the save in flight and act on how it ended.

        Args:
            timeout_s: How long to wait, in seconds.
            is_end: Whether no save will follow. That the newest one has failed is an error then,
                also with ``warn``: there is no training left to go on with.

        Raises:
            DeadlineError: It did not end in time.
            SaveFailedError: See ``is_end``.
        """
        for pending in list(self._unsettled):
            pending.check_done(timeout_s)
        self.settle()
        if is_end and self._only_warned is not None:
            (name, error), self._only_warned = self._only_warned, None
            raise SaveFailedError(
                f"The training ends and its newest state is not saved: {name} could not be.",
                safe="Checkpoints that were committed before are intact.",
                hint=f"The place is {self.store.url}. Start again from the newest checkpoint.",
                name=name,
            ) from error

    def wait_for_writing(self, timeout_s: float | None) -> None:
        """Wait until nothing is being written, whatever came of it.

        Raises:
            DeadlineError: It did not end in time.
        """
        for pending in list(self._unsettled):
            pending.check_done(timeout_s)

    def _note_success(self) -> None:
        """Take note of a save that was committed, and say so where earlier ones were not."""
        if self._num_failed:
            _log.warning("Saves succeed again; %d in a row had failed.", self._num_failed)
        self._num_failed, self._only_warned = 0, None

    def _too_many(self, name: str, error: BaseException) -> SaveFailedError:
        failed = SaveFailedError(
            f"{self._num_failed} saves in a row failed; the last one was {name}.",
            safe="Checkpoints that were committed before are intact.",
            hint=f"The place is {self.store.url}.",
        )
        failed.__cause__ = error
        return failed

    def _after_commit(self, manifest: Manifest) -> Checkpoint:
        """Show the new checkpoint to people and apply retention. Runs in the background thread."""
        checkpoint = Checkpoint(
            self.store, manifest.name, state=State.COMMITTED, stats=manifest.stats
        )
        self._manifests.forget(manifest.name)
        if self._cached is not None:
            self._cached.keep(manifest)
        if self.team.rank != 0:
            return checkpoint
        if "/" not in manifest.name:
            note_commit(manifest.name, manifest.time.get("batch"))
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
            self._unranked.look(view)
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
            is_read = isinstance(reason, InUseError)
            if is_read and self.options.save_format == "torch":
                self._show(read_manifest(self.store, name))  # it stays, and so does its name
            level = logging.INFO if is_read else logging.WARNING
            _log.log(level, "The checkpoint %s was to be deleted and was not: %s", name, reason)

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

    def _log_cost(self, pending: PendingSave[Checkpoint]) -> None:
        """Say what a save has cost; that one failed is said elsewhere."""
        if pending.has_failed:
            return
        _log.info("Saved %s: %s.", pending.name, cost_text(pending.stats))
        reason = pending.stats.get("eager_reason")
        if reason and reason not in (EAGER_ASKED, LAST_SAVE, BY_HAND, self._told_reason):
            self._told_reason = reason
            what = "A part of the state" if pending.stats["late_bytes"] else "The whole state"
            _log.info("%s was copied before the save returned: %s.", what, reason)
