"""Sources of state: room for a tensor is made only for shapes that a tensor can have."""

from __future__ import annotations

import pytest
import torch

import milepost as mp
from milepost.state.source import TensorInfo, new_tensor


@pytest.mark.parametrize(
    "shape", [(0, 2**62, 2**62), (2**62, 2**62), (2**63,), (0, 2**80), (-1,), (2, -3)]
)
def test_an_impossible_shape_is_a_malformed_checkpoint(shape):
    """A header may claim it for a tensor without bytes; another checkpoint is resumed then."""
    with pytest.raises(mp.FormatError, match="No tensor can have the stored shape"):
        new_tensor(TensorInfo("U8", shape))


def test_a_lack_of_memory_does_not_count_as_damage():
    """The checkpoint is whole: an older one would need as much."""
    with pytest.raises(RuntimeError, match="memory") as caught:
        new_tensor(TensorInfo("U8", (2**50,)))
    assert not isinstance(caught.value, mp.CheckpointError)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3), (1,) * 70])
def test_possible_shapes_are_made(shape):
    """Empty ones and numbers are shapes, too."""
    made = new_tensor(TensorInfo("F32", shape))
    assert (tuple(made.shape), made.dtype) == (shape, torch.float32)


def test_a_dtype_that_torch_lacks_is_named():
    """The file may come from a newer torch."""
    with pytest.raises(mp.FormatError, match="'F3'"):
        new_tensor(TensorInfo("F3", (1,)))
