"""Small tensors that are stored whole: which of those that are wanted can be read many at a time.

There may be very many. So what they have in common is looked at in some of them together, and one
by one only where one of these is unlike what is stored. Those that lie side by side in one block of
a file are copied in one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ..format.digest import BLOCK_BYTES
from ..format.header import StoredTensor
from ..tensors.dtypes import dtype_of_code
from ..tensors.flat import Run
from .parts import Numbers, PartTable, Places
from .ranges import Batch

__all__ = ["is_small_whole", "small_wholes"]

_SMALL_BYTES = 256 * 1024
"""Tensors of fewer bytes are copied together with their neighbours."""

_TOGETHER = 256
"""How many are looked at, and copied, together: they still are in a cache when the next property is
read. And the views that are made to copy them are gone before Python would look for garbage."""

_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_is_cpu, _layout_of = attrgetter("is_cpu"), attrgetter("layout")
_TYPES, _LAYOUTS = frozenset({Tensor, Parameter}), frozenset({torch.strided})


def small_wholes(
    table: PartTable, keys: Sequence[str], ones: Sequence[Tensor | Run]
) -> tuple[dict[str, list[Batch]], list[int]]:
    """Return what to read for small tensors that are wanted and stored whole.

    Args:
        table: Where the tensors of an item lie.
        keys: The names of those that are wanted.
        ones: Where each goes.

    Returns:
        What to read by file, and the places in ``keys`` of those that are to be read otherwise.
    """
    places = table.places(keys)
    sizes = places.stops - places.starts
    fits = (sizes > 0) & (sizes < _SMALL_BYTES)
    fits &= places.starts // BLOCK_BYTES == (places.stops - 1) // BLOCK_BYTES
    kinds = places.kinds.tolist()
    dtypes = [dtype_of_code(code) for code, _ in table.kinds]
    shapes = [shape for _, shape in table.kinds]
    taken: list[int] = []
    found: list[Any] = []
    candidates = np.flatnonzero(fits).tolist()
    for start in range(0, len(candidates), _TOGETHER):
        rows = candidates[start : start + _TOGETHER]
        some = [ones[row] for row in rows]
        stored = [dtypes[kinds[row]] for row in rows]
        if not _are_like(some, stored, [shapes[kinds[row]] for row in rows]):
            rows = [row for row in rows if is_small_whole(ones[row], table.place(keys[row])[1])]
            stored = [ones[row].dtype for row in rows]
        taken += rows
        found += stored
    is_left = np.ones(len(keys), dtype=bool)
    is_left[taken] = False
    numbers = {one: number for number, one in enumerate(dict.fromkeys(found))}
    numbered = np.array(list(map(numbers.__getitem__, found)), dtype=np.int64)
    picked = np.array(taken, dtype=np.int64)
    batches = _batches(table, places, picked, numbered, keys, ones)
    return batches, np.flatnonzero(is_left).tolist()


def is_small_whole(one: Tensor | Run, entry: StoredTensor) -> TypeGuard[Tensor]:
    """Return whether a tensor can be read together with others.

    Args:
        one: Where it goes.
        entry: What is stored.
    """
    size = entry.stop - entry.start
    return (
        isinstance(one, Tensor)
        and 0 < size < _SMALL_BYTES
        and entry.start // BLOCK_BYTES == (entry.stop - 1) // BLOCK_BYTES
        and type(one) in _TYPES
        and one.device.type == "cpu"
        and one.layout is torch.strided
        and one.shape == entry.shape
        and one.nbytes == size
        and not one.is_quantized
        and not one.is_conj()
        and not one.is_neg()
    )


def _are_like(some: list[Any], dtypes: list[Any], shapes: list[tuple[int, ...]]) -> bool:
    """Return whether all of some tensors are plain ones of the host, just like what is stored."""
    return (
        _TYPES.issuperset(map(type, some))
        and list(map(_dtype_of, some)) == dtypes
        and list(map(_shape_of, some)) == shapes
        and all(map(_is_cpu, some))
        and _LAYOUTS.issuperset(map(_layout_of, some))
        and not any(map(Tensor.is_conj, some))
        and not any(map(Tensor.is_neg, some))
    )


def _batches(
    table: PartTable,
    places: Places,
    picked: Numbers,
    dtypes: Numbers,
    keys: Sequence[str],
    ones: Sequence[Any],
) -> dict[str, list[Batch]]:
    """Return those of one file, block and dtype that lie side by side, some of them at a time."""
    batches: dict[str, list[Batch]] = defaultdict(list)
    if not len(picked):
        return batches
    order = np.lexsort((places.starts[picked], places.files[picked]))
    picked, dtypes = picked[order], dtypes[order]
    files, starts, stops = places.files[picked], places.starts[picked], places.stops[picked]
    kinds = places.kinds[picked]
    is_next = (files[1:] == files[:-1]) & (starts[1:] == stops[:-1]) & (dtypes[1:] == dtypes[:-1])
    is_next &= starts[1:] // BLOCK_BYTES == starts[:-1] // BLOCK_BYTES
    rows = picked.tolist()
    for first, end in pairwise([0, *(np.flatnonzero(~is_next) + 1).tolist(), len(rows)]):
        for low in range(first, end, _TOGETHER):
            high = min(low + _TOGETHER, end)
            some = rows[low:high]
            kind = kinds[low] if (kinds[low:high] == kinds[low]).all() else None
            batches[table.files[int(files[low])]].append(
                Batch(
                    [keys[row] for row in some],
                    int(starts[low]),
                    int(stops[high - 1]),
                    [ones[row] for row in some],
                    None if kind is None else table.kinds[int(kind)][1],
                )
            )
    return batches
