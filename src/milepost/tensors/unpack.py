"""A tree of JSON and a table of dense tensors -> values with tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..format import tree
from .dtypes import named_dtype
from .flat import Run
from .generators import set_generator

__all__ = ["leaf_keys", "leaf_tag", "unpack_item"]

GetTensor = Callable[[str], Tensor | Run]


def unpack_item(packed: Any, get: GetTensor) -> Any:
    """Put an item together.

    Args:
        packed: The tree that :func:`pack_item` made.
        get: Returns the dense tensor of a key, as it is in the container, or what this rank has of
            it. One tensor is returned for every place that refers to the key.

    Raises:
        FormatError: A malformed tree.
        MissingError: From ``get``, for a key that is not there.
    """
    made: dict[str, Any] = {}

    def dense(tag: Mapping[str, Any]) -> Any:
        key = leaf_tag(tag)
        if key not in made:
            found = get(key)
            made[key] = _run(found, tag) if isinstance(found, Run) else _shape(found, tag)
        return made[key]

    def resolve(tag: Mapping[str, Any]) -> Any:
        try:
            return _RESOLVERS[tag["$"]](tag, dense)
        except (RuntimeError, IndexError) as error:
            raise FormatError(f"The state holds a malformed {tag['$']!r}: {error}.") from error

    return tree.decode(packed, resolver=resolve)


def leaf_tag(tag: Any) -> str:
    """Return the key in the tag of a dense tensor.

    Raises:
        FormatError: Not such a tag.
    """
    if type(tag) is dict and tag.get("$") == "tensor" and type(tag.get("key")) is str:
        return tag["key"]  # type: ignore[no-any-return]  # nearly always, and there are many
    if not isinstance(tag, Mapping) or tag.get("$") != "tensor" or type(tag.get("key")) is not str:
        raise FormatError("The state refers to a tensor in a malformed way.")
    return str(tag["key"])


def leaf_keys(packed: Any) -> Iterator[str]:
    """Yield the key of every dense tensor that a tree refers to, again for every reference."""
    stack = [packed]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            if value.get("$") == "tensor":
                yield leaf_tag(value)
            else:
                stack.extend(reversed(list(value.values())))


def _shape(value: Tensor, tag: Mapping[str, Any]) -> Tensor:
    if "dtype" in tag:
        dtype = named_dtype(tag["dtype"])
        if dtype is None:
            raise FormatError(f"This version of torch has no dtype {tag['dtype']!r}.")
        if value.dtype is not torch.uint8 or value.shape[-1:] != (dtype.itemsize,):
            raise FormatError(f"The state holds no {dtype} where it says so.")
        if value.numel():
            value = value.view(dtype).squeeze(-1)
        else:
            value = torch.empty(value.shape[:-1], dtype=dtype, device="cpu")
    stride = tag.get("stride")
    if stride is None:
        return value
    if len(stride) != value.dim() or not _fits(stride, value):
        raise FormatError("The state gives a tensor strides that do not fit its shape.")
    strided = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return strided.copy_(value)


def _run(value: Run, tag: Mapping[str, Any]) -> Run:
    """Return a run that was read as raw bytes in its dtype."""
    if "dtype" not in tag:
        return value
    dtype = named_dtype(tag["dtype"])
    if dtype is None or value.shape[-1:] != (dtype.itemsize,):
        raise FormatError(f"The state holds no {tag['dtype']} where it says so.")
    start = value.start // dtype.itemsize
    return Run(value.data.view(dtype), start, value.shape[:-1], value.replicas)


def _fits(stride: list[Any], value: Tensor) -> bool:
    if not all(type(step) is int and step >= 0 for step in stride):
        return False
    last = sum(step * (length - 1) for step, length in zip(stride, value.shape, strict=True))
    return bool(value.numel() == 0 or last + 1 == value.numel())


def _sparse_coo(tag: Mapping[str, Any], dense: Callable[[Any], Tensor]) -> Tensor:
    return torch.sparse_coo_tensor(
        dense(tag["indices"]),
        dense(tag["values"]),
        tag["size"],
        is_coalesced=bool(tag["coalesced"]) or None,
        check_invariants=True,
    )


def _sparse_compressed(tag: Mapping[str, Any], dense: Callable[[Any], Tensor]) -> Tensor:
    layouts = {
        "sparse_csr": torch.sparse_csr,
        "sparse_csc": torch.sparse_csc,
        "sparse_bsr": torch.sparse_bsr,
        "sparse_bsc": torch.sparse_bsc,
    }
    return torch.sparse_compressed_tensor(
        dense(tag["compressed"]),
        dense(tag["plain"]),
        dense(tag["values"]),
        tag["size"],
        layout=layouts[tag["layout"]],
        check_invariants=True,
    )


def _quantized(tag: Mapping[str, Any], dense: Callable[[Any], Tensor]) -> Tensor:
    ints = dense(tag["ints"])
    if "scale" in tag:
        return torch._make_per_tensor_quantized_tensor(
            ints, float(tag["scale"]), int(tag["zero_point"])
        )
    return torch._make_per_channel_quantized_tensor(
        ints, dense(tag["scales"]), dense(tag["zero_points"]), int(tag["axis"])
    )


def _generator(tag: Mapping[str, Any], dense: Callable[[Any], Tensor]) -> torch.Generator:
    generator = torch.Generator(device=tag["device"])
    set_generator(generator, dense(tag["state"]))
    return generator


def _dtype(tag: Mapping[str, Any], dense: Callable[[Any], Tensor]) -> torch.dtype:
    del dense
    found = getattr(torch, str(tag["v"]), None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"This version of torch has no dtype {tag['v']!r}.")
    return found


_RESOLVERS: dict[str, Callable[[Mapping[str, Any], Callable[[Any], Tensor]], Any]] = {
    "tensor": lambda tag, dense: dense(tag),
    "numpy.tensor": lambda tag, dense: dense(tag["tensor"]).numpy(),
    "sparse_coo": _sparse_coo,
    "sparse_compressed": _sparse_compressed,
    "quantized": _quantized,
    "torch.dtype": _dtype,
    "torch.device": lambda tag, _: torch.device(tag["v"]),
    "torch.Size": lambda tag, _: torch.Size(tag["v"]),
    "torch.Generator": _generator,
}
