"""Runs of elements as boxes: nothing left out, nothing twice, in order."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.tensors.boxes import Box
from milepost.tensors.flat import Run, boxes_of_run

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shape=SHAPES, ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_the_boxes_of_a_run_are_its_elements_in_order(
    shape: tuple[int, ...], ends: tuple[float, float]
) -> None:
    """Against plain slicing of the flattened tensor."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    start, stop = sorted(round(end * whole.numel()) for end in ends)
    boxes = boxes_of_run(shape, start, stop)
    found = [whole[box.slices(within=Box.whole(shape))].reshape(-1) for box in boxes]
    assert torch.equal(
        torch.cat([torch.empty(0, dtype=torch.int64), *found]), whole.reshape(-1)[start:stop]
    )
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(not box.is_empty for box in boxes)


@given(shape=SHAPES, cuts=st.lists(st.floats(0, 1), max_size=4))
def test_runs_of_all_ranks_are_written_and_read_back(
    shape: tuple[int, ...], cuts: list[float]
) -> None:
    """The memory of each box is that of the run: what is read into it is in the run."""
    size = math.prod(shape)
    whole = torch.arange(size, dtype=torch.float64).reshape(shape)
    edges = [0, *sorted(round(cut * size) for cut in cuts), size]
    seen = torch.zeros(shape, dtype=torch.float64)
    for rank, (start, stop) in enumerate(itertools.pairwise(edges)):
        run = Run(torch.full((stop - start,), -1.0, dtype=torch.float64), start, shape, (rank,))
        for box, memory in run.pieces():
            memory.copy_(whole[box.slices(within=Box.whole(shape))])
            seen[box.slices(within=Box.whole(shape))] += 1
        assert torch.equal(run.data, run.cut(whole))
    assert torch.equal(seen, torch.ones(shape, dtype=torch.float64))
