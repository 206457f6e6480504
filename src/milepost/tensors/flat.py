"""Runs of elements: what a rank holds of a tensor that was flattened, joined to others, and cut.

Optimizers and wrappers that shard by bytes give a rank some elements of a tensor in the order of
memory, wherever the cut falls: the end of one row, some whole rows, the beginning of another. Such
a run is a few boxes, and is stored and read as those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .boxes import Box, local_box, local_tensor

__all__ = ["Run", "boxes_of_run", "pieces_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Some elements of a tensor, in the order of its memory.

    Attributes:
        data: Their values on this rank, in one dimension and without gaps; may be none.
        start: The number of the first of them in the whole.
        shape: Shape of the whole.
        replicas: The ranks that hold this very run.
        copies: What is computed with in place of it, in a dtype of its own: the same run, or the
            whole tensor. A restore writes them too, and a save does without them.
    """

    data: Tensor
    start: int
    shape: tuple[int, ...]
    replicas: tuple[int, ...]
    copies: tuple[Tensor | Run, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Return its dtype."""
        return self.data.dtype

    def pieces(self) -> list[tuple[Box, Tensor]]:
        """Return the boxes that it is made of, each with its memory."""
        found: list[tuple[Box, Tensor]] = []
        position = 0
        for box in boxes_of_run(self.shape, self.start, self.start + self.data.numel()):
            size = math.prod(box.sizes)
            found.append((box, self.data[position : position + size].view(box.sizes)))
            position += size
        return found

    def cut(self, whole: Tensor) -> Tensor:
        """Return these elements of a whole tensor."""
        return whole.reshape(-1)[self.start : self.start + self.data.numel()]

    def like(self, dtype: torch.dtype, *, num_bytes_each: int = 0) -> Run:
        """Return an uninitialised run of the same elements.

        Args:
            dtype: Its dtype.
            num_bytes_each: For elements that are stored as raw bytes, in one dimension more.
        """
        count = max(num_bytes_each, 1)
        data = torch.empty(self.data.numel() * count, dtype=dtype, device=self.data.device)
        shape = (*self.shape, num_bytes_each) if num_bytes_each else self.shape
        return Run(data, self.start * count, shape, self.replicas)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that a run of elements is made of, in its order.

    Args:
        shape: Shape of the whole.
        start: The number of its first element.
        stop: The number after its last.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, -(-stop // inner)
    if last - first == 1 and stop - start < inner:
        return _within_row(shape, first, start - first * inner, stop - first * inner)
    found: list[Box] = []
    if start % inner:
        found += _within_row(shape, first, start % inner, inner)
        first += 1
    end = stop // inner
    if end > first:
        rest = tuple(shape[1:])
        found.append(Box((first, *(0 for _ in rest)), (end - first, *rest)))
    if stop % inner:
        found += _within_row(shape, end, 0, stop % inner)
    return found


def pieces_of(value: Tensor | Run) -> list[tuple[Box, Tensor]]:
    """Return what this rank holds of a tensor: boxes with elements, each with its memory."""
    if isinstance(value, Run):
        return value.pieces()
    box = local_box(value)
    return [] if box.is_empty else [(box, local_tensor(value))]


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [
        Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of_run(shape[1:], start, stop)
    ]
