"""Whether small things have changed: schedulers, scalers, plain values.

Nothing large is copied for it. A value of plain Python is compared as it is, and a tensor by its
version counter, so that an accelerator is not waited for. Of an object with a state of its own the
attributes are compared: its ``state_dict`` may take long, and is called for saves only. Of what is
larger, of another kind, or slow to ask, it is not known whether it has changed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from .objects import ValuePart
from .parts import Part

__all__ = ["SmallState", "mark_of"]

_log = logging.getLogger("milepost")

_MOST_VALUES = 256
_MOST_BYTES = 1024
_SLOW_S = 0.002
_MOST_SLOW = 8


class SmallState:
    """Compares small objects with what they were.

    Args:
        parts: The objects, by the names that users know.
        is_timed: Whether one that turns out slow to ask is not asked again.
    """

    def __init__(self, parts: Mapping[str, Part], *, is_timed: bool) -> None:
        self._get = {name: _getter(part) for name, part in parts.items()}
        self._is_timed = is_timed
        self._unknown: set[str] = set()
        self._num_slow: dict[str, int] = {}
        self._before: dict[str, Any] = {}

    def take(self) -> None:
        """Note what they are now."""
        self._before = {name: self._mark(name) for name in self._get if name not in self._unknown}

    def changed(self) -> list[str]:
        """Return the names of those that are not what they were, or of which that is not known."""
        return [
            name
            for name in self._get
            if name in self._unknown
            or self._mark(name) != self._before.get(name)
            or name in self._unknown  # only now
        ]

    def _mark(self, name: str) -> Any:
        started_s = time.perf_counter()
        try:
            mark = mark_of(self._get[name]())
        except Exception as error:  # noqa: BLE001 - a save will raise it; here it is only not known
            _log.debug("Whether %s changes within a batch is not known: %s", name, error)
            self._unknown.add(name)
            return None
        if self._is_timed and time.perf_counter() - started_s > _SLOW_S:
            self._num_slow[name] = self._num_slow.get(name, 0) + 1
            if self._num_slow[name] == _MOST_SLOW:
                self._unknown.add(name)
        return mark


def mark_of(value: Any) -> Any:
    """Return something that is equal as long as a value is the same.

    Raises:
        ValueError: The value is too large, or of a kind that is not compared.
    """
    return _mark(value, [_MOST_VALUES])


def _mark(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("too many values")
    kind = type(value)
    if value is None or kind in (bool, int):
        return kind, value
    if kind is float:
        return kind, value.hex()  # NaN is equal to itself
    if kind in (str, bytes) and len(value) <= _MOST_BYTES:
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(_mark(one, left) for one in value)
    if isinstance(value, Mapping) and kind.__module__ in ("builtins", OrderedDict.__module__):
        return kind, tuple((_mark(key, left), _mark(one, left)) for key, one in value.items())
    if isinstance(value, Tensor):
        return _mark_of_tensor(value)
    if kind.__module__ == "numpy" and getattr(value, "nbytes", _MOST_BYTES + 1) <= _MOST_BYTES:
        return kind, str(value.dtype), value.shape, value.tobytes()
    raise ValueError(f"{kind.__qualname__} is not compared")


def _mark_of_tensor(tensor: Tensor) -> Any:
    if tensor.nbytes > _MOST_BYTES:
        raise ValueError("a large tensor")
    about = (tensor.dtype, tuple(tensor.shape))
    if tensor.device.type == "cpu":
        return about, repr(tensor.tolist())
    version = 0 if tensor.is_inference() else tensor._version
    # Held, so that no other one can take its place.
    return about, _Held(tensor), tensor.data_ptr(), version


class _Held:
    """Keeps a tensor alive and compares equal to any other."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    __hash__ = None  # type: ignore[assignment]


def _getter(part: Part) -> Callable[[], Any]:
    target = getattr(part, "target", None)
    if isinstance(target, GradScaler):
        # Its state dict waits for the accelerator.
        scaler = target
        return lambda: [getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)]
    if isinstance(part, ValuePart) or isinstance(target, LRScheduler):
        return part.capture
    return lambda: _attributes(target)


class _Plain:
    """Has attributes and nothing else."""


def _attributes(target: Any) -> dict[str, Any]:
    kind = type(target)
    if (kind.__basicsize__, kind.__itemsize__) != (_Plain.__basicsize__, 0):
        raise ValueError(f"{kind.__qualname__} has more than its attributes")
    attributes: dict[str, Any] = vars(target)
    return attributes
