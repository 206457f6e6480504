"""Packing an item again and again: what was found out before is used again while it holds.

From save to save a state has the same names, shapes and dtypes, tied in the same way; what changes
are values. So the form of an item is kept, and the next value is held against it: its containers
key by key, rows of them that are alike all together, and its tensors all at once, in a few passes
that take some ten nanoseconds a tensor each.
Whatever is neither a tensor nor a container of tensors, such as a counter, is encoded anew. The
tree, the leaves and, with them, the layout of the parts are then the very objects of the save
before.

If anything differs, the item is packed from the ground up, as if there had been no save before.
Of a tensor nothing is kept but numbers, so that no memory outlives its owner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..format import tree
from .facts import TensorFacts
from .flat import Run
from .pack import PLAIN_TENSORS, Holders, Home, Leaf, PackedItem, is_inline, pack_item, simple_tag

__all__ = ["Packing"]

_KEY_TYPES = frozenset({str, int})


class Packing:
    """Packs one item of a run for each of its saves.

    Args:
        name: Name of the item.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._form: _Form | None = None

    def pack(
        self,
        value: Any,
        *,
        frozen: Iterable[str] = (),
        leaders: Iterable[str] = (),
        home: Home = "all",
        holders: Holders | None = None,
    ) -> PackedItem:
        """Take the item apart; see :func:`pack_item`.

        Returns:
            What that function returns. Its tree and leaves may be those of the save before, and are
            not to be changed.
        """
        names = (frozenset(frozen), frozenset(leaders))
        form, self._form = self._form, None
        if form is not None and holders is None and form.names == names:
            try:
                found, packed = form.match(value)
            except _ChangedError:
                pass  # not of that form any more
            else:
                self._form = form
                return PackedItem(self._name, packed, form.leaves, found, home)
        item = pack_item(
            self._name, value, frozen=names[0], leaders=names[1], home=home, holders=holders
        )
        if holders is None:
            self._form = _form_of(value, item, names)
        return item


class _ChangedError(Exception):
    """A value is not of the form that is known."""


class _Node(Protocol):
    """A place in a value: a tensor, a container of such, or something else."""

    def match(self, value: Any, found: list[Any]) -> Any:
        """Collect the tensors in a value and return its tree.

        Raises:
            _ChangedError: It is not of this form.
        """


class _Tensor:
    """One tensor. What it must be like is looked at later, for all at once."""

    __slots__ = ("_tag",)

    def __init__(self, tag: Any) -> None:
        self._tag = tag

    def match(self, value: Any, found: list[Any]) -> Any:
        found.append(value)
        return self._tag


class _Other:
    """Anything without tensors, encoded each time."""

    __slots__ = ("_path",)

    def __init__(self, path: tree.Path) -> None:
        self._path = path

    def match(self, value: Any, found: list[Any]) -> Any:  # noqa: ARG002 - there are none
        return tree.encode(value, sink=_sink, path=self._path, depth=len(self._path) - 1)


class _Container:
    """A dict or a list that holds tensors, however deep.

    Args:
        value: It.
        packed: Its tree.
        children: What is in it.
    """

    __slots__ = ("_children", "_key_types", "_keys", "_kind", "_packed", "_parts", "is_flat")

    def __init__(self, value: Any, packed: Any, children: Sequence[_Node]) -> None:
        self._kind = type(value)
        self._keys = len(value) if self._kind is list else tuple(value)
        self._key_types = () if self._kind is list else tuple(map(type, value))
        self._children = children
        self.is_flat = all(isinstance(child, _Tensor) for child in children)
        self._packed = packed
        self._parts = _parts(packed)

    def match(self, value: Any, found: list[Any]) -> Any:
        if type(value) is not self._kind:
            raise _ChangedError
        if self._kind is list:
            if len(value) != self._keys:
                raise _ChangedError
            members = value
        else:
            # 1 and True are equal, and so are a text and one of a class of its own.
            if tuple(value) != self._keys or tuple(map(type, value)) != self._key_types:
                raise _ChangedError
            members = value.values()
        if self.is_flat:
            found.extend(members)
            return self._packed
        parts = [
            child.match(member, found)
            for child, member in zip(self._children, members, strict=True)
        ]
        if not all(map(is_, parts, self._parts)):
            # The tree of the save before stays as it is: it may not be written yet.
            self._packed, self._parts = _with_parts(self._packed, parts), parts
        return self._packed


