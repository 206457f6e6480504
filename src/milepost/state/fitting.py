"""Whether what is stored of a module fits what it has, seen of all its tensors together.

Nearly always each stored tensor is just like the live one of its name, and then there is nothing to
say of any of them. To find that out one by one takes a call for each; here it takes one pass for
each question. Where the answer to one of these is no, the tensors are compared one by one instead,
by somebody who can say which of them does not fit, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..tensors.dtypes import dtype_of_code
from ..tensors.flat import Run
from .source import TensorInfo

__all__ = ["Fit", "find_fit"]

_TOGETHER = 256
"""How many tensors are looked at together: they still are in a cache when the next property is."""

_kind_of, _key_of = itemgetter("$"), itemgetter("key")
_code_of, _stored_shape_of = attrgetter("code"), attrgetter("shape")
_dtype_of, _shape_of, _layout_of = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")
_is_meta = attrgetter("is_meta")
_STRIDED = frozenset({torch.strided})


@dataclass(frozen=True, slots=True)
class Fit:
    """What is stored of a module, all of it just like what is live.

    Attributes:
        names: The names in what is stored, in its order.
        keys: The name in the container of each.
        tensors: The live tensor of each.
    """

    names: Sequence[str]
    keys: Sequence[str]
    tensors: Sequence[Tensor]

    def wanted(self, item: str) -> list[tuple[str, str, Tensor | Run]]:
        """Return what to read; see ``StateSource.read``."""
        return list(zip(repeat(item), self.keys, self.tensors))


def find_fit(
    live: Mapping[str, Tensor], tree: Any, infos: Callable[[], Mapping[str, TensorInfo]]
) -> Fit | None:
    """Return what is stored if all of it is just like what is live.

    Args:
        live: The tensors of a module by name, of classes that are their values and nothing else.
        tree: The stored tree.
        infos: Returns what each dense tensor of the source is.

    Returns:
        It; ``None`` if it has to be compared one by one.
    """
    if type(tree) is not dict or "$" in tree or tree.keys() != live.keys():
        return None
    tags = list(tree.values())
    keys = _keys(tags)
    if not keys:
        return None
    found = list(map(infos().get, keys))
    if set(map(type, found)) != {TensorInfo}:
        return None
    tensors = list(map(live.__getitem__, tree))
    if not _are_like(tensors, found) or _are_tied_only_here(tensors, keys):
        return None
    return Fit(list(tree), keys, tensors)


def _keys(tags: list[Any]) -> list[str]:
    """Return the keys in the tags of dense tensors of a dtype that the container knows; or none."""
    if set(map(type, tags)) != {dict}:
        return []
    try:
        keys = list(map(_key_of, tags))
        if set(map(_kind_of, tags)) != {"tensor"} or set(map(type, keys)) != {str}:
            return []
    except (KeyError, TypeError):  # it is something else, or refers to a tensor in a malformed way
        return []
    has_more = sum(map(len, tags)) != 2 * len(tags)
    return [] if has_more and [tag for tag in tags if "dtype" in tag] else keys


def _are_like(tensors: list[Tensor], infos: list[Any]) -> bool:
    """Return whether tensors are just like what is stored of each."""
    dtype_of = {code: dtype_of_code(code) for code in set(map(_code_of, infos))}
    for start in range(0, len(tensors), _TOGETHER):
        some, stored = tensors[start : start + _TOGETHER], infos[start : start + _TOGETHER]
        if list(map(_dtype_of, some)) != list(map(dtype_of.__getitem__, map(_code_of, stored))):
            return False
        if list(map(_shape_of, some)) != list(map(_stored_shape_of, stored)):
            return False
        if not _STRIDED.issuperset(map(_layout_of, some)) or any(map(_is_meta, some)):
            return False
    return True


def _are_tied_only_here(tensors: list[Tensor], keys: list[str]) -> bool:
    """Return whether one tensor stands for several that are stored."""
    num_live = len(set(map(id, tensors)))
    return num_live < len(tensors) and num_live < len(set(keys))
