"""Which ranks hold what of a state that is spread over them.

The ranks tell each other once, when the run is opened, so that a save needs no talk about who
writes a tensor that several of them have. What appears later is written by every rank that has it:
readers take the first. What a rank gives up later is missed by the leader, who looks whether every
tensor was written before it commits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import MismatchError
from .parts import Place

__all__ = ["Holders", "join_places"]

_DEEPEST = 3
"""Keys of the longest place: group, ``state``, name of the parameter."""


class Holders:
    """Who holds what of one item.

    Args:
        rank: This rank.
        found: The ranks by place.
    """

    def __init__(self, rank: int, found: Mapping[Place, tuple[int, ...]]) -> None:
        self._own = (rank,)
        self._found = found

    def __call__(self, path: Sequence[Any]) -> tuple[int, ...]:
        """Return the ranks that hold what is at a path, which begins with the item, in order."""
        for length in range(1, _DEEPEST + 1):
            ranks = self._found.get(tuple(path[1 : 1 + length]))
            if ranks is not None:
                return ranks
        return self._own

    @property
    def places(self) -> Collection[Place]:
        """Return what all ranks hold together."""
        return self._found.keys()


def join_places(told: Sequence[Mapping[str, Sequence[Sequence[str]] | None]]) -> dict[str, Any]:
    """Put together what every rank holds of each item.

    Args:
        told: By rank: the places by item; ``None`` for an item that the rank has all of.

    Returns:
        By item: pairs of ranks and the places that just these ranks hold; as JSON.

    Raises:
        MismatchError: Some ranks have all of an item, and others do not.
    """
    ranks_of: dict[str, dict[Place, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, items in enumerate(told):
        for item, places in items.items():
            if (places is None) != (told[0].get(item, places) is None):
                raise _apart(item, rank)
            for place in places or ():
                ranks_of[item][tuple(place)].append(rank)
    joined: dict[str, list[Any]] = {}
    for item, found in ranks_of.items():
        groups: dict[tuple[int, ...], list[list[str]]] = defaultdict(list)
        for place, ranks in found.items():
            groups[tuple(ranks)].append(list(place))
        joined[item] = [[list(ranks), places] for ranks, places in groups.items()]
    return joined


def _apart(item: str, rank: int) -> MismatchError:
    return MismatchError(
        f"Rank 0 and rank {rank} do not mean the same by {item}: one of them has all of it, and "
        "the other a part.",
        safe="No checkpoint was touched.",
        hint="Where a model is split into stages every rank must say so: milepost.Stage(module).",
        item=item,
        rank=rank,
    )
