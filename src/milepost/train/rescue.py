"""The last clean point of a training, to be saved when something goes wrong after it.

A point is clean when every object is in the state that belongs to the batches the timer has
counted. The loop marks each one: before it fetches a batch, and before it evaluates. From there
until the optimizers step, only three things move on: the random generators, the position of the
loader, and buffers that a forward pass writes to. The first two are noted at the mark and put back;
the third cannot be put back, so it is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..state.batch_in_hand import version_of
from ..state.loader import ResumableLoader
from ..state.rng import apply_rng, capture_rng

__all__ = ["Buffers", "CleanPoint"]


class Buffers:
    """The buffers of a model, found once, since a walk over its modules is not free.

    Args:
        model: The model, with all its modules.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners = [
            module._buffers  # noqa: SLF001 - live: a buffer that is replaced shows up
            for module in model.modules()
            if module._buffers  # noqa: SLF001
        ]

    def versions(self) -> tuple[tuple[torch.Tensor, int], ...]:
        """Return each buffer with its version counter, which every write in place moves on."""
        return tuple(
            (buffer, version_of(buffer))
            for owner in self._owners
            for buffer in owner.values()
            if buffer is not None
        )


@dataclass(frozen=True, slots=True)
class CleanPoint:
    """What has to be put back to return to a clean point.

    Attributes:
        rng: The random generators.
        position: The loader's position.
        own: What of the loader is this rank's own beside that.
        buffers: Each buffer of the model, with its version counter.
    """

    rng: Mapping[str, Any]
    position: Mapping[str, Any]
    own: Mapping[str, Any]
    buffers: tuple[tuple[torch.Tensor, int], ...]

    @classmethod
    def mark(cls, buffers: Buffers, loader: ResumableLoader) -> CleanPoint:
        """Note the present point."""
        rng, position = capture_rng(), loader.state_dict()
        return cls(rng, position, loader.rank_state(), buffers.versions())

    def is_intact(self, buffers: Buffers) -> bool:
        """Return whether no buffer was written to or replaced since."""
        now = buffers.versions()
        return len(now) == len(self.buffers) and all(
            new is old and version == before
            for (new, version), (old, before) in zip(now, self.buffers, strict=True)
        )

    def put_back(self, loader: ResumableLoader) -> None:
        """Return the generators and the loader to this point."""
        loader.load_state_dict(self.position)
        loader.load_rank_state(self.own)
        apply_rng(self.rng)
