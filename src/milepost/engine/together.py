"""A save of several ranks: what each contributes, and that all of them mean the same.

    on every rank, in the background         a stop or an error on any rank
    agree: same name, same structure         nothing was written anywhere
    the leader claims a folder               an attempt that the next session sweeps
    every rank writes its share              the same; the leader abandons the attempt
    the leader commits                       as with one rank: see ``runs/publish.py``

Every step has a deadline and ends alike on all ranks. No collective of the training is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import MismatchError
from ..format.digest import crc32c
from ..format.layout import INDEX, part_file, rank_index
from ..format.manifest import FORMAT_VERSION
from ..ranks.solo import Team
from ..tensors.pack import PackedItem
from .pieces import piece_rows
from .plan import FROZEN
from .sameness import Marks, differing_groups, raise_differing
from .shares import owners_seen
from .tables import directory

__all__ = ["Share", "agree", "tensor_map"]

_SHOWN = 8


@dataclass(slots=True)
class Share:
    """What one rank contributes to a save.

    Attributes:
        name: The wanted name.
        facts: What must be equal on all ranks.
        whole: The items as this rank has them, without values.
        own: The items with the leaves that this rank writes.
        error: Why this rank has nothing to contribute.
        joined: The trees of what is spread over the ranks, as all have them together; the leader's.
        marks: Checksums of what it shares with others.
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    whole: Sequence[PackedItem] = ()
    own: Sequence[PackedItem] = ()
    error: BaseException | None = None
    joined: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)

    @classmethod
    def of(
        cls,
        whole: Sequence[PackedItem],
        own: Sequence[PackedItem],
        *,
        name: str,
        said: Mapping[str, Any],
        marks: Marks | None = None,
    ) -> Share:
        """Describe what this rank has and writes.

        Args:
            whole: The items as this rank has them.
            own: The items with the leaves that this rank writes.
            name: The wanted name.
            said: What else must be equal on all ranks.
            marks: Checksums of what it shares with others.
        """
        facts = {
            "name": name,
            **said,
            "items": {item.name: [item.home, _structure(item)] for item in whole},
        }
        return cls(name, facts, whole, own, marks=marks or Marks())

    @classmethod
    def of_error(cls, error: BaseException) -> Share:
        """Describe a rank that has no state to save."""
        return cls("", error=error)

    def documents(
        self,
        places: Mapping[tuple[str, str], tuple[str, int, int]],
        *,
        rank: int,
        team: int,
        joined: Mapping[str, list[Any]] | None = None,
    ) -> dict[str, bytes]:
        """Return the JSON files that this rank writes, by path.

        Args:
            places: Where each tensor lies that this rank writes by itself.
            rank: This rank.
            team: The number of ranks.
            joined: Where all of the shared tensors lie, if one rank writes them; by item.
        """
        table: dict[str, Any] = {}
        for item in self.own:
            if joined is None or item.home == "each":
                found = {key: place for (name, key), place in places.items() if name == item.name}
                rows = piece_rows(item.leaves, found)
            else:
                rows = joined.get(item.name, [])
            entry: dict[str, Any] = {"pieces": rows}
            if item.home == "each":
                entry["tree"] = item.tree
            table[item.name] = entry
        documents = {
            rank_index(rank): _json({"format": FORMAT_VERSION, "rank": rank, "items": table})
        }
        if rank == 0:
            items: dict[str, dict[str, Any]] = {
                item.name: {
                    "tree": self.joined.get(item.name, item.tree),
                    "files": [],
                    # Joined it is like any other to whoever reads it.
                    "home": "all" if item.home == "spread" else item.home,
                }
                for item in self.whole
            }
            if joined is None:
                grids, tensors = directory(self.whole, world_size=team)
                maps = self._maps(team)
            else:
                grids, tensors, maps = [], _joined_directory(joined), _joined_maps(joined)
            for name, rows in tensors.items():
                items[name]["tensors"] = rows
            index = {"format": FORMAT_VERSION, "ranks": team, "grids": grids, "items": items}
            documents[INDEX] = _json(index)
            documents.update(maps)
        return documents

    def _maps(self, team: int) -> dict[str, bytes]:
        """Return for other tools where the tensors of each item are whose parts hold whole ones."""
        seen = owners_seen(self.whole, rank=0, world_size=team)
        maps: dict[str, bytes] = {}
        for item in self.whole:
            named = [(leaf, seen.get((item.name, leaf.part_key))) for leaf in item.leaves]
            is_whole = all(leaf.shape == leaf.whole_shape for leaf in item.leaves)
            if item.home in ("each", "spread") or not named or not is_whole:
                continue
            if any(owner is None for _, owner in named):
                continue
            files = {
                leaf.part_key: part_file(
                    item.name, variant=FROZEN if leaf.is_frozen else "", rank=owner
                )
                for leaf, owner in named
            }
            maps.update(tensor_map(item.name, files, sum(leaf.num_bytes for leaf, _ in named)))
        return maps


