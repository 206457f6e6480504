"""Staging: one copy of the state from live memory into the arena.

When :meth:`Stager.stage` returns, the caller may change every tensor but those that are to be
copied late: see ``copying.py``. Views of the arena are made once for a plan. Large tensors on the
host are copied one by one by the plain memory copy of the system, which does not wait for a team of
threads; all others in one call for a part, however many there are. Both release the interpreter
lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..staging import FORBIDDEN, NOTHING_LARGE, CopyCheck
from ..state.owned import Late
from ..tensors.memory import host_bytes
from ..tensors.pack import PackedItem
from .arena import Arena
from .comparing import same_bytes
from .copying import Copy, LateTensor
from .peek import can_peek
from .plan import PartPlan, Plan

__all__ = ["StagedPart", "Stager", "why_not_late"]


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
        self._num_stagings = 0

    def stage(
        self,
        plan: Plan,
        items: Sequence[PackedItem],
        *,
        owned: Late | None = None,
        check: CopyCheck = "sample",
    ) -> tuple[list[StagedPart], Copy]:
        """Copy the state.

        Args:
            plan: Its layout.
            items: The state, with live tensors.
            owned: What may be copied later; ``None``: nothing.
            check: How that is watched until it is copied.

        Returns:
            The parts in the order of the plan, and what is left to copy. Frozen parts are compared
            with what the arena holds of them, byte for byte, and only copied when they differ.
        """
        self._num_stagings += 1
        owned = owned if can_peek() else None
        replaced = self.arena.reserve(plan.arena_bytes)
        if replaced or plan is not self._plan:
            self._lay_out(plan)
        by_name = {item.name: item for item in items}
        staged = []
        late: list[LateTensor] = []
        with torch.no_grad():
            for part in plan.parts:
                tensors = by_name[part.item].tensors
                sources = [tensors[index] for index in part.leaves]
                late_ones: set[int] = set()
                if owned is not None and not part.is_frozen:
                    large = ((index, sources[index]) for index in part.large)
                    late_ones.update(i for i, one in large if _is_plain(one) and one in owned)
                late += self._note_late(part, sources, late_ones, check)
                staged.append(self._stage_part(part, sources, late_ones))
        _synchronize(items)
        return staged, Copy(late, end_bytes=plan.arena_bytes)

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

    def _note_late(
        self, part: PartPlan, sources: list[Tensor], late: set[int], check: CopyCheck
    ) -> list[LateTensor]:
        """Note what those tensors are like that are copied later."""
        found = []
        for index in sorted(late):
            entry, source = part.tensors[index], sources[index]
            start, stop = part.arena_start + entry.start, part.arena_start + entry.stop
            place = self.arena.array(start, stop)
            name = f"{part.item}/{entry.key}"
            found.append(
                LateTensor.of(
                    name,
                    source,
                    place=place,
                    start_bytes=start,
                    check=check,
                    shift=self._num_stagings,
                )
            )
        return found

    def _stage_part(self, part: PartPlan, sources: list[Tensor], late: set[int]) -> StagedPart:
        destinations = self._destinations(part, sources)
        if part.is_frozen and part.file in self._held:
            changed = [
                (destination, source)
                for destination, source in zip(destinations, sources, strict=True)
                if not same_bytes(destination, source)
            ]
            for destination, source in changed:
                destination.copy_(source)
            return StagedPart(part, is_unchanged=not changed)
        by_itself = {i for i in part.large if i not in late and _is_plain(sources[i])}
        for index in sorted(by_itself):
            np.copyto(host_bytes(destinations[index]), host_bytes(sources[index]))
        together: Sequence[int] = range(len(sources))
        if part.large:
            together = [i for i in together if i not in by_itself and i not in late]
        if together:
            torch._foreach_copy_(
                [destinations[i] for i in together],
                [sources[i] for i in together],
                non_blocking=True,
            )
        if part.is_frozen:
            self._held.add(part.file)
        return StagedPart(part, is_unchanged=False)


def why_not_late(owned: Late, copy: Copy) -> str:
    """Return why nothing is copied late, or not all that optimizers have; else nothing."""
    if not can_peek():
        return FORBIDDEN
    return owned.reason or ("" if copy.is_late else NOTHING_LARGE)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor lie in the host's memory as they do in a part."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_inference():
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _synchronize(items: Sequence[PackedItem]) -> None:
    """Wait for copies from accelerators, which return before they are done."""
    devices = {tensor.device for item in items for tensor in item.tensors}
    for device in devices:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
