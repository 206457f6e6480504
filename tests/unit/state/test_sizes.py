"""How large a state is going to be, before the optimizers have what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from milepost.state.sizes import Size, guess_kept, share_of, sum_sizes
from milepost.state.stages import Stage

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
]


def large_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors but the counters of steps."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [one for one in kept if isinstance(one, torch.Tensor) and one.numel() > 1]
    return sum(one.nbytes for one in (*model.parameters(), *model.buffers(), *tensors))


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda one: getattr(one, "__name__", None))
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(kind, options):
    """The memory of the first save is got before the first batch."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    model[0].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    (before,) = sum_sizes([model], [optimizer]).values()
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    (after,) = sum_sizes([model], [optimizer]).values()
    assert before.likely_bytes == large_bytes(model, optimizer)
    assert before.most_bytes == before.likely_bytes
    assert abs(after.likely_bytes - before.likely_bytes) <= 8 * len(optimizer.state)


def test_nothing_is_guessed_of_an_optimizer_that_says_nothing():
    """Memory that is got and never used would be taken from the training. Room is left for it."""
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.Rprop(model.parameters())
    assert guess_kept(optimizer.param_groups[0]) is None
    assert sum_sizes([model], [optimizer]) == {None: Size(4096, 4 * 4096)}
    tied = sum_sizes([model, nn.ModuleList([model])], [])
    assert tied == {None: Size(4096, 4096)}


def test_ranks_expect_the_share_that_they_write():
    """What all hold is written by one of them each; what a rank holds alone, by itself."""
    layer, alike = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    sizes = sum_sizes([Stage(layer), alike], [torch.optim.SGD(layer.parameters(), lr=0.1)])
    assert sizes == {(): Size(4096, 4096), None: Size(4096, 4096)}
    assert share_of(sizes, rank=0, world_size=1) == Size(8192, 8192)
    assert share_of(sizes, rank=3, world_size=4) == Size(4096 + 1024, 8192)
    assert share_of({(0, 2): Size(4096, 4096)}, rank=2, world_size=4) == Size(2048, 4096)
    led = [share_of(sizes, rank=rank, world_size=4, to_leader=True) for rank in (0, 1)]
    assert led == [Size(8192, 8192), Size(4096, 8192)]
