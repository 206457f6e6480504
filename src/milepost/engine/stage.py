"""Staging: one copy of the state from live memory into the arena.

Frozen parts are compared first, and what is left to copy is said: what the caller's thread copies
(see ``filling.py``), and what is copied late (see ``copying.py``). Views of the arena are made once
for a plan. Small tensors are copied in one call for a block, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..staging import FORBIDDEN, NOTHING_LARGE, CopyCheck
from ..state.owned import Late
from ..tensors.pack import PackedItem
from .arena import Arena
from .comparing import same_bytes
from .copying import Copy, LateTensor
from .filled import Filled
from .filling import Block, Filling, PartFill, blocks_of, is_plain
from .peek import can_peek
from .pinned import cuda_devices
from .plan import PartPlan, Plan
from .streaming import Stream
from .sums import Sums

__all__ = ["StagedPart", "Stager", "Staging", "why_not_late"]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part whose bytes lie in the arena.

    Attributes:
        plan: Its layout.
        is_unchanged: Whether it is frozen and holds the very bytes of the last staging.
    """

    plan: PartPlan
    is_unchanged: bool


@dataclass(frozen=True, slots=True)
class Staging:
    """A state on its way into the arena.

    Attributes:
        parts: The parts in the order of the plan.
        filling: What the caller's thread is to copy.
        late: What is copied by a thread of its own, after that.
    """

    parts: list[StagedPart]
    filling: Filling | Stream
    late: Copy

    @property
    def stream(self) -> Stream | None:
        """Return the stream, if the state goes through a ring of blocks."""
        return self.filling if isinstance(self.filling, Stream) else None

    @property
    def unchanged_bytes(self) -> int:
        """Return the bytes of the parts that are not copied."""
        return sum(part.plan.size_bytes for part in self.parts if part.is_unchanged)


class Stager:
    """Copies states of one structure into an arena.

    Args:
        arena: The memory. Nobody else may write to it.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._plan: Plan | None = None
        self._views: dict[str, list[Tensor]] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}
        self._held: set[str] = set()
        self._num_stagings = 0

    def stage(self, plan: Plan, items: Sequence[PackedItem]) -> list[StagedPart]:
        """Copy all of a state; see :meth:`begin`."""
        staging = self.begin(plan, items)
        staging.filling.run(is_awaited=False)
        return staging.parts

    def begin(
        self,
        plan: Plan,
        items: Sequence[PackedItem],
        *,
        owned: Late | None = None,
        check: CopyCheck = "sample",
    ) -> Staging:
        """Find out what has to be copied of a state, and where it goes.

        Frozen parts are compared with what the arena holds of them, byte for byte.

        Args:
            plan: Its layout.
            items: The state, with live tensors.
            owned: What may be copied later; ``None``: nothing.
            check: How that is watched until it is copied.
        """
        self._num_stagings += 1
        owned = owned if can_peek() else None
        replaced = self.arena.reserve(plan.arena_bytes)
        if replaced or plan is not self._plan:
            self._lay_out(plan)
        cuda = cuda_devices(items)
        if cuda:
            self.arena.pin(plan.arena_bytes)
        by_name = {item.name: item for item in items}
        parts: list[StagedPart] = []
        fills: list[PartFill] = []
        late: list[LateTensor] = []
        with torch.no_grad():
            for part in plan.parts:
                tensors = by_name[part.item].tensors
                sources = [tensors[index] for index in part.leaves]
                left_out: set[int] = set()
                if owned is not None and not part.is_frozen:
                    large = ((index, sources[index]) for index in part.large)
                    left_out.update(i for i, one in large if is_plain(one) and one in owned)
                late += self._note_late(part, sources, left_out, check)
                destinations = self._destinations(part, sources)
                is_held = part.is_frozen and part.file in self._held
                if is_held:
                    left_out.update(_unchanged(destinations, sources))
                is_unchanged = is_held and len(left_out) == len(sources)
                parts.append(StagedPart(part, is_unchanged=is_unchanged))
                if not is_unchanged:
                    fills.append(self._fill(part, sources, destinations, left_out))
        end, files = plan.arena_bytes, [(part.arena_start, part.arena_stop) for part in plan.parts]
        sums = Sums(files, self.arena.view)
        filling = Filling(self.arena, fills, end_bytes=end, sums=sums, cuda=cuda)
        return Staging(parts, filling, Copy(late, end_bytes=end, sums=sums))

    def _fill(
        self,
        part: PartPlan,
        sources: list[Tensor],
        destinations: list[Tensor],
        left_out: set[int],
    ) -> PartFill:
        self._held.discard(part.file)  # until it is copied
        blocks = self._blocks.get(part.file)
        if blocks is None:
            blocks = self._blocks[part.file] = blocks_of(part)

        def hold() -> None:
            if part.is_frozen:
                self._held.add(part.file)

        return PartFill(part, blocks, sources, destinations, left_out, hold)

    def forget(self) -> None:
        """Treat every frozen part as changed at the next staging."""
        self._held.clear()

    def _lay_out(self, plan: Plan) -> None:
        self._plan, self._views, self._blocks = plan, {}, {}
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


def why_not_late(owned: Late, copy: Filled) -> str:
    """Return why nothing is copied late, or not all that optimizers have; else nothing."""
    if not can_peek():
        return FORBIDDEN
    return owned.reason or ("" if copy.is_late else NOTHING_LARGE)


def _unchanged(staged: Sequence[Tensor], live: Sequence[Tensor]) -> set[int]:
    """Return which tensors the arena has as they are."""
    pairs = enumerate(zip(staged, live, strict=True))
    return {index for index, (one, other) in pairs if same_bytes(one, other)}
