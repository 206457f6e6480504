"""Boxes: the rectangular piece of a sharded tensor that this rank holds.

A ``DTensor`` is one tensor to its users and a piece of it on each rank. Stored is the whole, in
pieces: each with the place where it begins. Whoever reads it sees the whole again, or cuts other
pieces out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "Box",
    "covers_once",
    "is_sharded",
    "local_box",
    "local_tensor",
    "mesh_place",
    "mesh_ranks",
    "overlap",
    "replicas_of",
    "root_mesh",
    "shape_of",
]


Place = tuple[int, ...]
_STAGES = ("pp", "pipe", "stage")
"""How the dimension of a mesh is called whose ranks hold different tensors."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular piece of a tensor.

    Attributes:
        offsets: Where it begins, in elements of each dimension.
        sizes: Its lengths.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing in it."""
        return 0 in self.sizes

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of another one that holds it."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, start, size in zip(self.offsets, within.offsets, self.sizes, strict=True)
        )


def overlap(a: Box, b: Box) -> Box | None:
    """Return what two boxes share, or ``None``."""
    starts = tuple(map(max, a.offsets, b.offsets))
    stops = tuple(
        min(i + n, j + m) for i, n, j, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def covers_once(boxes: Iterable[Box], whole: Box) -> bool:
    """Return whether boxes cover every element of a box exactly once, and nothing beyond it."""
    filled = [box for box in boxes if not box.is_empty]
    if sum(math.prod(box.sizes) for box in filled) != math.prod(whole.sizes):
        return False
    if any(overlap(box, whole) != box for box in filled):
        return False
    if not whole.sizes or len(filled) < 2:
        return len(filled) < 2
    # A line sweeps along the longest dimension: only boxes that it crosses together can overlap.
    dim = max(range(len(whole.sizes)), key=lambda d: whole.sizes[d])
    crossed: list[Box] = []
    for box in sorted(filled, key=lambda one: one.offsets[dim]):
        start = box.offsets[dim]
        crossed = [one for one in crossed if one.offsets[dim] + one.sizes[dim] > start]
        if any(overlap(one, box) is not None for one in crossed):
            return False
        crossed.append(box)
    return True


def is_sharded(value: object) -> bool:
    """Return whether a value is a ``DTensor``, without loading the module that defines it."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed")


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    return tuple(value.shape)


def local_tensor(value: Tensor) -> Tensor:
    """Return the memory that this rank holds of a tensor."""
    if not is_sharded(value):
        return value
    dtensor: DTensor = value  # type: ignore[assignment]
    return dtensor._local_tensor.detach()


def local_box(value: Tensor) -> Box:
    """Return the piece that this rank holds of a tensor.

    Raises:
        UnsupportedStateError: A sum that was not taken yet, or a piece that is no box.
    """
    if not is_sharded(value):
        return Box.whole(value.shape)
    dtensor: DTensor = value  # type: ignore[assignment]
    mesh = dtensor.device_mesh
    box = _box(mesh, tuple(dtensor.placements), tuple(dtensor.shape), mesh_place(mesh))
    if box.sizes != tuple(dtensor._local_tensor.shape):
        raise UnsupportedStateError(
            f"A tensor has {list(dtensor._local_tensor.shape)} on this rank, where its placement "
            f"{dtensor.placements} says {list(box.sizes)}.",
        )
    return box


@lru_cache(maxsize=4096)
def _box(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...], place: Place
) -> Box:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    del place  # the mesh knows it by itself
    strange = [p for p in placements if type(p) not in (Replicate, Shard)]
    if any(not _is_strided_shard(placement) for placement in strange):
        raise UnsupportedStateError(
            f"A tensor is placed as {placements}, which is no box of its values.",
            hint="Redistribute it to Shard or Replicate before the save.",
        )
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if 0 in sizes:
        return Box((0,) * len(sizes), tuple(sizes))
    return Box(tuple(offsets), tuple(sizes))


def replicas_of(value: Tensor) -> tuple[int, ...] | None:
    """Return the ranks that hold the same piece, in order; ``None`` for all ranks.

    A tensor on a part of a larger mesh, such as one that is sharded over data and left alone by
    tensor parallelism, is held once more for each coordinate of the dimensions that are left out.
    Not so for stages of a pipeline: each has tensors of its own.
    """
    if not is_sharded(value):
        return None
    dtensor: DTensor = value  # type: ignore[assignment]
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()  # this rank has no part in the mesh
    return _replicas(mesh, tuple(dtensor.placements), tuple(coordinate), mesh_place(mesh))


def mesh_ranks(value: Tensor) -> frozenset[int]:
    """Return the ranks that hold a sharded tensor together, and those beside them."""
    mesh: DeviceMesh = value.device_mesh  # type: ignore[attr-defined]
    return frozenset(_mesh_ranks(mesh, mesh_place(mesh)))


def mesh_place(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return where this rank is in the whole mesh; empty if it is not there.

    Meshes are equal on all ranks: what was found out for one of them is remembered by this too.
    """
    whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return tuple(whole.get_coordinate() or ())


def root_mesh(mesh: DeviceMesh) -> tuple[Tensor, list[int]]:
    """Return the ranks of the mesh that a mesh was cut out of, and which of its dimensions it has.

    Dimensions of stages are left out, at the place of this rank. A mesh that was not cut out of
    another by the names of dimensions is returned itself.
    """
    whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    names, kept = whole.mesh_dim_names or (), mesh.mesh_dim_names or ()
    coordinate = whole.get_coordinate()
    if whole is mesh or not names or not set(kept) <= set(names) or coordinate is None:
        return mesh.mesh, list(range(mesh.mesh.dim()))
    is_fixed = [name not in kept and name.startswith(_STAGES) for name in names]
    fixed = tuple(at if fix else slice(None) for at, fix in zip(coordinate, is_fixed, strict=True))
    left = [name for name, fix in zip(names, is_fixed, strict=True) if not fix]
    return whole.mesh[fixed], [left.index(name) for name in kept]


@lru_cache(maxsize=1024)
def _replicas(
    mesh: DeviceMesh, placements: tuple[Any, ...], coordinate: tuple[int, ...], place: Place
) -> tuple[int, ...]:
    from torch.distributed.tensor import Replicate

    del place  # what lies beside the mesh depends on it
    ranks, kept = root_mesh(mesh)
    held: list[int | slice] = [slice(None)] * ranks.dim()
    for at, placement in enumerate(placements):
        if type(placement) is not Replicate:
            held[kept[at]] = coordinate[at]
    return tuple(sorted(ranks[tuple(held)].reshape(-1).tolist()))


@lru_cache(maxsize=1024)
def _mesh_ranks(mesh: DeviceMesh, place: Place) -> tuple[int, ...]:
    del place
    return tuple(root_mesh(mesh)[0].reshape(-1).tolist())


def _is_strided_shard(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"
