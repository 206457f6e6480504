"""What a module consists of, found once and used again as long as it does.

To find the names of all parameters of a model takes a microsecond for each, and a save needs them
for several purposes. So a walk is kept for each module. Before it is used again, the tree of the
module is held against it: the very same modules, and in each the same names with the same objects.
Whatever may change without that, such as ``requires_grad`` and the mode of a module, is looked at
each time. So are buffers: many modules have another object for one after each batch.

What is asked for each save calls no Python function for a module or a parameter. It passes over the
tables of all modules together, in loops of the interpreter's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress, cycle
from operator import attrgetter, methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from .flattened import is_flattened, is_registered
from .places import buffers_in, parameters_in, places_in
from .plain import PlainState
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
        versions: By name: what the classes of modules say of the form of their state, if not what
            ``nn.Module`` does.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(places_in(module))
        members = [one for _, one in named]
        first_names: dict[int, str] = {}
        self._is_first = [first_names.setdefault(id(one), name) is name for name, one in named]
        self.clean = clean = name_cleaner(module)
        self.is_flat = is_flattened(module)
        self.module_names = [clean(f"{name}.").rstrip(".") for name in first_names.values()]
        self.versions = {
            clean(f"{path}.").rstrip("."): member._version
            for path, member in named
            if member._version != nn.Module._version
        }
        self.parameters = [(clean(name), id(one)) for name, one in parameters_in(named)]
        self.buffers = frozenset(clean(name) for name, _ in buffers_in(named))
        # By place: a module that stands at two of them is among these twice.
        self._members = list(map(ref, members))
        self._types = list(map(type, members))
        tables = _tables(members)
        values = _values(tables)
        self._lengths, self._keys = list(map(len, tables)), _keys(tables)
        kinds = [
            kind
            for length, kind in zip(self._lengths, cycle(("module", "parameter", "buffer")))
            for _ in range(length)
        ]
        there = [kind if one is not None else "" for kind, one in zip(kinds, values, strict=True)]
        self._is_buffer = [kind == "buffer" for kind in there]
        self._is_parameter = [kind == "parameter" for kind in there]
        self._is_fixed = [not is_buffer for is_buffer in self._is_buffer]
        # By number: what an object was replaced by may be equal to it, or compare as tensors do.
        self._ids = list(map(id, compress(values, self._is_fixed)))
        self._plain = None if self.is_flat else PlainState(named, clean)
        self._flags: list[bool] = []
        self._frozen: frozenset[str] = frozenset()

    def modules(self) -> list[Any]:
        """Return the modules, each once; ``None`` for one that is gone."""
        return list(compress(self._live(), self._is_first))

    def is_current(self, module: nn.Module) -> bool:
        """Return whether the module still consists of the same."""
        members = self._live()
        if self.is_flat or None in members or members[0] is not module or is_registered(module):
            return False
        if list(map(type, members)) != self._types:
            return False
        tables = _tables(members)
        if list(map(len, tables)) != self._lengths or _keys(tables) != self._keys:
            return False
        values = _values(tables)
        if list(map(id, compress(values, self._is_fixed))) != self._ids:
            return False
        if type(None) in set(map(type, compress(values, self._is_buffer))):
            return False
        if _at_once.values is not None:
            _at_once.values[id(self)] = values
        return True

    def state(self) -> dict[str, Tensor] | None:
        """Return what the ``state_dict()`` of the module would hold now, by clean name.

        Returns:
            Its parameters and buffers, themselves; ``None`` if only the module can tell.
        """
        if self._plain is None:
            return None
        members = self._live()
        return self._plain.state(members, _values(_tables(members)))

    def frozen(self) -> frozenset[str]:
        """Return the names of parameters that require no gradients now."""
        known = _at_once.frozen
        if known is not None and id(self) in known:
            return known[id(self)]
        flags = list(map(_is_trained, compress(self._values(), self._is_parameter)))
        if flags != self._flags:
            self._flags = flags
            names = (name for name, _ in self.parameters)
            self._frozen = frozenset(
                name for name, is_trained in zip(names, flags, strict=True) if not is_trained
            )
        if known is not None:
            known[id(self)] = self._frozen
        return self._frozen

    def _live(self) -> list[Any]:
        return [one() for one in self._members]

    def _values(self) -> list[Any]:
        """Return what is in all tables, by place."""
        known = _at_once.values and _at_once.values.get(id(self))
        return known or _values(_tables(self._live()))


_is_trained = attrgetter("requires_grad")
_tables_of = attrgetter("_modules", "_parameters", "_buffers")
_keys_of, _values_of = methodcaller("keys"), methodcaller("values")


def _tables(members: Sequence[nn.Module]) -> list[Any]:
    """Return three tables of each module, one after the other."""
    return list(chain.from_iterable(map(_tables_of, members)))


def _keys(tables: Sequence[Any]) -> list[str]:
    # By keys() if need be: a scripted module has tables of its own kind, which are no dicts.
    are_dicts = {dict, OrderedDict}.issuperset(map(type, tables))
    return list(chain.from_iterable(tables if are_dicts else map(_keys_of, tables)))


def _values(tables: Sequence[Any]) -> list[Any]:
    return list(chain.from_iterable(map(_values_of, tables)))


class _AtOnce(threading.local):
    """What one thread knows while nobody changes modules: walks, values, and what is frozen."""

    walks: dict[int, Walk] | None = None
    values: dict[int, list[Any]] | None = None
    frozen: dict[int, frozenset[str]] | None = None


_walks: WeakKeyDictionary[nn.Module, Walk] = WeakKeyDictionary()
_at_once = _AtOnce()


def walk_of(module: nn.Module) -> Walk:
    """Return what a module consists of.

    Args:
        module: A module without outer wrappers.
    """
    known = _at_once.walks
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
    before = _at_once.walks, _at_once.values, _at_once.frozen
    if _at_once.walks is None:
        _at_once.walks, _at_once.values, _at_once.frozen = {}, {}, {}
    try:
        yield
    finally:
        _at_once.walks, _at_once.values, _at_once.frozen = before
