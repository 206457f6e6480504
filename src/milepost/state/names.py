"""Names of parameters, free of what wrappers add to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .flattened import FlatShare, flat_shares
from .places import parameters_in, places_in
from .stages import Model, Stage
from .walks import walk_of
from .wrappers import name_cleaner, unwrap

__all__ = ["ParameterNames", "named_parameters", "tied_names"]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module by clean name, under all names of tied ones.

    One that was flattened with others comes under the names of all that it is made of.
    """
    clean = name_cleaner(module)
    owners: set[int] = set()
    for share in flat_shares(module, clean):
        owners.add(id(share.parameter))
        for name in share.names:
            yield name, share.parameter
    for name, parameter in parameters_in(places_in(module)):
        if id(parameter) not in owners:
            yield clean(name), parameter


class ParameterNames:
    """Names of the parameters of all tracked models.

    Args:
        models: Models by the name they are tracked under. With one model a parameter is called as
            in its state; with several the name of the model goes in front, as in
            ``generator/0.weight``.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._has_several = len(models) > 1
        # What a parameter is made of, mostly one, and all names of each.
        self._names: dict[int, list[list[tuple[str, str]]]] = {}
        self._shares: dict[int, list[FlatShare]] = {}
        self._staged: set[int] = set()
        self._first: Mapping[int, str] | None = None
        for item, model in models.items():
            for wrapped in model.modules if isinstance(model, Stage) else (model,):
                module = unwrap(wrapped)
                walk = walk_of(module)
                flat = self._add_flat(item, flat_shares(module, walk.clean)) if walk.is_flat else ()
                for plain, number in walk.parameters:
                    if number not in flat:
                        things = self._names.setdefault(number, [[]])
                        things[0].append((plain, f"{item}/{plain}"))
                    if isinstance(model, Stage):
                        self._staged.add(number)
        self._counts = Counter(
            plain for things in self._names.values() for names in things for plain, _ in names
        )

    def _add_flat(self, item: str, shares: Iterable[FlatShare]) -> set[int]:
        """Note the names of parameters that were flattened; return the ids of these."""
        added: set[int] = set()
        known: set[int] = set()
        for share in shares:
            known.add(id(share.parameter))
            if share.owner is None:
                continue
            owner = id(share.owner)
            if owner in self._names and owner not in added:
                continue  # known from another model
            added.add(owner)
            names = [(plain, f"{item}/{plain}") for plain in share.names]
            self._names.setdefault(owner, []).append(names)
            self._shares.setdefault(owner, []).append(share)
        return known

    def of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, or ``None`` if no tracked model has it."""
        things = self._names.get(id(parameter))
        return None if things is None else things[0][0][self._has_several]

    @property
    def first(self) -> Mapping[int, str]:
        """Return the name of every parameter by its ``id``, where all of them are whole."""
        if self._first is None:
            has_several = self._has_several
            self._first = {
                number: things[0][0][has_several] for number, things in self._names.items()
            }
        return self._first

    def all(self) -> set[str]:
        """Return all names of all parameters: tied ones have several."""
        return {
            name[self._has_several]
            for things in self._names.values()
            for names in things
            for name in names
        }

    def shares(self, parameter: torch.Tensor) -> tuple[FlatShare, ...]:
        """Return what a parameter is made of, if it was flattened."""
        return tuple(self._shares.get(id(parameter), ()))

    @property
    def are_alike(self) -> bool:
        """Return whether every rank has all parameters whole, or as ``DTensor``."""
        return not self._shares and not self._staged

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
        found = self.all_among(parameter, stored, tied)
        return found[0] if found else None

    def all_among(
        self,
        parameter: torch.Tensor,
        stored: Collection[str],
        tied: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[str, ...]:
        """Return the names of all that a parameter is made of; see :meth:`among`."""
        things = self._names.get(id(parameter), ())
        if len(things) == 1 and things[0][0][self._has_several] in stored:
            return (things[0][0][self._has_several],)  # nearly always, and there are many
        return tuple(self._pick(names, stored, tied or {}) for names in things)

    def _pick(
        self,
        names: Sequence[tuple[str, str]],
        stored: Collection[str],
        tied: Mapping[str, Sequence[str]],
    ) -> str:
        now = names[0][self._has_several]
        if now in stored:
            return now
        for plain, full in names:
            forms = (full, plain) if self._has_several else (plain, full)
            is_certain = not self._has_several or self._counts[plain] == 1
            for form in forms if is_certain else forms[:1]:
                for name in (form, *tied.get(form, ())):
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
            if type(tag) is dict and tag.get("$") == "tensor":
                names_of[str(tag.get("key"))].append(name)
        for names in names_of.values():
            if len(names) > 1:
                found.update(dict.fromkeys(names, names))
                full = [f"{item}/{name}" for name in names]
                found.update(dict.fromkeys(full, full))
    return found
