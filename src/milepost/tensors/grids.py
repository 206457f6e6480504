"""Grids: how a sharded tensor was dealt out, so that a reader knows which ranks to ask for a piece.

A mesh of ranks cuts a tensor along some of its dimensions, one after the other: each dimension of
the mesh that cuts gives its first coordinate the first piece, and so on. From that follows which
ranks hold what, without a list of the pieces of a thousand ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .boxes import Box, is_sharded, local_box, mesh_place, root_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["Grid", "grid_of", "holders"]


@dataclass(frozen=True, slots=True)
class Grid:
    """How a tensor is dealt out.

    Attributes:
        shape: Lengths of the dimensions of the mesh.
        ranks: The ranks in it, the last dimension running fastest.
        cuts: Which dimension of the mesh cuts which dimension of the tensor, in order. Ranks that
            differ in other dimensions hold the same.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]


def holders(grid: Grid, whole: Sequence[int], wanted: Box) -> list[int]:
    """Return the ranks that hold something of a box, replicas included.

    Args:
        grid: How the tensor is dealt out.
        whole: Its shape.
        wanted: The box.
    """
    strides = [math.prod(grid.shape[at + 1 :]) for at in range(len(grid.shape))]
    axes: list[list[int]] = []
    for dimension in dict.fromkeys(dim for _, dim in grid.cuts):
        places = [mesh_dim for mesh_dim, dim in grid.cuts if dim == dimension]
        lengths = [grid.shape[mesh_dim] for mesh_dim in places]
        low = wanted.offsets[dimension]
        found = _coordinates(lengths, 0, whole[dimension], low, low + wanted.sizes[dimension])
        axes.append(
            [sum(c * strides[at] for c, at in zip(one, places, strict=True)) for one in found]
        )
    is_cut = {mesh_dim for mesh_dim, _ in grid.cuts}
    for at, length in enumerate(grid.shape):
        if at not in is_cut:
            axes.append([c * strides[at] for c in range(length)])
    return sorted(grid.ranks[sum(place)] for place in product(*axes))


def _coordinates(
    lengths: Sequence[int], start: int, size: int, low: int, high: int
) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates of the pieces of ``start:start + size`` that overlap ``low:high``."""
    if not lengths:
        yield ()
        return
    step = -(-size // lengths[0])
    first = max((low - start) // step, 0) if step else 0
    for number in range(first, lengths[0]):
        begin = start + number * step
        end = min(begin + step, start + size)
        if begin >= min(high, start + size):
            return
        if end > low:
            for rest in _coordinates(lengths[1:], begin, end - begin, low, high):
                yield (number, *rest)


def grid_of(value: Tensor) -> Grid | None:
    """Return how a tensor is dealt out; ``None`` if it is not, or in a way that has no simple rule.

    What comes back was held against the piece that this rank has.
    """
    if not is_sharded(value):
        return None
    dtensor: DTensor = value  # type: ignore[assignment]
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    grid = _grid(mesh, tuple(dtensor.placements), mesh_place(mesh))
    if grid is None or coordinate is None:
        return None
    rank = int(mesh.mesh[tuple(coordinate)])
    box = local_box(value)
    is_right = box.is_empty or box == _piece(grid, tuple(value.shape), rank)
    return grid if is_right else None


@lru_cache(maxsize=256)
def _grid(mesh: DeviceMesh, placements: tuple[Any, ...], place: tuple[int, ...]) -> Grid | None:
    del place  # what the mesh was cut out of depends on it
    order = _order(mesh, placements)
    ranks, kept = root_mesh(mesh)
    if order is None:
        return None
    cuts = tuple((kept[mesh_dim], placements[mesh_dim].dim) for mesh_dim in order)
    return Grid(tuple(ranks.shape), tuple(ranks.reshape(-1).tolist()), cuts)


def _order(mesh: DeviceMesh, placements: Sequence[Any]) -> list[int] | None:
    """Return the dimensions of the mesh that cut, in the order in which they do.

    That is from the first to the last. A strided shard comes after those behind it which cut the
    same dimension of the tensor.
    """
    from torch.distributed.tensor import Replicate, Shard

    order: list[int] = []
    for at in reversed(range(len(placements))):
        placement = placements[at]
        if type(placement) is Replicate:
            continue
        if type(placement) is Shard:
            order.insert(0, at)
            continue
        behind = [one for one in order if placements[one].dim == placement.dim]
        split = math.prod(mesh.size(one) for one in behind)
        if getattr(placement, "split_factor", None) != split:
            return None
        order.insert(order.index(behind[-1]) + 1 if behind else 0, at)
    return order


@lru_cache(maxsize=4096)
def _piece(grid: Grid, whole: tuple[int, ...], rank: int) -> Box:
    place = grid.ranks.index(rank)
    coordinate: list[int] = []
    for length in reversed(grid.shape):
        place, at = divmod(place, length)
        coordinate.insert(0, at)
    offsets, sizes = [0] * len(whole), list(whole)
    for mesh_dim, dim in grid.cuts:
        step = -(-sizes[dim] // grid.shape[mesh_dim])
        begin = min(coordinate[mesh_dim] * step, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(step, sizes[dim] - begin)
    return Box(tuple(offsets), tuple(sizes))
