"""The comparison that all exactness tests trust."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from milepost.testing.asserts import assert_equal_states, first_difference

NAN = torch.tensor([math.nan, 1.0])
SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([1]), np.array([1.0])),
        (np.float32(1), np.float64(1)),
        (SPARSE, torch.eye(3)),
        (SPARSE, (2 * torch.eye(3)).to_sparse()),
        (torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16)),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({1}, {2}),
        ("a", b"a"),
        (None, 0),
    ],
)
def test_anything_that_differs_is_seen(left: Any, right: Any) -> None:
    """Each of these is equal to someone who compares values."""
    assert first_difference(left, right) is not None
    assert first_difference(right, left) is not None


@pytest.mark.parametrize(
    "value",
    [
        NAN, torch.zeros(0), torch.tensor(1.0), torch.tensor([1 + 2j]), SPARSE,
        torch.tensor([True]), torch.ones(2, dtype=torch.bfloat16),
        np.array(["a", None], dtype=object),
        math.nan, {"a": [NAN, (1, "x")]}, {1, 2}, b"x", None,
    ],
    ids=str,
)  # fmt: skip
def test_anything_equals_its_copy(value: Any) -> None:
    """NaN included."""
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert_equal_states(value, copy)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_rows_of_sparse_tensors_are_compared() -> None:
    """Equal places with other values are not equal."""
    one, other = torch.eye(2).to_sparse_csr(), (2 * torch.eye(2)).to_sparse_csr()
    assert first_difference(one, one.clone()) is None
    assert first_difference(one, other) == "state.values: differs, first at element 0"


def test_strides_do_not_matter() -> None:
    """The values are the same, wherever they lie."""
    assert_equal_states(
        torch.arange(6).reshape(2, 3).t().contiguous().t(), torch.arange(6).reshape(2, 3)
    )


def test_the_message_leads_to_the_difference() -> None:
    """In a state of thousands of tensors one must be told where to look."""
    left = {"optimizers": {"AdamW": [torch.zeros(2), torch.tensor([0.0, 1.0, 2.0])]}}
    right = {"optimizers": {"AdamW": [torch.zeros(2), torch.tensor([0.0, 1.0, 3.0])]}}
    with pytest.raises(AssertionError) as caught:
        assert_equal_states(left, right)
    assert str(caught.value) == "state['optimizers']['AdamW'][1]: differs, first at element 2"
