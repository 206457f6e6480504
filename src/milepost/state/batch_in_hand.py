"""The batch that the loop's body works on, and whether it has changed anything yet.

Between two batches the state is whole. Within one it is not, and yet users save there, and errors
happen there. What may be saved then depends on how far the batch has come:

    untouched   no optimizer step has begun, no buffer, parameter or gradient was written, unless
                to zeros. The state is that of the batch before; the batch is given back to its
                loader and trained again with the random numbers it had.
    stepped     the state is that after this batch.
    in between  gradients, parameters or buffers were written, and no step was taken.

Beside that, something small may have changed before all of it: a scheduler, a plain value. Then the
batch is not as good as untouched, for repeating it would change that again.

A batch may also end without a step, when gradients are accumulated over several. Those gradients
are then a part of the state. Each optimizer has steps of its own: one may step in every batch while
another accumulates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from ..errors import FormatError
from .loader import ResumableLoader
from .marks import Marks, ModuleTensors, gradients_of, is_zero
from .names import ParameterNames
from .small import SmallState

__all__ = ["BatchInHand", "num_samples"]

_log = logging.getLogger("milepost")


class _Watched:
    """One optimizer, and what is known of the gradients that it will use.

    Gradients that are still those of its newest step are left over: nobody adds to them.

    Attributes:
        parameters: All of its parameters; a frozen one may be trained later.
        is_stepped: Whether it has stepped since the newest batch was taken.
        num_steps: How many steps it has begun.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = []
        self.is_stepped = False
        self.num_steps = 0
        self._is_partial = False
        self._before = Marks()
        self._left_over = Marks()
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Watch its steps."""
        self.refresh()
        if not self._handles:
            self._handles = [
                self.optimizer.register_step_pre_hook(self._note_step),
                self.optimizer.register_step_post_hook(self._note_gradients),
            ]

    def end(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self) -> None:
        """Note the state of the gradients before a batch."""
        self._before = self._marks()
        self._is_partial = any(self._before.differ_from(self._left_over))
        self.is_stepped = False

    def refresh(self) -> None:
        """Find the parameters: groups are added, and parameters exchanged within one."""
        groups = self.optimizer.param_groups
        self.parameters = list(chain.from_iterable(group["params"] for group in groups))

    def is_unchanged(self, *, but_for_new_gradients: bool) -> bool:
        """Return whether the batch has written to no gradient.

        Args:
            but_for_new_gradients: Whether one may be written that adds to none of batches before.
        """
        marks = self._marks()
        if marks == self._before:
            return True
        if self._is_partial:
            return False
        # What zero_grad does is nothing that is computed from the batch.
        return but_for_new_gradients or _are_zero(self.parameters, marks.differ_from(self._before))

    def accumulated(self, *, before_batch: bool) -> list[Tensor | None]:
        """Return the gradients that later batches will add to, by parameter.

        Args:
            before_batch: Return those from before the batch in hand. It is taken again.
        """
        marks = self._marks()
        none: list[Tensor | None] = [None] * len(self.parameters)
        if before_batch and marks != self._before:
            return none
        is_new = marks.differ_from(self._left_over)
        if not any(is_new) or _are_zero(self.parameters, is_new):
            return none
        return gradients_of(self.parameters)

    def begin_anew(self) -> None:
        """Take the gradients that are there for those that later batches will add to."""
        self.is_stepped, self._left_over, self._before = False, Marks(), self._marks()
        self._is_partial = any(self._before.differ_from(self._left_over))

    def _marks(self) -> Marks:
        self.refresh()
        return Marks(gradients_of(self.parameters))

    def _note_step(self, *_: Any) -> None:
        self.is_stepped = True
        self.num_steps += 1

    def _note_gradients(self, *_: Any) -> None:
        self._left_over = self._marks()


class BatchInHand:
    """Watches what a batch changes.

    Attributes:
        num_samples: Samples of the batch; ``None`` when none is in hand.
    """

    def __init__(self) -> None:
        self.num_samples: int | None = None
        self._loader: ResumableLoader | None = None
        self._watched: list[_Watched] = []
        self._tensors = ModuleTensors(())
        self._buffers = Marks()
        self._weights: list[Tensor] = []
        self._weight_marks = Marks()
        self._others: list[Tensor] = []
        self._other_gradients = Marks()
        self._small: SmallState | None = None
        self._is_given_back = False

    def watch(
        self,
        *,
        optimizers: Iterable[Optimizer],
        models: Iterable[nn.Module],
        small: SmallState | None = None,
    ) -> None:
        """Begin to watch. Optimizers are watched through hooks, tensors by version counters."""
        self.release()
        self._small = small
        known = {id(watched.optimizer): watched for watched in self._watched}
        self._watched = [known.get(id(one)) or _Watched(one) for one in optimizers]
        for watched in self._watched:
            watched.begin()
        self._tensors = ModuleTensors(models)

    def release(self) -> None:
        """Stop watching."""
        for watched in self._watched:
            watched.end()

    def take(self, loader: ResumableLoader, num_samples: int) -> None:
        """Note that the loop's body gets a batch."""
        self._loader, self.num_samples = loader, num_samples
        for watched in self._watched:
            watched.take()
        self._buffers = Marks(self._tensors.buffers(), is_held=True)
        self._weights = self._tensors.parameters()
        self._weight_marks = Marks(self._weights, is_held=True)
        ours = set(map(id, chain.from_iterable(one.parameters for one in self._watched)))
        self._others = [one for one in self._weights if id(one) not in ours]
        self._other_gradients = Marks(gradients_of(self._others))
        if self._small is not None:
            self._small.take()

    def put_down(self) -> None:
        """Note that the body is done with it."""
        self._loader, self.num_samples, self._is_given_back = None, None, False
        self._buffers = self._weight_marks = self._other_gradients = Marks()
        self._weights, self._others = [], []

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
        found: dict[str, Tensor] = {}
        index = 0
        for watched in self._watched:
            gradients = watched.accumulated(before_batch=self._is_given_back)
            for parameter, gradient in zip(watched.parameters, gradients, strict=True):
                if gradient is not None:
                    found[names.of(parameter) or f"#{index}"] = gradient
                index += 1
        return found

    def restore_gradients(
        self, stored: Mapping[str, Tensor], names: ParameterNames
    ) -> Mapping[str, Tensor]:
        """Put stored gradients back, and take away those that are not stored.

        One that does not fit its parameter, or that no watched optimizer uses, is dropped with a
        warning.

        Returns:
            Those that no watched optimizer uses; see :meth:`add_gradients`.

        Raises:
            FormatError: Something is stored that is no gradient; nothing was changed.
        """
        if not isinstance(stored, Mapping) or not all(
            isinstance(gradient, Tensor) for gradient in stored.values()
        ):
            raise FormatError("What is stored as gradients is none.")
        for watched in self._watched:
            watched.refresh()
            for parameter in watched.parameters:
                parameter.grad = None
        unused = self.add_gradients(stored, names)
        for watched in self._watched:
            watched.begin_anew()
        if unused:
            _log.warning(
                "Stored gradients belong to no parameter of an optimizer that is tracked, and were "
                "left behind: %s.",
                ", ".join(sorted(unused)),
            )
        return unused

    def add_gradients(
        self, stored: Mapping[str, Tensor], names: ParameterNames
    ) -> Mapping[str, Tensor]:
        """Put some stored gradients back, and leave all others as they are.

        Returns:
            Those that no watched optimizer uses.
        """
        index, unused = 0, dict(stored)
        for watched in self._watched:
            watched.refresh()
            for parameter in watched.parameters:
                name = names.among(parameter, stored) or f"#{index}"
                unused.pop(name, None)
                if name in stored:
                    _set_gradient(name, parameter, stored[name])
                index += 1
        return unused

    def _is_unchanged(self, *, but_for_new_gradients: bool) -> bool:
        if any(watched.is_stepped for watched in self._watched):
            return False
        if Marks(self._tensors.buffers(), is_held=True) != self._buffers:
            return False
        if not self._are_weights_unchanged():
            return False
        return all(
            watched.is_unchanged(but_for_new_gradients=but_for_new_gradients)
            for watched in self._watched
        )

    def _are_weights_unchanged(self) -> bool:
        """Return whether no parameter was written to, nor may have been where no hook tells.

        What comes of the gradients of a parameter that no watched optimizer has is not known: with
        one of them in hand the parameter may have been changed through ``.data``.
        """
        # In a process group, parameters may be exchanged for those of all ranks in a forward pass.
        is_shared = dist.is_available() and dist.is_initialized()
        weights = self._weights if is_shared else self._tensors.parameters()
        if Marks(weights, is_held=True) != self._weight_marks:
            return False
        others = Marks(gradients_of(self._others))
        return _are_zero(self._others, others.differ_from(self._other_gradients))


def _are_zero(parameters: Sequence[Tensor], places: Iterable[bool]) -> bool:
    """Return whether the gradients at these places are all zeros, as far as they are there."""
    gradients = gradients_of(compress(parameters, places))
    return all(gradient is None or is_zero(gradient) for gradient in gradients)


def _set_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    try:
        parameter.grad = gradient.to(parameter.device)
    except RuntimeError as error:
        _log.warning("The stored gradient of %s does not fit and was dropped: %s", name, error)


def num_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; 0 if there is none."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((count for part in batch if (count := num_samples(part))), 0)
    return 0
