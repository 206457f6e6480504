"""Shares: which rank writes what, found by every rank for itself.

A piece that several ranks hold is written by one of them. Which one follows from a rule that all of
them apply to the same facts, so that nothing has to be agreed upon: the pieces held by the same set
of ranks are given out one by one, the largest first, each to the rank that has the least so far.
Small ones go in bundles: thousands of counters spread over a thousand ranks would have every reader
open a thousand files.
What is the leader's by nature, such as the running means of a batch norm, stays with the leader.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..tensors.pack import Leaf, PackedItem

__all__ = ["own_share", "owners", "owners_seen"]

_SMALL_BYTES = 4096
_BUNDLE_BYTES = 64 * 1024


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
    for num_bytes, names in _bundles(pieces):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + max(num_bytes, 1), rank))
        given.update(dict.fromkeys(names, rank))
    return given


def _bundles(pieces: Sequence[tuple[str, int]]) -> list[tuple[int, list[str]]]:
    """Return bytes and names of what is given out at once, the largest first."""
    bundles = [(size, [name]) for name, size in pieces if size >= _SMALL_BYTES]
    total = 0
    names: list[str] = []
    for name, size in sorted(piece for piece in pieces if piece[1] < _SMALL_BYTES):
        if names and total + size > _BUNDLE_BYTES:
            bundles.append((total, names))
            total, names = 0, []
        names.append(name)
        total += size
    if names:
        bundles.append((total, names))
    return sorted(bundles, key=lambda bundle: (-bundle[0], bundle[1]))


def owners_seen(
    items: Iterable[PackedItem], *, rank: int, world_size: int, to_leader: bool = False
) -> dict[tuple[str, str], int]:
    """Return which rank writes each leaf, by item and name in the part, where this one can tell.

    It cannot tell of a piece that others hold and it does not.

    Args:
        items: The whole state, as this rank holds it.
        rank: This rank.
        world_size: The number of ranks.
        to_leader: Whether the leader has whatever it holds.
    """
    groups: dict[tuple[int, ...], list[tuple[tuple[str, str], Leaf]]] = defaultdict(list)
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        for leaf in item.leaves:
            name = (item.name, leaf.part_key)
            if item.home == "each":
                seen[name] = rank
            elif item.home == "leader" or leaf.is_leaders or 0 in leaf.whole_shape:
                holders = (leaf.replicas or ()) if item.home == "spread" else (0,)
                seen.update({name: holders[0]} if holders else {})
            elif leaf.replicas is None:
                groups[tuple(range(world_size))].append((name, leaf))
            elif rank in leaf.replicas and not leaf.box.is_empty:
                groups[leaf.replicas].append((name, leaf))
    for ranks, members in groups.items():
        if to_leader and 0 in ranks:
            seen.update((name, 0) for name, _ in members)
            continue
        given = owners([("/".join(name), leaf.num_bytes) for name, leaf in members], ranks)
        seen.update((name, given["/".join(name)]) for name, _ in members)
    return seen


def own_share(
    items: Iterable[PackedItem], *, rank: int, world_size: int, to_leader: bool = False
) -> list[PackedItem]:
    """Return the items with those leaves only that this rank writes.

    Args:
        items: The whole state, as this rank holds it.
        rank: This rank.
        world_size: The number of ranks.
        to_leader: Whether the leader has whatever it holds.
    """
    packed = list(items)
    seen = owners_seen(packed, rank=rank, world_size=world_size, to_leader=to_leader)
    shares = []
    for item in packed:
        own = [
            index
            for index, leaf in enumerate(item.leaves)
            if seen.get((item.name, leaf.part_key)) == rank
        ]
        leaves, tensors = [item.leaves[i] for i in own], [item.tensors[i] for i in own]
        shares.append(PackedItem(item.name, item.tree, leaves, tensors, item.home))
    return shares
