"""What tensors are at some moment, to tell later which of them were written to or replaced.

Every write in place moves the version counter of a tensor on. One that is replaced is another
object, which may lie at the same address; so the old one is held, or a weak reference to it, of
which there is one only for as long as it is held itself.

This is asked for in every batch. No Python function is called for a module or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any
from weakref import ref

from torch import Tensor, nn

from .places import places_in

__all__ = ["Marks", "ModuleTensors", "gradients_of", "is_zero", "version_of"]

_version = attrgetter("_version")
_gradient = attrgetter("grad")
_values = methodcaller("values")


class Marks:
    """Which tensors there were, and how often each had been written to.

    Args:
        tensors: The tensors; ``None`` where there is none.
        is_held: Whether they are kept alive. Gradients are not: they take as much memory as the
            model.
    """

    __slots__ = ("_held", "_ids", "_versions")

    def __init__(self, tensors: Sequence[Tensor | None] = (), *, is_held: bool = False) -> None:
        self._held: list[Any] = (
            list(tensors) if is_held else [None if one is None else ref(one) for one in tensors]
        )
        self._ids = list(map(id, self._held))
        self._versions = _versions(tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks):
            return NotImplemented
        return self._ids == other._ids and self._versions == other._versions

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._ids)

    def differ_from(self, other: Marks) -> list[bool]:
        """Return for each place whether there is a tensor that ``other`` did not find like this."""
        if self == other:
            return [False] * len(self)
        known = set(zip(other._ids, other._versions, strict=True))
        none = id(None)
        return [
            one != none and (one, version) not in known
            for one, version in zip(self._ids, self._versions, strict=True)
        ]


class ModuleTensors:
    """The parameters and buffers that modules have, also those that come later.

    Args:
        models: The modules, with all that are inside.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._children: list[Any] = []
        self._found: list[Any] = []
        self._ids: list[int] = []
        self._parameters: list[Any] = []
        self._buffers: list[Any] = []
        self._look()

    def parameters(self) -> list[Tensor]:
        """Return the parameters, under every name of each."""
        self._look()
        tables = chain.from_iterable(map(_values, self._parameters))
        return [one for one in tables if one is not None]

    def buffers(self) -> list[Tensor]:
        """Return the buffers, under every name of each."""
        self._look()
        tables = chain.from_iterable(map(_values, self._buffers))
        return [one for one in tables if one is not None]

    def _look(self) -> None:
        """Find the tables of all modules, if modules have come or gone."""
        found = list(chain.from_iterable(map(_values, self._children)))
        if self._children and list(map(id, found)) == self._ids:
            return
        places = chain.from_iterable(map(places_in, self._models))
        modules = list(dict.fromkeys(module for _, module in places))
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        # Held, so that no other module can take the place of one that is gone.
        self._found = list(chain.from_iterable(map(_values, self._children)))
        self._ids = list(map(id, self._found))


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each parameter."""
    return list(map(_gradient, parameters))


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; those made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def is_zero(gradient: Tensor) -> bool:
    """Return whether a gradient is known to be all zeros."""
    if hasattr(gradient, "_local_tensor"):
        return False  # a rank that looks at its own share only may find what others do not
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    if type(None) in set(map(type, tensors)):
        return [0 if one is None else version_of(one) for one in tensors]
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # one was made in inference mode
        return [0 if one is None else version_of(one) for one in tensors]
