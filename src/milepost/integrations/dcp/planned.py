"""What a plan of torch.distributed.checkpoint (DCP) says is to be written.

A planner gives each entry a name, says which ranks write which pieces, and hands out the data when
it is asked for. Tensors become boxes whose memory is asked for as late as can be; other values
become trees.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ...convert.dcp_trees import Path, Place, entries_of
from ...convert.torch_file import load_torch_file
from ...engine.live import LiveBytes
from ...engine.loose import LooseBox
from ...errors import MismatchError, UnsupportedStateError
from ...format.digest import crc32c
from ...tensors.boxes import Box, covers_once
from ...tensors.dtypes import CODES, dtype_name, named_dtype
from ...tensors.pack import pack_item

__all__ = ["box_of", "digests_of", "paths_of", "tensors_of", "value_of"]


def paths_of(plans: Sequence[SavePlan]) -> dict[str, Path]:
    """Return the path of every entry by its name, in the order of the state."""
    named: dict[str, Path] = {}
    for plan in plans:
        data = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        named.update((name, tuple(path)) for name, path in data.items() if name not in named)
    planned = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    ordered = [name for name in named if name in planned]
    ordered += [name for name in planned if name not in named]
    return {name: named.get(name, (name,)) for name in ordered}


def tensors_of(
    plans: Sequence[SavePlan],
) -> tuple[dict[str, torch.dtype], dict[str, list[Box]]]:
    """Return the dtype of each tensor, and its pieces.

    Raises:
        MismatchError: The ranks mean different tensors, or their pieces do not cover one.
    """
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for plan in plans:
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                continue
            assert item.tensor_data is not None
            name, data = item.index.fqn, item.tensor_data
            facts = (data.properties.dtype, tuple(data.size))
            if facts != (dtypes.setdefault(name, facts[0]), shapes.setdefault(name, facts[1])):
                raise MismatchError(f"The ranks have different tensors called {name}.")
            boxes[name].append(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    for name, found in boxes.items():
        if not covers_once(found, Box.whole(shapes[name])):
            raise MismatchError(
                f"The pieces of {name} on all ranks do not cover it exactly once.",
                safe="Nothing was written.",
            )
    return dtypes, boxes


def box_of(planner: SavePlanner, item: WriteItem, place: Place) -> LooseBox:
    """Return a piece of a tensor; its memory is asked for when it is written."""
    data = item.tensor_data
    assert data is not None
    dtype, name = data.properties.dtype, item.index.fqn
    if data.properties.layout is not torch.strided or (
        dtype not in CODES and named_dtype(dtype_name(dtype)) is None
    ):
        raise UnsupportedStateError(
            f"{name} is a tensor of {dtype} with the layout {data.properties.layout}, which cannot "
            "be stored.",
            safe="Nothing was committed.",
            path=name,
        )
    box, whole = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), tuple(data.size)

    def get() -> Tensor:
        found = planner.resolve_data(item)
        if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != data.chunk.sizes:
            raise MismatchError(f"The planner has another tensor {name} than the one it planned.")
        return found

    if dtype not in CODES:
        size = dtype.itemsize
        box, whole = Box((*box.offsets, 0), (*box.sizes, size)), (*whole, size)
    live = LiveBytes(get, data.chunk.sizes.numel() * dtype.itemsize)
    return LooseBox(place.key, CODES.get(dtype, "U8"), whole, box, live.num_bytes, live)


def digests_of(planner: SavePlanner) -> dict[str, int]:
    """Return a checksum of each value that is no tensor, as this rank has it, by name.

    Values with tensors in them are left out, and all of a planner that hides its state.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultSavePlanner) or not isinstance(state, Mapping):
        return {}
    found: dict[str, int] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            packed = pack_item("value", value)
            if not packed.leaves:
                found[name] = crc32c(json.dumps(packed.tree, allow_nan=False).encode("ascii"))
    return found


def value_of(planner: SavePlanner, item: WriteItem, place: Place) -> tuple[Any, list[LooseBox]]:
    """Return the tree of a value that is no tensor, and the tensors in it."""
    if (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    ):
        value = planner.lookup_object(item.index)
    else:
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        value = load_torch_file(data)  # only what can be read without running code
    packed = pack_item(place.item, value, at=place.path)
    found = list(entries_of(place.item, packed.tree, at=()))
    if len(found) != 1 or found[0][0] != ():
        raise UnsupportedStateError(
            f"{item.index.fqn} is a container of entries, which would not be found again.",
            safe="Nothing was committed.",
            hint="Use DefaultSavePlanner(flatten_state_dict=True).",
            path=item.index.fqn,
        )
    boxes = [
        LooseBox(
            leaf.key,
            leaf.code,
            leaf.whole_shape,
            leaf.box,
            leaf.num_bytes,
            LiveBytes(lambda tensor=tensor: tensor, leaf.num_bytes),  # type: ignore[misc]
        )
        for leaf, tensor in zip(packed.leaves, packed.tensors, strict=True)
    ]
    return packed.tree, boxes
