"""Where a state is restored from: the contract, and one that lives in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from ..collecting import no_collecting
from ..errors import FormatError, MissingError
from ..stores.pages import ask_for_huge_pages
from ..tensors.boxes import Box, is_sharded
from ..tensors.dtypes import dtype_of_code
from ..tensors.flat import Run, pieces_of
from ..tensors.pack import Leaf, PackedItem, pack_item
from ..tensors.unpack import leaf_keys, unpack_item

__all__ = [
    "MemorySource",
    "StateSource",
    "TensorInfo",
    "load_item",
    "load_tree",
    "new_like",
    "new_tensor",
    "subtree",
    "whole_of",
]

_LARGE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A dense tensor of a source, without its values.

    Attributes:
        code: Dtype code in the container.
        shape: Shape in the container.
    """

    code: str
    shape: tuple[int, ...]


class StateSource(Protocol):
    """A stored state: trees by item, and dense tensors by item and key."""

    name: str

    @property
    def trees(self) -> Mapping[str, Any]:
        """Return the tree of every item."""

    def tensors(self, item: str) -> Mapping[str, TensorInfo]:
        """Return what each dense tensor of an item is."""

    def read(self, wanted: Sequence[tuple[str, str, Tensor | Run]]) -> None:
        """Read tensors into existing ones.

        Args:
            wanted: ``(item, key, destination)``; the destination has the stored dtype and shape. Of
                a sharded one only the piece that this rank holds is read.

        Raises:
            DamagedError: Bytes that do not match their checksum.
        """


class MemorySource:
    """A state that is already in memory, such as one read from a ``.pt`` file.

    Args:
        name: What to call it in messages.
        items: Values by item.
    """

    def __init__(self, name: str, items: Mapping[str, Any]) -> None:
        self.name = name
        self._packed = {item: pack_item(item, value) for item, value in items.items()}
        self._leaves = {item: _by_key(packed) for item, packed in self._packed.items()}

    @classmethod
    def from_packed(cls, name: str, items: Sequence[PackedItem]) -> MemorySource:
        """Wrap items that were packed already."""
        source = cls(name, {})
        source._packed = {packed.name: packed for packed in items}
        source._leaves = {packed.name: _by_key(packed) for packed in items}
        return source

    @property
    def trees(self) -> Mapping[str, Any]:
        """Return the tree of every item."""
        return {item: packed.tree for item, packed in self._packed.items()}

    def tensors(self, item: str) -> Mapping[str, TensorInfo]:
        """Return what each dense tensor of an item is."""
        return {k: TensorInfo(leaf.code, leaf.shape) for k, (leaf, _) in self._leaves[item].items()}

    def read(self, wanted: Sequence[tuple[str, str, Tensor | Run]]) -> None:
        """Copy tensors into existing ones."""
        with torch.no_grad():
            for item, key, destination in wanted:
                whole = self._leaves[item][key][1]
                for box, live in pieces_of(destination):
                    if live.dtype is torch.uint8 and whole.dtype is not torch.uint8:
                        raw = whole.contiguous().reshape(-1).view(torch.uint8)
                        whole = raw.view((*whole.shape, whole.itemsize))
                    live.copy_(whole[box.slices(within=Box.whole(whole.shape))])


def _by_key(packed: PackedItem) -> dict[str, tuple[Leaf, Tensor]]:
    found = zip(packed.leaves, packed.tensors, strict=True)
    return {leaf.key: (leaf, tensor) for leaf, tensor in found}


def new_tensor(info: TensorInfo) -> Tensor:
    """Return an uninitialised CPU tensor of the stored dtype and shape.

    Raises:
        FormatError: There is no such dtype, or no tensor can have such a shape.
    """
    dtype = dtype_of_code(info.code)
    if dtype is None:
        raise FormatError(f"This version of torch has no dtype for {info.code!r}.")
    try:
        made = torch.empty(info.shape, dtype=dtype, device="cpu")
    except (RuntimeError, TypeError):
        _check_shape(info.shape, dtype)
        raise  # a possible shape: there is not enough memory for it
    if made.nbytes >= _LARGE_BYTES:
        ask_for_huge_pages(made.data_ptr(), made.nbytes)
    return made


