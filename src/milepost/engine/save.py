"""Saving: capture, plan and stage in the caller's thread; write and commit in the background.

    caller's thread                       background thread
    wait for the save before              claim a folder
    plan (used again while it fits)       write the parts, checksummed
    stage: one copy into the arena   ->   write the index
    return a PendingSave                  publish the manifest
                                          after the commit: pointers, retention

There is one arena and so at most one save in flight; a save that is due while another is being
written waits for it. The thread that writes is no daemon: a process that ends waits for its save.

Where several ranks write one run, the background threads of all ranks go through the same steps
together, and the leader commits when every rank has written its share: see ``together.py``.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, DeadlineError, FencedError, UsageError
from ..format.layout import INDEX
from ..format.manifest import FORMAT_VERSION, FileEntry, Manifest
from ..ranks.lines import Desk, call
from ..ranks.solo import Deadlines, RankCheck, Team
from ..runs.publish import Claim, abandon, claim, publish, withdraw
from ..runs.sessions import Session
from ..stores.base import Store
from ..stores.pages import page_memory
from ..tensors.pack import PackedItem
from ..tensors.unpack import unpack_item
from ..version import __version__
from ..visible import SUFFIXES
from .arena import Arena
from .gathered import Gathered, describe, gathered, serve
from .joining import join_trees
from .pending import PendingSave
from .plan import Plan, make_plan
from .sameness import Marks, mark
from .shares import own_share
from .single import check_plain, encode_single
from .stage import StagedPart, Stager
from .together import Share, agree, tensor_map
from .write import FileJob, file_job, write_files

__all__ = ["SaveRequest", "Saver"]

_log = logging.getLogger("milepost")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a checkpoint says about itself.

    Attributes:
        name: Wanted name.
        reason: See ``Manifest.reason``.
        is_final: Whether training has ended.
        time: The timer's counters.
        metrics: Numbers by name.
        notes: What a resume cannot reproduce exactly.
    """

    name: str
    reason: str
    is_final: bool = False
    time: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Saver(Generic[T]):
    """Writes the checkpoints of one session.

    Args:
        store: The run's store.
        session: The settled session.
        layout: ``milepost``, or ``torch`` for single files.
        compression: For single files; see ``single.SUFFIXES``.
        link_unchanged: Whether frozen parts that did not change share the file of the checkpoint
            before.
        on_commit: Called in the background thread after a checkpoint was committed; what it returns
            is what waiting for the save returns.
        team: The ranks that write the run together; by default this process alone.
        sharding: Of several ranks: ``auto``, each writes what it holds; ``consolidated``, the
            leader writes whole tensors.
        deadlines: How long ranks wait for each other.
        rank_check: How ranks are compared that should have the same; see ``sameness.py``.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._team = None if team is None or team.world_size == 1 else team.for_thread("save")
        self._deadlines = deadlines or Deadlines()
        self._rank_check: RankCheck = rank_check
        self._sharding = sharding
        self.store = store
        self.session = session
        self._layout = layout
        self._compression = compression
        self._link_unchanged = link_unchanged
        self._on_commit = on_commit
        self._clock = clock
        self._stager = Stager(Arena())
        self._plan: Plan | None = None
        self._attempt = 0
        self._pid = os.getpid()
        self._parent = session.origin.name if session.origin else None
        self._linkable: dict[str, tuple[str, FileEntry]] = {}
        self._committed: set[str] = set()
        self._current: PendingSave[T] | None = None
        self._fenced: FencedError | None = None

    @property
    def in_flight(self) -> PendingSave[T] | None:
        """Return the save that is being written, if any."""
        current = self._current
        return current if current is not None and not current.done() else None

    def save(self, items: Sequence[PackedItem], request: SaveRequest) -> PendingSave[T]:
        """Copy a state and write it in the background.

        Args:
            items: The state, with live tensors. They may change once this returns.
            request: What the checkpoint says about itself.

        Raises:
            FencedError: A newer session owns the run.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "A run cannot be saved to from a forked child of the process that opened it.",
                safe="Nothing was written.",
                hint="Save from the process that opened the run.",
            )
        if self._fenced is not None:
            raise self._fenced
        started_s = time.perf_counter()
        if self._current is not None:
            self._current.check_done(None)
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
        try:
            staged = self._stager.stage(self._plan, items)
        except BaseException:
            # What the arena holds now belongs to no checkpoint: nothing may be linked for it.
            self._stager.forget()
            self._linkable.clear()
            self._committed.clear()
            raise
        for part in staged:
            if not part.is_unchanged:
                self._linkable.pop(part.plan.file, None)
                self._committed.discard(part.plan.file)
        blocking_s = time.perf_counter() - started_s
        stats = {
            "state_bytes": self._plan.size_bytes,
            "wait_s": waited_s,
            "plan_s": planned_s,
            "mark_s": marked_s,
            "stage_s": blocking_s - waited_s - planned_s - marked_s,
            "blocking_s": blocking_s,
        }
        self._attempt += 1
        pending: PendingSave[T] = PendingSave(request.name)
        trees = {item.name: item.tree for item in items}
        share = None
        if self._team is not None:
            said = self._said(request)
            share = Share.of(whole, items, name=request.name, said=said, marks=marks)
        work = _Work(
            request, self._attempt, staged, trees, stats, pending, layout, share, is_joined
        )
        self._begin(work)
        return pending

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
            self._current.check_done(None)
        self._attempt += 1
        pending: PendingSave[T] = PendingSave(name)
        pending.was_reported = True  # by the error itself
        share = Share.of_error(error)
        request = SaveRequest(name=name, reason="manual")
        self._begin(_Work(request, self._attempt, (), {}, {}, pending, self._layout, share))

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

    def _begin(self, work: _Work[T]) -> None:
        pending = self._current = work.pending
        try:
            threading.Thread(target=self._run, args=(work,), name="milepost-save").start()
        except BaseException as error:
            pending.fail(error)  # or whoever waits for it would wait for ever
            raise

    def _run(self, work: _Work[T]) -> None:
        try:
            manifest = self._commit(work) if work.share is None else self._commit_share(work)
            work.pending.stats = work.stats
            result = self._on_commit(manifest)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            if isinstance(error, FencedError):
                self._fenced = error
            work.pending.stats = work.stats
            work.pending.fail(error)
        else:
            work.pending.succeed(result)

    def _commit(self, work: _Work[T]) -> Manifest:
        held = claim(self.store, self.session, work.request.name, work.attempt)
        work.pending.name = held.folder
        try:
            manifest = self._write(held, work)
        except BaseException as error:
            if not isinstance(error, FencedError):
                self._abandon(held, error)
            raise
        started_s = time.perf_counter()
        try:
            publish(self.store, self.session, manifest)
        except FencedError:
            raise
        except CheckpointError as error:
            self._abandon(held, error)
            raise
        work.stats["commit_s"] = time.perf_counter() - started_s
        self._note_commit(manifest)
        return manifest

    def _commit_share(self, work: _Work[T]) -> Manifest:
        """Commit together with the other ranks; every rank returns the manifest, or fails alike."""
        assert self._team is not None
        assert work.share is not None
        team, share, deadline_s = self._team, work.share, self._deadlines.write_s
        meet_s = self._deadlines.meet_s
        agree(team, share, timeout_s=meet_s)
        share.joined = join_trees(team, share.whole, share.own, timeout_s=meet_s)
        held: Claim | None = None
        mine_written: list[str] = []
        started_s = time.perf_counter()
        has_desk = work.is_joined and team.rank == 0
        try:
            with closing(Desk(team.host)) if has_desk else nullcontext() as desk:
                held, address = self._claim_together(team, share.name, work.attempt, desk)
                work.pending.name = held.folder
                mine = held

                def write() -> list[Any]:
                    if work.is_joined:
                        entries = self._write_joined(mine, work, desk, address)
                    else:
                        entries = self._write_share(mine, work)
                    mine_written.extend(entry.path for entry in entries)
                    return [entry.to_json() for entry in entries]

                def commit(written: list[list[Any]]) -> bytes:
                    work.stats["write_s"] = time.perf_counter() - started_s
                    entries = [
                        FileEntry.from_json(one, where=f"rank {rank}")
                        for rank, files in enumerate(written)
                        for one in files
                    ]
                    manifest = self._manifest(mine, work, entries, team.world_size)
                    publish(self.store, self.session, manifest)
                    return manifest.to_bytes()

                data = team.gather("write its share", write, commit, timeout_s=deadline_s)
        except BaseException as error:
            if held is not None and not isinstance(error, FencedError):
                if team.rank == 0:
                    self._abandon(held, error)
                else:
                    self._withdraw(held, mine_written)
            raise
        manifest = Manifest.from_bytes(data, where=held.folder)
        ended_s = time.perf_counter() - started_s
        work.stats["commit_s"] = ended_s - work.stats.setdefault("write_s", ended_s)
        self._note_commit(manifest)
        self._committed.update(part.plan.file for part in work.staged)
        return manifest

    def _claim_together(
        self, team: Team, name: str, attempt: int, desk: Desk | None
    ) -> tuple[Claim, Any]:
        """Return the claim, and where the leader's desk is if it has one."""

        def hold() -> dict[str, Any]:
            held = asdict(claim(self.store, self.session, name, attempt))
            return {"claim": held, "desk": None if desk is None else desk.address}

        found = team.lead("claim a folder", hold, timeout_s=self._deadlines.write_s)
        return Claim(**found["claim"]), found["desk"]

    def _write_share(self, held: Claim, work: _Work[T]) -> list[FileEntry]:
        """Write the parts of this rank and the table of what is in them; the leader, the trees."""
        assert self._team is not None
        assert work.share is not None
        documents = work.share.documents(
            _places(work.staged), rank=self._team.rank, team=self._team.world_size
        )
        entries, linked = self._write_parts(held, work.staged, documents)
        work.stats["written_bytes"] = sum(entry.size_bytes for entry in entries)
        work.stats["linked_bytes"] = sum(entry.size_bytes for entry in linked)
        return [*entries, *linked]

    def _write_joined(
        self, held: Claim, work: _Work[T], desk: Desk | None, address: Any
    ) -> list[FileEntry]:
        """Have the leader write what all ranks share, and each rank write what is its own."""
        assert self._team is not None
        assert work.share is not None
        rank, times, memory = self._team.rank, self._deadlines, self._stager.arena.view
        with nullcontext() if desk is None else closing(desk):  # or others would wait for it
            describing = partial(describe, work.staged, work.share.own, committed=self._committed)
            if desk is None:
                line = call(address, rank=rank, call_s=times.meet_s, timeout_s=times.write_s)
                with closing(line):
                    serve(line, work.staged, describing, rank=rank, memory=memory)
                return [] if work.layout == "torch" else self._write_own(held, work, None)
            with gathered(
                desk,
                work.staged,
                describing(),
                world_size=self._team.world_size,
                memory=memory,
                deadlines=times,
            ) as found:
                if work.layout == "torch":
                    return self._write_state(
                        held, work, found.state({**work.trees, **work.share.joined})
                    )
                return self._write_own(held, work, found)

    def _write_own(self, held: Claim, work: _Work[T], found: Gathered | None) -> list[FileEntry]:
        """Write what is this rank's own; and what all ranks share, on the rank that has it all."""
        assert self._team is not None
        assert work.share is not None
        own = {item.name for item in work.share.own if item.home == "each"}
        staged = [part for part in work.staged if part.plan.item in own]
        jobs: list[FileJob] = []
        linked: list[FileEntry] = []
        rows: dict[str, list[Any]] = {}
        for item, part, is_unchanged in () if found is None else found.parts():
            rows.setdefault(item, []).extend(part.rows())
            if not is_unchanged:
                self._linkable.pop(part.file, None)
            entry = self._try_link(held, part.file) if is_unchanged else None
            if entry is not None:
                linked.append(entry)
            elif found is not None:
                jobs.append(part.job(f"{held.folder}/{part.file}", found.tables[item], found))
        documents = work.share.documents(
            _places(staged), rank=self._team.rank, team=self._team.world_size, joined=rows
        )
        entries, more = self._write_parts(held, staged, documents, jobs)
        linked += more
        work.stats["written_bytes"] = sum(entry.size_bytes for entry in entries)
        work.stats["linked_bytes"] = sum(entry.size_bytes for entry in linked)
        return [*entries, *linked]

    def _note_commit(self, manifest: Manifest) -> None:
        """Remember what later checkpoints may share files with."""
        if "/" not in manifest.name:
            self._parent = manifest.name
            for entry in manifest.files:
                self._linkable[entry.path] = (manifest.name, entry)

    def _abandon(self, held: Claim, error: BaseException) -> None:
        """Remove what a failed attempt wrote; say so where that fails too."""
        try:
            left = abandon(self.store, held)
        except CheckpointError as second:
            _log.warning("After %s: %s was not removed: %s", error, held.folder, second)
            return
        if left:
            _log.warning("After a failed save %s could not be removed: %s", held.folder, left)

    def _withdraw(self, held: Claim, paths: Sequence[str]) -> None:
        """Remove what this rank wrote after the leader had given up; say so where that fails."""
        try:
            withdraw(self.store, held, paths)
        except CheckpointError as error:
            _log.warning("What was written too late to %s was not removed: %s", held.folder, error)

    def _write(self, held: Claim, work: _Work[T]) -> Manifest:
        started_s = time.perf_counter()
        if work.layout == "torch":
            entries = self._write_single(held, work)
            linked: list[FileEntry] = []
        else:
            entries, linked = self._write_parts(held, work.staged, _documents(work))
        work.stats["write_s"] = time.perf_counter() - started_s
        work.stats["written_bytes"] = sum(entry.size_bytes for entry in entries)
        work.stats["linked_bytes"] = sum(entry.size_bytes for entry in linked)
        return self._manifest(held, work, [*entries, *linked], 1)

    def _manifest(
        self,
        held: Claim,
        work: _Work[T],
        files: Sequence[FileEntry],
        world_size: int,
    ) -> Manifest:
        request = work.request
        return Manifest(
            name=held.folder,
            run_id=self.session.run_id,
            session=self.session.number,
            attempt=held.attempt,
            write_id=held.write_id,
            parent=self._parent,
            reason=request.reason,
            is_final=request.is_final,
            created_s=self._clock(),
            time=request.time,
            metrics=request.metrics,
            world_size=world_size,
            layout=work.layout,
            items=tuple(work.trees),
            files=tuple(sorted(files, key=lambda entry: entry.path)),
            software=_software(),
            notes=request.notes,
            stats=dict(work.stats),
        )

    def _write_parts(
        self,
        held: Claim,
        staged: Sequence[StagedPart],
        documents: Mapping[str, bytes],
        others: Sequence[FileJob] = (),
    ) -> tuple[list[FileEntry], list[FileEntry]]:
        jobs: list[FileJob] = list(others)
        linked: list[FileEntry] = []
        for part in staged:
            entry = self._try_link(held, part.plan.file) if part.is_unchanged else None
            if entry is not None:
                linked.append(entry)
                continue
            plan = part.plan
            data = self._stager.arena.view(plan.arena_start, plan.arena_stop)
            jobs.append(file_job(f"{held.folder}/{plan.file}", plan.file, data))
        for path, document in documents.items():
            jobs.append(file_job(f"{held.folder}/{path}", path, _aligned(document)))
        return write_files(self.store, jobs), linked

    def _try_link(self, held: Claim, path: str) -> FileEntry | None:
        """Share the file of an unchanged part; ``None`` if it has to be written."""
        if not (self._link_unchanged and path in self._linkable):
            return None
        if "/" in held.folder or not self.store.traits.hard_links:
            return None
        folder, entry = self._linkable[path]
        try:
            self.store.link(f"{folder}/{path}", f"{held.folder}/{path}")
        except CheckpointError as error:
            _log.info("Could not link %s of %s (%s); it is written again.", path, folder, error)
            return None
        return replace(entry, linked_from=folder)

    def _write_single(self, held: Claim, work: _Work[T]) -> list[FileEntry]:
        tensors = {
            (part.plan.item, entry.key): self._staged_tensor(part, index)
            for part in work.staged
            for index, entry in enumerate(part.plan.tensors)
        }

        def build(item: str) -> Any:
            def get(key: str) -> Tensor:
                return tensors[item, key]

            return unpack_item(work.trees[item], get)

        value = layout_state({item: build(item) for item in work.trees})
        return self._write_state(held, work, value)

    def _write_state(self, held: Claim, work: _Work[T], value: Any) -> list[FileEntry]:
        check_plain(value, ("checkpoint",))
        path = f"{held.folder}{SUFFIXES[self._compression]}"
        blocks = encode_single(value, compression=self._compression)
        entries = write_files(self.store, [FileJob(f"{held.folder}/{path}", path, blocks)])
        work.stats["written_bytes"] = sum(entry.size_bytes for entry in entries)
        return entries

    def _staged_tensor(self, part: StagedPart, index: int) -> Tensor:
        from ..state.source import TensorInfo, new_tensor

        entry = part.plan.tensors[index]
        if entry.start == entry.stop:
            return new_tensor(TensorInfo(entry.dtype, entry.shape))
        start = part.plan.arena_start
        raw = self._stager.arena.tensor(start + entry.start, start + entry.stop)
        empty = new_tensor(TensorInfo(entry.dtype, ()))
        return raw.view(empty.dtype).view(entry.shape).clone()


