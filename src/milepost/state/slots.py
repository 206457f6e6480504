"""Slots of an optimizer: a parameter as it has it, and the names its state is stored under.

Mostly that is one name. Where parameters were flattened and joined, the optimizer has one tensor
for several of them, and of each only some elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError
from ..tensors.boxes import is_sharded
from ..tensors.flat import Run
from ..tensors.unpack import leaf_tag
from .flattened import FlatShare
from .source import TensorInfo, new_like

__all__ = ["Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimizer.

    Attributes:
        parameter: The parameter.
        names: Names of what it is made of.
        shares: What this rank has of each; nothing where the parameter is plain or a ``DTensor``.
    """

    parameter: Tensor
    names: tuple[str, ...]
    shares: tuple[FlatShare, ...] = ()

    @property
    def held(self) -> tuple[str, ...]:
        """Return the names of those that this rank has elements of."""
        if not self.shares:
            return self.names
        return tuple(
            name
            for name, share in zip(self.names, self.shares, strict=True)
            if share.run.data.numel()
        )

    def split(self, value: Any) -> dict[str, Any]:
        """Return the state of each parameter by name.

        Args:
            value: What the optimizer keeps for the slot.
        """
        if not self.shares:
            return {self.names[0]: value}
        return {
            name: {key: _part(one, share) for key, one in value.items()}
            for name, share in zip(self.names, self.shares, strict=True)
            if share.run.data.numel()
        }

    def into(
        self, stored: Mapping[str, Any], infos: Mapping[str, TensorInfo]
    ) -> dict[str, Tensor | Run]:
        """Return tensors to read state into, cut as the parameter is, by key.

        Args:
            stored: Trees of the state by name.
            infos: What is stored of the item.
        """
        found: dict[str, Tensor | Run] = {}
        if not self.shares and not is_sharded(self.parameter):
            return found
        whole: list[Tensor | Run] = [share.run for share in self.shares]
        for name, live in zip(self.names, whole or [self.parameter.detach()], strict=True):
            state = stored.get(name)
            for tag in state.values() if isinstance(state, Mapping) else ():
                key = leaf_tag(tag) if _is_plain(tag) else ""
                if key in infos and infos[key].shape == tuple(live.shape):
                    found[key] = new_like(live, infos[key])
        return found

    def join(self, stored: Mapping[str, Any]) -> Any:
        """Return what the optimizer is to keep for the slot; ``None`` if nothing is stored.

        Args:
            stored: State by name.

        Raises:
            MismatchError: What is stored cannot be that of one tensor.
        """
        if not self.shares:
            return stored.get(self.names[0])
        held = [
            (stored.get(name), share)
            for name, share in zip(self.names, self.shares, strict=True)
            if share.run.data.numel()
        ]
        states = [(state, share) for state, share in held if state is not None]
        if not states:
            return None
        keys = list(states[0][0])
        if len(states) != len(held) or any(list(state) != keys for state, _ in states):
            raise self._misfit()
        return {
            key: self._join_values([(state[key], share) for state, share in states]) for key in keys
        }

    def _join_values(self, found: list[tuple[Any, FlatShare]]) -> Any:
        values = [_elements(value, share) for value, share in found]
        if any(value is None for value in values):
            first = found[0][0]
            if all(_same(value, first) for value, _ in found):
                return first
            raise self._misfit()
        size = found[0][1].owner_size
        if len(values) == 1 and values[0].numel() == size:
            return values[0]
        joined = torch.zeros(size, dtype=values[0].dtype, device=values[0].device)
        for value, (_, share) in zip(values, found, strict=True):
            joined[share.offset : share.offset + value.numel()] = value
        return joined

    def _misfit(self) -> MismatchError:
        return MismatchError(
            f"The state of {', '.join(self.names[:4])} is not of one kind, and these parameters "
            "are one to the optimizer now.",
            hint="Build the FullyShardedDataParallel with use_orig_params=True.",
            names=self.names,
        )


def _part(value: Any, share: FlatShare) -> Any:
    """Return the part of a value that belongs to one parameter: its elements, or all of it."""
    is_each = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == share.owner_size
    if not is_each:
        # Of its own, or it would be saved under another name on each rank: that of the first.
        return value.detach().clone() if isinstance(value, Tensor) else value
    run, count = share.run, share.run.data.numel()
    data = value.detach().reshape(-1)[share.offset : share.offset + count]
    return Run(data, run.start, run.shape, run.replicas)


def _elements(value: Any, share: FlatShare) -> Any:
    """Return the elements that this rank has of a value, or ``None`` if it has no elements."""
    if isinstance(value, Run):
        return value.data
    if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == share.run.shape:
        return share.run.cut(value).clone()
    return None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype is second.dtype and torch.equal(first, second)
    return bool(first == second)


def _is_plain(tag: Any) -> bool:
    return isinstance(tag, Mapping) and tag.get("$") == "tensor" and "dtype" not in tag
