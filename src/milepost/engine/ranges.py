"""Bytes of files, and where in memory they go.

Bytes that lie in memory as they lie in the file are written there at once. Others, such as some
columns of a matrix, are put together beside it in portions of at most a block each, that are copied
and dropped once they are whole: so what is held beside the target is a few blocks, however large
the tensors are and however they were cut.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.nn import Parameter

from ..format.digest import BLOCK_BYTES
from ..stores.pages import page_memory
from ..tensors.boxes import Box
from ..tensors.memory import host_bytes
from .pieces import Cut

__all__ = ["Batch", "Bytes", "Range", "ranges_of"]

_PORTION_BYTES = BLOCK_BYTES
"""How many bytes are put together at most: a portion of this size lies in two blocks."""

_PAGES_BYTES = 128 * 1024
"""From how many bytes on a portion has pages of its own, which go back to the system with it. An
allocator that large pieces come from and go to in turns may keep many times as much."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file, and where they go.

    Attributes:
        tensor: The tensor they are.
        start: The first byte.
        stop: The byte after the last.
        target: The flat bytes they go to, or what puts them together.
    """

    tensor: str
    start: int
    stop: int
    target: Bytes | _Portion

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return what the bytes are of."""
        return (self.tensor,)

    def fill(self, at: int, data: Bytes) -> None:
        """Take some of the bytes, from byte ``at`` of the file on."""
        low = at - self.start
        if isinstance(self.target, _Portion):
            self.target.fill(low, data)
        else:
            self.target[low : low + len(data)] = data

    def memory(self, low: int, high: int) -> memoryview | None:
        """Return where bytes ``low`` to ``high`` of the file go, if they lie there side by side."""
        if isinstance(self.target, _Portion):
            return None
        return self.target.data[low - self.start : high - self.start]


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole tensors that lie side by side in one block of a file, copied in one call.

    Attributes:
        tensors: Their names.
        start: The first byte.
        stop: The byte after the last.
        targets: Where they go: tensors of one dtype on the host.
        shape: That of each, if all have the same one.
    """

    tensors: list[str]
    start: int
    stop: int
    targets: list[Tensor]
    shape: tuple[int, ...] | None = None

    def fill(self, at: int, data: Bytes) -> None:  # noqa: ARG002 - it always is the beginning
        """Take the bytes, all of them."""
        if not data.flags.writeable:
            data = data.copy()  # or torch would warn, though nobody writes to it
        flat = torch.from_numpy(data).view(self.targets[0].dtype)
        views: tuple[Tensor, ...] | list[Tensor]
        if self.shape is None:
            views = _unflatten_dense_tensors(flat, self.targets)  # type: ignore[no-untyped-call]
        else:  # half the work, for views that are made in one step
            views = flat.view(len(self.targets), *self.shape).unbind()
        torch._foreach_copy_(self.targets, views)

    def memory(self, low: int, high: int) -> None:
        """Return nothing: the bytes go to many places."""


class _Portion:
    """Bytes that are put together beside their place: memory for them is held only meanwhile.

    Args:
        num_bytes: How many.
        place: Where the values belong.
        strides: How far apart these are in the bytes, in elements of each dimension.
    """

    def __init__(self, num_bytes: int, place: Tensor, strides: Sequence[int]) -> None:
        self._num_bytes = self._missing_bytes = num_bytes
        self._place = place
        self._strides = strides
        self._memory: Bytes | None = None
        self._lock = threading.Lock()
        # That of the caller, whatever thread copies: it orders the copy after earlier work.
        is_cuda = place.device.type == "cuda"
        self._stream = torch.cuda.current_stream(place.device) if is_cuda else None

    def fill(self, low: int, data: Bytes) -> None:
        """Take some of the bytes; with the last of them the values go to their place."""
        with self._lock:
            if self._memory is None:
                self._memory = _memory(self._num_bytes)
            memory = self._memory
        memory[low : low + len(data)] = data
        with self._lock:
            self._missing_bytes -= len(data)
            if self._missing_bytes:
                return
            self._memory = None
        flat = torch.from_numpy(memory).view(self._place.dtype)
        values = flat.as_strided(self._place.shape, self._strides)
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream:
            self._place.copy_(values)


def _memory(num_bytes: int) -> Bytes:
    if num_bytes < _PAGES_BYTES:
        return np.empty(num_bytes, dtype=np.uint8)
    return np.frombuffer(page_memory(num_bytes), dtype=np.uint8, count=num_bytes)


def ranges_of(cut: Cut, box: Box, live: Tensor, *, tensor: str) -> Iterator[Range]:
    """Yield what to read for a cut of a tensor.

    What is written into CPU tensors goes past torch, so their versions are counted up here.

    Args:
        cut: The cut.
        box: The box that is wanted.
        live: Memory for the box.
        tensor: The tensor, for messages.
    """
    place = live[cut.shared.slices(within=box)] if cut.shared != box else live
    if not live.is_inference():
        torch.autograd.graph.increment_version(live)
    return _ranges(place, cut.start, cut.strides, tensor)


def _ranges(place: Tensor, start: int, strides: Sequence[int], tensor: str) -> Iterator[Range]:
    sizes = place.shape
    steps = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    span = 1 + sum(steps)
    num_bytes = span * place.element_size()
    is_flat = span == place.numel() and place.is_contiguous()
    is_flat = is_flat and not (place.is_conj() or place.is_neg())
    if is_flat and place.device.type == "cpu" and type(place) in (Tensor, Parameter):
        yield Range(tensor, start, start + num_bytes, host_bytes(place))
    elif num_bytes <= _PORTION_BYTES:
        portion = _Portion(num_bytes, place, strides)
        yield Range(tensor, start, start + num_bytes, portion)
    else:
        # Where the elements are farthest apart, so that the halves lie one behind the other.
        dim = steps.index(max(steps))
        half = sizes[dim] // 2
        step_bytes = strides[dim] * place.element_size()
        first, second = place.narrow(dim, 0, half), place.narrow(dim, half, sizes[dim] - half)
        yield from _ranges(first, start, strides, tensor)
        yield from _ranges(second, start + half * step_bytes, strides, tensor)
