"""Modules whose parameters were flattened, joined and cut.

Each rank holds a run of the elements of all parameters of a unit, in one flat tensor. What it holds
of each parameter follows from tables, so nothing has to be gathered: neither the weights nor the
state of an optimizer, which lies in the same order.

``FullyShardedDataParallel`` is known here, by the tables that it keeps since torch 2.4. Of others
somebody else knows: see :func:`register`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedStateError
from ..tensors.flat import Run

__all__ = [
    "FlatShare",
    "Flattening",
    "flat_shares",
    "flat_state",
    "is_flattened",
    "is_registered",
    "owners_in_groups",
    "register",
    "reshard",
]

Clean = Callable[[str], str]

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FLAT = "_flat_param"
_OWN_HOOKS = frozenset({"FullyShardedDataParallel", "CheckpointWrapper"})


@dataclass(frozen=True, slots=True)
class FlatShare:
    """What this rank has of one parameter.

    Attributes:
        names: Its names in the module, free of wrappers; tied weights have several.
        run: Its elements, in the live memory.
        parameter: The parameter in the module; of several that are one it is that one.
        owner: What an optimizer has for it: the parameter, or the flat one of its whole unit;
            ``None`` if no optimizer has it.
        offset: Where its elements begin in the owner.
        owner_size: Elements of the owner on this rank, padding among them.
    """

    names: tuple[str, ...]
    run: Run
    parameter: nn.Parameter
    owner: Tensor | None
    offset: int
    owner_size: int


class Flattening(Protocol):
    """What is known of a module whose parameters were flattened by others than torch."""

    def shares(self, clean: Clean) -> list[FlatShare]:
        """Return what this rank has of every parameter."""

    def owners(self) -> list[list[Tensor]]:
        """Return the flat tensors of each group of the optimizer."""

    def refresh(self) -> None:
        """Throw away what was made of values that were just restored over."""


_registered: WeakKeyDictionary[nn.Module, Flattening] = WeakKeyDictionary()
_owned: WeakKeyDictionary[Optimizer, Flattening] = WeakKeyDictionary()


def register(module: nn.Module, optimizer: Optimizer, flattening: Flattening) -> None:
    """Say how the parameters of a module were flattened.

    Args:
        module: The module.
        optimizer: The optimizer that has the flat ones.
        flattening: What is known of it.
    """
    _registered[module], _owned[optimizer] = flattening, flattening


@contextmanager
def owners_in_groups(optimizer: Optimizer) -> Iterator[None]:
    """Put the flat parameters into the groups of an optimizer that has them only while it steps."""
    flattening = _owned.get(optimizer)
    if flattening is None:
        yield
        return
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, owners in zip(optimizer.param_groups, flattening.owners(), strict=True):
            group["params"] = owners
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def is_flattened(module: nn.Module) -> bool:
    """Return whether some of a module's parameters were flattened."""
    return is_registered(module) or next(_units(module), None) is not None


def is_registered(module: nn.Module) -> bool:
    """Return whether somebody has said how its parameters were flattened; see :func:`register`."""
    return module in _registered


def flat_shares(module: nn.Module, clean: Clean) -> list[FlatShare]:
    """Return what this rank has of every parameter that was flattened.

    Args:
        module: The module.
        clean: Frees names from wrappers.
    """
    found: list[FlatShare] = []
    if module in _registered:
        return _registered[module].shares(clean)
    for path, unit in _units(module):
        handle = unit._handle
        flat = handle.flat_param
        # Before the first forward pass the flat parameter itself is the shard.
        local = getattr(flat, "_local_shard", flat).detach()
        replicas = _replicas(unit, handle)
        prefix = f"{path}." if path else ""
        tied = defaultdict(list)
        for info in flat._shared_param_infos:
            first = _join(info.prim_module_name, info.prim_param_name)
            tied[first].append(_join(info.module_name, info.param_name))
        for index, (name, shape, part) in enumerate(
            zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        ):
            offset, count = part.offset_in_shard or 0, part.numel_in_shard or 0
            start = part.intra_param_start_idx or 0
            run = Run(local[offset : offset + count], start, tuple(shape), replicas)
            names = tuple(clean(prefix + one) for one in (name, *tied[name]))
            if handle._use_orig_params:
                own = flat._params[index]
                found.append(FlatShare(names, run, own, own, 0, count))
            else:
                found.append(FlatShare(names, run, flat, flat, offset, local.numel()))
    return found


def flat_state(module: nn.Module, clean: Clean) -> dict[str, Any]:
    """Return the state of such a module by clean name: runs, and what was not flattened.

    Raises:
        UnsupportedStateError: A module inside changes its state dict in a way of its own.
    """
    runs = {name: share.run for share in flat_shares(module, clean) for name in share.names}
    if module in _registered:
        plain = {clean(name): value for name, value in module.state_dict().items()}
        return {name: runs.get(name, value) for name, value in plain.items()}
    members: dict[str, list[str]] = defaultdict(list)
    for name in runs:
        members[name.rpartition(".")[0]].append(name)
    state: dict[str, Any] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        own = type(child).__name__ in _OWN_HOOKS
        if not own and (child._state_dict_hooks or child._state_dict_pre_hooks):
            raise UnsupportedStateError(
                f"{path or 'The model'} has hooks on its state_dict, and is inside a "
                "FullyShardedDataParallel, whose state is taken without it.",
                hint="Use fully_shard (FSDP2), or remove the hooks.",
                path=path,
            )
        if own and type(child).__name__ == "FullyShardedDataParallel":
            continue
        state.update((name, runs[name]) for name in members.pop(clean(f"{path}.")[:-1], ()))
        plain = {}
        child._save_to_state_dict(plain, f"{path}." if path else "", keep_vars=False)
        for key, value in plain.items():
            name = clean(key)
            if name not in runs and not key.endswith(_FLAT):
                state[name] = value
    return state


def reshard(module: nn.Module) -> None:
    """Throw away gathered weights, which are older than what was just restored."""
    if module in _registered:
        _registered[module].refresh()
    for _, unit in _units(module):
        handle = unit._handle
        is_begun = hasattr(handle.flat_param, "_local_shard")
        # The gathered ones are kept after a pass of the outermost unit, also where its parameters
        # are the shards again.
        if is_begun and handle.uses_sharded_strategy and not handle.needs_unshard():
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(unit, handle, True)  # noqa: FBT003 - free the gathered ones


def _units(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers that have parameters, without loading the module that defines them."""
    loaded = sys.modules.get(_MODULE)
    if loaded is None:
        return
    for path, child in module.named_modules():
        if isinstance(child, loaded.FullyShardedDataParallel) and child._handle is not None:
            yield path, child


def _replicas(unit: Any, handle: Any) -> tuple[int, ...]:
    """Return the ranks that hold the same elements of a unit, as far as is known."""
    if not handle.uses_sharded_strategy:
        group = handle.process_group
    else:
        group = getattr(unit, "_inter_node_pg", None)
    if group is None:
        return (dist.get_rank(),)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
