"""Whole tensors out of the pieces that several ranks hold, block by block.

A part with whole tensors is laid out as usual, and each block of it is filled from the pieces when
it is written. A range of a tensor is a few boxes of it, and what such a box and a piece share lies
in the piece without a gap: so exactly the wanted bytes are copied, and no tensor is held whole.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..format.header import ITEM_SIZES, StoredTensor, encode_header
from ..tensors.boxes import Box
from .pieces import StoredWhole, cuts
from .stream import Fill, part_job
from .write import SizedJob

__all__ = ["Blocks", "CachedBlocks", "JoinedPart", "boxes_of_range", "plan_joined", "whole_fill"]


class Blocks(Protocol):
    """The bytes of files, in blocks of one size. Used by several threads at once.

    Attributes:
        block_bytes: The size of all blocks but the last of each file.
    """

    block_bytes: int

    def get(self, file: str, index: int) -> memoryview:
        """Return a block of a file. It stays as it is for as long as it is held."""


class CachedBlocks:
    """Blocks that are loaded when they are asked for, the last few of which are kept.

    Args:
        load: Returns block ``index`` of a file. Called once at a time for each block, and again for
            one that was dropped since.
        block_bytes: The size of a block.
        max_blocks: How many are kept; at least 1.
    """

    def __init__(
        self, load: Callable[[str, int], memoryview], *, block_bytes: int, max_blocks: int
    ) -> None:
        self.block_bytes = block_bytes
        self._load = load
        self._max_blocks = max(max_blocks, 1)
        self._slots: OrderedDict[tuple[str, int], _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: str, index: int) -> memoryview:
        """Return a block; see :class:`Blocks`."""
        key = (file, index)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot()
                if len(self._slots) > self._max_blocks:
                    self._slots.popitem(last=False)
            else:
                self._slots.move_to_end(key)
        with slot.lock:
            if slot.block is None:
                slot.block = self._load(file, index)
            return slot.block


class _Slot:
    """A place for one block; whoever comes first loads it, the others wait for that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.block: memoryview | None = None


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``stop`` of a tensor consist of, in their order.

    Args:
        shape: Its shape.
        start: The first element, row-major.
        stop: The element after the last.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, first - 1, start - (first - 1) * row, stop - (first - 1) * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = tuple(shape[1:])
        yield Box((first, *(0,) * len(rest)), (last - first, *rest))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def whole_fill(stored: StoredWhole, blocks: Blocks, *, name: str) -> Fill:
    """Return what makes the bytes of a whole tensor from its pieces.

    Args:
        stored: Where the pieces are.
        blocks: The bytes of the files that they are in.
        name: The tensor, for messages.
    """
    size = ITEM_SIZES[stored.code]

    def fill(start: int, view: memoryview) -> None:
        target = np.frombuffer(view, dtype=np.uint8)
        done = 0
        for box in boxes_of_range(stored.shape, start // size, (start + len(view)) // size):
            count = math.prod(box.sizes) * size
            whole = target[done : done + count].reshape(*box.sizes, size)
            for cut in cuts(stored, box, name=name):
                place = whole[cut.shared.slices(within=box)]
                _copy(blocks, cut.file, cut.start, place)
            done += count

    return fill


def _copy(blocks: Blocks, file: str, start: int, place: np.ndarray[Any, Any]) -> None:
    """Copy as many bytes of a file as a place takes, in the order of its elements."""
    stop = start + place.nbytes
    found: list[np.ndarray[Any, Any]] = []
    at = start
    while at < stop:
        index, offset = divmod(at, blocks.block_bytes)
        length = min(stop - at, blocks.block_bytes - offset)
        found.append(np.frombuffer(blocks.get(file, index)[offset : offset + length], np.uint8))
        at += length
    if not place.flags.c_contiguous:
        place[...] = (found[0] if len(found) == 1 else np.concatenate(found)).reshape(place.shape)
        return
    flat, at = place.reshape(-1), 0
    for piece in found:
        flat[at : at + len(piece)] = piece
        at += len(piece)


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """The layout of a part with whole tensors.

    Attributes:
        file: Its file name.
        header: Length field and header.
        tensors: Entries in the order of the file.
    """

    file: str
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return self.tensors[-1].stop if self.tensors else len(self.header)

    def rows(self) -> list[Any]:
        """Return the table of what is in it, as JSON; see ``pieces.piece_rows``."""
        return [
            [
                entry.key,
                entry.dtype,
                list(entry.shape),
                [0] * len(entry.shape),
                list(entry.shape),
                self.file,
                entry.start,
                entry.stop,
            ]
            for entry in self.tensors
        ]

    def job(self, key: str, table: Mapping[str, StoredWhole], blocks: Blocks) -> SizedJob:
        """Return the job of writing it.

        Args:
            key: Its key in the store.
            table: Where the pieces of its tensors are.
            blocks: The bytes of the files that they are in.
        """
        fills = [whole_fill(table[one.key], blocks, name=one.key) for one in self.tensors]
        return part_job(key, self.file, header=self.header, tensors=self.tensors, fills=fills)


def plan_joined(
    file: str,
    table: Mapping[str, StoredWhole],
    *,
    metadata: Mapping[str, str] | None = None,
) -> JoinedPart:
    """Lay out a part with whole tensors: larger elements first, so that each is aligned to its own.

    Args:
        file: Its file name.
        table: The tensors by key; among elements of one size their order stays, which is that of
            the parts they come from.
        metadata: Text for the header, beside the usual.
    """
    order = sorted(table, key=lambda key: -ITEM_SIZES[table[key].code])
    described = [
        (
            key,
            table[key].code,
            table[key].shape,
            math.prod(table[key].shape) * ITEM_SIZES[table[key].code],
        )
        for key in order
    ]
    header, tensors = encode_header(described, metadata={"format": "pt", **(metadata or {})})
    return JoinedPart(file, header, tuple(tensors))
