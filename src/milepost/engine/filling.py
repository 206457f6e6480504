"""Filling the arena: what the caller's thread copies of a state, block by block of the files.

    nobody waits for it                     a save that is waited for
    the caller copies what is small or      the caller copies everything in the order of the
    unusual, and shares the large tensors   arena, while blocks that are complete are being
    with a second thread, in pieces         written; see ``Filled.require``

A piece is copied by one thread alone. A team of threads that shares out every piece is no faster,
and where others compute it waits for its slowest member at each: two threads that take pieces when
they are ready wait for each other once, at the end.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..format.digest import BLOCK_BYTES
from ..tensors.memory import host_bytes
from .arena import Arena
from .filled import Filled
from .pinned import side_streams
from .plan import PartPlan
from .sums import HOT_BYTES, Sums
from .workers import Workers, num_cores

__all__ = ["Block", "Filling", "PartFill", "blocks_of", "copy_bytes", "is_plain", "synchronize"]

_RUN = 32 * 1024 - 1
"""Elements that torch copies in one thread: from the next one on it shares them out."""
_SHARED_BYTES = 32 * 1024 * 1024
"""From how much on a second thread is worth its start."""


@dataclass(frozen=True, slots=True)
class Block:
    """What of a part lies in one block of its file.

    Attributes:
        stop_bytes: Where the block ends in the file.
        low: The first tensor that begins in it.
        high: The first one that begins behind it.
        pieces: Of large tensors: which, and which of its bytes.
    """

    stop_bytes: int
    low: int
    high: int
    pieces: tuple[tuple[int, int, int], ...]


def blocks_of(part: PartPlan) -> tuple[Block, ...]:
    """Return what lies in each block of a part."""
    num_tensors = len(part.tensors)
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for index in part.large:
        entry = part.tensors[index]
        at = entry.start
        while at < entry.stop:
            number = at // BLOCK_BYTES
            stop = min(entry.stop, (number + 1) * BLOCK_BYTES)
            pieces.setdefault(number, []).append((index, at - entry.start, stop - entry.start))
            at = stop
    borders = [*range(BLOCK_BYTES, part.size_bytes, BLOCK_BYTES), part.size_bytes]
    starts = [entry.start for entry in part.tensors] if len(borders) > 1 else []
    found, low = [], 0
    for number, stop in enumerate(borders):
        is_last = number == len(borders) - 1  # with empty tensors, which begin where it ends
        high = num_tensors if is_last else bisect_left(starts, stop, low)
        found.append(Block(stop, low, high, tuple(pieces.get(number, ()))))
        low = high
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PartFill:
    """What is to be copied of a part.

    Attributes:
        part: Its layout.
        blocks: The same, by block.
        sources: Its live tensors, in file order.
        destinations: Where they go.
        left_out: Those that are not copied, or not here.
        on_done: Called when it is done.
    """

    part: PartPlan
    blocks: Sequence[Block]
    sources: list[Tensor]
    destinations: list[Tensor]
    left_out: AbstractSet[int]
    on_done: Callable[[], None]


class Filling(Filled):
    """The copy of a state into the arena by the caller's thread.

    Args:
        arena: The memory.
        fills: What goes there, in its order.
        end_bytes: Where the state ends in it.
        sums: Where to leave checksums.
        cuda: CUDA devices that some of it lies on.
    """

    def __init__(
        self,
        arena: Arena,
        fills: Sequence[PartFill],
        *,
        end_bytes: int,
        sums: Sums,
        cuda: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(start_bytes=0, end_bytes=end_bytes, sums=sums)
        self._cuda = cuda
        self._is_over = False
        self._arena = arena
        self._fills = fills

    def run(self, *, is_awaited: bool) -> None:
        """Copy.

        Args:
            is_awaited: Whether somebody waits for blocks meanwhile. If the save fails that they
                are for, this returns, and who waits for the save is told.

        Raises:
            BaseException: What went wrong with the copy; whoever waits for it gets it too.
        """

        def copy() -> None:
            with torch.no_grad(), side_streams(self._cuda):
                if is_awaited:
                    self._copy_in_order()
                else:
                    self._copy_together()

        self._fill_here(copy)
        self._fills = ()

    def _copy_in_order(self) -> None:
        self._require_wanted()
        for fill in self._fills:
            plain, tensors = _plain_ones(fill), _Bytes(fill.sources)
            for block in fill.blocks:
                rest = _copy_rest(fill, block, plain)
                pieces = _pieces_in(fill, block, plain, tensors)
                stop = fill.part.arena_start + block.stop_bytes
                if self._is_ahead:
                    synchronize(rest)
                    self._copy_with_sums(pieces, stop)
                else:
                    for piece in pieces:
                        self._copy_piece(piece)
                    synchronize(rest)
                self._reach(stop)
            fill.on_done()

    def _copy_together(self) -> None:
        plain = [_plain_ones(fill) for fill in self._fills]
        pieces = [piece for one in zip(self._fills, plain, strict=True) for piece in _pieces(*one)]
        is_shared = sum(map(len, pieces)) >= _SHARED_BYTES and num_cores() > 1
        workers = Workers[_Piece]("milepost-copy", num_threads=2 if is_shared else 1)
        for piece in pieces:
            workers.put(piece)
        copied: list[Sequence[Tensor]] = []

        def copy(own: Iterator[_Piece]) -> None:
            with torch.no_grad():  # which each thread says for itself
                if threading.current_thread() is self._thread:
                    for fill, ones in zip(self._fills, plain, strict=True):
                        copied.extend([_copy_rest(fill, block, ones) for block in fill.blocks])
                for piece in own:
                    with workers.touching():
                        self._copy_piece(piece)

        workers.run(copy)
        for some in copied:
            synchronize(some)
        for fill in self._fills:
            fill.on_done()

    def _copy_with_sums(self, pieces: Iterable[_Piece], stop: int) -> None:
        """Copy what is left of a block that ends there, and take its checksum."""
        for piece in pieces:
            for at in range(piece.start, piece.stop, HOT_BYTES):
                hot = piece.cut(at, min(piece.stop, at + HOT_BYTES))
                self._copy_piece(hot)
                self.sums.take(hot.place_bytes + len(hot))
        self.sums.take(stop)

    def _copy_piece(self, piece: _Piece) -> None:
        at = piece.place_bytes
        source = piece.tensors.of(piece.index)[piece.start : piece.stop]
        copy_bytes(self._arena.tensor(at, at + len(piece)), source)


class _Bytes:
    """The bytes of tensors; a view of each is made once."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = sources
        self._made: dict[int, Tensor] = {}

    def of(self, index: int) -> Tensor:
        made = self._made.get(index)
        if made is None:
            made = self._made[index] = bytes_of(self._sources[index])
        return made


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a large tensor that are copied at once.

    Attributes:
        tensors: The tensors.
        index: Which of them.
        start: Its first byte.
        stop: The byte behind its last one.
        place_bytes: Where it goes in the arena.
    """

    tensors: _Bytes
    index: int
    start: int
    stop: int
    place_bytes: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> _Piece:
        """Return some of it, by the bytes of the tensor."""
        place = self.place_bytes + start - self.start
        return replace(self, start=start, stop=stop, place_bytes=place)


def _pieces(fill: PartFill, plain: AbstractSet[int]) -> Iterator[_Piece]:
    tensors = _Bytes(fill.sources)
    for block in fill.blocks:
        yield from _pieces_in(fill, block, plain, tensors)


def _pieces_in(
    fill: PartFill, block: Block, plain: AbstractSet[int], tensors: _Bytes
) -> Iterator[_Piece]:
    for index, start, stop in block.pieces:
        if index in plain:
            place = fill.part.arena_start + fill.part.tensors[index].start
            yield _Piece(tensors, index, start, stop, place + start)


def _plain_ones(fill: PartFill) -> AbstractSet[int]:
    """Return which large tensors are copied in pieces."""
    wanted = (index for index in fill.part.large if index not in fill.left_out)
    return {index for index in wanted if is_plain(fill.sources[index])}


def _copy_rest(fill: PartFill, block: Block, plain: AbstractSet[int]) -> Sequence[Tensor]:
    """Copy, in one call, what begins in a block and is not copied in pieces; return what that is.

    Copies from accelerators are not done then; see :func:`synchronize`.
    """
    sources, destinations = fill.sources, fill.destinations
    whole = range(block.low, block.high)
    if plain or fill.left_out:
        left_out = fill.left_out
        chosen = [index for index in whole if index not in plain and index not in left_out]
        sources = [sources[index] for index in chosen]
        destinations = [destinations[index] for index in chosen]
    elif len(whole) != len(sources):
        sources = sources[block.low : block.high]
        destinations = destinations[block.low : block.high]
    if sources:
        torch._foreach_copy_(destinations, sources, non_blocking=True)
    return sources


def is_plain(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor lie in the host's memory as they do in a part."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_inference():
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, not a copy: [num_bytes], uint8.

    Args:
        tensor: One that is plain, and not empty.
    """
    return tensor.detach().view(-1).view(torch.uint8)


def copy_bytes(into: Tensor, source: Tensor) -> None:
    """Copy bytes, in this thread alone.

    By torch, whose loads and stores are wider than those of the system's copy, if both begin at a
    whole word; it is one call for all runs, so that the interpreter lock is asked for once.

    Args:
        into: Where to: [n], uint8.
        source: What: [n], uint8.
    """
    num_bytes = len(source)
    for word in (torch.int64, torch.int32):
        size = word.itemsize
        places = (
            into.data_ptr(),
            into.storage_offset(),
            source.data_ptr(),
            source.storage_offset(),
        )
        if num_bytes >= size and not any(place % size for place in places):
            whole = num_bytes - num_bytes % size
            torch._foreach_copy_(
                torch.split(into[:whole].view(word), _RUN),
                torch.split(source[:whole].view(word), _RUN),
            )
            into, source = into[whole:], source[whole:]
            break
    if len(source):
        np.copyto(host_bytes(into), host_bytes(source))


def synchronize(tensors: Sequence[Tensor]) -> None:
    """Wait for copies from accelerators, which return before they are done."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # ours; see ``pinned.py``
        elif device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
