"""Ranks that should have the same bytes: what is found, and what is known to be missed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import milepost as mp
from milepost.engine.sameness import Marks, differing_groups, mark, raise_differing
from milepost.ranks.solo import RankCheck, Solo
from milepost.tensors.pack import Home, pack_item


def marks(
    values: dict[str, Tensor],
    rank: int = 0,
    *,
    name: str = "ba1",
    how: RankCheck = "sample",
    home: Home = "all",
    leaders: tuple[str, ...] = (),
) -> Marks:
    holders = (lambda path: (rank,)) if home == "spread" else None
    item = pack_item("model", values, home=home, leaders=leaders, holders=holders)
    return mark([item], rank=rank, world_size=2, name=name, how=how)


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    large = torch.randn(300, 70)
    return {
        "large": large,
        "turned": torch.randn(70, 300).t(),
        "images": torch.randn(2, 8, 30, 30).to(memory_format=torch.channels_last),
        "gaps": torch.randn(200, 200)[:, ::2],
        "scalar": torch.tensor(3.0),
        "one of a column": torch.ones(3, 2).bfloat16()[:1, 0],
        "half": torch.randn(5000).bfloat16(),
        "wide": torch.randn(900, dtype=torch.complex128),
        "flags": torch.arange(9001) % 3 == 0,
        "empty": torch.empty(0, 4),
        "small": torch.randn(7, dtype=torch.float16),
        "spread": torch.randn(1, 1).expand(100, 100),
    }


@pytest.mark.parametrize("how", ["sample", "full"])
def test_equal_tensors_have_equal_checksums(how: RankCheck) -> None:
    """Whatever their layout in memory, which is the same on all ranks."""
    first, second = marks(values(), how=how), marks(values(), 1, how=how)
    assert first.sums == second.sums
    assert set(first.groups) == {"0-1"}
    assert set(first.groups["0-1"]) == {f"model/{name}" for name in values() if name != "empty"}


@pytest.mark.parametrize("how", ["sample", "full"])
@pytest.mark.parametrize("name", [name for name in values() if name != "empty"])
def test_a_tensor_that_differs_everywhere_is_found_and_named(name: str, how: RankCheck) -> None:
    """As it does after one step with another gradient."""
    other = values()
    changed = other[name].clone(memory_format=torch.preserve_format)
    other[name] = ~changed if changed.dtype is torch.bool else changed + 1
    told = [marks(values(), how=how), marks(other, 1, how=how)]
    assert differing_groups([one.sums for one in told]) == ["0-1"]

    class Both(Solo):
        rank, world_size = 0, 2

        def gather(self, task, work, conclude, *, timeout_s):
            return conclude([one.groups for one in told])

    with pytest.raises(mp.MismatchError) as caught:
        raise_differing(Both(), told[0], ["0-1"], timeout_s=1)
    assert caught.value.facts["names"] == [f"model/{name}"]


def test_one_element_of_many_is_found_by_the_full_check_and_in_time_by_samples() -> None:
    """Where samples are taken changes with the name of the checkpoint."""
    here, there = values(), values()
    there["large"][123, 45] += 1
    full = [marks(here, how="full").sums, marks(there, 1, how="full").sums]
    assert differing_groups(full) == ["0-1"]
    found = [
        marks(here, name=f"ba{n}").sums != marks(there, 1, name=f"ba{n}").sums for n in range(200)
    ]
    assert 0 < sum(found) < 100  # 64 runs of 64 bytes of 84,000: one in twenty


def test_what_is_a_ranks_own_is_not_compared() -> None:
    """Buffers are the leader's; what is declared, and what only one rank has, may differ."""
    assert marks(values(), home="each").groups == {}
    assert marks(values(), home="leader").groups == {}
    assert marks(values(), home="spread").groups == {}
    assert marks(values(), how="none").groups == {}
    assert "model/large" not in marks(values(), leaders=("large",)).groups["0-1"]


def test_groups_are_compared_within_themselves() -> None:
    """Ranks of other groups have other tensors."""
    told = [{"0-1": 1, "0,2": 5}, {"0-1": 1, "1,3": 6}, {"2-3": 2, "0,2": 5}, {"2-3": 2, "1,3": 7}]
    assert differing_groups(told) == ["1,3"]
    assert differing_groups([{"0-1": 1}, {}]) == ["0-1"]
