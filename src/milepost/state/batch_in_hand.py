"""The batch that the loop's body works on, and whether it has changed anything yet.

Between two batches the state is whole. Within one it is not, and yet users save there, and errors
happen there. What may be saved then depends on how far the batch has come:

    untouched   no optimizer step has begun, no buffer and no gradient was written. The state is
                that of the batch before; the batch is given back to its loader and trained again
                with the random numbers it had.
    stepped     the state is that after this batch.
    in between  gradients or buffers were written, and no step was taken.

Beside that, something small may have changed before all of it: a scheduler, a plain value. Then the
batch is not as good as untouched, for repeating it would change that again.

A batch may also end without a step, when gradients are accumulated over several. Those gradients
are then a part of the state. Each optimizer has steps of its own: one may step in every batch while
another accumulates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import FormatError
from .loader import ResumableLoader
from .names import ParameterNames
from .small import SmallState

__all__ = ["BatchInHand", "num_samples", "version_of"]

_log = logging.getLogger("milepost")


class _Watched:
    """One optimizer, and what is known of the gradients that it will use.

    Attributes:
        parameters: All of its parameters; a frozen one may be trained later.
        is_stepped: Whether it has stepped since the newest batch was taken.
        is_partial: Whether it had gradients to add to when that batch was taken.
        num_steps: How many steps it has begun.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = []
        self.is_stepped = True
        self.is_partial = False
        self.num_steps = 0
        self.before: list[Any] = []
        self._num_groups = 0
        self._handle: Any = None

    def begin(self) -> None:
        """Watch its steps."""
        self.refresh()
        if self._handle is None:
            self._handle = self.optimizer.register_step_pre_hook(self._note_step)

    def end(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self) -> None:
        """Note the state of the gradients before a batch."""
        self.refresh()
        self.before = self.marks()
        self.is_partial = not self.is_stepped and self.before.count(None) < len(self.before)
        self.is_stepped = False

    def refresh(self) -> None:
        """Look for groups of parameters that were added."""
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups:
            self.parameters = [p for group in groups for p in group["params"]]
            self._num_groups = len(groups)

    def leaves_gradients(self) -> bool:
        """Return whether later batches will add to gradients that are there now."""
        return not self.is_stepped and any(p.grad is not None for p in self.parameters)

    def marks(self) -> list[Any]:
        """Return something that differs once a gradient was written."""
        return [
            None if (gradient := p.grad) is None else (id(gradient), version_of(gradient))
            for p in self.parameters
        ]

    def _note_step(self, *_: Any) -> None:
        self.is_stepped = True
        self.num_steps += 1


