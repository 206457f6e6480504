"""``ZeroRedundancyOptimizer``: an optimizer inside has the state of some parameters on each rank.

Its own ``state_dict`` gathers everything on one rank first, step by step through the memory of that
rank, and is as old as the last time somebody asked for it. Here each rank hands out what it has at
the moment of the save, and takes what is its own from whatever is stored.
"""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from ..errors import UnsupportedStateError

__all__ = ["class_name", "holder_of", "share_options"]

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def holder_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state of this rank: the one inside, or itself.

    Raises:
        UnsupportedStateError: One that overlaps its steps with the backward pass.
    """
    if not _is_zero(optimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise UnsupportedStateError(
            "A ZeroRedundancyOptimizer with overlap_with_ddp=True has no optimizer inside whose "
            "state can be taken.",
            hint="Build it with overlap_with_ddp=False.",
        )
    return inner


def share_options(optimizer: Optimizer) -> None:
    """Give the options of the groups to the optimizer inside, if there is one."""
    inner = holder_of(optimizer)
    if inner is not optimizer:
        for group, target in zip(optimizer.param_groups, inner.param_groups, strict=True):
            target.update({key: value for key, value in group.items() if key != "params"})


def class_name(target: object) -> str:
    """Return the class of an object; of an optimizer around another one that of the inner."""
    if isinstance(target, Optimizer) and _is_zero(target):
        target = getattr(target, "optim", target)
    return type(target).__qualname__


def _is_zero(optimizer: Optimizer) -> bool:
    """Return whether it is one, without loading the module that defines it."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
