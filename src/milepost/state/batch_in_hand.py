"""The batch that the loop's body works on, and whether it has changed anything yet.

Between two batches the state is whole. Within one it is not, and yet users save there, and errors
happen there. What may be saved then depends on how far the batch has come:

    untouched   no optimizer step has begun, no buffer and no gradient was written. The state is
                that of the batch before; the batch is given back to its loader and trained again
                with the random numbers it had.
    stepped     the state is that after this batch.
    in between  gradients or buffers were written, and no step was taken.

A batch may also end without a step, when gradients are accumulated over several. Those gradients
are then a part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .loader import ResumableLoader
from .names import ParameterNames

__all__ = ["BatchInHand"]

_NUM_LOOKED_AT = 16


class BatchInHand:
    """Watches what a batch changes.

    Attributes:
        num_samples: Samples of the batch; ``None`` when none is in hand.
    """

    def __init__(self) -> None:
        self.num_samples: int | None = None
        self._loader: ResumableLoader | None = None
        self._buffers: list[Tensor] = []
        self._parameters: list[Tensor] = []
        self._before: list[Any] = []
        self._is_stepped = True
        self._is_partial = False
        self._is_given_back = False
        self._handles: list[Any] = []

    def watch(self, *, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Begin to watch. Optimizers are watched through hooks, buffers by version counters."""
        self.release()
        self._buffers = [buffer for module in models for buffer in module.buffers()]
        self._parameters = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._note_step))
            self._parameters += [p for group in optimizer.param_groups for p in group["params"]]

    def release(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self, loader: ResumableLoader, num_samples: int) -> None:
        """Note that the loop's body gets a batch."""
        self._loader, self.num_samples = loader, num_samples
        self._is_partial = self._leaves_gradients()
        self._is_stepped = False
        self._before = self._marks()

    def put_down(self) -> None:
        """Note that the body is done with it."""
        if not self._is_given_back:
            self._is_partial = self._leaves_gradients()
        self._loader, self.num_samples, self._is_given_back = None, None, False

    @property
    def is_held(self) -> bool:
        """Return whether the body has a batch."""
        return self.num_samples is not None

    @property
    def is_untouched(self) -> bool:
        """Return whether the batch in hand has changed nothing yet."""
        return not self._is_stepped and self._marks() == self._before

    @property
    def is_undone_by_repeating(self) -> bool:
        """Return whether training the batch again makes good for what it has done so far.

        Gradients are written anew, unless they add to those of batches before.
        """
        if self._is_stepped:
            return False
        now, count = self._marks(), len(self._buffers)
        return now[:count] == self._before[:count] and (not self._is_partial or now == self._before)

    def give_back(self) -> Mapping[str, Any] | None:
        """Give the batch back to its loader.

        Returns:
            The random state right before it was fetched; ``None`` if the loader cannot go back.
        """
        loader = self._loader
        if loader is None or not loader.unread():
            return None
        self._is_given_back = True
        return loader.fetch_rng

    def take_again(self) -> None:
        """Undo :meth:`give_back`, after a save in the middle of a loop that goes on."""
        if self._loader is not None:
            self._loader.reread()
        self._is_given_back = False

    def gradients(self, names: ParameterNames) -> dict[str, Tensor]:
        """Return the gradients that later batches will add to, by parameter; else nothing."""
        is_done = self.is_held and not self._is_given_back
        is_partial = self._leaves_gradients() if is_done else self._is_partial
        if not is_partial:
            return {}
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                found[names.of(parameter) or f"#{index}"] = parameter.grad
        return found

    def restore_gradients(self, stored: Mapping[str, Tensor], names: ParameterNames) -> None:
        """Put stored gradients back."""
        for index, parameter in enumerate(self._parameters):
            gradient = stored.get(names.among(parameter, stored) or f"#{index}")
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device)
        self._is_stepped, self._is_partial = False, bool(stored)

    def _leaves_gradients(self) -> bool:
        return not self._is_stepped and any(p.grad is not None for p in self._parameters)

    def _marks(self) -> list[Any]:
        """Return something that differs once a buffer or a gradient was written."""
        marks: list[Any] = [buffer._version for buffer in self._buffers]
        for parameter in self._parameters[:_NUM_LOOKED_AT]:
            gradient = parameter.grad
            marks.append(None if gradient is None else (id(gradient), gradient._version))
        return marks

    def _note_step(self, *_: Any) -> None:
        self._is_stepped = True
