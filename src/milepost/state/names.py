"""Names of parameters, free of what wrappers add to them.

``torch.compile`` inserts ``_orig_mod`` and data parallelism ``module`` into the names of a module's
state. They are stripped when saving and matched when loading, so that a checkpoint of a wrapped
model fits the plain one and the other way round.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .stages import Model, Stage

__all__ = ["ParameterNames", "name_cleaner", "tied_names", "unwrap"]

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
        models: Models by the name they are tracked under. With one model a parameter is called as
            in its state; with several the name of the model goes in front, as in
            ``generator/0.weight``.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._has_several = len(models) > 1
        self._names: dict[int, list[tuple[str, str]]] = {}
        self._staged: set[int] = set()
        for item, model in models.items():
            for wrapped in model.modules if isinstance(model, Stage) else (model,):
                module = unwrap(wrapped)
                clean = name_cleaner(module)
                for name, parameter in module.named_parameters(remove_duplicate=False):
                    plain = clean(name)
                    self._names.setdefault(id(parameter), []).append((plain, f"{item}/{plain}"))
                    if isinstance(model, Stage):
                        self._staged.add(id(parameter))
        self._counts = Counter(plain for names in self._names.values() for plain, _ in names)

    def of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, or ``None`` if no tracked model has it."""
        names = self._names.get(id(parameter))
        return None if names is None else names[0][self._has_several]

    def all(self) -> set[str]:
        """Return all names of all parameters: tied ones have several."""
        return {name[self._has_several] for names in self._names.values() for name in names}

    def is_staged(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter belongs to a stage, so that other ranks have others."""
        return id(parameter) in self._staged

    def among(
        self,
        parameter: torch.Tensor,
        stored: Collection[str],
        tied: Mapping[str, Sequence[str]] | None = None,
    ) -> str | None:
        """Return the name of a parameter as it was stored.

        The number of tracked models may have been another one then, or be another one by now. And
        where weights are tied the first of their names counts, which may have been another one.

        Args:
            parameter: The parameter.
            stored: The stored names.
            tied: For names of what was one tensor then, its other names.

        Returns:
            One of the stored names if one fits; else the name as it is now, or ``None``.
        """
        now = self.of(parameter)
        if now is None or now in stored:
            return now
        for plain, full in self._names[id(parameter)]:
            forms = (full, plain) if self._has_several else (plain, full)
            is_certain = not self._has_several or self._counts[plain] == 1
            for form in forms if is_certain else forms[:1]:
                for name in (form, *(tied or {}).get(form, ())):
                    if name in stored:
                        return name
        return now


def tied_names(trees: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of what is stored as one tensor, each with all of them.

    Args:
        trees: By item.
    """
    found: dict[str, list[str]] = {}
    for item, tree in trees.items():
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, tag in tree.items() if isinstance(tree, Mapping) else ():
            if isinstance(tag, Mapping) and tag.get("$") == "tensor":
                names_of[str(tag.get("key"))].append(name)
        for names in names_of.values():
            if len(names) > 1:
                found.update(dict.fromkeys(names, names))
                full = [f"{item}/{name}" for name in names]
                found.update(dict.fromkeys(full, full))
    return found
