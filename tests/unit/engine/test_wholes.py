"""Whole tensors out of pieces: every range of them, from whatever pieces they were cut into."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engine.pieces import Piece, StoredWhole
from milepost.engine.wholes import CachedBlocks, boxes_of_range, plan_joined, whole_fill
from milepost.errors import FormatError
from milepost.format.header import ITEM_SIZES
from milepost.stores import MemoryStore
from milepost.tensors.boxes import Box

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_a_range_are_its_elements_in_their_order(shape, data):
    """Each once: what is filled box by box is what a plain slice of the flat tensor is."""
    whole = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    found: list[int] = []
    for box in boxes_of_range(shape, start, stop):
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        found += whole[place].reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes_of_range(shape, start, stop))) <= max(2 * len(shape) - 1, 1)


def cut_up(whole: np.ndarray, rng: random.Random, files: dict[str, bytearray]) -> StoredWhole:
    """Store an array in random pieces of a grid, each somewhere in one of two files."""
    borders = []
    for length in whole.shape:
        inner = rng.sample(range(1, length), min(rng.randrange(3), length - 1)) if length else []
        borders.append([0, *sorted(inner), length])
    stored = StoredWhole("F64", whole.shape)
    for corner in itertools.product(*(itertools.pairwise(one) for one in borders)):
        box = Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        piece = whole[tuple(slice(a, b) for a, b in corner)].tobytes()
        file = rng.choice(sorted(files))
        files[file] += bytes(8 * rng.randrange(3))
        stored.pieces.append(Piece(file, box, len(files[file]), len(files[file]) + len(piece)))
        files[file] += piece
    rng.shuffle(stored.pieces)
    return stored


def blocks_of(files: dict[str, bytearray], block_bytes: int, asked: list) -> CachedBlocks:
    def load(file: str, index: int) -> memoryview:
        asked.append((file, index))
        return memoryview(files[file])[index * block_bytes : (index + 1) * block_bytes]

    return CachedBlocks(load, block_bytes=block_bytes, max_blocks=4)


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.integers(0, 2**32), st.data())
def test_any_range_of_a_tensor_comes_out_of_any_pieces(shape, seed, data):
    """Across borders of pieces, of blocks and of rows."""
    rng = random.Random(seed)
    whole = np.frombuffer(rng.randbytes(8 * int(np.prod(shape, dtype=int)))).reshape(shape)
    files = {"a": bytearray(), "b": bytearray()}
    stored = cut_up(whole, rng, files)
    fill = whole_fill(stored, blocks_of(files, 8 * rng.randint(1, 9), []), name="x")
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    found = bytearray(8 * (stop - start))
    fill(8 * start, memoryview(found))
    assert found == whole.tobytes()[8 * start : 8 * stop]


def test_a_joined_part_is_what_safetensors_writes(tmp_path):
    """With every dtype that has a code there, in the order of their sizes."""
    from safetensors.numpy import load_file

    rng = random.Random(5)
    files = {"a": bytearray(), "b": bytearray()}
    arrays = {f"t{n}": np.frombuffer(rng.randbytes(8 * 6)).reshape(2, 3) for n in range(20)}
    table = {key: cut_up(array, rng, files) for key, array in arrays.items()}
    table["none"] = StoredWhole("F32", (0, 4))
    table["byte"] = StoredWhole(
        "U8", (), [Piece("a", Box((), ()), len(files["a"]), len(files["a"]) + 1)]
    )
    files["a"] += b"\x07"
    part = plan_joined("m.safetensors", table)
    job = part.job("m", table, blocks_of(files, 64, []))
    data = b"".join(bytes(block) for block in job.blocks)
    assert len(data) == part.size_bytes == job.size_bytes
    (tmp_path / "m.safetensors").write_bytes(data)
    found = load_file(tmp_path / "m.safetensors")
    assert set(found) == set(table)
    assert all(found[key].tobytes() == array.tobytes() for key, array in arrays.items())
    assert found["byte"].tolist() == 7
    assert found["none"].shape == (0, 4)
    assert all(entry.start % ITEM_SIZES[entry.dtype] == 0 for entry in part.tensors)


def test_a_hole_or_an_overlap_is_refused():
    """What is not there must not become zeros."""
    files = {"a": bytearray(64)}
    blocks = blocks_of(files, 64, [])
    hole = StoredWhole("F64", (4,), [Piece("a", Box((0,), (3,)), 0, 24)])
    twice = StoredWhole(
        "F64", (4,), [Piece("a", Box((0,), (3,)), 0, 24), Piece("a", Box((2,), (2,)), 24, 40)]
    )
    for stored in (hole, twice):
        with pytest.raises(FormatError, match="exactly once"):
            whole_fill(stored, blocks, name="x")(0, memoryview(bytearray(32)))


def test_blocks_are_kept_up_to_a_number_and_loaded_once_at_a_time():
    """Memory is bounded, and two threads that want one block do not read it twice."""
    loaded: list[int] = []
    gate = threading.Event()

    def load(file: str, index: int) -> memoryview:
        loaded.append(index)
        assert gate.wait(20)
        return memoryview(bytes([index]))

    blocks = CachedBlocks(load, block_bytes=1, max_blocks=2)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(blocks.get("a", 1)[0])) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(20)
    assert (loaded, found) == ([1], [1, 1, 1])
    for index in (2, 3, 1):
        blocks.get("a", index)
    assert loaded == [1, 2, 3, 1]
    assert len(blocks._slots) == 2


def test_a_block_that_failed_is_tried_again():
    """An error must not be taken for a block."""
    failures = [OSError("once")]

    def load(file: str, index: int) -> memoryview:
        if failures:
            raise failures.pop()
        return memoryview(b"x")

    blocks = CachedBlocks(load, block_bytes=1, max_blocks=2)
    with pytest.raises(OSError, match="once"):
        blocks.get("a", 0)
    assert blocks.get("a", 0) == b"x"


def test_a_joined_part_is_written_block_by_block(monkeypatch):
    """By several threads at once, each with memory of its own."""
    from milepost.engine import demand, stream, write
    from milepost.engine.write import write_files
    from milepost.format.digest import crc32c
    from milepost.testing.saver import read_key

    for module in (demand, stream, write):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(demand, "block_count", lambda size: -(-size // 4096))
    monkeypatch.setattr(write, "block_count", lambda size: -(-size // 4096))
    rng = random.Random(1)
    files = {"a": bytearray(), "b": bytearray()}
    arrays = {f"t{n}": np.frombuffer(rng.randbytes(8 * 60 * 61)).reshape(60, 61) for n in range(4)}
    table = {key: cut_up(array, rng, files) for key, array in arrays.items()}
    part = plan_joined("m", table)
    store = MemoryStore()
    monkeypatch.setattr("milepost.format.manifest.block_count", lambda size: -(-size // 4096))
    (entry,) = write_files(store, [part.job("m", table, blocks_of(files, 1024, []))])
    data = bytes(read_key(store, "m"))
    assert entry.crcs == tuple(crc32c(data[at : at + 4096]) for at in range(0, len(data), 4096))
    for tensor in part.tensors:
        assert data[tensor.start : tensor.stop] == arrays[tensor.key].tobytes()
