"""Ranks without processes: meshes that believe to be a given rank, and tensors laid out on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Spec:
    """A tensor and how it lies: ``placements`` has one entry for each mesh dimension.

    ``None`` stands for a plain tensor that every rank has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[int | None, ...] | None

    def torch_placements(self) -> list[Placement]:
        return [Replicate() if dim is None else Shard(dim) for dim in self.placements or ()]


def mesh_at(sizes: Sequence[int], rank: int) -> DeviceMesh:
    """Return a mesh as one rank sees it; there is no process group."""
    ranks = torch.arange(math.prod(sizes)).reshape(tuple(sizes))
    names = ("a", "b", "c")[: len(sizes)]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    # Meshes of two ranks are equal, and what was found out for one is used again for the other.
    mesh._thread_id = rank
    return mesh


def local_slices(
    shape: Sequence[int], placements: Sequence[int | None], sizes: Sequence[int], rank: int
) -> tuple[slice, ...]:
    """Return which piece a rank has, by cutting as ``torch.chunk`` does, a mesh dimension a time.

    An oracle: it shares no code with what is tested.
    """
    coordinate = []
    for size in reversed(sizes):
        coordinate.append(rank % size)
        rank //= size
    bounds = [(0, length) for length in shape]
    for dim, size, at in zip(placements, sizes, reversed(coordinate), strict=True):
        if dim is not None:
            low, high = bounds[dim]
            step = -(-(high - low) // size)
            start = min(low + at * step, high)
            bounds[dim] = (start, min(start + step, high))
    return tuple(slice(low, high) for low, high in bounds)


def whole_tensor(spec: Spec, seed: int) -> Tensor:
    """Return a tensor of bytes that look random, every bit pattern allowed."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(spec.shape)
    if spec.dtype is torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (count * spec.dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(spec.dtype).reshape(spec.shape)


def as_held(whole: Tensor, spec: Spec, sizes: Sequence[int], rank: int) -> Tensor:
    """Return what a rank holds of a tensor: a piece in a ``DTensor``, or the whole."""
    if spec.placements is None:
        return whole.clone()
    piece = whole[local_slices(spec.shape, spec.placements, sizes, rank)].clone()
    return DTensor.from_local(
        piece,
        mesh_at(sizes, rank),
        spec.torch_placements(),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


mesh_sizes = st.one_of(
    st.tuples(st.integers(1, 8)),
    st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4)]),
)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.dtype]:
    """Shapes with empty, odd and single lengths, and a dtype."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return shape, draw(st.sampled_from(DTYPES))


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, num_mesh_dims: int) -> Spec:
    """One way to lay a tensor on a mesh."""
    dims: list[int | None] = [None, *range(len(shape))]
    how = draw(st.one_of(st.none(), st.tuples(*[st.sampled_from(dims)] * num_mesh_dims)))
    return Spec(shape, dtype, how)
