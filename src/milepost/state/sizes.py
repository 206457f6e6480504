"""How large a state is going to be: what models hold, and what optimizers keep or will keep.

Most optimizers keep nothing before their first step. What they will keep then is guessed from their
options; of one whose options say nothing, only what is there already is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..tensors.boxes import is_sharded, local_tensor, replicas_of
from .flattened import is_flattened
from .stages import Stage
from .wrappers import unwrap
from .zero import holder_of

__all__ = ["Size", "Sizes", "guess_kept", "held_bytes", "share_of", "sum_sizes"]

_MOST_KEPT = 3
"""Tensors that an optimizer keeps for a parameter at most, if its options do not say how many."""

Holders = tuple[int, ...] | None
"""The ranks that hold the same values; ``None`` for all of them."""


@dataclass(slots=True)
class Size:
    """About how large something is.

    Attributes:
        likely_bytes: What to expect.
        most_bytes: What it may come to.
    """

    likely_bytes: int = 0
    most_bytes: int = 0

    def add(self, likely_bytes: int, most_bytes: int) -> None:
        """Count something more."""
        self.likely_bytes += likely_bytes
        self.most_bytes += most_bytes


Sizes = Mapping[Holders, Size]
"""How large a state is, by the ranks that hold it."""


def sum_sizes(models: Iterable[nn.Module | Stage], optimizers: Iterable[Optimizer]) -> Sizes:
    """Return how large the state on this rank is.

    Args:
        models: The models. What a stage holds, or a model whose parameters are flattened, is this
            rank's own, which is the key ``()``.
        optimizers: Their optimizers.
    """
    sizes: dict[Holders, Size] = defaultdict(Size)
    holders: dict[int, Holders] = {}
    for model in models:
        modules = model.modules if isinstance(model, Stage) else (unwrap(model),)
        for module in modules:
            is_own = isinstance(model, Stage) or is_flattened(module)
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) not in holders:
                    holders[id(tensor)] = () if is_own else _holders(tensor)
                    num_bytes = held_bytes(tensor)
                    sizes[holders[id(tensor)]].add(num_bytes, num_bytes)
    for optimizer in optimizers:
        holder = holder_of(optimizer)
        is_split = holder is not optimizer  # each rank keeps it for parameters of its own then
        for group in holder.param_groups:
            guessed = guess_kept(group)
            for parameter in group["params"]:
                own = () if is_split else holders.get(id(parameter), ())
                sizes[own].add(*_kept(holder, parameter, guessed))
    return dict(sizes)


def share_of(sizes: Sizes, *, rank: int, world_size: int, to_leader: bool = False) -> Size:
    """Return about how much of it one rank writes.

    Args:
        sizes: What it holds.
        rank: The rank.
        world_size: The number of ranks.
        to_leader: Whether the leader writes whatever it holds.

    Returns:
        The share, and at most all that it holds.
    """
    share = Size()
    for holders, size in sizes.items():
        ranks: Sequence[int] = range(world_size) if holders is None else holders or (rank,)
        part = size.likely_bytes // len(ranks)
        if to_leader and 0 in ranks:
            part = size.likely_bytes if rank == 0 else 0
        share.add(part, size.most_bytes)
    return share


def guess_kept(group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of its size an optimizer keeps for a parameter; ``None``: unknown.

    Args:
        group: The options of a group of parameters.
    """
    if "betas" in group:  # the family of Adam
        return 2 + bool(group.get("amsgrad"))
    if "centered" in group:  # RMSprop
        return 1 + bool(group["centered"]) + bool(group.get("momentum"))
    if "momentum" in group:
        return int(bool(group["momentum"]))
    return None


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of a sharded one of the piece that this rank holds."""
    if is_lazy(tensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return 0
    return local_tensor(tensor).nbytes


def _kept(optimizer: Optimizer, parameter: Tensor, guessed: int | None) -> tuple[int, int]:
    """Return how much an optimizer keeps for a parameter, likely and at most."""
    kept = optimizer.state.get(parameter)
    if isinstance(kept, Mapping) and kept:
        there = sum(held_bytes(value) for value in kept.values() if isinstance(value, Tensor))
        return there, there
    if not parameter.requires_grad:
        return 0, 0
    num_bytes = held_bytes(parameter)
    if guessed is None:
        return 0, _MOST_KEPT * num_bytes
    return guessed * num_bytes, guessed * num_bytes


def _holders(tensor: Tensor) -> Holders:
    return replicas_of(tensor) if is_sharded(tensor) else None
