"""Values with tensors -> a tree of JSON and a flat table of dense tensors.

One :class:`Packer` serves one item. It takes the tensors out of the tree, gives each a key in the
item's part, and leaves a tag in its place. Two names for one tensor get one key, so that tied
weights are written once and come back tied. Of a view only the view is written. Sparse and
quantized tensors are taken apart into dense ones.

Nothing is copied here: the tensors of an item are live memory until they are staged. How an item is
packed that was packed before stands in ``packing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..errors import UnsupportedStateError
from ..format import tree
from .boxes import Box, is_sharded, local_box, local_tensor, mesh_ranks, replicas_of
from .dtypes import CODES, dtype_name, named_dtype
from .flat import Run
from .grids import Grid, grid_of

__all__ = [
    "PLAIN_TENSORS",
    "Holders",
    "Home",
    "Leaf",
    "PackedItem",
    "is_inline",
    "pack_item",
    "simple_tag",
]

INLINE_ARRAY_BYTES = 16 * 1024
"""Numpy arrays up to this size stay in the tree; larger ones go to the part like tensors."""

PLAIN_TENSORS: tuple[type, ...] = (
    torch.Tensor,
    torch.nn.Parameter,
    getattr(torch.nn, "Buffer", torch.nn.Parameter),  # since torch 2.5
)
"""Classes whose instances are their values and nothing else."""

Home = Literal["all", "each", "leader", "spread"]
"""Whose an item is, of several ranks: the same on all of them, of each its own, the leader's, or
spread, so that each has a piece of it and all of them together the whole."""

Holders = Callable[[tree.Path], tuple[int, ...]]
"""Returns the ranks that hold what is at a place of an item that is spread, in order."""


@dataclass(slots=True)
class Leaf:
    """What one dense tensor to store is. Saves of one structure share it: it does not change.

    Attributes:
        key: Its name in the tree.
        dtype: Dtype of the live tensor.
        code: Dtype code in the container.
        shape: Shape in the container; one dimension more than the tensor's for raw bytes.
        num_bytes: Bytes in the part.
        box: Which piece of the whole it is, in the dimensions of the container.
        whole_shape: Shape of the whole in the container.
        replicas: The ranks that hold this very piece; ``None`` for all ranks.
        grid: How the whole was dealt out, if that follows a rule.
        is_frozen: Whether it belongs to what the run does not train.
        is_leaders: Whether it is the leader's, though other ranks have something of that name.
    """

    key: str
    dtype: torch.dtype
    code: str
    shape: tuple[int, ...]
    num_bytes: int
    box: Box
    whole_shape: tuple[int, ...]
    replicas: tuple[int, ...] | None = None
    grid: Grid | None = None
    is_frozen: bool = False
    is_leaders: bool = False

    @property
    def part_key(self) -> str:
        """Return its name in the part: that of a piece says where it begins."""
        if self.shape == self.whole_shape:
            return self.key
        return f"{self.key}@{'x'.join(map(str, self.box.offsets))}"


@dataclass(slots=True)
class PackedItem:
    """One top-level part of the state, taken apart.

    Attributes:
        name: Name of the item.
        tree: The JSON that stands for its structure.
        leaves: What the tensors are that the tree refers to.
        tensors: The live tensor of each leaf, of any device and stride, parameters among them; of a
            sharded one the piece that this rank holds.
        home: Whose it is.
    """

    name: str
    tree: Any
    leaves: list[Leaf] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    home: Home = "all"


def pack_item(
    name: str,
    value: Any,
    *,
    frozen: Iterable[str] = (),
    leaders: Iterable[str] = (),
    home: Home = "all",
    holders: Holders | None = None,
    at: tree.Path = (),
) -> PackedItem:
    """Take one item apart.

    Args:
        name: Name of the item.
        value: Nested containers, numbers, arrays and tensors.
        frozen: Keys of tensors that the run does not train.
        leaders: Keys of tensors that are saved as the leader has them.
        home: Whose it is.
        holders: Who holds what of it, where it is spread.
        at: Where in the item the value stands, if it is not the whole of it.

    Raises:
        UnsupportedStateError: A value that cannot be stored; the message leads to it.
    """
    packer = _Packer(holders)
    packed = tree.encode(value, sink=packer.sink, path=(name, *at))
    names = set(frozen)
    if names:
        for key, pieces in packer.leaves.items():
            for leaf, _ in pieces:
                leaf.is_frozen = packer.aliases[key] <= names
    for key in leaders:
        # Of a sharded tensor the leader has a piece only.
        if key in packer.leaves and key not in packer.sharded:
            packer.leaves[key][0][0].is_leaders = True
    found = [pair for pieces in packer.leaves.values() for pair in pieces]
    return PackedItem(name, packed, [leaf for leaf, _ in found], [one for _, one in found], home)


def simple_tag(value: Any) -> dict[str, Any] | None:
    """Return the tag of what describes tensors; ``None`` for anything else."""
    if isinstance(value, torch.dtype):
        return {"$": "torch.dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "v": str(value)}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": list(value)}
    return None


def is_inline(value: Any) -> bool:
    """Return whether a value without tensors stays in the tree, as all do but large arrays."""
    if type(value).__module__ != "numpy" or type(value).__name__ not in ("ndarray", "memmap"):
        return True
    if value.nbytes <= INLINE_ARRAY_BYTES or not value.dtype.isnative:
        return True
    return named_dtype(value.dtype.name) is None


class _Packer:
    def __init__(self, holders: Holders | None = None) -> None:
        self._holders = holders
        self.leaves: dict[str, list[tuple[Leaf, Tensor]]] = {}
        self.aliases: dict[str, set[str]] = {}
        self.sharded: set[str] = set()
        self._seen: dict[tuple[Any, ...], str] = {}
        self._owners: list[Tensor | Run] = []

    def sink(self, path: tree.Path, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if isinstance(value, Run):
            return self._dense(path, value)
        tag = simple_tag(value)
        if tag is not None:
            return tag
        if isinstance(value, torch.Generator):
            state = self._tensor((*path, "state"), value.get_state())
            return {"$": "torch.Generator", "device": str(value.device), "state": state}
        if isinstance(value, torch.nn.Module):
            raise UnsupportedStateError(
                f"{tree.path_text(path)} is a module.",
                hint="Track the module by a name of its own, or store its state_dict().",
                path=tree.path_text(path),
            )
        return self._array(path, value)

    def _array(self, path: tree.Path, value: Any) -> Any:
        if is_inline(value):
            return None
        import numpy as np

        dense = torch.from_numpy(np.require(value, requirements=["C", "W"]))
        return {"$": "numpy.tensor", "tensor": self._dense(path, dense)}

    def _tensor(self, path: tree.Path, value: Tensor) -> Any:
        if is_sharded(value) and value.device.type != "meta":
            return self._dense(path, value.detach())
        if type(value) not in PLAIN_TENSORS or value.device.type == "meta" or value.is_nested:
            raise UnsupportedStateError(
                f"{tree.path_text(path)} is a {_describe(value)} without storable values.",
                hint=_hint(value),
                path=tree.path_text(path),
            )
        value = value.detach()
        if value.layout is torch.sparse_coo:
            return {
                "$": "sparse_coo",
                "size": list(value.shape),
                "coalesced": value.is_coalesced(),
                "indices": self._dense((*path, "indices"), value._indices()),
                "values": self._dense((*path, "values"), value._values()),
            }
        if value.layout in _COMPRESSED:
            return self._compressed(path, value)
        if value.layout is not torch.strided:
            raise UnsupportedStateError(
                f"{tree.path_text(path)} has the layout {value.layout}, which cannot be stored.",
                hint="Convert it to a strided or sparse tensor first.",
                path=tree.path_text(path),
            )
        if value.is_quantized:
            return self._quantized(path, value)
        return self._dense(path, value)

    def _compressed(self, path: tree.Path, value: Tensor) -> Any:
        by_row = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer = value.crow_indices() if by_row else value.ccol_indices()
        inner = value.col_indices() if by_row else value.row_indices()
        return {
            "$": "sparse_compressed",
            "layout": _COMPRESSED[value.layout],
            "size": list(value.shape),
            "compressed": self._dense((*path, "compressed"), outer),
            "plain": self._dense((*path, "plain"), inner),
            "values": self._dense((*path, "values"), value.values()),
        }

    def _quantized(self, path: tree.Path, value: Tensor) -> Any:
        tag: dict[str, Any] = {
            "$": "quantized",
            "dtype": dtype_name(value.dtype),
            "ints": self._dense((*path, "ints"), value.int_repr()),
        }
        scheme = value.qscheme()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**tag, "scale": value.q_scale(), "zero_point": value.q_zero_point()}
        scales = value.q_per_channel_scales()
        return {
            **tag,
            "axis": value.q_per_channel_axis(),
            "float_zero": scheme is torch.per_channel_affine_float_qparams,
            "scales": self._dense((*path, "scales"), scales),
            "zero_points": self._dense((*path, "zero_points"), value.q_per_channel_zero_points()),
        }

    def _dense(self, path: tree.Path, value: Tensor | Run) -> dict[str, Any]:
        code = CODES.get(value.dtype)
        name = dtype_name(value.dtype)
        if code is None and named_dtype(name) is None:
            raise UnsupportedStateError(
                f"{tree.path_text(path)} has the dtype {name}, which cannot be stored.",
                path=tree.path_text(path),
            )
        plain_key = "/".join(map(tree.key_text, path[1:])) or "value"
        is_whole = isinstance(value, Tensor) and not is_sharded(value)
        identity = _identity(value)
        if identity and self._holders is not None:
            # Names that other ranks hold too are one only where those tie them as well.
            identity = (*identity, self._holders(path))
        key = self._seen.get(identity) if identity else None
        if key is None:
            key = self._free_key(plain_key)
            self.leaves[key] = self._leaves(key, value, code, self._replicas(path, value))
            self.aliases[key] = set()
            if not is_whole:
                self.sharded.add(key)
            if identity:
                self._seen[identity] = key
                # Memory that is used again would make a stranger look like an alias.
                self._owners.append(value)
        self.aliases[key].add(plain_key)
        tag: dict[str, Any] = {"$": "tensor", "key": key}
        if code is None:
            tag["dtype"] = name
        if isinstance(value, Tensor) and is_whole and not value.is_contiguous():
            tag.update({"stride": list(value.stride())} if _is_dense(value) else {})
        return tag

    def _leaves(
        self, key: str, value: Tensor | Run, code: str | None, replicas: tuple[int, ...] | None
    ) -> list[tuple[Leaf, Tensor]]:
        """Return what this rank has of a tensor: one piece; of a run several, or an empty one."""
        if isinstance(value, Run):
            nothing = (0,) * len(value.shape)
            held = value.pieces() or [(Box(nothing, nothing), value.data.new_empty(nothing))]
            grid = None
        else:
            held, grid = [(local_box(value), local_tensor(value))], grid_of(value)
        whole = tuple(value.shape)
        found = []
        for box, local in held:
            sizes, shape = box.sizes, whole
            if code is None:  # as raw bytes, in one dimension more
                raw = value.dtype.itemsize
                box = Box((*box.offsets, 0), (*sizes, raw))  # noqa: PLW2901
                sizes, shape = box.sizes, (*whole, raw)
            tensor = local.resolve_conj().resolve_neg()
            num_bytes = local.nbytes
            leaf = Leaf(
                key, value.dtype, code or "U8", sizes, num_bytes, box, shape, replicas, grid
            )
            found.append((leaf, tensor))
        return found

    def _replicas(self, path: tree.Path, value: Tensor | Run) -> tuple[int, ...] | None:
        """Return the ranks that hold this very piece."""
        if isinstance(value, Run):
            return value.replicas if value.data.numel() else ()
        replicas = replicas_of(value)
        if self._holders is None:
            return replicas
        holders = self._holders(path)
        if replicas is None:
            return holders
        # Of a tensor that several stages have shards of, the first stage saves all of them.
        is_elsewhere = bool(holders) and holders[0] not in mesh_ranks(value)
        return () if is_elsewhere else tuple(rank for rank in replicas if rank in holders)

    def _free_key(self, wanted: str) -> str:
        key, count = wanted, 1
        while key in self.leaves or key == "__metadata__":
            count += 1
            key = f"{wanted}~{count}"
        return key


_COMPRESSED: dict[torch.layout, str] = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}


def _identity(value: Tensor | Run) -> tuple[Any, ...] | None:
    """Return what two tensors share if they are one and the same memory, or ``None`` if empty."""
    if isinstance(value, Run):
        # Names of one parameter have one run of it, also where it is empty.
        return ("run", id(value))
    if is_sharded(value):
        # A piece may be empty here and not elsewhere, and yet every rank must find the same.
        local = local_tensor(value)
        memory = local.untyped_storage()._cdata
        return ("sharded", memory, local.storage_offset(), value.dtype, tuple(value.shape))
    if value.numel() == 0:
        return None
    return (
        value.device,
        value.data_ptr(),
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.is_conj(),
        value.is_neg(),
    )


def _is_dense(value: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlap, in some order."""
    expected = 1
    for stride, length in sorted(zip(value.stride(), value.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _hint(value: Tensor) -> str:
    if is_lazy(value):
        return "Run one batch through the lazy module first: that gives it a shape and values."
    if value.is_nested:
        return "Store the list of its tensors, from unbind()."
    return "Give it real values first; sharded tensors need every rank's own part."


def _describe(value: Tensor) -> str:
    kind = type(value)
    if value.device.type == "meta":
        return "meta tensor"
    if value.is_nested:
        return "nested tensor"
    return f"{kind.__module__}.{kind.__qualname__}"
