"""Streaming: a state that is larger than the memory it may take goes through a ring of blocks.

    caller's thread                         threads that write
    wait until it is known what is linked
    wait until a slot is free
    assemble the next block in it     ->    take the next block, write it
    ...                               <-    give its slot back
    return when the last one is in a slot

Blocks have numbers, in the order of the files, and a block has the slot of its number modulo the
number of slots. Whatever the number of slots and of threads, they never wait for each other in a
ring:

- Blocks are assembled in the order of their numbers, and asked for in that order too: threads take
  them from one queue, each takes one at a time, and gives it back before it takes another.
- Who assembles block ``n`` waits only for an earlier block, ``n - slots``. That one is in its
  slot, and so whoever took it, or takes it next, has it at once, writes it and gives it back.
- Who waits for block ``n`` waits for the blocks up to it to be assembled, and those wait, as
  above, for still earlier ones, all of which are in slots.
- A thread that fails gives its slot back as well, and the error ends the stream from both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DeadlineError
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.manifest import FileEntry
from ..state.marks import version_of
from ..tensors.pack import PackedItem
from .arena import Arena
from .demand import BlocksOnDemand
from .filled import Filled
from .filling import blocks_of, bytes_of, copy_bytes, is_plain, synchronize
from .pinned import cuda_devices, side_streams
from .plan import PartPlan, Plan
from .sums import HOT_BYTES, Sums
from .write import SizedJob

__all__ = ["MIN_SLOTS", "Stream", "StreamPart", "Streamer", "copy_elements"]

MIN_SLOTS = 4
"""One is assembled, two are written, and one is ready."""

_SLICE_S = 1.0
_LONGEST_WAIT_S = 3600.0
"""How long one waits for a slot. Whatever a store is asked for has a deadline itself."""


@dataclass(frozen=True, slots=True)
class _Block:
    """What lies in a block of a part.

    Attributes:
        start_bytes: Where it begins in the file.
        stop_bytes: Where it ends.
        whole: Small tensors that lie in it altogether.
        views: Where those go: to the slot of this block.
        pieces: Of all others: which, and which of its bytes.
    """

    start_bytes: int
    stop_bytes: int
    whole: tuple[int, ...]
    views: list[Tensor]
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A part that is streamed.

    Attributes:
        plan: Its layout.
        first: The number of its first block.
        blocks: Its blocks.
        sources: Its live tensors, in file order.
    """

    plan: PartPlan
    first: int
    blocks: Sequence[_Block]
    sources: list[Tensor]