def agree(team: Team, share: Share, *, timeout_s: float) -> None:
    """Make sure that every rank saves the same thing.

    Raises:
        RankFailedError: A rank has no state to save; the same error on every rank.
        MismatchError: The ranks have different names, structures or tensors; naming what differs.
        DeadlineError: A rank does not take part.
    """

    def facts() -> dict[str, Any]:
        if share.error is not None:
            raise share.error
        return {"facts": share.facts, "sums": share.marks.sums}

    said = team.gather("save", facts, _compare, timeout_s=timeout_s)
    if said["groups"]:
        raise_differing(team, share.marks, said["groups"], timeout_s=timeout_s)
    if not said["differing"]:
        return
    if said["what"]:
        raise _divergence(said["what"])
    names = said["items"]
    # Rarely needed, and then worth the way: which of the values it is.
    paths = team.gather(
        "compare its state", lambda: _leaves(share, names), _differing, timeout_s=timeout_s
    )
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    listed = ", ".join(paths[:_SHOWN]) + more
    raise _divergence(f"they have different values of {listed or ', '.join(names)}")


def _compare(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return which facts differ among ranks, in words, or the names of the items that do.

    If none do: the groups of ranks whose tensors differ.
    """
    found = [one["facts"] for one in told]
    first = found[0]
    differing = [key for key in first if any(one[key] != first[key] for one in found)]
    what, items = "", []
    if differing and "items" not in differing:
        what = "; ".join(
            f"{key} is {first[key]!r} on rank 0 and {one[key]!r} on rank {rank}"
            for key in differing
            for rank, one in list(enumerate(found))
            if one[key] != first[key]
        )
    elif differing:
        items = _differing([one["items"] for one in found])
    groups = [] if differing else differing_groups([one["sums"] for one in told])
    return {"differing": differing, "what": what, "items": items, "groups": groups}


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that some ranks have other values of than the leader, or not at all."""
    first = found[0]
    return sorted(
        {
            key
            for one in found
            for key in {*one, *first}
            if key not in one or key not in first or one[key] != first[key]
        }
    )


def tensor_map(item: str, files: Mapping[str, str], total_bytes: int) -> dict[str, bytes]:
    """Return the file that tells other tools in which part each whole tensor of an item is."""
    table = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    return {f"{item}.safetensors.index.json": _json(table)}


def _joined_directory(joined: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {
        item: [[key, code, shape, {"rank": 0}] for key, code, shape, *_ in rows]
        for item, rows in joined.items()
    }


def _joined_maps(joined: Mapping[str, list[Any]]) -> dict[str, bytes]:
    maps: dict[str, bytes] = {}
    for item, rows in joined.items():
        files = {row[0]: row[5] for row in rows}
        if len(set(files.values())) > 1:
            maps.update(tensor_map(item, files, sum(row[7] - row[6] for row in rows)))
    return maps


def _divergence(said: str) -> MismatchError:
    return MismatchError(
        f"The ranks do not save the same: {said}.",
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint="Make the values equal, or declare them as a rank's own: milepost.PerRank(object).",
    )


def _structure(item: PackedItem) -> int:
    """Return a checksum of what must be equal on all ranks of an item; 0 where nothing must."""
    if item.home != "all":
        return 0
    return crc32c(_json([item.tree, _described(item)]))


def _described(item: PackedItem) -> list[Any]:
    # A rank may have several pieces of a tensor, or an empty one.
    return list(
        {
            leaf.key: [
                leaf.key,
                leaf.code,
                list(leaf.whole_shape),
                leaf.is_leaders,
                leaf.is_frozen,
            ]
            for leaf in item.leaves
        }.values()
    )


def _leaves(share: Share, names: Iterable[str]) -> dict[str, int]:
    """Return a checksum of each value in some items, by its path."""
    found: dict[str, int] = {}
    wanted = set(names)
    for item in share.whole:
        if item.name in wanted and item.home == "all":
            _walk(item.name, item.tree, found)
            for row in _described(item):
                found[f"{item.name}/{row[0]}"] = crc32c(_json(row))
    return found


def _walk(path: str, value: Any, found: dict[str, int]) -> None:
    if isinstance(value, dict) and "$" not in value:
        for key, member in value.items():
            _walk(f"{path}/{key}", member, found)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            _walk(f"{path}/{index}", member, found)
    else:
        found[path] = crc32c(_json(value))


def _json(value: Any) -> bytes:
    """Encode without sorting: the order of a dict is part of the state."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
