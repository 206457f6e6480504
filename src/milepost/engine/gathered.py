"""What every rank has staged, in the leader's reach: for files that one rank writes alone.

    leader                                another rank
    opens a desk, tells where it is
    takes the calls                       calls
    reads what each has                   tells what it has staged
    asks for blocks, while it writes  ->  answers with bytes from its arena
    says that it is done                  goes on to write what is its own

Nothing is copied for it on the other ranks, and of theirs the leader holds a few blocks. It is done
in the background, after the state was staged, so that no rank trains any slower; and it is no
collective: a rank that fails, hangs or dies is an error of this save, and of nothing else.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import RankFailedError
from ..format.layout import part_file
from ..ranks.lines import Desk, Line
from ..ranks.solo import Deadlines
from ..state.source import TensorInfo, new_tensor
from ..tensors.pack import PackedItem
from ..tensors.unpack import unpack_item
from .pieces import StoredWhole, piece_rows, read_rows
from .plan import FROZEN
from .stage import StagedPart
from .wholes import CachedBlocks, JoinedPart, plan_joined, whole_fill

__all__ = ["Gathered", "describe", "gathered", "serve"]

_CACHE_BYTES = 128 * 1024 * 1024
_MIN_BLOCK_BYTES = 64 * 1024
_MAX_BLOCK_BYTES = 4 * 1024 * 1024
_TASK = "hand over its share"

Memory = Callable[[int, int], memoryview]
"""Returns a range of the arena."""


def describe(
    staged: Sequence[StagedPart], items: Sequence[PackedItem], *, committed: Collection[str]
) -> dict[str, Any]:
    """Return what a rank has staged, as JSON.

    Args:
        staged: The parts in its arena.
        items: What is in them.
        committed: The parts of which the last checkpoint has what was staged last.
    """
    places = {
        (part.plan.item, entry.key): (part.plan.file, entry.start, entry.stop)
        for part in staged
        for entry in part.plan.tensors
    }
    found: dict[str, Any] = {}
    for item in items:
        own = {key: place for (name, key), place in places.items() if name == item.name}
        found[item.name] = {"pieces": piece_rows(item.leaves, own), "home": item.home}
        if item.home == "each":
            found[item.name]["tree"] = item.tree
    files = {
        part.plan.file: [
            part.plan.size_bytes,
            part.plan.is_frozen,
            part.is_unchanged and part.plan.file in committed,
        ]
        for part in staged
    }
    return {"items": found, "files": files}


def serve(
    line: Line,
    staged: Sequence[StagedPart],
    said: Callable[[], Mapping[str, Any]],
    *,
    rank: int,
    memory: Memory,
) -> None:
    """Tell the leader what this rank has, and give it what it asks for until it is done.

    Args:
        line: The line to the leader.
        staged: The parts in the arena.
        said: Returns what :func:`describe` returns.
        rank: This rank.
        memory: The arena.

    Raises:
        RankFailedError: The leader is gone.
        DeadlineError: It asked for nothing in time.
    """
    starts = {part.plan.file: part.plan.arena_start for part in staged}
    try:
        line.send(json.dumps(said(), allow_nan=False).encode())
        while message := line.receive():
            file, start, stop = json.loads(bytes(message))
            line.send(memory(starts[file] + start, starts[file] + stop))
    except BaseException as error:
        line.send_error(_TASK, error, rank=rank)
        raise


@contextmanager
def gathered(
    desk: Desk,
    staged: Sequence[StagedPart],
    said: Mapping[str, Any],
    *,
    world_size: int,
    memory: Memory,
    deadlines: Deadlines,
) -> Iterator[Gathered]:
    """Have the other ranks call, and give what all of them have staged.

    Args:
        desk: Where they call.
        staged: The parts in the leader's own arena.
        said: What :func:`describe` returned for them.
        world_size: The number of ranks.
        memory: The leader's arena.
        deadlines: How long to wait for a rank.
    """
    lines = desk.take_calls(world_size, call_s=deadlines.meet_s, timeout_s=deadlines.write_s)
    try:
        found = [said, *(json.loads(bytes(lines[rank].receive())) for rank in sorted(lines))]
        yield Gathered(found, lines, _own(staged, memory))
    finally:
        # Also after an error: what went wrong here is told in another way.
        for line in lines.values():
            line.finish()


def _own(staged: Sequence[StagedPart], memory: Memory) -> dict[str, memoryview]:
    return {part.plan.file: memory(part.plan.arena_start, part.plan.arena_stop) for part in staged}


class Gathered:
    """What all ranks have staged; see :func:`gathered`.

    Args:
        said: What each rank has, by rank.
        lines: A line to each of the other ranks.
        own: The leader's parts.

    Attributes:
        tables: Where the pieces of each tensor are that all ranks share; by item.
    """

    def __init__(
        self,
        said: Sequence[Mapping[str, Any]],
        lines: Mapping[int, Line],
        own: Mapping[str, memoryview],
    ) -> None:
        self._said = said
        self._lines = {rank: _Asked(line) for rank, line in lines.items()}
        self._own = own
        self._files: dict[str, list[Any]] = {}
        self._rank_of: dict[str, int] = {}
        for rank, one in enumerate(said):
            self._files.update(one["files"])
            self._rank_of.update(dict.fromkeys(one["files"], rank))
        block_bytes = _CACHE_BYTES // (2 * len(said))
        block_bytes = min(max(block_bytes, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
        self.block_bytes = block_bytes - block_bytes % 4096
        self._cached = CachedBlocks(
            self._load, block_bytes=self.block_bytes, max_blocks=2 * len(said)
        )
        self.tables = self._tables()

    def get(self, file: str, index: int) -> memoryview:
        """Return a block of what a rank has staged; see ``wholes.Blocks``."""
        own = self._own.get(file)
        if own is None:
            return self._cached.get(file, index)
        return own[index * self.block_bytes : (index + 1) * self.block_bytes]

    def parts(self) -> list[tuple[str, JoinedPart, bool]]:
        """Lay out whole parts of all shared items.

        Returns:
            The item and the layout of each, and whether it holds the very bytes that the last
            checkpoint has of it.
        """
        parts: list[tuple[str, JoinedPart, bool]] = []
        for item, table in self.tables.items():
            frozen = {
                key: stored
                for key, stored in table.items()
                if stored.pieces and all(self._files[one.file][1] for one in stored.pieces)
            }
            others = {key: stored for key, stored in table.items() if key not in frozen}
            if others:
                parts.append((item, plan_joined(part_file(item), others), False))
            if frozen:
                files = {piece.file for stored in frozen.values() for piece in stored.pieces}
                is_unchanged = all(self._files[file][2] for file in files)
                plan = plan_joined(part_file(item, variant=FROZEN), frozen)
                parts.append((item, plan, is_unchanged))
        return parts

    def state(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """Read everything into memory.

        Args:
            trees: The tree of each item, as the leader has it.

        Returns:
            ``{"state": {...}, "rng": [...]}``, and ``"ranks"`` with what else the other ranks have
            for themselves, if there is any: by rank, and by item.
        """
        items: dict[str, Any] = {}
        for name, tree in trees.items():
            table = self.tables.get(name)
            table = self._own_table(0, name) if table is None else table
            items[name] = self._value(table, tree, name)
        rng, ranks = list(items.pop("rng", [])), []
        for rank, said in enumerate(self._said):
            own = {
                name: self._value(self._own_table(rank, name), one["tree"], name)
                for name, one in said["items"].items()
                if one["home"] == "each" and rank > 0
            }
            rng += own.pop("rng", [])
            ranks.append(own)
        return {"state": items, "rng": rng, **({"ranks": ranks} if any(ranks) else {})}

    def _value(self, table: Mapping[str, StoredWhole], tree: Any, item: str) -> Any:
        def get(key: str) -> Tensor:
            stored = table[key]
            tensor = new_tensor(TensorInfo(stored.code, stored.shape))
            if math.prod(stored.shape):
                raw = tensor.reshape(-1).view(torch.uint8).numpy()
                flat = memoryview(raw)  # type: ignore[arg-type]  # arrays are buffers
                whole_fill(stored, self, name=f"{item}/{key}")(0, flat)
            return tensor

        return unpack_item(tree, get)

    def _tables(self) -> dict[str, dict[str, StoredWhole]]:
        tables: dict[str, dict[str, StoredWhole]] = {}
        for rank, said in enumerate(self._said):
            for name, one in said["items"].items():
                if one["home"] != "each":
                    table = tables.setdefault(name, {})
                    read_rows(table, one["pieces"], where=f"what rank {rank} has of {name}")
        return tables

    def _own_table(self, rank: int, item: str) -> dict[str, StoredWhole]:
        table: dict[str, StoredWhole] = {}
        one = self._said[rank]["items"][item]
        read_rows(table, one["pieces"], where=f"what rank {rank} has of {item}")
        return table

    def _load(self, file: str, index: int) -> memoryview:
        start = index * self.block_bytes
        stop = min(start + self.block_bytes, self._files[file][0])
        return self._lines[self._rank_of[file]].ask(file, start, stop)


class _Asked:
    """A rank that is asked for bytes by several threads, one at a time."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()

    def ask(self, file: str, start: int, stop: int) -> memoryview:
        with self._lock:
            self._line.send(json.dumps([file, start, stop]).encode())
            block = self._line.receive()
        if len(block) != stop - start:
            raise RankFailedError(
                f"A rank gave {len(block):,} bytes of {file} where {stop - start:,} were asked for."
            )
        return block