class _Rows:
    """A dict of dicts that hold tensors and nothing else, as optimizers have for parameters.

    Args:
        value: It.
        packed: Its tree.
    """

    __slots__ = ("_keys", "_lengths", "_names", "_packed")

    def __init__(self, value: Any, packed: Any) -> None:
        self._packed = packed
        self._keys = list(value)
        self._lengths = list(map(len, value.values()))
        self._names = list(chain.from_iterable(value.values()))

    @staticmethod
    def are_in(value: Any, children: Sequence[_Node]) -> bool:
        """Return whether a container holds such rows; rows of different keys are rows too."""
        return (
            type(value) is dict
            and set(map(type, value)) == {str}
            and set(map(type, value.values())) == {dict}
            and set(map(type, chain.from_iterable(value.values()))) == {str}
            and all(type(child) is _Container and child.is_flat for child in children)
        )

    def match(self, value: Any, found: list[Any]) -> Any:
        if type(value) is not dict or set(map(type, value)) != {str} or list(value) != self._keys:
            raise _ChangedError
        rows = list(value.values())
        if set(map(type, rows)) != {dict} or list(map(len, rows)) != self._lengths:
            raise _ChangedError
        names = list(chain.from_iterable(rows))
        if set(map(type, names)) != {str} or names != self._names:
            raise _ChangedError
        found.extend(chain.from_iterable(map(dict.values, rows)))
        return self._packed


class _Form:
    """What is the same of an item in each save.

    Args:
        root: The value.
        names: What of it is frozen, and what is the leader's.
        item: The item, packed.
        found: All tensors in it, in order.
        firsts: Which of these the leaves are; the others are further names of them.
    """

    def __init__(
        self,
        root: _Node,
        names: tuple[frozenset[str], frozenset[str]],
        item: PackedItem,
        *,
        found: Sequence[Tensor],
        firsts: Sequence[int],
    ) -> None:
        self._root = root
        self.names = names
        self.leaves: list[Leaf] = item.leaves
        self._firsts = firsts
        self._num_codecs = tree.num_codecs()
        self._facts = TensorFacts(found)

    def match(self, value: Any) -> tuple[list[Tensor], Any]:
        """Return the tensors of the leaves and the tree of a value.

        Raises:
            _ChangedError: It is not of this form.
        """
        if tree.num_codecs() != self._num_codecs:
            raise _ChangedError
        found: list[Any] = []
        packed = self._root.match(value, found)
        if not self._facts.are_of(found):
            raise _ChangedError
        if len(self._firsts) < len(found):
            found = [found[index] for index in self._firsts]
        return found, packed


def _is_lazily_changed(found: Sequence[Tensor]) -> bool:
    """Return whether the values of any tensor are not what is in its memory."""
    return any(map(Tensor.is_conj, found)) or any(map(Tensor.is_neg, found))


def _form_of(
    value: Any, item: PackedItem, names: tuple[frozenset[str], frozenset[str]]
) -> _Form | None:
    """Return the form of a value that was packed, or ``None`` if it has to be packed each time."""
    found: list[Tensor] = []
    tags: list[str] = []
    try:
        root = _node(value, item.tree, (item.name,), found, tags)
    except _ChangedError:
        return None
    if root is None or _is_lazily_changed(found):
        return None
    firsts: dict[str, int] = {}
    for index, key in enumerate(tags):
        firsts.setdefault(key, index)
    if [leaf.key for leaf in item.leaves] != list(firsts):
        return None
    return _Form(root, names, item, found=found, firsts=list(firsts.values()))


def _node(
    value: Any, packed: Any, path: tree.Path, found: list[Tensor], tags: list[str]
) -> _Node | None:
    """Return what a value is; ``None`` for one without tensors.

    Raises:
        _ChangedError: Nothing of which the form would be known.
    """
    kind = type(value)
    if kind in PLAIN_TENSORS:
        if packed["$"] != "tensor":
            raise _ChangedError  # taken apart into several
        found.append(value)
        tags.append(packed["key"])
        return _Tensor(packed)
    if kind in (dict, OrderedDict) and _KEY_TYPES.issuperset(map(type, value)):
        members = list(value.items())
    elif kind is list:
        members = list(enumerate(value))
    else:
        tree.encode(value, sink=_sink, path=path)  # or it holds what is known to the sink only
        return None
    children = [
        _node(member, part, (*path, key), found, tags)
        for (key, member), part in zip(members, _parts(packed), strict=True)
    ]
    if not any(children):
        return None
    nodes = [
        child or _Other((*path, key)) for child, (key, _) in zip(children, members, strict=True)
    ]
    return _Rows(value, packed) if _Rows.are_in(value, nodes) else _Container(value, packed, nodes)


def _parts(packed: Any) -> list[Any]:
    """Return the trees of the members of a container."""
    if isinstance(packed, list):
        return packed
    if "$" in packed:
        return [part for _, part in packed["items"]]
    return list(packed.values())


def _with_parts(packed: Any, parts: list[Any]) -> Any:
    """Return the tree of a container with other members."""
    if isinstance(packed, list):
        return parts
    if "$" in packed:
        keys = [key for key, _ in packed["items"]]
        return {**packed, "items": [list(pair) for pair in zip(keys, parts, strict=True)]}
    return dict(zip(packed, parts, strict=True))


def _sink(path: tree.Path, value: Any) -> Any:  # noqa: ARG001 - a sink is told the path
    if isinstance(value, Tensor | Run | torch.Generator | nn.Module):
        raise _ChangedError
    tag = simple_tag(value)
    if tag is None and not is_inline(value):
        raise _ChangedError
    return tag
