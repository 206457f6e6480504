"""Shares: which rank writes what, found by every rank for itself.

A piece that several ranks hold is written by one of them. Which one follows from a rule that all of
them apply to the same facts, so that nothing has to be agreed upon: the pieces held by the same set
of ranks are given out one by one, the largest first, each to the rank that has the least so far.
What is the leader's by nature, such as the running means of a batch norm, stays with the leader.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..tensors.pack import Leaf, PackedItem

__all__ = ["own_share", "owners"]


def owners(pieces: Sequence[tuple[str, int]], ranks: Sequence[int]) -> dict[str, int]:
    """Give out pieces that all of some ranks hold.

    Args:
        pieces: Name and bytes of each.
        ranks: The ranks that hold all of them.

    Returns:
        The rank that writes each piece. It depends on nothing but the arguments, and not on their
        order.
    """
    loads = [(0, rank) for rank in sorted(ranks)]
    given: dict[str, int] = {}
    for name, num_bytes in sorted(pieces, key=lambda piece: (-piece[1], piece[0])):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + max(num_bytes, 1), rank))
        given[name] = rank
    return given


def own_share(items: Iterable[PackedItem], *, rank: int, world_size: int) -> list[PackedItem]:
    """Return the items with those leaves only that this rank writes.

    Args:
        items: The whole state, as this rank holds it.
        rank: This rank.
        world_size: The number of ranks.
    """
    groups: dict[tuple[int, ...], list[tuple[str, Leaf]]] = defaultdict(list)
    mine: set[str] = set()
    packed = list(items)
    for item in packed:
        for leaf in item.leaves:
            name = f"{item.name}/{leaf.part_key}"
            if item.home == "each":
                mine.add(name)
            elif item.home == "leader" or leaf.is_leaders or 0 in leaf.whole_shape:
                holders = (leaf.replicas or ()) if item.home == "spread" else (0,)
                mine.update([name] if rank in holders[:1] else [])
            elif leaf.replicas is None:
                groups[tuple(range(world_size))].append((name, leaf))
            elif rank in leaf.replicas and not leaf.box.is_empty:
                groups[leaf.replicas].append((name, leaf))
    for ranks, members in groups.items():
        given = owners([(name, leaf.num_bytes) for name, leaf in members], ranks)
        mine.update(name for name, owner in given.items() if owner == rank)
    return [
        PackedItem(
            item.name,
            item.tree,
            [leaf for leaf in item.leaves if f"{item.name}/{leaf.part_key}" in mine],
            home=item.home,
        )
        for item in packed
    ]