def new_like(value: Tensor | Run, info: TensorInfo) -> Tensor | Run:
    """Return an uninitialised tensor of the stored dtype, sharded as another one is.

    Args:
        value: The other one, of the stored shape.
        info: What is stored.
    """
    dtype = dtype_of_code(info.code)
    if isinstance(value, Run):
        assert dtype is not None
        is_raw = len(info.shape) > len(value.shape)
        return value.like(dtype, num_bytes_each=info.shape[-1] if is_raw else 0)
    if not is_sharded(value) or dtype is None:
        return new_tensor(info)
    return torch.empty_like(value, dtype=dtype)


def _check_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    try:
        torch.empty(shape, dtype=dtype, device="meta")  # takes no memory
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"No tensor can have the stored shape {list(shape)}: {error}.") from error


def load_item(
    source: StateSource, item: str, *, into: Mapping[str, Tensor | Run] | None = None
) -> Any:
    """Read one item whole and put it together.

    Args:
        source: Where it is stored.
        item: The item.
        into: Tensors to read into by key, such as sharded ones; for the others new ones are made.

    Raises:
        MissingError: The source has no such item, or the tree names a tensor that is not there.
        DamagedError: Bytes that do not match their checksum.
    """
    if item not in source.trees:
        raise MissingError(
            f"{source.name} holds no item {item!r}.", hint=f"It holds {sorted(source.trees)}."
        )
    return load_tree(source, item, source.trees[item], into=into)


def load_tree(
    source: StateSource, item: str, tree: Any, *, into: Mapping[str, Tensor | Run] | None = None
) -> Any:
    """Read what a tree refers to, such as a part of the tree of an item, and put it together.

    Args:
        source: Where it is stored.
        item: The item.
        tree: The tree.
        into: See :func:`load_item`.

    Raises:
        MissingError: The tree names a tensor that is not there.
        DamagedError: Bytes that do not match their checksum.
    """
    infos = source.tensors(item)
    given = into or {}
    with no_collecting():
        keys = [key for key in dict.fromkeys(leaf_keys(tree)) if key in infos]
        made: dict[str, Tensor | Run] = {
            key: given[key] if key in given else new_tensor(infos[key]) for key in keys
        }
        wanted = list(zip(repeat(item), made, made.values()))
    source.read(wanted)

    def get(key: str) -> Tensor | Run:
        if key not in made:
            raise MissingError(f"{source.name}: item {item!r} lacks the tensor {key!r}.")
        return made[key]

    with no_collecting():
        return unpack_item(tree, get)


class _Subtree:
    """A source in which one member of a group looks like an item.

    Attributes:
        whole: The source that it is part of.
    """

    def __init__(self, source: StateSource, item: str, member: str) -> None:
        self.name = source.name
        self.whole = source
        self._source = source
        self._item = item
        self._shown = f"{item}/{member}"
        self._tree = source.trees[item][member]

    @property
    def trees(self) -> Mapping[str, Any]:
        return {self._shown: self._tree}

    def tensors(self, item: str) -> Mapping[str, TensorInfo]:
        assert item == self._shown
        infos = self._source.tensors(self._item)
        return {key: infos[key] for key in leaf_keys(self._tree) if key in infos}

    def read(self, wanted: Sequence[tuple[str, str, Tensor | Run]]) -> None:
        self._source.read([(self._item, key, tensor) for _, key, tensor in wanted])


def whole_of(source: StateSource) -> StateSource:
    """Return the source that another is part of, or itself."""
    return source.whole if isinstance(source, _Subtree) else source


def subtree(source: StateSource, item: str, member: str) -> StateSource:
    """Return a source that shows one member of a group as the item ``item/member``."""
    return _Subtree(source, item, member)
