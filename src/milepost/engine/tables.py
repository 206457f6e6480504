"""What a reader has to know of a checkpoint of several ranks, and no more.

Each rank has a table of what it wrote, ``index-r00003.json``. The common index has a directory:
what each tensor is, and which rank wrote it, or over which grid of ranks it was dealt out. From
that a reader finds whose tables it needs; of a thousand ranks it is often its own and a few more.

The directory only says where to look. If the pieces found there do not cover what is wanted, all
tables are read, and they decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import FormatError
from ..format.header import ITEM_SIZES
from ..state.source import TensorInfo
from ..tensors.boxes import Box
from ..tensors.grids import Grid, holders
from ..tensors.pack import PackedItem
from .pieces import StoredWhole, read_rows
from .shares import owners_seen

__all__ = ["RankTables", "directory"]

_ENTRY_FIELDS = 4


def directory(items: Sequence[PackedItem], *, world_size: int) -> tuple[list[Any], dict[str, Any]]:
    """Return what the leader knows of where tensors are, as JSON.

    Args:
        items: The whole state, as the leader holds it.
        world_size: The number of ranks.

    Returns:
        The grids, and for each item of which it knows all tensors a list of
        ``[key, code, shape, where]``. ``where`` is ``{"rank": number}``, ``{"grid": place in the
        grids}`` or, where it cannot tell, ``None``.
    """
    seen = owners_seen(items, rank=0, world_size=world_size)
    grids: dict[Grid, int] = {}
    tensors: dict[str, Any] = {}
    for item in items:
        if item.home not in ("all", "leader"):
            continue
        rows = tensors[item.name] = []
        # Of a run of elements a rank may have several pieces.
        for leaf in {leaf.key: leaf for leaf in item.leaves}.values():
            where: dict[str, int] | None = None
            if leaf.grid is not None and leaf.grid.cuts and item.home == "all":
                where = {"grid": grids.setdefault(leaf.grid, len(grids))}
            elif leaf.shape == leaf.whole_shape and (item.name, leaf.part_key) in seen:
                where = {"rank": seen[item.name, leaf.part_key]}
            rows.append([leaf.key, leaf.code, list(leaf.whole_shape), where])
    return [[list(g.shape), list(g.ranks), [list(c) for c in g.cuts]] for g in grids], tensors


class RankTables:
    """The tables of several ranks, each read when it is needed.

    Args:
        name: The checkpoint, for messages.
        index: The common index.
        num_ranks: The number of ranks that wrote it.
        read: Returns the checked table of a rank, by item.
    """

    def __init__(
        self,
        name: str,
        index: Mapping[str, Any],
        num_ranks: int,
        read: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._name = name
        self._num_ranks = num_ranks
        self._read = read
        self._items: Mapping[str, Any] = index["items"]
        self._grids = [_grid(one, num_ranks, name) for one in _list(index.get("grids", []), name)]
        self._tables: dict[str, dict[str, StoredWhole]] = {name: {} for name in self._items}
        self._where: dict[str, dict[str, Any]] = {}
        self._was_read: set[int] = set()
        for item, entry in self._items.items():
            if "tensors" in entry:
                self._enter(item, _list(entry["tensors"], name))

    def infos(self, item: str) -> dict[str, TensorInfo]:
        """Return what each tensor of an item is."""
        if item not in self._where:
            self.read_all()
        return {key: TensorInfo(one.code, one.shape) for key, one in self._tables[item].items()}

    def table(self, item: str) -> dict[str, StoredWhole]:
        """Return the tensors of an item with the pieces that were found so far."""
        return self._tables[item]

    def locate(self, wanted: Iterable[tuple[str, str, Box]]) -> None:
        """Read the tables that some boxes need.

        Args:
            wanted: ``(item, key, box)``.
        """
        needed: set[int] = set()
        known: dict[tuple[int, tuple[int, ...], Box], list[int]] = {}
        for item, key, box in wanted:
            where = self._where.get(item, {}).get(key)
            if where is None:
                self.read_all()
                return
            if "rank" in where:
                needed.add(where["rank"])
                continue
            shape = self._tables[item][key].shape
            at = (where["grid"], shape, box)
            if at not in known:
                known[at] = holders(self._grids[where["grid"]], shape, box)
                needed.update(known[at])
        for rank in sorted(needed):
            self._take(rank)

    def read_all(self) -> bool:
        """Read the tables of all ranks; return whether there was any left."""
        is_more = len(self._was_read) < self._num_ranks
        for rank in range(self._num_ranks):
            self._take(rank)
        return is_more

    def _take(self, rank: int) -> None:
        if rank in self._was_read:
            return
        for item, entry in self._read(rank).items():
            if self._items[item].get("home") == "each":
                continue
            where = f"{self._name}: the table of rank {rank}, {item}"
            table = self._tables[item]
            num_known = len(table)
            read_rows(table, entry["pieces"], where=where)
            if item in self._where and len(table) != num_known:
                raise FormatError(f"{where} holds a tensor that is not in the index.", path=where)
        self._was_read.add(rank)

    def _enter(self, item: str, rows: Sequence[Any]) -> None:
        table, places = self._tables[item], self._where.setdefault(item, {})
        for row in rows:
            if not isinstance(row, list) or len(row) != _ENTRY_FIELDS:
                raise _malformed(self._name)
            key, code, shape, where = row
            if not (isinstance(key, str) and code in ITEM_SIZES and _are_counts(shape)):
                raise _malformed(self._name)
            if where is not None and not self._is_place(where, len(shape)):
                raise _malformed(self._name)
            if key in table:
                raise FormatError(f"The index of {self._name} has {key!r} twice.")
            table[key] = StoredWhole(code, tuple(shape))
            places[key] = where

    def _is_place(self, where: Any, num_dims: int) -> bool:
        if not isinstance(where, dict) or len(where) != 1:
            return False
        ((kind, number),) = where.items()
        limit = {"rank": self._num_ranks, "grid": len(self._grids)}.get(kind, 0)
        if type(number) is not int or not 0 <= number < limit:
            return False
        return kind == "rank" or all(dim < num_dims for _, dim in self._grids[number].cuts)


def _grid(entry: Any, num_ranks: int, name: str) -> Grid:
    if not isinstance(entry, list) or len(entry) != len(("shape", "ranks", "cuts")):
        raise _malformed(name)
    shape, ranks, cuts = entry
    is_right = (
        _are_counts(shape)
        and _are_counts(ranks)
        and len(ranks) == math.prod(shape) > 0
        and all(rank < num_ranks for rank in ranks)
        and isinstance(cuts, list)
        and all(_are_counts(cut) and len(cut) == 2 and cut[0] < len(shape) for cut in cuts)
        and len({cut[0] for cut in cuts}) == len(cuts)
    )
    if not is_right:
        raise _malformed(name)
    return Grid(tuple(shape), tuple(ranks), tuple((at, dim) for at, dim in cuts))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _malformed(name)
    return value


def _malformed(name: str) -> FormatError:
    return FormatError(f"The index of {name} says in no sensible way where tensors are.")
