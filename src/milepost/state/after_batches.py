"""What a loop does after the last batch of an epoch, and before the epoch is counted.

Schedulers step there, and validations run. A checkpoint that is made there says that the batches
are done and the epoch is not, so that a resume does all of it again. That is exact only if nothing
of it has changed the state yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .loader import ResumableLoader
from .marks import version_of
from .places import buffers_in, parameters_in, places_in
from .rng import capture_rng
from .small import SmallState, mark_of

__all__ = ["AfterBatches"]

_PLAIN = (Tensor, nn.Parameter)


class AfterBatches:
    """Looks what has changed since the last batch of an epoch.

    Attributes:
        is_begun: Whether the batches of an epoch have run out, and the epoch is not counted yet.
        rng: The random state that belongs to the position of the loader then.
    """

    def __init__(self) -> None:
        self.is_begun = False
        self.rng: Mapping[str, Any] | None = None
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._small: SmallState | None = None
        self._loaders: dict[str, ResumableLoader] = {}
        self._before: dict[str, Any] = {}

    def begin(
        self,
        loader: ResumableLoader,
        *,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        small: SmallState,
        loaders: Mapping[str, ResumableLoader],
    ) -> None:
        """Note the state after the last batch.

        Args:
            loader: The loader that has run out.
            models: Tracked models by name.
            optimizers: Tracked optimizers by name.
            small: Everything else that is tracked.
            loaders: All tracked loaders. Where one that keeps its own position is, is not known.
        """
        self._models, self._optimizers = dict(models), dict(optimizers)
        self._small = small
        self._loaders = {name: one for name, one in loaders.items() if one is not loader}
        small.take()
        self._before = self._marks()
        # A sampler may draw at the end of an epoch, and does so again when it is asked again.
        self.rng = capture_rng() if loader.kind == "stateful" else loader.fetch_rng
        self.is_begun = True

    def end(self) -> None:
        """Note that the epoch is counted, or that other batches begin."""
        self.is_begun, self.rng, self._before, self._small = False, None, {}, None

    def changes(self) -> list[str]:
        """Return what has changed since, by name, and that of which it cannot be known."""
        if not self.is_begun or self._small is None:
            return []
        now = self._marks()
        changed = [name for name, marks in now.items() if marks != self._before.get(name)]
        return [*changed, *self._small.changed()]

    def _marks(self) -> dict[str, Any]:
        marks: dict[str, Any] = {}
        for name, model in self._models.items():
            places = list(places_in(model))
            tensors = [one for _, one in chain(parameters_in(places), buffers_in(places))]
            # The tensors are held, so that no other one can take the place of one that is replaced.
            marks[name] = (
                _Same(tensors),
                [version_of(tensor) for tensor in tensors],
                _samples(tensors),
            )
        for name, optimizer in self._optimizers.items():
            marks[name] = (
                [
                    _mark_or_none({key: one for key, one in group.items() if key != "params"})
                    for group in optimizer.param_groups
                ],
                _state_versions(optimizer),
            )
        marks.update((name, loader.mark()) for name, loader in self._loaders.items())
        return marks


class _Same:
    """Compares equal to another one of the very same tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and [*map(id, self.tensors)] == [*map(id, other.tensors)]

    __hash__ = None  # type: ignore[assignment]


def _mark_or_none(options: Mapping[str, Any]) -> Any:
    marks = {}
    for key, value in options.items():
        try:
            marks[key] = mark_of(value)
        except ValueError:  # no number: such as a function that was given as an option
            marks[key] = id(value)
    return marks


def _state_versions(optimizer: Optimizer) -> list[int]:
    return [
        version_of(value)
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _samples(tensors: list[Tensor]) -> bytes:
    """Return one number of each: what is written through ``.data`` moves no version counter."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if is_plain and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            middle = tensor.detach()[tuple(size // 2 for size in tensor.shape)]
            found.setdefault(tensor.device, []).append(middle.to(torch.float32))
    return b"".join(torch.stack(ones).cpu().numpy().tobytes() for ones in found.values())
