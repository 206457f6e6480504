"""Whether the state is still that of the last finished batch.

After an exception somewhere in a batch, the state may be saved to resume from only if nothing of it
has changed since the batch before: no optimizer step has begun, and no buffer was written. The
random state of the moment before the batch was fetched goes with it, since drawing numbers is a
change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .loader import ResumableLoader
from .rng import capture_rng

__all__ = ["CleanState"]


class CleanState:
    """Watches what a batch changes."""

    def __init__(self) -> None:
        self.rng: dict[str, Any] | None = None
        self._buffers: list[Tensor] = []
        self._versions: list[int] = []
        self._is_stepped = False
        self._loader: ResumableLoader | None = None
        self._handles: list[Any] = []

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Notice when a step of this optimizer begins."""
        self._handles.append(optimizer.register_step_pre_hook(self._note_step))

    def watch_modules(self, modules: Iterable[nn.Module]) -> None:
        """Notice when a buffer of these modules is written."""
        self._buffers = [buffer for module in modules for buffer in module.buffers()]

    def begin_batch(self, loader: ResumableLoader | None = None) -> None:
        """Note the state before a batch is trained on."""
        self.rng = capture_rng() if loader is None else loader.fetch_rng
        self._versions = [buffer._version for buffer in self._buffers]
        self._is_stepped = False
        self._loader = loader

    def end_batch(self) -> None:
        """Note that the batch is finished."""
        self.rng, self._loader, self._is_stepped = None, None, False
        self._versions = [buffer._version for buffer in self._buffers]

    def is_clean(self) -> bool:
        """Return whether nothing was changed since the last finished batch."""
        versions = [buffer._version for buffer in self._buffers]
        return not self._is_stepped and versions == (self._versions or versions)

    def step_back(self) -> bool:
        """Give the batch in hand back to its loader; return whether that was possible."""
        loader, self._loader = self._loader, None
        return loader is None or loader.unread()

    def release(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note_step(self, *_: Any) -> None:
        self._is_stepped = True
