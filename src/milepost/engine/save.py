"""Saving: capture, plan and stage in the caller's thread; write and commit in the background.

    caller's thread                       background thread
    wait for the save before              claim a folder
    plan (used again while it fits)       wait for what is copied late
    stage: one copy into the arena   ->   write the parts, checksummed
    return a PendingSave                  write the index
                                          make sure that nobody changed what was copied late
                                          publish the manifest
                                          after the commit: pointers, retention

A save that is waited for is handed to the background first, and its blocks are written as soon as
the caller's thread has copied them: see ``filling.py``. So is one of a state that is larger than
the memory it may take, which goes through a ring of blocks: see ``streaming.py``.

What optimizers own may be copied by a thread of its own while training goes on; an optimizer that
is about to step waits for it: see ``copying.py`` and ``barrier.py``.

There is one arena and so at most one save in flight; a save that is due while another is being
written waits for it. The thread that writes is no daemon: a process that ends waits for its save.

Where several ranks write one run, the background threads of all ranks go through the same steps
together, and the leader commits when every rank has written its share: see ``together.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ..errors import DeadlineError, FencedError, UsageError
from ..format.manifest import Manifest
from ..ranks.solo import Deadlines, RankCheck, Team
from ..runs.sessions import Session
from ..staging import OVER_BUDGET, CopyCheck
from ..state.owned import Late
from ..state.sizes import Sizes, share_of
from ..stores.base import Store
from ..tensors.pack import PackedItem
from .arena import Arena
from .barrier import Barrier
from .commits import Committer, SaveRequest, Work
from .copying import Copy
from .filled import Filled
from .links import Links
from .pending import PendingSave
from .plan import Plan, make_plan
from .sameness import Marks, mark
from .shares import own_share
from .stage import StagedPart, Stager, Staging, why_not_late
from .streaming import Streamer
from .together import Share

__all__ = ["SaveRequest", "Saver"]

T = TypeVar("T")

_LONGEST_SAVE_S = 24 * 3600.0
"""How long a save waits for the one before. Whatever a store is asked for has a deadline itself."""


class Saver(Generic[T]):
    """Writes the checkpoints of one session.

    Args:
        store: The run's store.
        session: The settled session.
        layout: ``milepost``, or ``torch`` for single files.
        compression: Of single files or of parts; see ``visible.check_compression``.
        link_unchanged: Whether frozen parts that did not change share the file of the checkpoint
            before.
        on_commit: Called in the background thread after a checkpoint was committed; what it returns
            is what waiting for the save returns.
        team: The ranks that write the run together; by default this process alone.
        sharding: Of several ranks: ``auto``, each writes what it holds; ``consolidated``, the
            leader writes whole tensors.
        deadlines: How long ranks wait for each other.
        rank_check: How ranks are compared that should have the same; see ``sameness.py``.
        copy_check: How what is copied late is watched until it is; see ``copying.py``.
        budget_bytes: How much memory the copy of the state may take; a larger one is streamed.
        clock: Returns the seconds since 1970.
    """

    def __init__(  # noqa: PLR0913 - one for each thing that differs, all by keyword
        self,
        store: Store,
        session: Session,
        *,
        layout: str = "milepost",
        compression: str = "",
        link_unchanged: bool = True,
        on_commit: Callable[[Manifest], T],
        team: Team | None = None,
        sharding: str = "auto",
        deadlines: Deadlines | None = None,
        rank_check: RankCheck = "sample",
        copy_check: CopyCheck = "sample",
        budget_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._team = None if team is None or team.world_size == 1 else team.for_thread("save")
        self._deadlines = deadlines or Deadlines()
        self._rank_check: RankCheck = rank_check
        self._sharding = sharding
        self.store = store
        self.session = session
        self._layout = layout
        self._on_commit = on_commit
        self._copy_check: CopyCheck = copy_check
        self._barrier = Barrier()
        arena = Arena()
        self._stager = Stager(arena)
        self._streamer = (
            None if budget_bytes is None else Streamer(arena, budget_bytes=budget_bytes)
        )
        self._links = Links(store, is_wanted=link_unchanged)
        self._committer = Committer(
            store,
            session,
            arena=arena,
            links=self._links,
            team=self._team,
            deadlines=self._deadlines,
            compression=compression,
            clock=clock,
        )
        self._plan: Plan | None = None
        self._attempt = 0
        self._pid = os.getpid()
        self._current: PendingSave[T] | None = None
        self._copy: Filled | None = None
        self._fenced: FencedError | None = None

    @property
    def in_flight(self) -> PendingSave[T] | None:
        """Return the save that is being written, if any."""
        current = self._current
        return current if current is not None and not current.done() else None

    def save(
        self,
        items: Sequence[PackedItem],
        request: SaveRequest,
        *,
        owned: Late | None = None,
        eager_reason: str = "",
        is_waited_for: bool = False,
        capture_s: float = 0.0,
        waited_s: float = 0.0,
    ) -> PendingSave[T]:
        """Copy a state and write it in the background.

        Args:
            items: The state, with live tensors. They may change once this returns.
            request: What the checkpoint says about itself.
            capture_s: The seconds it took to collect the state.
            owned: What of the state may be copied while the training goes on, until an optimizer
                is about to step; ``None``: nothing.
            eager_reason: Why it is nothing, for the record.
            is_waited_for: Whether the caller goes on only when it is committed. Then it is written
                while it is copied, which ends it sooner and holds up the copy.
            waited_s: The seconds that were waited for the save before already.

        Raises:
            BaseException: What went wrong with the copy. Nothing is committed then.
            FencedError: A newer session owns the run.
            DeadlineError: The save before does not end.
        """
        started_s = time.perf_counter() - waited_s
        self.wait_until_free()
        waited_s = time.perf_counter() - started_s
        whole, rank = items, None
        layout = "milepost" if "/" in request.name else self._layout
        is_joined = layout == "torch" or self._sharding == "consolidated"
        if self._team is not None:
            rank, ranks = self._team.rank, self._team.world_size
            items = own_share(items, rank=rank, world_size=ranks, to_leader=is_joined)
        self._plan = make_plan(items, self._plan, rank=rank)
        planned_s = time.perf_counter() - started_s - waited_s
        marks = self._marks(whole, request.name)
        marked_s = time.perf_counter() - started_s - waited_s - planned_s
        if self._is_streamed(self._plan) and owned is not None:
            owned, eager_reason = None, OVER_BUDGET
        staging = self._stage(self._plan, items, owned)
        is_awaited = staging.stream is not None or (is_waited_for and not staging.late.is_late)
        copy: Filled = staging.filling if is_awaited else staging.late
        pending = PendingSave[T](request.name, copy=copy)
        try:
            self._copy = copy  # an interrupt may come at any line: whoever waits for it is let go
            if not is_awaited:
                self._fill(staging)
            if staging.late.is_late and owned is not None:
                self._barrier.hold(staging.late, owned.modules)
            staging.late.start()
            staged_s = time.perf_counter() - started_s
            stats: dict[str, Any] = {
                "state_bytes": self._plan.size_bytes,
                "capture_s": capture_s,
                "wait_s": waited_s,
                "plan_s": planned_s,
                "mark_s": marked_s,
                "stage_s": staged_s - waited_s - planned_s - marked_s,
                "blocking_s": capture_s + staged_s,
                **_copied(staging, eager_reason if owned is None else why_not_late(owned, copy)),
            }
            self._begin(
                pending,
                request,
                staged=staging.parts,
                copy=copy,
                stream=staging.stream,
                is_copied_here=is_awaited,
                trees={item.name: item.tree for item in items},
                stats=stats,
                layout=layout,
                share=self._share(whole, items, request, marks),
                is_joined=is_joined,
                began_s=started_s - capture_s,
            )
            if is_awaited:
                staging.filling.run(is_awaited=True)
        except BaseException as error:
            # Nobody will commit it, and an optimizer that is about to step must not wait for it.
            pending.was_reported = True  # by the error itself
            copy.stop(error)
            raise
        return pending

    def wait_until_free(self) -> None:
        """Wait until the save before has ended and nothing writes to the arena for it.

        Raises:
            FencedError: A newer session owns the run.
            DeadlineError: The save before does not end.
        """
        self._require_may_save()
        if self._current is not None:
            self._current.check_done(_LONGEST_SAVE_S)
        if self._copy is not None:
            self._copy.settle()
            self._copy = None

    def prepare(self, sizes: Sizes) -> None:
        """Have memory got ahead of the first save, in the background; see ``Arena.prepare``.

        Args:
            sizes: About how large the state is.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no arena, and may not save
        rank, ranks = (0, 1) if self._team is None else (self._team.rank, self._team.world_size)
        is_joined = self._layout == "torch" or self._sharding == "consolidated"
        share = share_of(sizes, rank=rank, world_size=ranks, to_leader=is_joined)
        likely_bytes, most_bytes = share.likely_bytes, share.most_bytes
        if self._streamer is not None:
            likely_bytes = min(likely_bytes, self._streamer.ring_bytes)
            most_bytes = min(most_bytes, self._streamer.ring_bytes)
        self._stager.arena.prepare(likely_bytes, most_bytes=most_bytes)

    def close(self) -> None:
        """Wait for what is being copied; a save that is being written goes on."""
        self._barrier.leave()
        self._stager.arena.close()

    def _require_may_save(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "A run cannot be saved to from a forked child of the process that opened it.",
                safe="Nothing was written.",
                hint="Save from the process that opened the run.",
            )
        if self._fenced is not None:
            raise self._fenced

    def _stage(self, plan: Plan, items: Sequence[PackedItem], owned: Late | None) -> Staging:
        """Find out what has to be copied, and note what earlier checkpoints have otherwise."""
        try:
            if self._streamer is not None and self._streamer.is_needed(plan):
                stream, kept = self._streamer.begin(plan, items, written=self._links.entry)
                parts = [StagedPart(part, is_unchanged=part.file in kept) for part in plan.parts]
                staging = Staging(parts, stream, Copy((), end_bytes=0, sums=stream.sums))
            else:
                staging = self._stager.begin(plan, items, owned=owned, check=self._copy_check)
        except BaseException:
            self._forget()
            raise
        for part in staging.parts:
            if not part.is_unchanged:
                self._links.forget(part.plan.file)
        return staging

    def _is_streamed(self, plan: Plan) -> bool:
        return self._streamer is not None and self._streamer.is_needed(plan)

    def _fill(self, staging: Staging) -> None:
        """Copy what the caller's thread copies, before anything is written."""
        try:
            staging.filling.run(is_awaited=False)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Link nothing of what the arena holds: it belongs to no checkpoint."""
        self._stager.forget()
        self._links.forget_all()

    def _share(
        self,
        whole: Sequence[PackedItem],
        items: Sequence[PackedItem],
        request: SaveRequest,
        marks: Marks,
    ) -> Share | None:
        """Return what this rank contributes, of several."""
        if self._team is None:
            return None
        said = self._said(request)
        return Share.of(whole, items, name=request.name, said=said, marks=marks)

    def _marks(self, whole: Sequence[PackedItem], name: str) -> Marks:
        """Take checksums of what this rank shares with others."""
        if self._team is None:
            return Marks()
        rank, ranks = self._team.rank, self._team.world_size
        return mark(whole, rank=rank, world_size=ranks, name=name, how=self._rank_check)

    def _said(self, request: SaveRequest) -> dict[str, Any]:
        """Return what must be the same on all ranks, beside the state."""
        return {
            "reason": request.reason,
            "is_final": request.is_final,
            "at": {unit: request.time.get(unit) for unit in ("epoch", "batch", "batch_in_epoch")},
            "rank_check": self._rank_check,
            "sharding": self._sharding,
        }

    def fail(self, name: str, error: BaseException) -> None:
        """Tell the other ranks that this one has no state to save; alone, do nothing.

        They have begun a save of that name, or will, and it must fail on all ranks alike.
        """
        if self._team is None or self._fenced is not None:
            return
        if self._current is not None:
            self._current.check_done(_LONGEST_SAVE_S)
        request = SaveRequest(name=name, reason="manual")
        pending = PendingSave[T](request.name)
        pending.was_reported = True  # by the error itself
        self._begin(pending, request, layout=self._layout, share=Share.of_error(error))

    def give_up(self, error: BaseException, *, patience_s: float | None = None) -> None:
        """Let the next save fail at once on the other ranks: this one takes part in no more.

        A save in flight is waited for, so that it ends as it would have, but for a rank that does
        not write its share, because it is gone. Alone, do nothing.

        Args:
            error: Why.
            patience_s: How long such a rank is waited for; ``None``: as long as for one that does
                not come to a save.
        """
        if self._team is None:
            return
        while self._current is not None and not self._current.done():
            try:
                self._current.check_done(
                    self._deadlines.meet_s if patience_s is None else patience_s
                )
            except DeadlineError:
                self._team.stop_waiting(error)
        self._team.give_up(error)

    def _begin(self, pending: PendingSave[T], request: SaveRequest, **given: Any) -> None:
        """Hand a save over to a thread of its own."""
        self._attempt += 1

        def name(folder: str) -> None:
            pending.name = folder

        work = Work(request=request, attempt=self._attempt, on_claim=name, **given)
        begins = threading.Lock()
        run = threading.Thread(target=self._run, args=(work, pending, begins), name="milepost-save")
        try:
            self._current = pending
            run.start()
        except BaseException as error:
            # An interrupt may come when the thread is on its way already: then that ends the save.
            if begins.acquire(blocking=False):
                pending.fail(error)  # or whoever waits for it would wait for ever
            raise

    def _run(self, work: Work, pending: PendingSave[T], begins: threading.Lock) -> None:
        if not begins.acquire(blocking=False):
            return  # it was given up before it began
        try:
            manifest = self._committer.commit(work)
            committed_s = time.perf_counter()
            late = {
                "commit_s": work.stats["commit_s"],
                "durable_s": committed_s - work.began_s,
            }
            pending.stats = work.stats
            work.stats.update(late)
            # Whoever gets the checkpoint from us learns more than its manifest could say.
            result = self._on_commit(replace(manifest, stats={**manifest.stats, **late}))
            work.stats["after_s"] = time.perf_counter() - committed_s
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            if isinstance(error, FencedError):
                self._fenced = error
            pending.stats = work.stats
            try:
                if work.copy is not None:
                    work.copy.stop(error)  # who sees that the save is over takes the arena
            finally:
                pending.fail(error)
        else:
            pending.succeed(result)


def _copied(staging: Staging, eager_reason: str) -> dict[str, Any]:
    """Return what of a state is copied, and how, for the record."""
    found: dict[str, Any] = {
        "unchanged_bytes": staging.unchanged_bytes,
        "late_bytes": staging.late.num_bytes,
    }
    if staging.stream is not None:
        found["streamed_bytes"] = sum(
            part.plan.size_bytes for part in staging.parts if not part.is_unchanged
        )
    if eager_reason:
        found["eager_reason"] = eager_reason
    return found
