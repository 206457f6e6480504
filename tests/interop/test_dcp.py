"""torch.distributed.checkpoint with Milepost as its storage, in both directions."""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from typer.testing import CliRunner

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.cli.app import app
from milepost.integrations.dcp import StorageReader, StorageWriter, writer
from milepost.testing.asserts import assert_equal_states

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def emptied(value: Any) -> Any:
    """Return a state of the same structure, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, dict):
        return {key: emptied(member) for key, member in value.items()}
    if isinstance(value, list):
        return [emptied(member) for member in value]
    return -1


def failed(call: Callable[[], Any]) -> BaseException:
    """Return the error behind the exception that DCP raises on every rank."""
    with pytest.raises(CheckpointException) as caught:
        call()
    (pair,) = caught.value.failures.values()
    return pair[0]


def names(place: Path) -> list[str]:
    return [one.name for one in mp.open_run(place).checkpoints()]


RICH = {
    "model": {"a.b": torch.arange(6.0).reshape(2, 3), "c": torch.ones(2).bfloat16()},
    "numbers": {"int": 3, "big": 1 << 3000, "float": 0.1, "inf": -math.inf, "none": None},
    "tuple": (1, (2, "x"), torch.arange(3)),
    "words": ["x", "y"],
    "bytes": b"\x00\xff",
    "nested": [{"w": torch.zeros(2), "lr": 0.5}, {"w": torch.ones(2), "betas": (0.9, 0.99)}],
    "odd names / $": {"$": torch.ones(1), "x/y": torch.zeros(1), "": 7},
    "rng": {"cpu": torch.get_rng_state()},
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2, dtype=torch.int64),
    "complex": torch.ones(2, dtype=torch.complex128),
    "bool": torch.tensor([True, False]),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "text": "7",
}


def test_a_nested_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Also what is no tensor: each kind as it was, without a pickle anywhere."""
    dcp.save(copy.copy(RICH), checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    target = {key: emptied(value) for key, value in RICH.items()}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "x"))
    assert_equal_states(RICH, target)
    assert mp.open_run(tmp_path).get("x").verify().is_good
    assert not [p for p in (tmp_path / "x").iterdir() if p.suffix not in (".json", ".safetensors")]


def test_the_whole_can_be_read_without_a_target(tmp_path: Path) -> None:
    """As torch's own converters do it, which rebuild the nesting from the metadata."""
    dcp.save(copy.copy(RICH), checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    found = dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=StorageReader(tmp_path))
    assert_equal_states(RICH, found)


def test_what_dcp_saved_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    """For the command line, for readers, and for plain safetensors."""
    model, optimizer = build()
    saver = StorageWriter(tmp_path)
    dcp.save(state_of(model, optimizer), checkpoint_id="a", storage_writer=saver)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    dcp.save({**state_of(model, optimizer), "step": 2}, checkpoint_id="b", storage_writer=saver)
    assert names(tmp_path) == ["a", "b"]
    assert saver.checkpoint is not None
    assert saver.checkpoint.name == "b"
    run = CliRunner()
    listed = run.invoke(app, ["ls", str(tmp_path), "--json"])
    assert [one["name"] for one in json.loads(listed.output)] == ["a", "b"]
    shown = run.invoke(app, ["show", str(tmp_path / "b"), "--tensors", "--json"])
    assert "0.weight" in {one["name"] for one in json.loads(shown.output)["tensors"]}
    assert run.invoke(app, ["verify", str(tmp_path / "b"), "--level", "full"]).exit_code == 0
    assert run.invoke(app, ["diff", str(tmp_path / "b"), str(tmp_path / "b")]).exit_code == 0
    assert run.invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 1
    plain = load_file(tmp_path / "b" / "model.safetensors")
    assert_equal_states(dict(model.state_dict()), plain)
    assert mp.open_run(tmp_path).latest().load()["state"]["step"] == 2


def test_a_checkpointer_restores_what_dcp_saved(tmp_path: Path) -> None:
    """Weights and optimizer go to the objects of the same names; both go on alike."""
    model, optimizer = build()
    dcp.save(
        state_of(model, optimizer), checkpoint_id=tmp_path / "a" / "x",
        storage_writer=StorageWriter(),
    )  # fmt: skip
    other, its_optimizer = build(seed=1)
    with mp.Checkpointer(tmp_path / "b", model=other, optimizer=its_optimizer) as run:
        run.restore(tmp_path / "a" / "x", items=["model", "optimizer"])
    torch.manual_seed(5)
    data = torch.randn(4, 3)
    for one, its in ((model, optimizer), (other, its_optimizer)):
        its.zero_grad()
        one(data).sum().backward()
        its.step()
    assert_equal_states(dict(model.state_dict()), dict(other.state_dict()))


