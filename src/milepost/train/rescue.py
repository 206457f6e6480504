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

from ..state.loader import ResumableLoader
from ..state.marks import Marks, ModuleTensors
from ..state.rng import apply_rng, capture_rng

__all__ = ["Buffers", "CleanPoint"]


class Buffers:
    """The buffers of a model, those that come while it trains included.

    Args:
        model: The model, with all its modules.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = ModuleTensors([model])

    def marks(self) -> Marks:
        """Return which there are now, and how often each was written to in place."""
        return Marks(self._tensors.buffers(), is_held=True)


@dataclass(frozen=True, slots=True)
class CleanPoint:
    """What has to be put back to return to a clean point.

    Attributes:
        rng: The random generators.
        position: The loader's position.
        own: What of the loader is this rank's own beside that.
        buffers: The buffers of the model.
    """

    rng: Mapping[str, Any]
    position: Mapping[str, Any]
    own: Mapping[str, Any]
    buffers: Marks

    @classmethod
    def mark(cls, buffers: Buffers, loader: ResumableLoader) -> CleanPoint:
        """Note the present point."""
        rng, position = capture_rng(), loader.state_dict()
        return cls(rng, position, loader.rank_state(), buffers.marks())

    def is_intact(self, buffers: Buffers) -> bool:
        """Return whether no buffer was written to or replaced since."""
        return buffers.marks() == self.buffers

    def put_back(self, loader: ResumableLoader) -> None:
        """Return the generators and the loader to this point."""
        loader.load_state_dict(self.position)
        loader.load_rank_state(self.own)
        apply_rng(self.rng)
