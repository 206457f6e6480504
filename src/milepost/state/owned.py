"""What optimizers own: tensors that nothing but their steps should change.

Parameters that are trained, and what the optimizers keep for them. They may be copied for a save
while the next forward and backward pass run, which only read them. Everything else may change at
any moment: buffers in a forward pass, averages in a callback, what another process shares.

Left out are parameters to which a forward pass is known to write; those of scripted modules, which
no hook makes wait before they load; and weights of embeddings, unless asked for: what trains with
noise on them writes to a few rows and back between two steps, which samples of the bytes would
miss. Also memory that other processes share, and whatever lies on an accelerator, where an order
between the copy and the kernels of the training would have to be made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..tensors.boxes import is_sharded, local_tensor
from .flattened import is_registered, owners_in_groups
from .walks import walk_of
from .wrappers import unwrap
from .zero import holder_of

__all__ = ["Late", "MemoryKey", "Owned", "memory_key", "owned_by"]

MemoryKey = tuple[int, int]
"""Address and size of the memory of a tensor."""

MIN_BYTES = 64 * 1024
"""Smaller tensors are copied at once: that takes less than to keep an eye on them."""

_PLAIN = frozenset({Tensor, nn.Parameter})
_is_cpu, _num_bytes_of = attrgetter("is_cpu"), attrgetter("nbytes")
_WRITTEN_TO = (ScriptModule, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Owned:
    """What optimizers own at this moment.

    Attributes:
        num_bytes: By memory: the bytes of each tensor.
        modules: The models, and those of their modules that have a parameter among it.
        reason: Why something an optimizer has is not among it; empty if there is no reason.
    """

    num_bytes: dict[MemoryKey, int]
    modules: tuple[nn.Module, ...]
    reason: str

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all of it."""
        return sum(self.num_bytes.values())

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of those: this very memory."""
        return memory_key(tensor) in self.num_bytes


class Late(Protocol):
    """What of a state may be copied after a save has begun to be written."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Return models that must not load a state dict meanwhile."""

    @property
    def reason(self) -> str:
        """Return why something that optimizers have is not among it; empty if there is none."""

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether a tensor, of the host's memory, is among it."""


def memory_key(tensor: Tensor) -> MemoryKey:
    """Return what tells the memory of a tensor from that of any other that lives now."""
    return tensor.data_ptr(), tensor.nbytes


def owned_by(
    optimizers: Iterable[Optimizer], modules: Iterable[nn.Module], *, with_embeddings: bool = True
) -> Owned:
    """Find what optimizers own.

    Args:
        optimizers: The optimizers.
        modules: The models that they train.
        with_embeddings: Whether the weights of embeddings are among it.
    """
    found: dict[MemoryKey, int] = {}
    reasons: dict[str, None] = {}
    everything = tuple(modules)
    models = tuple(model for model in everything if not isinstance(model, ScriptModule))
    walks = [walk_of(unwrap(model)) for model in everything]
    if any(walk.is_flat for walk in walks) or any(map(is_registered, models)):
        return Owned({}, models, "flattened parameters of a model")
    children = [child for walk in walks for child in walk.modules()]
    excluded = {id(weight) for weight in _written_between(children, also_noise=not with_embeddings)}
    parents: set[int] = set()
    for optimizer in optimizers:
        reason = _not_ours(optimizer)
        if reason:
            reasons[reason] = None
            continue
        for parameter, kept in _large_ones(optimizer):
            is_own = id(parameter) not in excluded
            for tensor in kept:
                if tensor is parameter and not is_own:
                    continue
                memory = _memory(tensor)
                if memory is None:
                    reasons[_why_unusual(tensor)] = None
                elif memory.nbytes >= MIN_BYTES:
                    found[memory_key(memory)] = memory.nbytes
                    if is_own:
                        parents.add(id(parameter))
    return Owned(found, (*models, *_parents(children, parents, models)), "; ".join(reasons))


