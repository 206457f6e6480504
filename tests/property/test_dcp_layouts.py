"""torch.distributed.checkpoint on simulated ranks: any layout is saved, and loaded in any other.

DCP's own steps are taken here for one rank after the other, where it would use collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.convert.dcp import DcpSource
from milepost.importing import import_checkpoint
from milepost.integrations.dcp import StorageReader, StorageWriter

from .simulated_ranks import Spec, as_held, mesh_sizes, placed, shapes, whole_tensor

State = dict[str, Spec]
Sizes = tuple[int, ...]


def states_of(sizes: Sequence[int], state: State, *, empty: bool = False) -> list[dict[str, Any]]:
    """Return the state as each rank holds it: a model and a number."""
    found = []
    for rank in range(math.prod(sizes)):
        held = {}
        for n, (name, spec) in enumerate(state.items()):
            whole = whole_tensor(spec, n)
            held[name] = as_held(whole.zero_() if empty else whole, spec, sizes, rank)
        found.append({"model": held, "step": 0 if empty else 7})
    return found


def save(states: Sequence[dict[str, Any]], make: Callable[[], Any]) -> None:
    """Do what ``dcp.save`` does on all ranks."""
    writers = [make() for _ in states]
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (one, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        planner.set_up_planner(state, one.storage_meta(), is_coordinator=rank == 0)
        one.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(one.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        one.write_data(planner.finish_plan(plan), planner).value()
        for one, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)


def load(states: Sequence[dict[str, Any]], make: Callable[[], StorageReader]) -> None:
    """Do what ``dcp.load`` does on all ranks."""
    readers, planners, plans = [make() for _ in states], [], []
    for rank, (reader, state) in enumerate(zip(readers, states, strict=True)):
        planner = DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()


def raw(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(found, right, strict=True):
        for name in other["model"]:
            assert raw(one["model"][name]).equal(raw(other["model"][name])), name


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Sizes, State, Sizes, State]:
    """The same tensors on two meshes."""
    first, second = draw(mesh_sizes), draw(mesh_sizes)
    made = draw(st.lists(shapes(), min_size=1, max_size=3))
    saved = {f"t{n}": draw(placed(*one, len(first))) for n, one in enumerate(made)}
    loaded = {f"t{n}": draw(placed(*one, len(second))) for n, one in enumerate(made)}
    return first, saved, second, loaded


@settings(max_examples=30, deadline=None)
@given(layouts=two_layouts())
def test_any_layout_goes_through_dcp_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: tuple[Sizes, State, Sizes, State]
) -> None:
    """By way of our writer and reader, and straight into live tensors of ours."""
    first, saved, second, loaded = layouts
    folder = tmp_path_factory.mktemp("run")
    save(states_of(first, saved), lambda: StorageWriter(folder, name="x"))
    right = states_of(second, loaded)
    found = states_of(second, loaded, empty=True)
    load(found, lambda: StorageReader(folder / "x"))
    assert_same(found, right)
    assert all(one["step"] == 7 for one in found)
    found = states_of(second, loaded, empty=True)
    source = open_checkpoint(folder / "x").source()
    for one in found:
        source.read([("model", name, value) for name, value in one["model"].items()])
    assert_same(found, right)
    assert mp.open_run(folder).get("x").verify().is_good


@settings(max_examples=20, deadline=None)
@given(layouts=two_layouts())
def test_a_plain_folder_of_any_layout_is_loaded_in_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: tuple[Sizes, State, Sizes, State]
) -> None:
    """As DCP's own writer made it: as it is, and after an import."""
    first, saved, second, loaded = layouts
    folder = tmp_path_factory.mktemp("plain")
    save(states_of(first, saved), lambda: FileSystemWriter(folder / "x", sync_files=False))
    right = states_of(second, loaded)
    for source in (
        DcpSource(folder / "x"),
        import_checkpoint(folder / "x", folder / "run").source(),
    ):
        found = states_of(second, loaded, empty=True)
        for one in found:
            source.read([("model", name, value) for name, value in one["model"].items()])
        assert_same(found, right)


def test_ranks_that_hold_different_tensors_of_one_name_are_told(tmp_path: Path) -> None:
    """Before anything is written."""
    spec = Spec((4,), torch.float32, (0,))
    states = states_of((2,), {"w": spec})
    other = states_of((2,), {"w": Spec((4,), torch.int64, (0,))})
    with pytest.raises(mp.MismatchError, match=r"model\.w"):
        save([states[0], other[1]], lambda: StorageWriter(tmp_path, name="x"))
    assert not tmp_path.joinpath("x").exists()


def test_a_rank_whose_results_are_lost_stops_the_commit(tmp_path: Path) -> None:
    """The manifest would name files that nobody vouches for."""
    states = states_of((2,), {"w": Spec((4,), torch.float32, (0,))})

    class Forgetful(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [results[0], []])

    with pytest.raises(mp.RankFailedError, match="2 ranks"):
        save(states, lambda: Forgetful(tmp_path, name="x"))
    assert mp.open_run(tmp_path).checkpoints() == []
    assert not (tmp_path / "x").exists()


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    """DCP would keep those of one rank for all; with leave, so does the writer."""
    states = states_of((2,), {"w": Spec((4,), torch.float32, (0,))})
    for rank, state in enumerate(states):
        state["loader"] = {"position": rank, "epoch": 1, f"own{rank}": rank}
    with pytest.raises(mp.MismatchError, match=r"of loader\.position\."):
        save(states, lambda: StorageWriter(tmp_path, name="x"))
    assert mp.open_run(tmp_path).checkpoints() == []
    save(states, lambda: StorageWriter(tmp_path, name="y", allow_differing=True))
    found = mp.open_run(tmp_path).get("y").load()["state"]["loader"]
    assert found["position"] in (0, 1)
    assert (found["own0"], found["own1"], found["epoch"]) == (0, 1, 1)
