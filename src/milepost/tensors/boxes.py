"""Boxes: the rectangular piece of a sharded tensor that this rank holds.

A ``DTensor`` is one tensor to its users and a piece of it on each rank. Stored is the whole, in
pieces: each with the place where it begins. Whoever reads it sees the whole again, or cuts other
pieces out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    "mesh_ranks",
    "overlap",
    "replicas_of",
    "shape_of",
]


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
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: DTensor = value  # type: ignore[assignment]
    strange = [p for p in dtensor.placements if type(p) not in (Replicate, Shard)]
    if any(not _is_strided_shard(placement) for placement in strange):
        raise UnsupportedStateError(
            f"A tensor is placed as {dtensor.placements}, which is no box of its values.",
            hint="Redistribute it to Shard or Replicate before the save.",
        )
    sizes, offsets = compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )
    if tuple(sizes) != tuple(dtensor._local_tensor.shape):
        raise UnsupportedStateError(
            f"A tensor has {list(dtensor._local_tensor.shape)} on this rank, where its placement "
            f"{dtensor.placements} says {list(sizes)}.",
        )
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
    from torch.distributed.tensor import Replicate

    dtensor: DTensor = value  # type: ignore[assignment]
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()  # this rank has no part in the mesh
    fixed = tuple(
        slice(None) if type(placement) is Replicate else at
        for placement, at in zip(dtensor.placements, coordinate, strict=True)
    )
    ranks = set(mesh.mesh[fixed].reshape(-1).tolist())
    return tuple(sorted(ranks | _beside(mesh, ranks)))


def mesh_ranks(value: Tensor) -> set[int]:
    """Return the ranks that hold a sharded tensor together, and those beside them."""
    mesh: DeviceMesh = value.device_mesh  # type: ignore[attr-defined]
    ranks = set(mesh.mesh.reshape(-1).tolist())
    return ranks | _beside(mesh, ranks)


def _beside(mesh: DeviceMesh, ranks: set[int]) -> set[int]:
    """Return the ranks that differ from some only in dimensions of the whole mesh left out here."""
    whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    names, kept = whole.mesh_dim_names or (), set(mesh.mesh_dim_names or ())
    if whole is mesh or not names or not kept <= set(names):
        return set()
    found: set[int] = set()
    for rank in ranks:
        (place,) = (whole.mesh == rank).nonzero().tolist()
        around = tuple(
            at if name in kept or name.startswith(_STAGES) else slice(None)
            for name, at in zip(names, place, strict=True)
        )
        found.update(whole.mesh[around].reshape(-1).tolist())
    return found


def _is_strided_shard(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"
