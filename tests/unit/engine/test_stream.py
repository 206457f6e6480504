"""Parts that are made while they are written: the bytes are those of a part made at once."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from milepost.engine import stream
from milepost.engine.live import LiveBytes
from milepost.engine.loose import LooseBox, write_boxes
from milepost.engine.plan import make_plan
from milepost.errors import NoSpaceError
from milepost.format.digest import BLOCK_BYTES
from milepost.format.header import encode_header
from milepost.format.manifest import FileEntry
from milepost.stores.memory import MemoryStore
from milepost.tensors.boxes import Box, covers_once
from milepost.tensors.pack import pack_item


def loose(key: str, value: torch.Tensor) -> LooseBox:
    size = value.numel() * value.itemsize
    shape = tuple(value.shape)
    return LooseBox(key, "F32", shape, Box.whole(shape), size, LiveBytes(lambda: value, size))


def test_a_part_of_many_blocks_holds_every_byte_in_its_place() -> None:
    """Tensors begin and end anywhere in a block, fill several, or are empty."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, BLOCK_BYTES // 4 - 20, 0, 1, 2 * BLOCK_BYTES // 4 + 7, 5]
    values = {f"t{n}": torch.randn(count, generator=generator) for n, count in enumerate(lengths)}
    values["transposed"] = torch.randn(30, 40, generator=generator).T
    store = MemoryStore()
    boxes = [loose(key, value) for key, value in values.items()]
    (entry,) = write_boxes(store, "c", {"model": boxes, "none": []}, rank=None)
    found = load(store.get("c/model.safetensors"))
    assert set(found) == set(values)
    assert all(torch.equal(found[key], values[key]) for key in values)
    assert FileEntry.from_json(entry.to_json(), where="x") == entry


def test_a_tensor_is_asked_for_once_and_let_go_of() -> None:
    """Where it had to be copied to the host, only what is being written is held there."""
    asked: list[str] = []
    value = torch.randn(3 * BLOCK_BYTES // 4)

    def get() -> torch.Tensor:
        asked.append("x")
        return value

    live = LiveBytes(get, value.numel() * 4)
    box = LooseBox("w", "F32", tuple(value.shape), Box.whole(value.shape), live.num_bytes, live)
    store = MemoryStore()
    write_boxes(store, "c", {"model": [box]}, rank=0)
    assert asked == ["x"]
    assert live._flat is None


def test_an_error_in_a_fill_leaves_no_file() -> None:
    """Of whatever thread it was in."""

    def fill(start: int, view: memoryview) -> None:
        raise NoSpaceError("by hand")

    box = LooseBox("w", "U8", (20,), Box.whole((20,)), 20, fill)
    store = MemoryStore()
    with pytest.raises(NoSpaceError):
        write_boxes(store, "c", {"model": [box]}, rank=0)
    assert list(store.list()) == []


def test_blocks_are_made_in_order_of_the_file_and_one_at_a_time() -> None:
    """They share memory: a slice of them could not be right."""
    header, entries = encode_header([("w", "U8", (9,), 9)])
    job = stream.part_job(
        "k", "k", header=header, tensors=entries,
        fills=[lambda start, view: view.__setitem__(slice(None), bytes([7] * len(view)))],
    )  # fmt: skip
    assert job.size_bytes == len(header) + 9
    assert b"".join(bytes(block) for block in job.blocks) == header + bytes([7] * 9)
    with pytest.raises(IndexError):
        job.blocks[1]
    with pytest.raises(TypeError):
        job.blocks[0:1]


boxes = st.builds(
    lambda a, b: Box((a[0], b[0]), (a[1], b[1])),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(boxes, max_size=5), whole=boxes)
def test_covering_once_is_what_counting_every_element_says(pieces: list[Box], whole: Box) -> None:
    """The sweep against a count, on grids small enough to count."""

    def elements(box: Box) -> list[tuple[int, ...]]:
        ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
        return list(itertools.product(*ranges))

    counted = sorted(e for box in pieces for e in elements(box))
    assert covers_once(pieces, whole) == (counted == elements(whole))
    tiles = [Box((x, y), (1, 1)) for x, y in elements(whole)]
    assert covers_once(tiles[::-1], whole)
    assert covers_once([Box((), ())], Box((), ()))
    assert not covers_once([Box((), ())] * 2, Box((), ()))
    assert math.prod(whole.sizes) == len(tiles)


def test_small_tensors_lie_together_before_large_ones() -> None:
    """Whoever wants only them, as ranks want the counters of all, reads one block of the part."""
    values = {f"t{n}": torch.zeros(1 if n % 2 else 3_000_000) for n in range(6)}
    store = MemoryStore()
    write_boxes(store, "c", {"model": [loose(k, v) for k, v in values.items()]}, rank=0)
    placed = pack_item("model", values)
    (part,) = make_plan([placed]).parts
    for small in ("t1", "t3", "t5"):
        entry = next(one for one in part.tensors if one.key == small)
        assert entry.stop <= len(part.header) + 12
    table = json.loads(store.get("c/index-r00000.json"))["items"]["model"]["pieces"]
    assert max(row[7] for row in table if row[2] == [1]) <= min(
        row[6] for row in table if row[2] != [1]
    )
