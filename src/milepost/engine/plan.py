"""The plan: which tensor lies where in which part, and where that is in the arena.

Tensors of one part are sorted by element size, so that each is aligned to its own elements, and
small ones lie together. What a run does not train goes into a part of its own, which can be shared
with the checkpoint before. The plan depends on names, dtypes and shapes alone and is used again as
long as those stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..format.header import ITEM_SIZES, PAGE_BYTES, StoredTensor, encode_header
from ..format.layout import part_file
from ..tensors.pack import Leaf, PackedItem

__all__ = ["LARGE_BYTES", "PartPlan", "Plan", "make_plan", "part_order"]

FROZEN = "frozen"
LARGE_BYTES = 64 * 1024
"""From this size on a tensor is copied by itself, and may be copied late."""

_SMALL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The layout of one part.

    Attributes:
        file: Its file name.
        item: The item it belongs to.
        header: Length field and header, a whole number of pages.
        tensors: Entries in file order.
        leaves: Index into the item's leaves for each entry.
        size_bytes: Size of the file.
        arena_start: Where it begins in the arena; page aligned.
        is_frozen: Whether it holds only tensors that the run does not train.
        large: Which entries have ``LARGE_BYTES`` or more.
    """

    file: str
    item: str
    header: bytes
    tensors: tuple[StoredTensor, ...]
    leaves: tuple[int, ...]
    size_bytes: int
    arena_start: int
    is_frozen: bool
    large: tuple[int, ...]

    @property
    def arena_stop(self) -> int:
        """Return the end of its bytes in the arena."""
        return self.arena_start + self.size_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a whole checkpoint.

    Attributes:
        parts: Its parts.
        arena_bytes: Memory that they take together.
        signature: The names of the items and the leaves that it was made for.
    """

    parts: tuple[PartPlan, ...]
    arena_bytes: int
    signature: Any

    @property
    def size_bytes(self) -> int:
        """Return the sum of the sizes of the parts."""
        return sum(part.size_bytes for part in self.parts)


def make_plan(
    items: Sequence[PackedItem], previous: Plan | None = None, *, rank: int | None = None
) -> Plan:
    """Lay out the parts of a state.

    Args:
        items: The state, taken apart; of several ranks what this one writes.
        previous: Returned as it is when it was made for a state of the same structure.
        rank: This rank, where several write.
    """
    # Of leaves that are the very ones of the save before no more than that is looked at.
    signature = [(item.name, item.leaves) for item in items]
    if previous is not None and previous.signature == signature:
        return previous
    parts: list[PartPlan] = []
    start = 0
    for item in items:
        frozen = [i for i, leaf in enumerate(item.leaves) if leaf.is_frozen]
        others = [i for i, leaf in enumerate(item.leaves) if not leaf.is_frozen]
        for chosen, is_frozen in ((others, False), (frozen, True)):
            if chosen:
                file = part_file(item.name, variant=FROZEN if is_frozen else "", rank=rank)
                part = _plan_part(item, chosen, file, is_frozen=is_frozen, arena_start=start)
                parts.append(part)
                start = -(-part.arena_stop // PAGE_BYTES) * PAGE_BYTES
    return Plan(tuple(parts), start, signature)


def part_order(item_bytes: int, num_bytes: int) -> tuple[int, bool]:
    """Return what to sort the tensors of a part by.

    Larger elements come first, so that each tensor is aligned to its own. Of those of one size the
    small tensors come first: a rank that wants only them, such as the step counters of an optimizer
    whose moments are on other ranks, finds them in one block.

    Args:
        item_bytes: Bytes of an element.
        num_bytes: Bytes of the tensor.
    """
    return -item_bytes, num_bytes > _SMALL_BYTES


def _plan_part(
    item: PackedItem, chosen: Sequence[int], file: str, *, is_frozen: bool, arena_start: int
) -> PartPlan:
    def place(index: int) -> tuple[int, bool]:
        leaf = item.leaves[index]
        # Raw bytes of a dtype without a code are still copied as that dtype.
        return part_order(max(ITEM_SIZES[leaf.code], leaf.dtype.itemsize), leaf.num_bytes)

    order = sorted(chosen, key=place)
    described: list[Leaf] = [item.leaves[index] for index in order]
    header, tensors = encode_header(
        [(leaf.part_key, leaf.code, leaf.shape, leaf.num_bytes) for leaf in described],
        metadata={"format": "pt"},
    )
    size = tensors[-1].stop
    return PartPlan(
        file=file,
        item=item.name,
        header=header,
        tensors=tuple(tensors),
        leaves=tuple(order),
        size_bytes=size,
        arena_start=arena_start,
        is_frozen=is_frozen,
        large=tuple(i for i, entry in enumerate(tensors) if entry.num_bytes >= LARGE_BYTES),
    )
