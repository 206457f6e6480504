"""Where each tensor of a checkpoint lies: in one part, or in pieces that several ranks wrote.

A checkpoint of several ranks has a table for each of them, ``index-r00003.json``: what it wrote,
which piece of which tensor that is, and where in which part. Put together they are one table of
whole tensors; a reader asks for any box of one and is told which bytes of which files to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import FormatError
from ..format.header import ITEM_SIZES
from ..tensors.boxes import Box, covers_once, overlap

__all__ = ["Cut", "Piece", "StoredWhole", "cuts", "piece_rows", "read_rows"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor in a part.

    Attributes:
        file: The part.
        box: Which box it is.
        start: Its first byte in the file.
        stop: The byte after its last.
    """

    file: str
    box: Box
    start: int
    stop: int


@dataclass(slots=True)
class StoredWhole:
    """A tensor that is stored in one piece or in several.

    Attributes:
        code: Dtype code in the container.
        shape: Shape of the whole in the container.
        pieces: Its pieces.
        boxes: The boxes of those that were read from tables.
    """

    code: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)
    boxes: set[Box] = field(default_factory=set, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes of a part that hold what two boxes share.

    Attributes:
        file: The part.
        start: The first byte to read.
        stop: The byte after the last.
        shared: The box that is wanted of them.
        strides: How far apart its elements are in what is read, in elements of each dimension.
    """

    file: str
    start: int
    stop: int
    shared: Box
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Return whether all the bytes are wanted, in their order."""
        return self.strides == _strides(self.shared.sizes)


def cuts(stored: StoredWhole, wanted: Box, *, name: str) -> list[Cut]:
    """Return what to read for a box of a tensor.

    Args:
        stored: Where the tensor is.
        wanted: The box, not empty.
        name: The tensor, for messages.

    Raises:
        FormatError: The pieces do not cover the box, or cover a part of it twice.
    """
    if len(stored.pieces) == 1 and stored.pieces[0].box == wanted:
        (piece,) = stored.pieces
        return [Cut(piece.file, piece.start, piece.stop, wanted, _strides(wanted.sizes))]
    found: list[Cut] = []
    size = ITEM_SIZES[stored.code]
    for piece in stored.pieces:
        shared = overlap(piece.box, wanted)
        if shared is None:
            continue
        strides = _strides(piece.box.sizes)
        first = sum(
            (offset - start) * stride
            for offset, start, stride in zip(
                shared.offsets, piece.box.offsets, strides, strict=True
            )
        )
        last = first + sum((n - 1) * s for n, s in zip(shared.sizes, strides, strict=True))
        dense = _strides(shared.sizes)
        if last - first + 1 == math.prod(shared.sizes):
            strides = dense  # lengths of one step anywhere
        found.append(
            Cut(
                piece.file,
                piece.start + first * size,
                piece.start + (last + 1) * size,
                shared,
                strides,
            )
        )
    if not covers_once([cut.shared for cut in found], wanted):
        covered = sum(math.prod(cut.shared.sizes) for cut in found)
        raise FormatError(
            f"The stored pieces of {name} do not cover it exactly once: {covered} of "
            f"{math.prod(wanted.sizes)} elements."
        )
    return found


def piece_rows(leaves: Iterable[Any], places: Mapping[str, tuple[str, int, int]]) -> list[Any]:
    """Return the table of what a rank wrote of one item, as JSON.

    Args:
        leaves: What it wrote.
        places: File, first byte and the byte after the last by name in the part.
    """
    return [
        [
            leaf.key,
            leaf.code,
            list(leaf.whole_shape),
            list(leaf.box.offsets),
            list(leaf.box.sizes),
            *places[leaf.part_key],
        ]
        for leaf in leaves
    ]


def read_rows(table: dict[str, StoredWhole], rows: Any, *, where: str) -> None:
    """Add the table of one rank to that of all.

    Raises:
        FormatError: It is malformed, or contradicts what other ranks say.
    """
    if not isinstance(rows, list):
        raise FormatError(f"{where} is not a table of tensors.", path=where)
    for row in rows:
        try:
            key, code, shape, offsets, sizes, file, start, stop = row
            box, whole = Box(_sizes(offsets), _sizes(sizes)), _sizes(shape)
            is_text = isinstance(key, str) and isinstance(file, str) and code in ITEM_SIZES
            num_bytes = math.prod(box.sizes) * ITEM_SIZES[code] if is_text else -1
            is_inside = len(box.offsets) == len(box.sizes) == len(whole) and all(
                offset + size <= length
                for offset, size, length in zip(box.offsets, box.sizes, whole, strict=True)
            )
            is_right = is_inside and type(start) is int and stop == start + num_bytes >= start >= 0
        except (TypeError, ValueError) as error:
            raise FormatError(f"{where} holds a malformed row: {error}.", path=where) from error
        if not is_right:
            raise FormatError(f"{where} holds a piece that cannot be where it says.", path=where)
        stored = table.setdefault(key, StoredWhole(code, whole))
        if (stored.code, stored.shape) != (code, whole):
            raise FormatError(f"{where}: ranks disagree about {key}.", path=where)
        # Where it cannot be known that two ranks hold the same, both may have written it.
        if box not in stored.boxes:
            stored.boxes.add(box)
            stored.pieces.append(Piece(file, box, start, stop))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError("a shape that is none")
    return tuple(values)


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for dimension in range(len(sizes) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * sizes[dimension + 1]
    return tuple(strides)
