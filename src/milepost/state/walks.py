"""What a module consists of, found once and used again as long as it does.

To find the names of all parameters of a model takes a microsecond for each, and a save needs them
for several purposes. So a walk is kept for each module. Before it is used again, the tree of the
module is held against it: the very same modules, and in each the same names with the same objects.
Whatever may change without that, such as ``requires_grad`` and the mode of a module, is looked at
each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from .flattened import is_flattened
from .wrappers import name_cleaner

__all__ = ["Walk", "walk_of", "walked_once"]


class Walk:
    """The parameters and buffers of a module by name, free of wrappers.

    Args:
        module: A module without outer wrappers.

    Attributes:
        clean: Frees a name in the module from wrappers.
        is_flat: Whether parameters were flattened: then names are found in another way, each time.
        parameters: Name and ``id`` of each parameter, under all names of tied ones.
        buffers: Names of the buffers.
        module_names: The name of each module.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        modules = [one for _, one in named]
        self.clean = clean = name_cleaner(module)
        self.is_flat = is_flattened(module)
        self.module_names = [clean(f"{name}.").rstrip(".") for name, _ in named]
        self.parameters = [
            (clean(name), id(one)) for name, one in module.named_parameters(remove_duplicate=False)
        ]
        self.buffers = frozenset(
            clean(name) for name, _ in module.named_buffers(remove_duplicate=False)
        )
        self._modules = list(map(ref, modules))
        self._facts = _facts(modules)
        number = {id(one): index for index, one in enumerate(modules)}
        self._places = [
            (number[id(child)], key)
            for _, child in module.named_modules(remove_duplicate=False)
            for key, parameter in child._parameters.items()
            if parameter is not None
        ]
        self._flags: list[bool] = []
        self._frozen: frozenset[str] = frozenset()

    def modules(self) -> list[Any]:
        """Return the modules, each once; ``None`` for one that is gone."""
        return [one() for one in self._modules]

    def is_current(self, module: nn.Module) -> bool:
        """Return whether the module still consists of the same."""
        modules = self.modules()
        if self.is_flat or None in modules or is_flattened(module):
            return False
        return modules[0] is module and _facts(modules) == self._facts

    def frozen(self) -> frozenset[str]:
        """Return the names of parameters that require no gradients now."""
        tables = [one._parameters for one in self.modules()]
        flags = [tables[number][key].requires_grad for number, key in self._places]
        if flags != self._flags:
            self._flags = flags
            names = (name for name, _ in self.parameters)
            self._frozen = frozenset(
                name for name, is_trained in zip(names, flags, strict=True) if not is_trained
            )
        return self._frozen


_keys_of = methodcaller("keys")


def _facts(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what a walk depends on."""
    facts: list[Any] = [list(map(type, modules))]
    for tables in (
        [one._modules for one in modules],
        [one._parameters for one in modules],
        [one._buffers for one in modules],
    ):
        facts.append(list(map(len, tables)))
        # By keys(): a scripted module has tables of its own kind, which are no dicts.
        facts.append(list(chain.from_iterable(map(_keys_of, tables))))
        # By number: what an object was replaced by may be equal to it, or compare as tensors do.
        facts.append([id(one) for table in tables for one in table.values()])
    return facts


_walks: WeakKeyDictionary[nn.Module, Walk] = WeakKeyDictionary()
_at_once = threading.local()


def walk_of(module: nn.Module) -> Walk:
    """Return what a module consists of.

    Args:
        module: A module without outer wrappers.
    """
    known: dict[int, Walk] | None = getattr(_at_once, "known", None)
    if known is not None and id(module) in known:
        return known[id(module)]
    walk = _walks.get(module)
    if walk is None or not walk.is_current(module):
        walk = _walks[module] = Walk(module)
    if known is not None:
        known[id(module)] = walk
    return walk


@contextmanager
def walked_once() -> Iterator[None]:
    """Look at each module once meanwhile, in this thread: nobody changes them."""
    before = getattr(_at_once, "known", None)
    _at_once.known = {} if before is None else before
    try:
        yield
    finally:
        _at_once.known = before
