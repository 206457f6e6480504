"""The model on several ranks: wrapping it, and what a wrapped model needs to be exact.

A plain model is wrapped in ``DistributedDataParallel``; one that was wrapped before is taken as it
is. Three things are done beyond wrapping:

- Every rank begins with the weights and buffers of rank 0, before anything is made of them.
- Gradients are summed in one order from the first batch on. Torch lays the gradients out anew after
  the first backward pass of a process, and where a gradient lies decides in which order more than
  two ranks sum it. So a resumed process would sum its first batch in another order than the process
  that went on. A backward pass without a batch settles the layout before.
- Buffers, such as the means of a batch norm, are rank 0's before an evaluation, as they are before
  every forward pass in training. What is evaluated is what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..tensors.boxes import is_sharded
from .group import Group

__all__ = [
    "Layout",
    "Parallel",
    "check_choices",
    "device_of",
    "is_deepspeed",
    "layout_of",
    "prepare",
    "reshard",
    "settle_gradients",
    "share_buffers",
    "without_sync",
    "wrap",
]

Parallel = Literal["ddp"] | None


class Layout(Enum):
    """How a model lies on the ranks."""

    WHOLE = "whole"
    """Each rank has all of it."""
    DATA = "data"
    """Sharded over all ranks (FSDP2), each of which trains on samples of its own."""
    OTHER = "other"
    """Sharded in another way: only the user knows which ranks train on the same samples."""


def check_choices(parallel: Any, step_schedulers_every: Any) -> None:
    """Refuse arguments that are none of those to choose from.

    Raises:
        UsageError: Naming the first.
    """
    if step_schedulers_every not in ("batch", "epoch"):
        raise UsageError(f"step_schedulers_every={step_schedulers_every!r}: batch or epoch?")
    if parallel is None or parallel == "ddp":
        return
    raise UsageError(
        f"parallel={parallel!r} is not known.",
        hint='Use "ddp", or None for a model that synchronises its gradients by itself. For FSDP2 '
        "or tensor parallelism wrap the model before it is given to the Trainer.",
    )


def layout_of(model: torch.nn.Module) -> Layout:
    """Return how a model lies on the ranks."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if flat or is_deepspeed(model):
        return Layout.OTHER
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not meshes:
        return Layout.WHOLE
    is_fully_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    is_over_all = all(mesh.ndim == 1 and mesh.size() == dist.get_world_size() for mesh in meshes)
    return Layout.DATA if is_fully_sharded and is_over_all else Layout.OTHER


def is_deepspeed(model: torch.nn.Module) -> bool:
    """Return whether a model is a DeepSpeed engine. Never imports DeepSpeed itself."""
    return any(
        kind.__module__.split(".")[0] == "deepspeed" and kind.__name__ == "DeepSpeedEngine"
        for kind in type(model).__mro__
    )


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model's parameters are."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def prepare(model: torch.nn.Module, group: Group) -> Layout:
    """Give every rank the weights of rank 0 where each has all of them; return the layout."""
    if group.is_alone:
        return Layout.WHOLE
    layout = layout_of(model)
    if layout is Layout.WHOLE and not isinstance(model, DistributedDataParallel):
        _share_weights(model)
    return layout


def _share_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not torch.nn.parameter.is_lazy(tensor):
                dist.broadcast(tensor, 0)


def share_buffers(model: torch.nn.Module) -> None:
    """Give every rank the buffers of rank 0, where those are what is saved of the model.

    Wrapped in ``DistributedDataParallel`` the next forward pass in training would do the same.
    """
    if isinstance(model, DistributedDataParallel):
        is_led = model.broadcast_buffers
    else:
        is_led = layout_of(model) is Layout.DATA
    if is_led:
        with torch.no_grad():
            for buffer in model.buffers():
                if not is_sharded(buffer):
                    dist.broadcast(buffer, 0)


def reshard(model: torch.nn.Module) -> None:
    """Let a sharded model (FSDP2) give back what a forward pass without a backward one gathered.

    Its parameters are the shards again then, which is what everybody else works with.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def wrap(model: torch.nn.Module, parallel: Parallel, group: Group) -> torch.nn.Module:
    """Return the model as it is trained on the ranks.

    Args:
        model: A plain model, or one that is wrapped already.
        parallel: What to do with a plain one.
        group: The ranks.
    """
    if group.is_alone:
        return model
    is_plain = not isinstance(model, DistributedDataParallel) and (
        layout_of(model) is Layout.WHOLE and any(p.requires_grad for p in model.parameters())
    )
    wrapped = DistributedDataParallel(model) if is_plain and parallel == "ddp" else model
    if isinstance(wrapped, DistributedDataParallel):
        settle_gradients(wrapped)
    return wrapped


def without_sync(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which gradients stay on their rank, to be summed up with later ones."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def settle_gradients(model: DistributedDataParallel) -> None:
    """Make torch lay out the gradients for good, as a function of the parameters' order alone.

    Without it the first batch of a process sums gradients in another order than later ones, and
    where more than two ranks do, a resumed training differs in its last bits. Every rank must call
    it, right after the model was wrapped; the :class:`Trainer` does. One backward pass is made, and
    neither weights, buffers nor random numbers change.

    Models that torch treats in another way (``static_graph``, ``find_unused_parameters``, hooks of
    communication), and those with hooks of their own, are left alone.
    """
    module: torch.nn.Module = model.module
    trained = [p for p in module.parameters() if p.requires_grad]
    has_own_way = model.static_graph or model.find_unused_parameters or model._comm_hooks  # noqa: SLF001
    is_begun = any(p.grad is not None for p in trained)
    if has_own_way or is_begun or _is_listened_to(module, trained):
        return
    with _forward_replaced(module, lambda: _sum_of_all(trained)), torch.enable_grad():
        model().backward()
    for parameter in trained:
        parameter.grad = None
    # The next forward pass takes the new layout over.


def _sum_of_all(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.stack([p.sum().abs().float() for p in parameters]).sum()


def _is_listened_to(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> bool:
    return bool(
        module._forward_hooks  # noqa: SLF001
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or any(
            getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks  # noqa: SLF001
            for p in parameters
        )
    )


@contextmanager
def _forward_replaced(
    module: torch.nn.Module, forward: Callable[[], torch.Tensor]
) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