class Stream(Filled):
    """One state on its way through the ring.

    Args:
        arena: The memory of the slots.
        parts: What is streamed.
        num_slots: How many blocks it holds.
        cuda: CUDA devices that some of the state lies on.

    Attributes:
        most_slots: How many slots were in use at a time.
    """

    def __init__(
        self,
        arena: Arena,
        parts: Sequence[StreamPart],
        *,
        num_slots: int,
        cuda: Sequence[torch.device] = (),
    ) -> None:
        # It is blocks that are counted here, in place of bytes.
        last = parts[-1].first + len(parts[-1].blocks) if parts else 0
        starts = [(part.first * BLOCK_BYTES, part.plan.size_bytes) for part in parts]
        files = [(start, start + num_bytes) for start, num_bytes in starts]
        super().__init__(start_bytes=0, end_bytes=last, sums=Sums(files, self._view))
        self._is_over = False
        self._arena = arena
        self._parts = parts
        self._firsts = {part.plan.file: part.first for part in parts}
        self._num_slots = num_slots
        self._cuda = cuda
        self._used: dict[int, int] = {}
        self._wanted: set[str] = set()
        self._is_chosen = False
        self.most_slots = 0

    def run(self, *, is_awaited: bool) -> None:
        """Assemble all blocks, in the caller's thread.

        Args:
            is_awaited: Must be so: somebody must write them meanwhile. If the save fails that they
                are for, this returns, and who waits for the save is told.

        Raises:
            BaseException: What went wrong with the copy; whoever waits for it gets it too.
        """
        assert is_awaited
        self._fill_here(self._copy)
        self._parts = ()

    def _copy(self) -> None:
        self._wait_until_chosen()
        with torch.no_grad(), side_streams(self._cuda):
            for part in self._parts:
                if part.plan.file not in self._wanted:
                    continue
                for index, block in enumerate(part.blocks):
                    number = part.first + index
                    self._take_slot(number)
                    self._assemble(part, block, number)
                    self._reach(number + 1)

    def _assemble(self, part: StreamPart, block: _Block, number: int) -> None:
        """Assemble a block in its slot, and take its checksum if there is time."""
        start, place, is_ahead = number * BLOCK_BYTES, self._place(number), self._is_ahead

        def take(num_bytes: int) -> None:
            if is_ahead:
                self.sums.take(start + num_bytes)

        assemble(self._arena, part, block, place, on_filled=take)

    def job(self, key: str, plan: PartPlan) -> SizedJob:
        """Return the job of writing a part, which is streamed then.

        Args:
            key: Its key in the store.
            plan: Its layout.
        """
        self._wanted.add(plan.file)
        blocks = _Streamed(self, self._firsts[plan.file], plan.size_bytes)
        return SizedJob(key, plan.file, blocks, plan.size_bytes)

    def choose(self) -> None:
        """Say that there is a job for every part that is to be written; the others are linked."""
        with self._changed:
            self._is_chosen = True
            self._changed.notify_all()

    def take(self, number: int, num_bytes: int) -> memoryview:
        """Return a block, once it is assembled.

        Raises:
            BaseException: What ended the stream before.
        """
        self._want(number + 1)
        self._wait_for(lambda: self._is_over or self._reached_bytes > number, None)
        if self._error is not None:
            raise self._error
        at = self._place(number)
        return self._arena.view(at, at + num_bytes)

    def give_back(self, number: int) -> None:
        """Say that a block is not needed any more. May be told twice."""
        with self._changed:
            if self._used.get(number % self._num_slots) == number:
                del self._used[number % self._num_slots]
                self._changed.notify_all()

    def _view(self, start: int, stop: int) -> memoryview:
        """Return bytes of a block that is in its slot, by where all blocks would lie in a row."""
        number, at = divmod(start, BLOCK_BYTES)
        place = self._place(number) + at
        return self._arena.view(place, place + stop - start)

    def _place(self, number: int) -> int:
        return number % self._num_slots * BLOCK_BYTES

    def _wait_until_chosen(self) -> None:
        with self._changed:
            self._wait_here(lambda: self._is_chosen, "It was not begun to write the state")

    def _take_slot(self, number: int) -> None:
        slot = number % self._num_slots
        with self._changed:
            self._wait_here(lambda: slot not in self._used, "No block of the state was written")
            self._used[slot] = number
            self.most_slots = max(self.most_slots, len(self._used))

    def _wait_here(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for those who write, in the thread that assembles; with ``_changed`` held."""
        waited_s = 0.0
        while not is_there() and self._stopped is None:
            if waited_s >= _LONGEST_WAIT_S:
                raise DeadlineError(
                    f"{what} within {_LONGEST_WAIT_S:g} s.",
                    safe="Nothing was committed; earlier checkpoints are intact.",
                    hint="The place is too slow or does not answer: milepost doctor.",
                )
            if not self._changed.wait(_SLICE_S):
                waited_s += _SLICE_S
        self._require_wanted()


class _Streamed(BlocksOnDemand):
    """The blocks of a part, each of which is there from its assembly until it is written."""

    def __init__(self, stream: Stream, first: int, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._stream = stream
        self._first = first

    def make(self, index: int, num_bytes: int) -> memoryview:
        """See ``BlocksOnDemand``; another thread makes it."""
        return self._stream.take(self._first + index, num_bytes)

    def checksum(self, index: int) -> int | None:
        """See ``write.SummedBlocks``."""
        return self._stream.sums.of((self._first + index) * BLOCK_BYTES)

    def give_back(self, index: int) -> None:
        """See ``write.LendingBlocks``."""
        self._stream.give_back(self._first + index)


class Streamer:
    """Streams states of one structure after another.

    Args:
        arena: The memory. Nobody else may use it at the same time.
        budget_bytes: How much of it may be used.
    """

    def __init__(self, arena: Arena, *, budget_bytes: int) -> None:
        self._arena = arena
        self.num_slots = budget_bytes // BLOCK_BYTES
        self._laid: tuple[Plan, int] | None = None
        self._blocks: dict[str, list[_Block]] = {}
        self._versions: dict[str, list[tuple[int, int, int]]] = {}

    @property
    def ring_bytes(self) -> int:
        """Return the memory that it uses."""
        return self.num_slots * BLOCK_BYTES

    def is_needed(self, plan: Plan) -> bool:
        """Return whether a state does not fit into the memory."""
        return plan.arena_bytes > self.ring_bytes

    def begin(
        self,
        plan: Plan,
        items: Sequence[PackedItem],
        *,
        written: Callable[[str], FileEntry | None],
    ) -> tuple[Stream, set[str]]:
        """Find out what has to be written of a state.

        A frozen part is what its file has, if no version counter has moved since that was written
        and the checksum of every block is the same.

        Args:
            plan: Its layout.
            items: The state, with live tensors.
            written: Returns what the last checkpoint has under a path, if that may be shared.

        Returns:
            The stream, and the files of the parts that did not change. Those are streamed too if
            there is a job for them, because they could not be linked.
        """
        self._arena.reserve(self.ring_bytes)
        cuda = cuda_devices(items)
        if cuda:
            self._arena.pin(self.ring_bytes)
        if self._laid != (plan, self._arena.generation):
            self._laid, self._blocks = (plan, self._arena.generation), {}
            self._versions.clear()
        by_name = {item.name: item for item in items}
        parts: list[StreamPart] = []
        unchanged: set[str] = set()
        first = 0
        for one in plan.parts:
            tensors = by_name[one.item].tensors
            sources = [tensors[index] for index in one.leaves]
            blocks = self._blocks.get(one.file)
            if blocks is None:
                blocks = self._blocks[one.file] = self._lay_out(one, first, sources)
            part = StreamPart(one, first, blocks, sources)
            first += len(blocks)
            parts.append(part)
            if one.is_frozen and self._is_unchanged(part, written(one.file)):
                unchanged.add(one.file)
        return Stream(self._arena, parts, num_slots=self.num_slots, cuda=cuda), unchanged

    def _is_unchanged(self, part: StreamPart, entry: FileEntry | None) -> bool:
        file = part.plan.file
        versions = [(one.data_ptr(), one.nbytes, version_of(one)) for one in part.sources]
        before, self._versions[file] = self._versions.get(file), versions
        if entry is None or versions != before:
            return False
        plain = entry.plain
        if plain.size_bytes != part.plan.size_bytes or len(plain.crcs) != len(part.blocks):
            return False
        with torch.no_grad():
            for number, block in enumerate(part.blocks):
                at = (part.first + number) % self.num_slots * BLOCK_BYTES
                assemble(self._arena, part, block, at)
                data = self._arena.view(at, at + block.stop_bytes - block.start_bytes)
                if crc32c(data) != plain.crcs[number]:
                    return False
        return True

    def _lay_out(self, plan: PartPlan, first: int, sources: Sequence[Tensor]) -> list[_Block]:
        """Say for each block what lies in it, and make views of its slot."""
        entries, large = plan.tensors, set(plan.large)
        found: list[_Block] = []
        crossing: list[int] = []
        start = 0
        for number, block in enumerate(blocks_of(plan)):
            at = (first + number) % self.num_slots * BLOCK_BYTES - start
            begun = [i for i in range(block.low, block.high) if entries[i].num_bytes]
            whole = [i for i in begun if i not in large and entries[i].stop <= block.stop_bytes]
            views = [
                self._arena.tensor(at + entries[i].start, at + entries[i].stop)
                .view(sources[i].dtype)
                .view(sources[i].shape)
                for i in whole
            ]
            crossing += [i for i in begun if i in large or entries[i].stop > block.stop_bytes]
            pieces = [
                (
                    i,
                    max(start, entries[i].start) - entries[i].start,
                    min(block.stop_bytes, entries[i].stop) - entries[i].start,
                )
                for i in crossing
            ]
            found.append(_Block(start, block.stop_bytes, tuple(whole), views, tuple(pieces)))
            start = block.stop_bytes
            crossing = [i for i in crossing if entries[i].stop > start]
        return found


def assemble(
    arena: Arena,
    part: StreamPart,
    block: _Block,
    at_bytes: int,
    *,
    on_filled: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy what lies in a block to a slot.

    Args:
        arena: The memory of the slots.
        part: The part.
        block: One of its blocks.
        at_bytes: Where the slot begins.
        on_filled: Called now and then, and at the end, with how many bytes of it are filled.
    """
    header = part.plan.header[block.start_bytes : block.stop_bytes]
    if header:
        arena.view(at_bytes, at_bytes + len(header))[:] = header
    sources = [part.sources[index] for index in block.whole]
    if sources:
        torch._foreach_copy_(block.views, sources, non_blocking=True)
        synchronize(sources)
    at_bytes -= block.start_bytes
    for index, start, stop in block.pieces:
        source, place = part.sources[index], at_bytes + part.plan.tensors[index].start
        if is_plain(source):
            data = bytes_of(source)
            for low in range(start, stop, HOT_BYTES):
                high = min(stop, low + HOT_BYTES)
                copy_bytes(arena.tensor(place + low, place + high), data[low:high])
                on_filled(part.plan.tensors[index].start + high - block.start_bytes)
        else:
            size = source.element_size()
            into = arena.tensor(place + start, place + stop).view(source.dtype)
            copy_elements(into, source, start // size, stop // size)
    on_filled(block.stop_bytes - block.start_bytes)


def copy_elements(into: Tensor, source: Tensor, start: int, stop: int) -> None:
    """Copy some elements of a tensor of any kind, without a copy of the whole in between.

    Args:
        into: Where to: [stop - start].
        source: A tensor of that dtype.
        start: The first element, in the order of rows.
        stop: The one behind the last.
    """
    if start == stop:
        return
    if stop - start == source.numel():
        into.view(source.shape).copy_(source)
        return
    if source.ndim == 1:
        into.copy_(source[start:stop])
        return
    size = source.numel() // source.shape[0]
    first, last = start // size, (stop - 1) // size
    if first == last:
        copy_elements(into, source[first], start - first * size, stop - first * size)
        return
    head = (first + 1) * size - start  # the end of one row, whole rows, the beginning of another
    tail = stop - last * size
    middle = len(into) - head - tail
    copy_elements(into[:head], source[first], size - head, size)
    if middle:
        into[head : head + middle].view(-1, *source.shape[1:]).copy_(source[first + 1 : last])
    copy_elements(into[head + middle :], source[last], 0, tail)