def _not_ours(optimizer: Optimizer) -> str:
    """Return why nothing is known of when an optimizer changes its tensors; else nothing."""
    name = type(optimizer).__qualname__
    if holder_of(optimizer) is not optimizer:
        return f"{name}, which has another optimizer inside"
    if not getattr(type(optimizer).step, "hooked", False):
        return f"{name}, before whose steps no hook can be placed"
    before = [group["params"] for group in optimizer.param_groups]
    with owners_in_groups(optimizer):
        if any(a is not g["params"] for a, g in zip(before, optimizer.param_groups, strict=True)):
            return f"flattened parameters of {name}"
    return ""


def _large_ones(optimizer: Optimizer) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the parameters that are trained, each with what of it and its state is not small."""
    trained = [
        one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    ]
    rows: Sequence[Any] = list(optimizer.state.values())
    if set(map(type, rows)) != {dict}:
        rows = [row for row in rows if isinstance(row, dict)]
    kept = [one for row in rows for one in row.values()]
    if not _PLAIN.issuperset(map(type, kept)):
        kept = [one for one in kept if isinstance(one, Tensor)]
    large = set(map(id, itertools.chain(_not_small(trained), _not_small(kept))))
    for parameter in trained if large else ():
        row = optimizer.state.get(parameter)
        ones = (parameter, *row.values()) if isinstance(row, dict) else (parameter,)
        found = [one for one in ones if id(one) in large]
        if found:
            yield parameter, found


def _not_small(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those that are not copied at once whatever else they are; where there are many, few.

    Small are those whose bytes are few, in the memory of the host.
    """
    if _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors)):
        sizes = list(map(_num_bytes_of, tensors))
        return [
            one for one, num_bytes in zip(tensors, sizes, strict=True) if num_bytes >= MIN_BYTES
        ]
    return [
        one
        for one in tensors
        if not (type(one) in _PLAIN and one.is_cpu and one.nbytes < MIN_BYTES)
    ]


def _memory(tensor: Tensor) -> Tensor | None:
    """Return the plain host memory of a tensor, or ``None`` if it has no such."""
    local = local_tensor(tensor) if is_sharded(tensor) else tensor
    if type(local) not in _PLAIN or is_lazy(local) or local.is_inference():
        return None
    if local.device.type != "cpu" or local.is_quantized or local.is_conj() or local.is_neg():
        return None
    if local.layout is not torch.strided or _is_shared(local):
        return None
    return local


def _why_unusual(tensor: Tensor) -> str:
    """Return why a tensor has no plain host memory."""
    if tensor.device.type != "cpu":
        return f"tensors on {tensor.device.type}"
    if not is_lazy(tensor) and _is_shared(local_tensor(tensor)):
        return "tensors in memory that other processes share"
    return "tensors of an unusual kind"


def _is_shared(tensor: Tensor) -> bool:
    """Return whether other processes may have the memory of a tensor, and write to it."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _written_between(modules: Iterable[nn.Module], *, also_noise: bool) -> Iterator[Tensor]:
    """Yield parameters to which something may write between two steps that does not wait."""
    everything = list(modules)
    special = {one for one in set(map(type, everything)) if issubclass(one, _WRITTEN_TO)}
    for module in [one for one in everything if type(one) in special]:
        if isinstance(module, ScriptModule):
            yield from module.parameters(recurse=False)  # it has no hook before it loads
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            also_noise or module.max_norm is not None  # renormalized where it is looked up
        ):
            yield module.weight


def _parents(
    modules: Iterable[nn.Module], parameters: set[int], models: Sequence[nn.Module]
) -> Iterator[nn.Module]:
    """Yield modules that have one of these parameters themselves, and are no models."""
    if not parameters:
        return
    known = set(map(id, models))
    for module in modules:
        if id(module) in known:
            continue
        if any(id(one) in parameters for one in module.parameters(recurse=False)):
            known.add(id(module))
            yield module
