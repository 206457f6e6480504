"""Any change to any byte of a checkpoint is noticed, named, and passed over by a resume."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.checkpoint import Checkpoint
from milepost.engine.save import Saver, SaveRequest
from milepost.runs import ensure_run, open_session, record_origin
from milepost.stores import MemoryStore
from milepost.tensors.pack import pack_item

WHOLE = bool(os.environ.get("MILEPOST_CAMPAIGN"))


def new_checkpoint():
    """Two checkpoints of a small state of several parts in memory; return the store."""
    store = MemoryStore()
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    saver = Saver(store, session, on_commit=lambda manifest: manifest)
    for number, name in enumerate(["other", "it"]):
        generator = torch.Generator().manual_seed(number)
        items = [
            pack_item(
                "model",
                {n: torch.rand(4, 5, generator=generator) for n in ("a", "frozen")},
                frozen=["frozen"],
            ),
            pack_item("optimizer", {"m": torch.rand(10, generator=generator), "n": [1, (2,)]}),
            pack_item("plain", {"x": number, "y": {3: "z"}}),
        ]
        saver.save(items, SaveRequest(name=name, reason="manual", metrics={"loss": 1.5})).wait()
    return store


@pytest.fixture(scope="module")
def store():
    return new_checkpoint()


FILES = [
    "manifest.json",
    "index.json",
    "model.safetensors",
    "model-frozen.safetensors",
    "optimizer.safetensors",
    "model.safetensors.index.json",
]
UNREAD = {"model.safetensors.index.json"}
"""Files for other tools; our own load does not need them."""


def problems(store):
    return [problem.path for problem in Checkpoint(store, "it").verify().problems]


def assert_noticed(store, file, *, loads=True):
    """Full verification names the file; a load raises and names it."""
    assert problems(store) == [file]
    if loads and file not in UNREAD:
        with pytest.raises(mp.FormatError, match=f"it/{file}"):
            Checkpoint(store, "it").load()


def positions(file, data):
    """Every byte; of padding and of tensors only some, unless there is time for all."""
    if WHOLE or not file.endswith("safetensors"):
        return range(len(data))
    used = len(data[:4096].rstrip(b" "))
    source = random.Random(file)
    return [*range(used), *source.sample(range(used, 4096), 100), *range(4096, len(data), 7)]


def test_the_files_of_the_checkpoint_are_all_tested(store):
    """A file that is not in the list would go untested."""
    keys = {entry.key for entry in store.list("it")}
    assert keys == {f"it/{file}" for file in [*FILES, "attempt.json"]}
    assert problems(store) == []


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_anywhere_is_noticed(store, file):
    """In records, headers, padding and data; the reader never sees a wrong value."""
    key = f"it/{file}"
    data = store.get(key)
    source = random.Random(1)
    chosen = list(positions(file, data))
    loaded = set(chosen) if WHOLE else set(source.sample(chosen, min(40, len(chosen))))
    try:
        for position in chosen:
            for bit in range(8) if WHOLE else [source.randrange(8)]:
                changed = bytearray(data)
                changed[position] ^= 1 << bit
                store.put(key, bytes(changed))
                assert_noticed(store, file, loads=position in loaded)
    finally:
        store.put(key, data)


@pytest.mark.parametrize("file", FILES)
def test_another_length_is_noticed(store, file):
    """Cut at every kind of border, or longer than it was."""
    key = f"it/{file}"
    data = store.get(key)
    lengths = {0, 1, 7, 8, 9, len(data) // 2, 4095, 4096, 4097, len(data) - 1}
    try:
        for length in sorted(n for n in lengths if n < len(data)):
            store.put(key, data[:length])
            assert_noticed(store, file)
        for more in (b"\0", b" ", data, bytes(4096)):
            store.put(key, data + more)
            assert_noticed(store, file)
        store.delete(key)
        if file == "manifest.json":
            with pytest.raises(mp.MissingError):
                Checkpoint(store, "it").verify()
            return
        assert problems(store) == [file]
        if file not in UNREAD:
            with pytest.raises(mp.MissingError, match=f"it/{file}"):
                Checkpoint(store, "it").load()
    finally:
        store.put(key, data)


@pytest.mark.parametrize("file", FILES)
def test_the_file_of_another_checkpoint_is_noticed(store, file):
    """Same names, same shapes, same size, and other values."""
    key = f"it/{file}"
    data = store.get(key)
    try:
        store.put(key, store.get(f"other/{file}"))
        if file == "manifest.json":
            # A whole record, of another place: its files do not match.
            assert set(problems(store)) >= {"model.safetensors", "optimizer.safetensors"}
            return
        if store.get(key) != data:
            assert_noticed(store, file)
    finally:
        store.put(key, data)


def test_two_swapped_parts_are_noticed(store):
    """Each is whole, and each is in the place of the other."""
    keys = ["it/model.safetensors", "it/model-frozen.safetensors"]
    data = [store.get(key) for key in keys]
    assert len(data[0]) == len(data[1])
    try:
        for key, other in zip(keys, reversed(data), strict=True):
            store.put(key, other)
        assert problems(store) == ["model-frozen.safetensors", "model.safetensors"]
        with pytest.raises(mp.DamagedError):
            Checkpoint(store, "it").load()
    finally:
        for key, own in zip(keys, data, strict=True):
            store.put(key, own)


def test_the_tensors_of_a_damaged_block_are_named(tmp_path):
    """In a part of many blocks the header is whole, and tells what lies in the bad one."""
    names = ("first", "second", "third")
    model = nn.ParameterDict({n: nn.Parameter(torch.ones(2_500_000)) for n in names})
    with mp.Checkpointer(tmp_path, model=model) as run:
        saved = run.save("a").wait()
    path = tmp_path / "a" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(2 * 8 * 1024 * 1024 + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    (problem,) = saved.verify().problems
    assert (problem.path, problem.block) == ("model.safetensors", 2)
    assert problem.tensors == ("second", "third")
    assert "second, third" in problem.text
    with pytest.raises(mp.DamagedError, match="second, third") as caught:
        saved.load()
    assert caught.value.facts["block"] == 2


def new_objects(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()  # a linked file is shared with the checkpoint before
    path.write_bytes(data)


DAMAGES = {
    "manifest": lambda f: flip(f / "manifest.json", 50),
    "no manifest seal": lambda f: (f / "manifest.json").write_bytes(b"{}"),
    "index": lambda f: flip(f / "index.json", 100),
    "header": lambda f: flip(f / "model.safetensors", 20),
    "padding": lambda f: flip(f / "model.safetensors", 4000),
    "data": lambda f: flip(f / "model.safetensors", -1),
    "frozen data": lambda f: flip(f / "model-frozen.safetensors", -1),
    "generators": lambda f: flip(f / "rng.safetensors", -1),
    "cut": lambda f: os.truncate(f / "model.safetensors", 4100),
    "missing": lambda f: (f / "model.safetensors").unlink(),
    "empty": lambda f: os.truncate(f / "index.json", 0),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_resume_passes_a_damaged_checkpoint_over_and_says_so(tmp_path, caplog, damage):
    """The one before is gone on from, whole; what was read of the bad one leaves no trace."""
    objects = new_objects(1)
    with mp.Checkpointer(tmp_path, **objects) as run:
        run.save("good", wait=True)
        expected = {k: v.clone() for k, v in objects["model"].state_dict().items()}
        with torch.no_grad():
            objects["model"][1].weight.fill_(9.0)
        run.save("bad", wait=True)
    DAMAGES[damage](tmp_path / "bad")
    live = new_objects(2)
    with mp.Checkpointer(tmp_path, **live) as run:
        assert run.resumed_from == "good"
    found = live["model"].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "bad" in caplog.text
    assert "going on from good" in caplog.text
    assert (tmp_path / "bad").exists()


def test_a_run_of_nothing_but_damage_is_never_begun_anew(tmp_path):
    """A silent fresh start would look like a training that forgot everything."""
    with mp.Checkpointer(tmp_path, **new_objects(1)) as run:
        run.save("one", wait=True)
        run.save("two", wait=True)
    for name in ("one", "two"):
        flip(tmp_path / name / "index.json", 100)
    with pytest.raises(mp.DamagedError, match=r"one(.|\n)*two|two(.|\n)*one"):
        mp.Checkpointer(tmp_path, **new_objects(2)).open()
    assert Path(tmp_path / "one" / "manifest.json").exists()
