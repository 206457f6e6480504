"""Grids: by rule and by looking at every rank, the same ranks hold a piece."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from milepost.tensors.boxes import Box
from milepost.tensors.grids import Grid, grid_of, holders

from .simulated_ranks import as_held, local_slices, mesh_at, mesh_sizes, placed, shapes


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box of a shape that is not empty."""
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    assume(all(low < high for low, high in spans))
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_rule_names_the_ranks_that_hold_something_of_a_box(data: st.DataObject) -> None:
    """No one is left out, or a piece would not be found; and no one is asked in vain."""
    sizes = data.draw(mesh_sizes)
    spec = data.draw(placed(*data.draw(shapes()), len(sizes)))
    assume(spec.placements is not None and 0 not in spec.shape)
    assert spec.placements is not None
    wanted = data.draw(boxes(spec.shape))
    whole = torch.zeros(spec.shape, dtype=spec.dtype)
    expected = []
    for rank in range(math.prod(sizes)):
        held = local_slices(spec.shape, spec.placements, sizes, rank)
        shared = [
            min(one.stop, low + size) - max(one.start, low)
            for one, low, size in zip(held, wanted.offsets, wanted.sizes, strict=True)
        ]
        if all(length > 0 for length in shared):
            expected.append(rank)
        grid = grid_of(as_held(whole, spec, sizes, rank))
        assert grid is not None
    assert holders(grid, spec.shape, wanted) == expected


def test_one_dimension_cut_by_two_of_the_mesh_is_cut_from_the_inside() -> None:
    """As fully sharded tensor parallel layers are: first by the last dimension of the mesh."""
    rows = 12
    for rank in range(4):
        mesh = mesh_at((2, 2), rank)
        outer, inner = divmod(rank, 2)
        low = inner * 6 + outer * 3
        tensor = DTensor.from_local(
            torch.zeros(3, 2),
            mesh,
            [_StridedShard(0, split_factor=2), Shard(0)],
            run_check=False,
            shape=torch.Size((rows, 2)),
            stride=(2, 1),
        )
        grid = grid_of(tensor)
        assert grid == Grid((2, 2), (0, 1, 2, 3), ((1, 0), (0, 0)))
        assert holders(grid, (rows, 2), Box((low, 0), (3, 2))) == [rank]
    assert holders(grid, (rows, 2), Box((4, 0), (4, 1))) == [1, 2]


def test_plain_tensors_have_no_grid() -> None:
    """Nor do those whose mesh has another rule."""
    assert grid_of(torch.zeros(3)) is None
    mesh = mesh_at((2, 2), 0)
    odd = DTensor.from_local(
        torch.zeros(2, 2),
        mesh,
        [_StridedShard(0, split_factor=4), Replicate()],
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )
    assert grid_of(odd) is None


def test_a_thousand_ranks_are_asked_for_one_piece_only() -> None:
    """Whoever loads what it saved asks itself and its replicas."""
    grid = Grid((64, 16), tuple(range(1024)), ((1, 0),))
    assert holders(grid, (160, 4), Box((30, 0), (10, 4))) == list(range(3, 1024, 16))
    assert holders(grid, (160, 4), Box((39, 0), (2, 4))) == sorted(
        [*range(3, 1024, 16), *range(4, 1024, 16)]
    )