class BatchInHand:
    """Watches what a batch changes.

    Attributes:
        num_samples: Samples of the batch; ``None`` when none is in hand.
    """

    def __init__(self) -> None:
        self.num_samples: int | None = None
        self._loader: ResumableLoader | None = None
        self._owners: list[dict[str, Tensor | None]] = []
        self._watched: list[_Watched] = []
        self._buffers: list[Tensor] = []
        self._versions: list[int] = []
        self._small: SmallState | None = None
        self._is_given_back = False

    def watch(
        self,
        *,
        optimizers: Iterable[Optimizer],
        models: Iterable[nn.Module],
        small: SmallState | None = None,
    ) -> None:
        """Begin to watch. Optimizers are watched through hooks, buffers by version counters."""
        self.release()
        self._small = small
        known = {id(watched.optimizer): watched for watched in self._watched}
        self._watched = [known.get(id(one)) or _Watched(one) for one in optimizers]
        for watched in self._watched:
            watched.begin()
        modules = (module for model in models for module in model.modules())
        # Live: a buffer that is replaced shows up.
        self._owners = [module._buffers for module in modules if module._buffers]

    def release(self) -> None:
        """Stop watching."""
        for watched in self._watched:
            watched.end()

    def take(self, loader: ResumableLoader, num_samples: int) -> None:
        """Note that the loop's body gets a batch."""
        self._loader, self.num_samples = loader, num_samples
        for watched in self._watched:
            watched.take()
        # Held, so that no other one can take the place of one that is replaced.
        self._buffers = list(self._live_buffers())
        self._versions = [version_of(buffer) for buffer in self._buffers]
        if self._small is not None:
            self._small.take()

    def put_down(self) -> None:
        """Note that the body is done with it."""
        if not self._is_given_back:
            for watched in self._watched:
                watched.is_partial = watched.leaves_gradients()
        self._loader, self.num_samples, self._is_given_back = None, None, False
        self._buffers = []

    @property
    def is_held(self) -> bool:
        """Return whether the body has a batch."""
        return self.num_samples is not None

    @property
    def is_given_back(self) -> bool:
        """Return whether the batch in hand counts as not taken yet."""
        return self._is_given_back

    @property
    def is_untouched(self) -> bool:
        """Return whether nothing was computed from the batch in hand yet."""
        return self._is_unchanged(but_for_new_gradients=False)

    @property
    def is_undone_by_repeating(self) -> bool:
        """Return whether training the batch again makes good for what it has done so far.

        Gradients are written anew, unless they add to those of batches before. A scheduler that was
        stepped would be stepped once more.
        """
        return self._is_unchanged(but_for_new_gradients=True) and not self.changed_small()

    @property
    def num_steps(self) -> int:
        """Return how many steps the watched optimizers have begun."""
        return sum(watched.num_steps for watched in self._watched)

    def changed_small(self) -> list[str]:
        """Return what small things the batch has changed, or may have changed, by name."""
        return [] if self._small is None else self._small.changed()

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
        found: dict[str, Tensor] = {}
        index = 0
        for watched in self._watched:
            watched.refresh()
            # Without a batch the optimizer may have stepped since, at the end of the epoch.
            is_partial = not watched.is_stepped and (is_done or watched.is_partial)
            for parameter in watched.parameters:
                if is_partial and parameter.grad is not None:
                    found[names.of(parameter) or f"#{index}"] = parameter.grad
                index += 1
        return found

    def restore_gradients(self, stored: Mapping[str, Tensor], names: ParameterNames) -> None:
        """Put stored gradients back, and take away those that are not stored.

        One that does not fit its parameter, or that no watched optimizer uses, is dropped with a
        warning.

        Raises:
            FormatError: Something is stored that is no gradient; nothing was changed.
        """
        if not isinstance(stored, Mapping) or not all(
            isinstance(gradient, Tensor) for gradient in stored.values()
        ):
            raise FormatError("What is stored as gradients is none.")
        index, unused = 0, set(stored)
        for watched in self._watched:
            watched.refresh()
            watched.is_stepped, watched.is_partial = False, False
            for parameter in watched.parameters:
                name = names.among(parameter, stored) or f"#{index}"
                unused.discard(name)
                parameter.grad = None
                if name in stored and _set_gradient(name, parameter, stored[name]):
                    watched.is_partial = True
                index += 1
        if unused:
            _log.warning(
                "Stored gradients belong to no parameter of an optimizer that is tracked, and were "
                "left behind: %s.",
                ", ".join(sorted(unused)),
            )

    def _live_buffers(self) -> Iterator[Tensor]:
        return (b for owner in self._owners for b in owner.values() if b is not None)

    def _is_unchanged(self, *, but_for_new_gradients: bool) -> bool:
        if any(watched.is_stepped for watched in self._watched):
            return False
        now = list(self._live_buffers())
        if [*map(id, now)] != [*map(id, self._buffers)]:
            return False
        if [version_of(buffer) for buffer in now] != self._versions:
            return False
        return all(
            watched.marks() == watched.before
            for watched in self._watched
            if watched.is_partial or not but_for_new_gradients
        )


def _set_gradient(name: str, parameter: Tensor, gradient: Tensor) -> bool:
    try:
        parameter.grad = gradient.to(parameter.device)
    except RuntimeError as error:
        _log.warning("The stored gradient of %s does not fit and was dropped: %s", name, error)
        return False
    return True


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; those made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def num_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; 0 if there is none."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((count for part in batch if (count := num_samples(part))), 0)
    return 0
