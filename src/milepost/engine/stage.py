"""Staging: one copy of the state from live memory into the arena.

When :meth:`Stager.stage` returns, the caller may change every tensor. Views of the arena are made
once for a plan; the copy itself is one call for a part, however many tensors it has, and releases
the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.pack import PackedItem
from .arena import Arena
from .plan import PartPlan, Plan

__all__ = ["StagedPart", "Stager"]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part whose bytes lie in the arena.

    Attributes:
        plan: Its layout.
        is_unchanged: Whether it is frozen and holds the very bytes of the last staging.
    """

    plan: PartPlan
    is_unchanged: bool


class Stager:
    """Copies states of one structure into an arena.

    Args:
        arena: The memory. Nobody else may write to it.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._plan: Plan | None = None
        self._views: dict[str, list[Tensor]] = {}
        self._held: set[str] = set()

    def stage(self, plan: Plan, items: Sequence[PackedItem]) -> list[StagedPart]:
        """Copy the state.

        Args:
            plan: Its layout.
            items: The state, with live tensors.

        Returns:
            The parts in the order of the plan. Frozen parts are compared with what the arena holds
            of them, byte for byte, and only copied when they differ.
        """
        replaced = self.arena.reserve(plan.arena_bytes)
        if replaced or plan is not self._plan:
            self._lay_out(plan)
        by_name = {item.name: item for item in items}
        staged = []
        with torch.no_grad():
            for part in plan.parts:
                tensors = by_name[part.item].tensors
                sources = [tensors[index] for index in part.leaves]
                staged.append(self._stage_part(part, sources))
        _synchronize(items)
        return staged

    def forget(self) -> None:
        """Treat every frozen part as changed at the next staging."""
        self._held.clear()

    def _lay_out(self, plan: Plan) -> None:
        self._plan, self._views = plan, {}
        self._held.clear()
        for part in plan.parts:
            header = self.arena.view(part.arena_start, part.arena_start + len(part.header))
            header[:] = part.header

    def _destinations(self, part: PartPlan, sources: Sequence[Tensor]) -> list[Tensor]:
        views = self._views.get(part.file)
        if views is None:
            views = []
            for entry, source in zip(part.tensors, sources, strict=True):
                start, stop = part.arena_start + entry.start, part.arena_start + entry.stop
                if start == stop:
                    views.append(torch.empty(source.shape, dtype=source.dtype, device="cpu"))
                else:
                    views.append(
                        self.arena.tensor(start, stop).view(source.dtype).view(source.shape)
                    )
            self._views[part.file] = views
        return views

    def _stage_part(self, part: PartPlan, sources: list[Tensor]) -> StagedPart:
        destinations = self._destinations(part, sources)
        if part.is_frozen and part.file in self._held:
            changed = [
                (destination, source)
                for destination, source in zip(destinations, sources, strict=True)
                if not _same_bytes(destination, source)
            ]
            for destination, source in changed:
                destination.copy_(source)
            return StagedPart(part, is_unchanged=not changed)
        torch._foreach_copy_(destinations, sources, non_blocking=True)
        if part.is_frozen:
            self._held.add(part.file)
        return StagedPart(part, is_unchanged=False)


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    """Compare bit patterns: a NaN equals itself, and -0.0 does not equal 0.0."""
    if first.numel() == 0:
        return True
    second = second.to(first.device).contiguous()
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _synchronize(items: Sequence[PackedItem]) -> None:
    """Wait for copies from accelerators, which return before they are done."""
    devices = {tensor.device for item in items for tensor in item.tensors}
    for device in devices:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
