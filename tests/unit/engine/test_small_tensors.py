"""Many small tensors: copied many at a time, and none of them differently for it."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from milepost.checkpoint import Checkpoint
from milepost.engine.parts import PartTable
from milepost.engine.ranges import Batch
from milepost.engine.small import is_small_whole, small_wholes
from milepost.errors import FormatError
from milepost.format.digest import BLOCK_BYTES
from milepost.format.header import StoredTable, StoredTensor
from milepost.stores import LocalStore, MemoryStore

DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float64, torch.uint8]


def many(num=600):
    """Small tensors of all kinds, three blocks of them, and some that are larger."""
    generator = torch.Generator().manual_seed(5)
    state = {}
    for index in range(num):
        shape = [(), (7,), (3, 5), (0, 4), (2, 1, 3), (9_000,)][index % 6]
        raw = torch.randint(0, 255, (*shape, 8), generator=generator, dtype=torch.uint8)
        dtype = DTYPES[index // 6 % len(DTYPES)]
        state[f"t{index}"] = raw.sum(-1).to(dtype)
    for index in range(5):
        state[f"large{index}"] = torch.randn(1_000_000 + index, generator=generator)
    return state


def targets(state):
    """Places of every kind: plain, parameters, columns of larger ones, transposed."""
    into = {}
    for index, (key, value) in enumerate(state.items()):
        live = torch.zeros_like(value)
        if index % 4 == 1 and value.is_floating_point():
            live = nn.Parameter(live)
        elif index % 4 == 2 and value.dim() == 2:
            live = torch.zeros(value.shape[0], 2 * value.shape[1], dtype=value.dtype)[:, ::2]
        elif index % 4 == 3 and value.dim() == 2:
            live = torch.zeros(*value.shape[::-1], dtype=value.dtype).t()
        into[key] = live
    return into


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_any_of_them_are_read_to_any_place(new_lab, tmp_path, is_local, share):
    """Gaps between what is wanted, views of other memory, and parameters that are trained."""
    state, store = many(), LocalStore(tmp_path) if is_local else MemoryStore()
    new_lab(store).save("a", {"model": state})
    into = targets(state)
    chosen = [key for key in into if random.Random(key).random() < share]
    random.Random(1).shuffle(chosen)
    before = {key: live._version for key, live in into.items()}
    Checkpoint(store, "a").source().read([("model", key, into[key]) for key in chosen])
    for key, live in into.items():
        expected = state[key] if key in chosen else torch.zeros_like(state[key])
        assert torch.equal(live, expected), key
        if key in chosen and live.numel():
            assert live._version > before[key]  # or a backward pass would not notice


def test_a_part_that_another_writer_has_laid_out_is_read_as_well(new_lab, tmp_path):
    """Its tensors may lie where they are not aligned."""
    store = LocalStore(tmp_path)
    state = {f"t{n}": torch.full((n % 5 + 1,), n, dtype=DTYPES[n % 4]) for n in range(200)}
    saved = new_lab(store).save("a", {"model": state})
    path = tmp_path / "a" / "model.safetensors"
    path.unlink()
    save_file(state, path)
    import dataclasses

    from milepost.engine.read import CheckpointSource
    from milepost.format.digest import block_crcs

    entry = saved.manifest.file("model.safetensors")
    data = path.read_bytes()
    foreign = dataclasses.replace(entry, size_bytes=len(data), crcs=tuple(block_crcs(data)))
    files = tuple(foreign if one.path == entry.path else one for one in saved.manifest.files)
    manifest = dataclasses.replace(saved.manifest, files=files)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    source = CheckpointSource(store, "a", manifest)
    source.read([("model", key, live) for key, live in into.items()])
    assert all(torch.equal(into[key], value) for key, value in state.items())


def test_one_name_may_be_read_to_two_places(new_lab):
    """Such as that of weights that were tied when they were saved."""
    state, store = {"a": torch.arange(6.0), "b": torch.ones(2)}, MemoryStore()
    new_lab(store).save("a", {"model": state})
    first, second = torch.zeros(6), torch.zeros(6)
    wanted = [("model", "a", first), ("model", "b", torch.zeros(2)), ("model", "a", second)]
    Checkpoint(store, "a").source().read(wanted)
    assert torch.equal(first, state["a"])
    assert torch.equal(second, state["a"])


def test_neighbours_of_one_dtype_in_one_block_are_one_copy():
    """A call for each of 100,000 would cost more than the disk."""
    start = BLOCK_BYTES - 64 * 100
    found = []
    for index in range(200):
        at = start + 64 * index
        one = torch.zeros(16, dtype=torch.float32 if index < 150 else torch.int32)
        found.append((StoredTensor(f"t{index}", "F32", (16,), at, at + 64), one))
    del found[120]
    random.Random(0).shuffle(found)
    table = PartTable({"part": StoredTable.of(entry for entry, _ in found)}, name="model")
    by_file, left = small_wholes(table, [entry.key for entry, _ in found], [t for _, t in found])
    batches = by_file.pop("part")
    assert not left
    assert not by_file
    assert [len(one.targets) for one in batches] == [100, 20, 29, 50]
    assert [(one.start, one.stop) for one in batches] == [
        (start, BLOCK_BYTES),
        (BLOCK_BYTES, BLOCK_BYTES + 64 * 20),
        (BLOCK_BYTES + 64 * 21, BLOCK_BYTES + 64 * 50),
        (BLOCK_BYTES + 64 * 50, BLOCK_BYTES + 64 * 100),
    ]
    assert all(isinstance(one, Batch) and len(one.tensors) == len(one.targets) for one in batches)


@pytest.mark.parametrize(
    "one",
    [
        torch.zeros(4, 4),
        torch.zeros(17),
        torch.zeros(16, dtype=torch.float64),
        torch.zeros(16, device="meta"),
        torch.eye(4).to_sparse(),
    ],
    ids=["shape", "length", "dtype", "meta", "sparse"],
)
def test_what_does_not_fit_exactly_is_left_to_others(one):
    """They refuse it, or know how to go about it."""
    assert is_small_whole(torch.zeros(16), StoredTensor("t", "F32", (16,), 4096, 4160))
    assert not is_small_whole(one, StoredTensor("t", "F32", (16,), 4096, 4160))
    across = StoredTensor("t", "F32", (16,), BLOCK_BYTES - 32, BLOCK_BYTES + 32)
    assert not is_small_whole(torch.zeros(16), across)


def test_what_is_wanted_of_several_parts_and_in_any_order_is_found():
    """Frozen weights have a part of their own, and a name of one part says nothing of another."""
    frozen = [StoredTensor(f"f{n}", "F32", (2,), 64 + 8 * n, 72 + 8 * n) for n in range(3)]
    trained = [StoredTensor(f"t{n}", "I64", (), 64 + 8 * n, 72 + 8 * n) for n in range(4)]
    empty: list[StoredTensor] = []
    headers = {"none": empty, "frozen": frozen, "none too": empty, "trained": trained}
    table = PartTable({k: StoredTable.of(v) for k, v in headers.items()}, name="model")
    for file, entries in headers.items():
        assert all(table.place(entry.key) == (file, entry) for entry in entries)
    assert {k: (one.code, one.shape) for k, one in table.infos().items()} == {
        entry.key: (entry.dtype, entry.shape) for entry in frozen + trained
    }
    keys = ["t3", "f1", "t0", "f0", "t1"]
    ones = [torch.zeros(2) if key < "t" else torch.zeros((), dtype=torch.int64) for key in keys]
    batches, left = small_wholes(table, keys, ones)
    assert not left
    assert {file: [one.tensors for one in found] for file, found in batches.items()} == {
        "frozen": [["f0", "f1"]],
        "trained": [["t0", "t1"], ["t3"]],
    }
    nothing = PartTable({}, name="model")
    assert (dict(nothing), nothing.infos(), small_wholes(nothing, [], [])) == ({}, {}, ({}, []))
    with pytest.raises(FormatError, match="'t0'"):
        PartTable({k: StoredTable.of(trained) for k in "ab"}, name="model")
