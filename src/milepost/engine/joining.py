"""Joining what is spread: the names that each rank has, as one tree for the checkpoint.

Ranks say first what their tree is like, by its checksum, so that of those who have the same only
one sends it. Every rank sends the keys of what it writes: the leader goes through the joined tree
and looks that nothing is left out. That cannot be seen by any rank alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import MismatchError
from ..format.digest import crc32c
from ..ranks.team import Team
from ..tensors.pack import PackedItem
from ..tensors.unpack import leaf_keys

__all__ = ["join_trees", "merge"]

_NAMES = frozenset({"params", "frozen", "others"})
"""Lists of names: joined, where other lists must be equal."""
_SHOWN = 8


def join_trees(
    team: Team, whole: Sequence[PackedItem], own: Sequence[PackedItem], *, timeout_s: float
) -> dict[str, Any]:
    """Return the trees of items that are spread, as all ranks have them together; to the leader.

    Args:
        team: The ranks.
        whole: The items as this rank has them.
        own: The items with the leaves that this rank writes.
        timeout_s: How long to wait for the last rank.

    Returns:
        By item; on the leader, who writes them, and nothing on other ranks.

    Raises:
        MismatchError: Ranks have different values under one name, or one that no rank writes; the
            same on every rank.
    """
    trees = {item.name: item.tree for item in whole if item.home == "spread"}
    if not trees:
        return {}
    sums = {name: crc32c(_json(tree)) for name, tree in trees.items()}
    wanted = team.gather("name what it has", lambda: sums, _first_of_each, timeout_s=timeout_s)
    mine = {name: tree for name, tree in trees.items() if team.rank in wanted[name]}
    written = {
        item.name: sorted({leaf.key for leaf in item.leaves}) for item in own if item.name in trees
    }
    joined: dict[str, Any] = {}

    def tell() -> dict[str, Any]:
        # As text: what is encoded already must not be encoded again.
        return {"trees": json.dumps(mine, allow_nan=False), "written": written}

    def join(told: Sequence[Mapping[str, Any]]) -> None:
        found: list[dict[str, Any]] = [json.loads(one["trees"]) for one in told]
        for name in trees:
            having = [one[name] for one in found if name in one]
            joined[name] = _join(name, having, [one["written"][name] for one in told])

    team.gather("join what is spread", tell, join, timeout_s=timeout_s)
    return joined


def _first_of_each(told: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return for each item the first rank of those that have the same."""
    found: dict[str, dict[int, int]] = {}
    for rank, sums in enumerate(told):
        for name, value in sums.items():
            found.setdefault(name, {}).setdefault(value, rank)
    return {name: list(ranks.values()) for name, ranks in found.items()}


def _join(name: str, trees: Sequence[Any], written: Iterable[Iterable[str]]) -> Any:
    joined = trees[0]
    differing: list[str] = []
    for tree in trees[1:]:
        joined = merge(joined, tree, path=name, differing=differing)
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise MismatchError(
            f"The ranks have different values of {', '.join(differing[:_SHOWN])}{more}.",
            safe="Nothing was committed; earlier checkpoints are intact.",
            hint="What several ranks have under one name must be the same.",
            names=differing,
        )
    missing = sorted(set(leaf_keys(joined)).difference(*written))
    if missing:
        raise MismatchError(
            f"No rank writes {name}/{f', {name}/'.join(missing[:_SHOWN])}: the ranks hold other "
            "things now than when the run was opened.",
            safe="Nothing was committed; earlier checkpoints are intact.",
            hint="Close the run and open it again after moving parameters between ranks.",
            names=missing,
        )
    return joined


def merge(first: Any, second: Any, *, path: str, differing: list[str]) -> Any:
    """Join two trees: the keys of both, in the order of the first.

    Args:
        first: As in JSON.
        second: The same.
        path: Where they are, for messages.
        differing: Paths of what cannot be joined are added to it.

    Returns:
        The joined tree.
    """
    if first == second:
        return first
    if _is_plain(first) and _is_plain(second):
        joined = dict(first)
        for key, value in second.items():
            where = f"{path}/{key}"
            joined[key] = (
                merge(first[key], value, path=where, differing=differing) if key in first else value
            )
        return joined
    key = path.rpartition("/")[2]
    if isinstance(first, list) and isinstance(second, list):
        if key in _NAMES:
            return list(dict.fromkeys([*first, *second]))
        if key == "param_groups":
            return _merge_groups(first, second)
    differing.append(path)
    return first


def _merge_groups(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Join groups of parameters: those with equal options become one."""
    joined = [dict(group) for group in first]
    free = list(range(len(joined)))
    for group in second:
        options = _options(group)
        home = next((index for index in free if _options(joined[index]) == options), None)
        if home is None:
            joined.append(dict(group))
        else:
            free.remove(home)
            names = dict.fromkeys([*joined[home]["params"], *group["params"]])
            joined[home]["params"] = list(names)
    return joined


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_plain(value: Any) -> bool:
    return isinstance(value, dict) and "$" not in value


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