@dataclass(slots=True)
class _Work(Generic[T]):
    """One save on its way through the background thread."""

    request: SaveRequest
    attempt: int
    staged: Sequence[StagedPart]
    trees: Mapping[str, Any]
    stats: dict[str, Any]
    pending: PendingSave[T]
    layout: str
    share: Share | None = None
    is_joined: bool = False


def layout_state(items: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange items as readers get them: ``{"state": {...}, "rng": [...]}``."""
    state = {name: value for name, value in items.items() if name != "rng"}
    return {"state": state, "rng": items.get("rng", [])}


def _places(staged: Sequence[StagedPart]) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Return where each tensor lies, by item and name in the part: file, first byte, the end."""
    return {
        (part.plan.item, entry.key): (part.plan.file, entry.start, entry.stop)
        for part in staged
        for entry in part.plan.tensors
    }


def _documents(work: _Work[Any]) -> dict[str, bytes]:
    """Return the JSON files of a checkpoint by path."""
    files: dict[str, list[str]] = {name: [] for name in work.trees}
    weights: dict[str, dict[str, str]] = {name: {} for name in work.trees}
    for part in work.staged:
        files[part.plan.item].append(part.plan.file)
        weights[part.plan.item].update((entry.key, part.plan.file) for entry in part.plan.tensors)
    index = {
        "format": FORMAT_VERSION,
        "items": {name: {"tree": tree, "files": files[name]} for name, tree in work.trees.items()},
    }
    documents = {INDEX: _json(index)}
    for name, parts in files.items():
        if len(parts) > 1:
            # Several parts of whole tensors: the index that other tools look for.
            total = sum(p.plan.size_bytes for p in work.staged if p.plan.item == name)
            documents.update(tensor_map(name, weights[name], total))
    return documents


def _json(value: Any) -> bytes:
    """Encode without sorting: the order of a dict is part of the state."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _aligned(data: bytes) -> memoryview:
    """Return a page-aligned copy that is readable up to the next page border."""
    memory = page_memory(len(data))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


def _software() -> dict[str, str]:
    return {
        "milepost": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
