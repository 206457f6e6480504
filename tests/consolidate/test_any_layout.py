"""Whatever ranks have saved, and however, comes out whole: offline, and while it is saved."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import milepost as mp
from milepost.convert.torch_file import load_torch_file
from milepost.engine.read import CheckpointSource
from milepost.state.source import load_item
from milepost.stores import MemoryStore
from milepost.tensors.pack import pack_item
from milepost.testing.saver import read_key

from ..property.simulated_ranks import as_held, mesh_sizes, placed, shapes, whole_tensor
from .saving_ranks import TIME, raw, save_on_ranks


@st.composite
def laid_out(draw):
    """A mesh, and some tensors that lie on it."""
    sizes = draw(mesh_sizes)
    found = draw(st.lists(shapes(), min_size=1, max_size=6))
    return sizes, [draw(placed(shape, dtype, len(sizes))) for shape, dtype in found]


def states_of(sizes, specs, seed):
    wholes = {f"t{n}": whole_tensor(spec, seed + n) for n, spec in enumerate(specs)}
    states = []
    for rank in range(math.prod(sizes)):
        held = {
            key: as_held(whole, spec, sizes, rank)
            for (key, whole), spec in zip(wholes.items(), specs, strict=True)
        }
        own = {"rank": rank, "x": torch.full((3,), float(rank))}
        states.append(
            [
                pack_item("model", held, frozen={"t0"}),
                pack_item("loop", {"seen": 5}, home="leader"),
                pack_item("own", own, home="each"),
                pack_item("rng", [{"torch": torch.tensor([rank])}], home="each"),
            ]
        )
    return wholes, states


def check(checkpoint, wholes, num_ranks):
    """Compare with what was saved, on every rank."""
    assert checkpoint.verify().is_good
    assert checkpoint.manifest.world_size == num_ranks
    assert dict(checkpoint.time) == TIME
    for rank in range(num_ranks):
        source = CheckpointSource(
            checkpoint.store, checkpoint.folder, checkpoint.manifest, rank=rank
        )
        assert raw(load_item(source, "model")) == raw(wholes)
        assert load_item(source, "own")["rank"] == rank
        assert load_item(source, "own")["x"].tolist() == [float(rank)] * 3
    loaded = checkpoint.load()
    assert loaded["state"]["loop"] == {"seen": 5}
    assert [int(one["torch"]) for one in loaded["rng"]] == list(range(num_ranks))


def check_single(path, wholes, num_ranks):
    """Read it with nothing but torch."""
    content = torch.load(path, weights_only=True)
    assert raw(content["state"]["model"]) == raw(wholes)
    assert content["state"]["loop"] == {"seen": 5}
    assert content["state"]["own"]["rank"] == 0
    assert [int(one["torch"]) for one in content["rng"]] == list(range(num_ranks))
    others = [one["own"]["rank"] for one in content.get("ranks", [])[1:]]
    assert others == list(range(1, num_ranks))


@settings(max_examples=5, deadline=None)
@given(laid_out(), st.integers(0, 10_000))
def test_any_layout_comes_out_whole(tmp_path_factory, found, seed):
    """Joined afterwards or by the save itself it is the same, and plain safetensors opens it."""
    sizes, specs = found
    wholes, states = states_of(sizes, specs, seed)
    num_ranks = len(states)
    store = MemoryStore()
    save_on_ranks(store, states)
    old = mp.open_run(store).get("ep3")
    check(old, wholes, num_ranks)
    folder = tmp_path_factory.mktemp("new")
    joined = mp.consolidate(old, folder / "a")
    assert joined.name == "ep3"
    check(joined, wholes, num_ranks)
    plain = load_file(folder / "a" / "ep3" / "model.safetensors")
    assert raw(plain) == raw(wholes)
    file = mp.consolidate(old, folder, format="safetensors")
    assert file == folder / "ep3.safetensors"
    assert raw(load_file(file)) == raw(wholes)
    check_single(mp.consolidate(old, folder, format="torch"), wholes, num_ranks)
    saved = MemoryStore()
    save_on_ranks(saved, states, sharding="consolidated")
    whole = mp.open_run(saved).get("ep3")
    check(whole, wholes, num_ranks)
    single = MemoryStore()
    manifest = save_on_ranks(single, states, layout="torch")
    (entry,) = manifest.files
    check_single(io.BytesIO(read_key(single, f"ep3/{entry.path}")), wholes, num_ranks)
    again = mp.consolidate(whole, folder / "b", name="c")
    assert again.name == "c"
    check(again, wholes, num_ranks)


def test_ties_and_raw_dtypes_are_kept(tmp_path: Path):
    """Two names of one tensor stay one; a dtype without a code keeps its bits."""
    states = []
    tied, odd = torch.arange(6.0).reshape(2, 3), torch.randn(4, dtype=torch.complex128)
    for _ in range(2):
        held = tied.clone()
        states.append([pack_item("model", {"a": held, "b": held, "c": odd.clone()})])
    store = MemoryStore()
    save_on_ranks(store, states)
    joined = mp.consolidate(mp.open_run(store).get("ep3"), tmp_path / "a")
    model = joined.load()["state"]["model"]
    assert model["a"] is model["b"]
    assert raw(model) == raw({"a": tied, "b": tied, "c": odd})
    with pytest.raises(mp.UnsupportedStateError, match="'c'"):
        mp.consolidate(joined, tmp_path, format="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    model = torch.load(mp.consolidate(joined, tmp_path, format="torch"))["state"]["model"]
    assert model["a"] is model["b"]
    assert raw(model) == raw({"a": tied, "b": tied, "c": odd})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_what_tensors_are_a_part_of_comes_into_the_single_file(tmp_path: Path):
    """Sparse and quantized tensors, arrays, generators, and memory in another order."""
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    value = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": quantized,
        "array": np.arange(10_000.0),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.arange(6, dtype=torch.float16)[::2],
    }
    store = MemoryStore()
    save_on_ranks(store, [[pack_item("x", value)]] * 2)
    path = mp.consolidate(mp.open_run(store).get("ep3"), tmp_path / "a.pt", format="torch")
    found = load_torch_file(path)["state"]["x"]
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found["quantized"].int_repr(), quantized.int_repr())
    assert np.array_equal(found["array"], value["array"])
    assert torch.equal(found["turned"], value["turned"])
    assert torch.equal(found["half"], value["half"])


def test_one_rank_stays_one_rank(tmp_path: Path):
    """And its frozen weights come into the one file."""
    model = {"w": torch.arange(4.0), "f": torch.ones(2, dtype=torch.bfloat16)}
    store = MemoryStore()
    save_on_ranks(store, [[pack_item("model", model, frozen={"f"}), pack_item("x", {"a": (1,)})]])
    joined = mp.consolidate(mp.open_run(store).get("ep3"), tmp_path / "a")
    assert joined.manifest.world_size == 1
    assert raw(load_file(tmp_path / "a/ep3/model.safetensors")) == raw(model)
    assert joined.verify().is_good
    assert raw(joined.load()["state"]["model"]) == raw(model)
    assert joined.load()["state"]["x"] == {"a": (1,)}


def test_the_new_run_goes_on(tmp_path: Path):
    """A training resumes from it, and saves after it."""
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(tmp_path / "old", model=model) as run:
        run.step(num_samples=1)
        run.save(wait=True)
    weights = raw(model.state_dict())
    mp.consolidate(tmp_path / "old", tmp_path / "new")
    torch.nn.init.zeros_(model.weight)
    with mp.Checkpointer(tmp_path / "new", model=model) as run:
        assert run.resumed_from == "ba1"
        assert raw(model.state_dict()) == weights
        run.step(num_samples=1)
        run.save(wait=True)
    assert [one.name for one in mp.open_run(tmp_path / "new").checkpoints()] == ["ba1", "ba2"]


def test_what_is_there_is_left_alone(tmp_path: Path):
    """A second time, over files of somebody else, over a file."""
    store = MemoryStore()
    _, states = states_of((2,), [], 0)
    states = [[pack_item("model", {"w": torch.ones(3)}), *one[1:]] for one in states]
    save_on_ranks(store, states)
    old = mp.open_run(store).get("ep3")
    mp.consolidate(old, tmp_path / "a")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(mp.ExistsError, match="holds checkpoints already"):
        mp.consolidate(old, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(mp.ExistsError, match="belong to no run"):
        mp.consolidate(old, tmp_path / "b")
    mp.consolidate(old, tmp_path / "c", format="safetensors")
    with pytest.raises(mp.ExistsError, match="already there"):
        mp.consolidate(old, tmp_path / "c", format="safetensors")
    assert {path: path.read_bytes() for path in before} == before
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine.txt"]


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    """A checkpoint that is one file; too little memory; a state without a model."""
    model = torch.nn.Linear(1, 1)
    with mp.Checkpointer(tmp_path / "t", model=model, save_format="torch") as run:
        run.save("a", wait=True)
    with pytest.raises(mp.UsageError, match="not in pieces"):
        mp.consolidate(tmp_path / "t", tmp_path / "x")
    with mp.Checkpointer(tmp_path / "m", net=model) as run:
        run.save("a", wait=True)
    with pytest.raises(mp.UsageError, match="at least"):
        mp.consolidate(tmp_path / "m", tmp_path / "x", memory_bytes=1)
    with pytest.raises(mp.MissingError, match="no item 'model'"):
        mp.consolidate(tmp_path / "m", tmp_path / "x", format="safetensors")
    assert not (tmp_path / "x").exists()