def test_the_state_of_a_model_alone_becomes_the_item_model(tmp_path: Path) -> None:
    """So that weights are found where everything looks for them."""
    model, _ = build()
    dcp.save(model.state_dict(), checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    checkpoint = mp.open_run(tmp_path).get("x")
    assert checkpoint.manifest.items == ("model",)
    other, _ = build(seed=1)
    checkpoint.load_weights(other)
    assert_equal_states(dict(model.state_dict()), dict(other.state_dict()))
    target = emptied(dict(model.state_dict()))
    dcp.load(target, storage_reader=StorageReader(tmp_path))
    assert_equal_states(dict(model.state_dict()), target)


def test_what_a_checkpointer_saved_loads_through_dcp(tmp_path: Path) -> None:
    """Under the names that DCP gives a nested state; and of one item, under those in it."""
    model, optimizer = build()
    frozen = model[0].bias.requires_grad_(False)
    frozen.grad = None
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("x", wait=True)
    right = state_of(model, optimizer)
    right["model"] = dict(right["model"])
    target = emptied(right)
    dcp.load(target, storage_reader=StorageReader(tmp_path))
    assert_equal_states(right["model"], target["model"])
    assert_equal_states(right["optimizer"]["state"], target["optimizer"]["state"])
    weights = emptied(right["model"])
    dcp.load(weights, storage_reader=StorageReader(tmp_path / "x", item="model"))
    assert_equal_states(right["model"], weights)


def test_a_checkpoint_of_one_file_loads_through_dcp(tmp_path: Path) -> None:
    """As ``save_format="torch"`` writes it."""
    model, _ = build()
    with mp.Checkpointer(tmp_path, save_format="torch", model=model) as run:
        run.save("x", wait=True)
    weights = emptied(dict(model.state_dict()))
    dcp.load(weights, storage_reader=StorageReader(tmp_path, item="model"))
    assert_equal_states(dict(model.state_dict()), weights)


def test_an_async_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    """What happens to the tensors afterwards is of no concern to it; nor are later saves."""
    value = {"w": torch.zeros(1000), "step": 0}
    saver = StorageWriter(tmp_path)
    for step in range(3):
        future = dcp.async_save(value, checkpoint_id=f"s{step}", storage_writer=saver)
        value["w"] += 1
        value["step"] += 1
        future.result()
    for step in range(3):
        state = mp.open_run(tmp_path).get(f"s{step}").load()["state"]
        assert state["model"]["w"].eq(step).all()
        assert state["step"] == step


class Stranger:
    """A class that nobody has registered."""


@pytest.mark.parametrize("value", [Stranger(), {1: Stranger()}, print], ids=["object", "in", "f"])
def test_a_value_that_would_need_a_pickle_is_refused(tmp_path: Path, value: Any) -> None:
    """With the way to it; nothing is committed, and the next save is well."""
    saver = StorageWriter(tmp_path)
    bad = {"model": {"w": torch.ones(2)}, "extra": {"x": value}}
    error = failed(lambda: dcp.save(bad, checkpoint_id="x", storage_writer=saver))
    assert isinstance(error, mp.UnsupportedStateError)
    assert "extra['x']" in str(error)
    assert names(tmp_path) == []
    dcp.save({"w": torch.ones(2)}, checkpoint_id="y", storage_writer=saver)
    assert names(tmp_path) == ["y"]
    assert not (tmp_path / "x").exists()


def test_a_planner_with_values_of_its_own_is_read_without_running_code(tmp_path: Path) -> None:
    """Its bytes are a file of torch's: plain ones become a tree, others are refused."""

    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return super().transform_object(write_item, object)

    saver = StorageWriter(tmp_path)
    dcp.save({"a": 5, "w": torch.ones(1)}, checkpoint_id="x", storage_writer=saver,
             planner=Planner())  # fmt: skip
    assert mp.open_run(tmp_path).get("x").load()["state"]["a"] == 5
    error = failed(lambda: dcp.save({"a": Stranger()}, checkpoint_id="y", storage_writer=saver,
                                    planner=Planner()))  # fmt: skip
    assert isinstance(error, mp.UnsupportedStateError)


def test_sparse_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """DCP cannot cut them into boxes."""
    state = {"w": torch.eye(3).to_sparse()}
    error = failed(
        lambda: dcp.save(state, checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    )
    assert isinstance(error, mp.UnsupportedStateError)
    assert "w is a tensor" in str(error)


def test_another_dtype_is_refused_unless_wanted(tmp_path: Path) -> None:
    """DCP by itself reads floats into integers in silence."""
    state = {"w": torch.tensor([1.5, 2.5]), "v": torch.ones(1)}
    dcp.save(state, checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    target = {"w": torch.full((2,), 7, dtype=torch.int8), "v": torch.zeros(1)}
    error = failed(lambda: dcp.load(target, storage_reader=StorageReader(tmp_path)))
    assert isinstance(error, mp.MismatchError)
    assert "w is torch.float32" in str(error)
    assert target["w"].eq(7).all()
    assert target["v"].eq(0).all()
    wide = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(wide, storage_reader=StorageReader(tmp_path, cast=True))
    assert wide["w"].tolist() == [1.5, 2.5]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """DCP's own files are loaded without a look at any checksum."""
    state = {"w": torch.zeros(3_000_000)}
    dcp.save(state, checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    part = tmp_path / "x" / "model.safetensors"
    data = bytearray(part.read_bytes())
    data[-9] ^= 4
    part.write_bytes(data)
    reader = StorageReader(tmp_path / "x")
    error = failed(lambda: dcp.load(state, storage_reader=reader))
    assert isinstance(error, mp.DamagedError)
    assert error.facts["tensors"] == ("w",)
    data[30] ^= 4
    part.write_bytes(data)
    with pytest.raises(mp.DamagedError):
        StorageReader(tmp_path / "x")


@pytest.mark.parametrize("phase", ["local plan", "plan", "claim", "write", "index", "publish"])
def test_an_error_in_any_phase_leaves_nothing_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Neither a checkpoint nor, after the next save, a leftover; earlier ones stay."""
    saver = StorageWriter(tmp_path)
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id="a", storage_writer=saver)

    def stop(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "no space")

    class Planner(DefaultSavePlanner):
        create_local_plan = stop if phase == "local plan" else DefaultSavePlanner.create_local_plan
        create_global_plan = stop if phase == "plan" else DefaultSavePlanner.create_global_plan

    with monkeypatch.context() as patch:
        if phase == "claim":
            patch.setattr("milepost.publisher.claim", stop)
        elif phase == "write":
            patch.setattr(writer, "write_boxes", stop)
        elif phase == "index":
            patch.setattr(writer, "write_index", stop)
        elif phase == "publish":
            patch.setattr("milepost.publisher.publish", stop)
        error = failed(
            lambda: dcp.save(state, checkpoint_id="b", storage_writer=saver, planner=Planner())
        )
        assert isinstance(error, OSError)
    assert names(tmp_path) == ["a"]
    dcp.save(state, checkpoint_id="c", storage_writer=saver)
    assert names(tmp_path) == ["a", "c"]
    assert not (tmp_path / "b").exists()


def test_a_later_writer_goes_on_from_the_newest_and_fences_the_earlier(tmp_path: Path) -> None:
    """A process that was thought dead must not add to a run that another has taken over."""
    old = StorageWriter(tmp_path)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="a", storage_writer=old)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="b", storage_writer=StorageWriter(tmp_path))
    error = failed(lambda: dcp.save({"w": torch.ones(1)}, checkpoint_id="c", storage_writer=old))
    assert isinstance(error, mp.FencedError)
    assert names(tmp_path) == ["a", "b"]
    back = StorageWriter(tmp_path, resumed_from="a")
    dcp.save({"w": torch.ones(1)}, checkpoint_id="d", storage_writer=back)
    assert names(tmp_path) == ["a", "d"]
    assert mp.open_run(tmp_path).latest().manifest.parent == "a"


def test_what_a_checkpoint_id_means(tmp_path: Path) -> None:
    """A name in the run, or a path to it; a run and a path that lead apart are refused."""
    state = {"w": torch.ones(1)}
    dcp.save(state, checkpoint_id=tmp_path / "r" / "a", storage_writer=StorageWriter())
    dcp.save(state, checkpoint_id=f"{tmp_path}/r/b/", storage_writer=StorageWriter(tmp_path / "r"))
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "r", name="c"))
    taken = StorageWriter(tmp_path / "r")
    dcp.save(state, checkpoint_id="a", storage_writer=taken)
    assert names(tmp_path / "r") == ["a", "b", "c", taken.checkpoint.name]
    with pytest.raises(mp.UsageError, match="leads to"):
        dcp.save(state, checkpoint_id=tmp_path / "q" / "a", storage_writer=taken)
    with pytest.raises(mp.UsageError, match="cannot name"):
        dcp.save(state, checkpoint_id="..", storage_writer=taken)
    for lost in (StorageWriter(), StorageWriter(tmp_path / "r")):
        error = failed(lambda lost=lost: dcp.save(state, storage_writer=lost))
        assert isinstance(error, mp.UsageError)
    for reader, which in (
        (StorageReader(tmp_path / "r"), "b"),
        (StorageReader(), tmp_path / "r/b"),
    ):
        target = {"w": torch.zeros(1)}
        dcp.load(target, checkpoint_id=which, storage_reader=reader)
        assert target["w"].eq(1).all()
    with pytest.raises(mp.MissingError):
        StorageReader(tmp_path / "nothing")
    with pytest.raises(mp.UsageError):
        dcp.load(state, checkpoint_id="b", storage_reader=StorageReader())


def test_retention_is_applied_after_a_commit(tmp_path: Path) -> None:
    """Old checkpoints go only when a newer one is safe."""
    saver = StorageWriter(tmp_path, keep=[mp.KeepLast(2)])
    for step in range(4):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=f"s{step}", storage_writer=saver)
    assert names(tmp_path) == ["s2", "s3"]


def test_what_would_lose_the_folder_of_a_save_is_refused(tmp_path: Path) -> None:
    """Cached plans have the folder of an earlier save; single ranks commit for themselves."""
    state = {"w": torch.ones(1)}
    saver = StorageWriter(tmp_path)
    cached = DefaultSavePlanner(enable_plan_caching=True)
    error = failed(lambda: dcp.save(state, checkpoint_id="x", storage_writer=saver, planner=cached))
    assert isinstance(error, mp.UsageError)
    with pytest.raises(mp.UsageError, match="use_collectives"):
        dcp.save(state, checkpoint_id="x", storage_writer=saver, use_collectives=False)
    nested = DefaultSavePlanner(flatten_state_dict=False)
    error = failed(
        lambda: dcp.save({"m": state}, checkpoint_id="x", storage_writer=saver, planner=nested)
    )
    assert isinstance(error, mp.UnsupportedStateError)
    assert names(tmp_path) == []


def test_a_missing_entry_is_told_by_dcp(tmp_path: Path) -> None:
    """And a partial load takes what is there."""
    dcp.save({"w": torch.ones(1)}, checkpoint_id="x", storage_writer=StorageWriter(tmp_path))
    target = {"w": torch.zeros(1), "more": torch.zeros(2)}
    error = failed(lambda: dcp.load(target, storage_reader=StorageReader(tmp_path)))
    assert "more" in str(error)
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, storage_reader=StorageReader(tmp_path), planner=partial)
    assert target["w"].eq(1).all()


def test_ordered_dicts_and_number_keys_of_a_checkpointer_are_found(tmp_path: Path) -> None:
    """DCP writes every key as text, and goes into every kind of dict."""
    value = OrderedDict([(1, {"x": torch.ones(2)}), ("two", [torch.zeros(1), {"y": 3}])])
    held = mp.Value(lambda: value, lambda loaded: None)
    with mp.Checkpointer(tmp_path, extra=held) as run:
        run.save("x", wait=True)
    target = {"extra": {"1": {"x": torch.zeros(2)}, "two": [torch.ones(1), {"y": 0}]}}
    dcp.load(target, storage_reader=StorageReader(tmp_path))
    assert target["extra"]["1"]["x"].eq(1).all()
    assert target["extra"]["two"][1]["y"] == 3
    found = set(StorageReader(tmp_path).read_metadata().state_dict_metadata)
    flat, _ = dcp._nested_dict.flatten_state_dict({"extra": value})
    assert set(flat) <= found
    assert isinstance(open_checkpoint(tmp_path).load()["state"]["extra"], OrderedDict)
