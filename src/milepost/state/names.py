"""Names of parameters, free of what wrappers add to them.

``torch.compile`` inserts ``_orig_mod`` and data parallelism ``module`` into the names of a module's
state. They are stripped when saving and matched when loading, so that a checkpoint of a wrapped
model fits the plain one and the other way round.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

__all__ = ["ParameterNames", "name_cleaner", "unwrap"]

_COMPILED = re.compile(r"(^|\.)_orig_mod(?=\.)")
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
        if "_orig_mod" in name:
            name = _COMPILED.sub("", name).lstrip(".")
        return name

    return clean


class ParameterNames:
    """Names of the parameters of all tracked models.

    Args:
        models: Modules by the name they are tracked under. With one model a parameter is called as
            in its state; with several the name of the model goes in front, as in
            ``generator/0.weight``.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._has_several = len(models) > 1
        self._names: dict[int, tuple[str, str]] = {}
        for item, wrapped in models.items():
            module = unwrap(wrapped)
            clean = name_cleaner(module)
            for name, parameter in module.named_parameters():
                plain = clean(name)
                self._names.setdefault(id(parameter), (plain, f"{item}/{plain}"))
        self._counts = Counter(plain for plain, _ in self._names.values())

    def of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, or ``None`` if no tracked model has it."""
        names = self._names.get(id(parameter))
        return None if names is None else names[self._has_several]

    def among(self, parameter: torch.Tensor, stored: Collection[str]) -> str | None:
        """Return the name of a parameter as it was stored.

        The number of tracked models may have been another one then, or be another one by now.

        Args:
            parameter: The parameter.
            stored: The stored names.

        Returns:
            One of the stored names if one fits; else the name as it is now, or ``None``.
        """
        now = self.of(parameter)
        if now is None or now in stored:
            return now
        plain, full = self._names[id(parameter)]
        other = plain if self._has_several else full
        is_certain = not self._has_several or self._counts[plain] == 1
        return other if other in stored and is_certain else now
