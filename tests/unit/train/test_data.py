"""Batches: counted, split and moved alike, whatever they are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from milepost.errors import UsageError
from milepost.train import DataSpec
from milepost.train.data import count_samples, move_batch, split_batch


class Pair(NamedTuple):
    x: Any
    y: Any


FIVE = torch.arange(5)


@pytest.mark.parametrize(
    "batch",
    [
        FIVE,
        (FIVE, FIVE),
        [FIVE, FIVE],
        {"x": FIVE, "y": FIVE},
        Pair(FIVE, FIVE),
        ({"x": FIVE}, FIVE),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "nested"],
)
def test_every_kind_of_batch_is_split_in_order(batch: object) -> None:
    """Microbatches together are the batch: nothing lost, nothing twice, the same container."""
    parts = split_batch(batch, 2)
    assert [count_samples(part) for part in parts] == [3, 2]
    assert all(type(part) is type(batch) for part in parts)
    assert torch.equal(torch.cat([_first(part) for part in parts]), FIVE)


def _first(batch: object) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


def test_text_is_split_along_with_tensors() -> None:
    """A list of strings beside a tensor belongs to the same samples."""
    parts = split_batch((FIVE, list("abcde")), 2)
    assert [part[1] for part in parts] == [["a", "b", "c"], ["d", "e"]]


def test_fewer_samples_than_parts_give_fewer_parts() -> None:
    """The last batch of an epoch may be smaller than the accumulation."""
    assert len(split_batch((FIVE[:2], FIVE[:2]), 4)) == 2


@pytest.mark.parametrize("batch", [(FIVE, FIVE[:3]), {"a": "text"}, torch.tensor(1.0)])
def test_unclear_sizes_are_refused(batch: object) -> None:
    """A wrong count would put wrong weights on microbatches and wrong numbers in names."""
    with pytest.raises(UsageError, match="how many samples"):
        count_samples(batch)


def test_moving_keeps_the_container() -> None:
    """Models see the same kind of batch on every device."""
    moved = move_batch({"x": Pair(FIVE, "text")}, torch.device("cpu"))
    assert type(moved["x"]) is Pair
    assert moved["x"].y == "text"


def test_spec_is_made_from_what_users_pass() -> None:
    """A loader, a spec or a dict of its arguments."""
    loader = [FIVE]
    spec = DataSpec(loader, num_samples=7)
    assert DataSpec.of(spec) is spec
    assert DataSpec.of(loader).dataloader is loader
    assert DataSpec.of({"dataloader": loader, "num_tokens": 3}).num_tokens == 3
