"""Wrappers around modules, and what they add to names.

``torch.compile`` inserts ``_orig_mod`` and data parallelism ``module`` into the names of a module's
state. They are stripped when saving and matched when loading, so that a checkpoint of a wrapped
model fits the plain one and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

__all__ = ["name_cleaner", "unwrap"]

_WRAPPED = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any stack of compile and data-parallel wrappers."""
    while True:
        if isinstance(module, _PARALLEL):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def name_cleaner(module: nn.Module) -> Callable[[str], str]:
    """Return the function from a name in ``module.state_dict()`` to its stored name.

    Args:
        module: A module without outer wrappers; wrappers further inside are handled here.
    """
    inner = sorted(
        (f"{n}.module." for n, child in module.named_modules() if isinstance(child, _PARALLEL)),
        key=len,
        reverse=True,
    )

    def clean(name: str) -> str:
        for prefix in inner:
            if name.startswith(prefix):
                name = prefix[: -len("module.")] + name[len(prefix) :]
        if "_orig_mod" in name or "_wrapped_module" in name:
            name = _WRAPPED.sub("", name).lstrip(".")
        return name

    return clean
