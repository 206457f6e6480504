"""Committing: what was staged is written, checksummed, and published, alone or with other ranks.

Runs in the background thread of a save. What a stop at any point leaves is in ``runs/publish.py``
and, for several ranks, in ``together.py``.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, FencedError
from ..format.digest import BLOCK_BYTES
from ..format.header import StoredTensor
from ..format.manifest import FileEntry, Manifest
from ..frames.codec import Method
from ..ranks.lines import Desk, call
from ..ranks.solo import Deadlines, Team
from ..runs.costs import together
from ..runs.leftovers import Leftovers
from ..runs.publish import Claim, claim, publish, withdraw
from ..runs.sessions import Session
from ..stores.base import Store
from ..stores.pages import page_memory
from ..tensors.unpack import unpack_item
from ..version import __version__
from ..visible import SUFFIXES
from .arena import Arena
from .choosing import Choice
from .documents import TreeTexts, documents, layout_state, places
from .filled import Filled
from .framing import Packing, packing_of
from .gathered import Gathered, describe, gathered, serve
from .joining import join_trees
from .links import Links
from .single import check_plain, encode_single
from .stage import StagedPart
from .streaming import Stream
from .together import Share, agree
from .write import (
    NUM_THREADS,
    NUM_THREADS_AWAITED,
    FileJob,
    WriteCost,
    copied_job,
    file_job,
    write_files,
)

__all__ = ["Committer", "SaveRequest", "Work"]

_log = logging.getLogger("milepost")

_Others = tuple[Sequence[FileJob], Mapping[str, Packing | None], Sequence[FileEntry]]
"""What else is written: how; and how it is compressed; and what is linked."""


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
        interval: See ``Manifest.interval``.
    """

    name: str
    reason: str
    is_final: bool = False
    time: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    interval: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Work:
    """One save on its way through the background thread.

    Attributes:
        request: What the checkpoint says about itself.
        attempt: Number of the attempt.
        staged: What lies in the arena.
        copy: How far it has come to lie there; ``None``: all of it does.
        stream: Where the blocks come from, if they are not all in the arena at a time.
        is_copied_here: Whether the thread that saves copies it, and waits until that is done.
        trees: The tree of each item.
        stats: What the save cost so far; more is added.
        layout: ``milepost`` or ``torch``.
        on_claim: Called with the folder, once it is known.
        share: What this rank contributes, of several.
        is_joined: Whether the leader writes whole tensors for all.
        began_s: When the save began, by ``time.perf_counter``.
    """

    request: SaveRequest
    attempt: int
    staged: Sequence[StagedPart] = ()
    copy: Filled | None = None
    stream: Stream | None = None
    is_copied_here: bool = False
    trees: Mapping[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    layout: str
    on_claim: Callable[[str], None]
    share: Share | None = None
    is_joined: bool = False
    began_s: float = field(default_factory=time.perf_counter)

    def require_copy(self, start_bytes: int = 0, num_bytes: int | None = None) -> None:
        """Wait until everything is in the arena, or a part of it.

        Args:
            start_bytes: Where the part begins.
            num_bytes: How much of it must be there; ``None``: all of the state.
        """
        if self.copy is not None:
            self.copy.require(None if num_bytes is None else start_bytes + num_bytes)

    def sum_of(self, start_bytes: int, at: int) -> int | None:
        """Return the checksum of a block that is in the arena, if it was taken on its way there.

        Args:
            start_bytes: Where the part begins.
            at: Where the block begins in the part.
        """
        return None if self.copy is None else self.copy.sums.of(start_bytes + at)

    def confirm_copy(self) -> None:
        """Make sure that what was copied is the state at the moment of the save.

        Raises:
            BaseException: It is not, or was not copied.
        """
        if self.copy is not None:
            self.copy.confirm()
            if self.is_copied_here:
                self.stats["stage_s"] += self.copy.copy_s
                self.stats["blocking_s"] += self.copy.copy_s
                return
            self.stats["copy_s"] = self.copy.copy_s
            self.stats["barrier_s"] = self.copy.waited_s


class Committer:
    """Writes and commits the checkpoints of one session.

    Args:
        store: The run's store.
        session: The settled session.
        arena: Where the staged bytes are.
        links: What may be shared with earlier checkpoints.
        team: The ranks that write together; ``None`` for this process alone.
        deadlines: How long ranks wait for each other.
        compression: Of single files or of parts; see ``visible.check_compression``.
        clock: Returns the seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        session: Session,
        *,
        arena: Arena,
        links: Links,
        team: Team | None,
        deadlines: Deadlines,
        compression: str,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.session = session
        self._arena = arena
        self._links = links
        self._leftovers = Leftovers(store)
        self._team = team
        self._deadlines = deadlines
        self._compression = compression
        self._choice = Choice(compression, num_threads=NUM_THREADS)
        self._method: Method | None = None
        self._clock = clock
        self._texts = TreeTexts()
        self._parent = session.origin.name if session.origin else None

    def commit(self, work: Work) -> Manifest:
        """Write and commit what was staged.

        Raises:
            FencedError: A newer session owns the run.
            CheckpointError: It could not be committed; what was written was removed.
        """
        return self._commit_alone(work) if work.share is None else self._commit_share(work)

    def _commit_alone(self, work: Work) -> Manifest:
        held = claim(self.store, self.session, work.request.name, work.attempt)
        work.on_claim(held.folder)
        try:
            manifest = self._write(held, work)
        except BaseException as error:
            if not isinstance(error, FencedError):
                self._leftovers.give_up(held, error)
            raise
        started_s = time.perf_counter()
        try:
            publish(self.store, self.session, manifest)
        except FencedError:
            raise
        except CheckpointError as error:
            self._leftovers.give_up(held, error)
            raise
        work.stats["commit_s"] = time.perf_counter() - started_s
        self._note_commit(manifest)
        return manifest

    def _commit_share(self, work: Work) -> Manifest:
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
                work.on_claim(held.folder)
                mine = held

                def write() -> dict[str, Any]:
                    entries = self._write_part_of(mine, work, desk, address)
                    mine_written.extend(entry.path for entry in entries)
                    work.stats["write_s"] = time.perf_counter() - started_s
                    files = [entry.to_json() for entry in entries]
                    return {"files": files, "stats": work.stats}

                def commit(written: list[dict[str, Any]]) -> bytes:
                    return self._commit_all(mine, work, written)

                data = team.gather("write its share", write, commit, timeout_s=deadline_s)
        except BaseException as error:
            if held is not None and not isinstance(error, FencedError):
                if team.rank == 0:
                    self._leftovers.give_up(held, error)
                else:
                    self._withdraw(held, mine_written)
            raise
        manifest = Manifest.from_bytes(data, where=held.folder)
        work.stats["commit_s"] = time.perf_counter() - started_s - work.stats["write_s"]
        self._note_commit(manifest)
        self._links.committed.update(part.plan.file for part in work.staged)
        return manifest

    def _commit_all(self, held: Claim, work: Work, written: list[dict[str, Any]]) -> bytes:
        """Commit what all ranks have written, on the leader; return the manifest."""
        entries = [
            FileEntry.from_json(one, where=f"rank {rank}")
            for rank, told in enumerate(written)
            for one in told["files"]
        ]
        stats = together([told["stats"] for told in written])
        held_up = [told["stats"] for told in written]
        work.stats["slowest_blocking_s"] = max(
            one["blocking_s"] + one.get("barrier_s", 0.0) for one in held_up
        )
        manifest = self._manifest(held, work, entries, len(written), stats)
        publish(self.store, self.session, manifest)
        return manifest.to_bytes()

    def _claim_together(
        self, team: Team, name: str, attempt: int, desk: Desk | None
    ) -> tuple[Claim, Any]:
        """Return the claim, and where the leader's desk is if it has one."""

        def hold() -> dict[str, Any]:
            held = asdict(claim(self.store, self.session, name, attempt))
            return {"claim": held, "desk": None if desk is None else desk.address}

        found = team.lead("claim a folder", hold, timeout_s=self._deadlines.write_s)
        return Claim(**found["claim"]), found["desk"]

    def _write_part_of(
        self, held: Claim, work: Work, desk: Desk | None, address: Any
    ) -> list[FileEntry]:
        """Write what this rank has to write of a checkpoint."""
        self._method = self._chosen(work)
        if work.is_joined:
            work.require_copy()
            entries = self._write_joined(held, work, desk, address)
        else:
            entries = self._write_share(held, work)
        work.confirm_copy()
        return entries

    def _write_share(self, held: Claim, work: Work) -> list[FileEntry]:
        """Write the parts of this rank and the table of what is in them; the leader, the trees."""
        assert self._team is not None
        assert work.share is not None
        texts = work.share.documents(
            places(work.staged), rank=self._team.rank, team=self._team.world_size
        )
        return self._write_parts(held, work, work.staged, texts)

    def _write_joined(
        self, held: Claim, work: Work, desk: Desk | None, address: Any
    ) -> list[FileEntry]:
        """Have the leader write what all ranks share, and each rank write what is its own."""
        assert self._team is not None
        assert work.share is not None
        rank, times, memory = self._team.rank, self._deadlines, self._arena.view
        with nullcontext() if desk is None else closing(desk):  # or others would wait for it
            describing = partial(
                describe, work.staged, work.share.own, committed=self._links.committed
            )
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

    def _write_own(self, held: Claim, work: Work, found: Gathered | None) -> list[FileEntry]:
        """Write what is this rank's own; and what all ranks share, on the rank that has it all."""
        assert self._team is not None
        assert work.share is not None
        own = {item.name for item in work.share.own if item.home == "each"}
        staged = [part for part in work.staged if part.plan.item in own]
        jobs: list[FileJob] = []
        packings: dict[str, Packing | None] = {}
        linked: list[FileEntry] = []
        rows: dict[str, list[Any]] = {}
        for item, part, is_unchanged in () if found is None else found.parts():
            rows.setdefault(item, []).extend(part.rows())
            if not is_unchanged:
                self._links.forget(part.file)
            entry = self._links.try_link(held.folder, part.file) if is_unchanged else None
            if entry is not None:
                linked.append(entry)
            elif found is not None:
                jobs.append(part.job(f"{held.folder}/{part.file}", found.tables[item], found))
                packings[part.file] = self._packing(part.tensors, part.size_bytes)
        texts = work.share.documents(
            places(staged), rank=self._team.rank, team=self._team.world_size, joined=rows
        )
        return self._write_parts(held, work, staged, texts, (jobs, packings, linked))

    def _note_commit(self, manifest: Manifest) -> None:
        """Remember what later checkpoints may share files with; the store answers, so clean up."""
        self._leftovers.remove()
        if "/" not in manifest.name:
            self._parent = manifest.name
            self._links.note(manifest)

    def _withdraw(self, held: Claim, paths: Sequence[str]) -> None:
        """Remove what this rank wrote after the leader had given up; say so where that fails."""
        try:
            withdraw(self.store, held, paths)
        except CheckpointError as error:
            _log.warning("What was written too late to %s was not removed: %s", held.folder, error)

    def _write(self, held: Claim, work: Work) -> Manifest:
        self._method = self._chosen(work)
        started_s = time.perf_counter()
        if work.layout == "torch":
            work.require_copy()
            entries = self._write_single(held, work)
        else:
            texts = documents(work.trees, work.staged, texts=self._texts)
            entries = self._write_parts(held, work, work.staged, texts)
        work.stats["write_s"] = time.perf_counter() - started_s
        work.confirm_copy()
        return self._manifest(held, work, entries, 1, work.stats)

    def _manifest(
        self,
        held: Claim,
        work: Work,
        files: Sequence[FileEntry],
        world_size: int,
        stats: Mapping[str, Any],
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
            stats=dict(stats),
            interval=request.interval,
        )

    def _write_parts(
        self,
        held: Claim,
        work: Work,
        staged: Sequence[StagedPart],
        texts: Mapping[str, bytes],
        others: _Others = ((), {}, ()),
    ) -> list[FileEntry]:
        jobs, packings, linked = list(others[0]), dict(others[1]), list(others[2])
        for part in staged:
            entry = self._links.try_link(held.folder, part.plan.file) if part.is_unchanged else None
            if entry is not None:
                linked.append(entry)
                continue
            plan, key = part.plan, f"{held.folder}/{part.plan.file}"
            if work.stream is not None:
                jobs.append(work.stream.job(key, plan))
            else:
                data = self._arena.view(plan.arena_start, plan.arena_stop)
                wait = partial(work.require_copy, plan.arena_start)
                sum_of = partial(work.sum_of, plan.arena_start)
                jobs.append(copied_job(key, plan.file, data, wait=wait, sum_of=sum_of))
            packings[plan.file] = self._packing(plan.tensors, plan.size_bytes)
        if work.stream is not None:
            work.stream.choose()
        for path, text in texts.items():
            jobs.append(file_job(f"{held.folder}/{path}", path, _aligned(text)))
        known = {path: packing for path, packing in packings.items() if packing is not None}
        return self._write_files(work, jobs, linked, packings=known)

    def _packing(self, tensors: Sequence[StoredTensor], size_bytes: int) -> Packing | None:
        """Return how a part is compressed, if it is."""
        if self._method is None:
            return None
        return packing_of(tensors, size_bytes, method=self._method)

    def _chosen(self, work: Work) -> Method | None:
        """Return how the parts of a save are compressed, if they are."""
        if not work.staged or work.layout == "torch":
            return None
        return self._choice.method(partial(self._sample, work))

    def _sample(self, work: Work) -> tuple[memoryview, int]:
        """Return a block from the middle of the largest part, and the size of its elements."""
        plan = max((part.plan for part in work.staged), key=lambda plan: plan.size_bytes)
        start = plan.size_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES
        packing = packing_of(plan.tensors, plan.size_bytes, method="zstd")
        item_bytes = 1 if packing is None else packing.item_bytes[start // BLOCK_BYTES]
        if work.stream is not None:
            # Whatever the first slot holds, of this save or the last; a copy, for it may change.
            return memoryview(bytes(self._arena.view(0, BLOCK_BYTES))), item_bytes
        block = self._arena.view(plan.arena_start, plan.arena_stop)[start : start + BLOCK_BYTES]
        work.require_copy(plan.arena_start, start + len(block))
        return block, item_bytes

    def _write_files(
        self,
        work: Work,
        jobs: Sequence[FileJob],
        linked: Sequence[FileEntry] = (),
        *,
        packings: Mapping[str, Packing] | None = None,
    ) -> list[FileEntry]:
        cost, started_s = WriteCost(), time.perf_counter()
        # A service has threads of its own, and compressing keeps the cores busy with two.
        is_alone = work.is_copied_here and self.store.traits.is_local and not packings
        entries = write_files(
            self.store,
            jobs,
            num_threads=NUM_THREADS_AWAITED if is_alone else NUM_THREADS,
            cost=cost,
            packings=packings,
        )
        self._choice.note(
            plain_bytes=sum(entry.plain.size_bytes for entry in entries),
            stored_bytes=sum(entry.size_bytes for entry in entries),
            write_s=time.perf_counter() - started_s,
            put_s=cost.frames.put_s + cost.sync_s if packings else None,
        )
        if self._choice.why:
            work.stats["compression"] = self._choice.why
        work.stats["sync_s"] = cost.sync_s
        if packings:
            work.stats["compressed_from_bytes"] = cost.frames.plain_bytes
            work.stats["compressed_to_bytes"] = sum(
                entry.size_bytes for entry in entries if entry.path in packings
            )
            work.stats["compress_s"] = cost.frames.compress_s
        work.stats["written_bytes"] = sum(entry.size_bytes for entry in entries)
        work.stats["linked_bytes"] = sum(entry.size_bytes for entry in linked)
        return [*entries, *linked]

    def _write_single(self, held: Claim, work: Work) -> list[FileEntry]:
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

    def _write_state(self, held: Claim, work: Work, value: Any) -> list[FileEntry]:
        check_plain(value, ("checkpoint",))
        path = f"{held.folder}{SUFFIXES[self._compression]}"
        blocks = encode_single(value, compression=self._compression)
        return self._write_files(work, [FileJob(f"{held.folder}/{path}", path, blocks)])

    def _staged_tensor(self, part: StagedPart, index: int) -> Tensor:
        from ..state.source import TensorInfo, new_tensor

        entry = part.plan.tensors[index]
        if entry.start == entry.stop:
            return new_tensor(TensorInfo(entry.dtype, entry.shape))
        start = part.plan.arena_start
        raw = self._arena.tensor(start + entry.start, start + entry.stop)
        empty = new_tensor(TensorInfo(entry.dtype, ()))
        return raw.view(empty.dtype).view(entry.shape).clone()


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
