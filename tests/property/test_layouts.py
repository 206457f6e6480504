"""Layouts: whatever the meshes and placements, every byte is written once and found again.

All ranks are simulated in this process; see ``simulated_ranks``.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard

from milepost.engine import shares as shares_module
from milepost.engine.arena import Arena
from milepost.engine.plan import make_plan
from milepost.engine.read import CheckpointSource
from milepost.engine.shares import own_share
from milepost.engine.stage import Stager
from milepost.engine.tables import RankTables, directory
from milepost.engine.together import Share
from milepost.engine.write import file_job, write_files
from milepost.errors import FormatError
from milepost.format.manifest import FileEntry, Manifest
from milepost.stores.memory import MemoryStore
from milepost.stores.pages import page_memory
from milepost.tensors.boxes import Box
from milepost.tensors.pack import Leaf, PackedItem, pack_item

from .simulated_ranks import Spec, as_held, mesh_at, mesh_sizes, placed, shapes, whole_tensor

State = dict[str, Spec]


@st.composite
def states(draw: st.DrawFn) -> tuple[tuple[int, ...], State]:
    """A mesh and a few tensors on it."""
    sizes = draw(mesh_sizes)
    made = draw(st.lists(shapes(), min_size=1, max_size=5))
    return sizes, {f"t{n}": draw(placed(*one, len(sizes))) for n, one in enumerate(made)}


def packed_by_rank(sizes: Sequence[int], state: State) -> list[list[PackedItem]]:
    """Return the item as each rank has it."""
    found = []
    for rank in range(math.prod(sizes)):
        held = {
            name: as_held(whole_tensor(spec, n), spec, sizes, rank)
            for n, (name, spec) in enumerate(state.items())
        }
        found.append([pack_item("model", held)])
    return found


def shares(by_rank: list[list[PackedItem]]) -> list[list[Leaf]]:
    """Return what each rank writes. In miniature: no piece is so small that it goes in a bundle."""
    world = len(by_rank)
    with mock.patch.object(shares_module, "_SMALL_BYTES", 0):
        return [
            own_share(one, rank=rank, world_size=world)[0].leaves
            for rank, one in enumerate(by_rank)
        ]


def dcp_plans(sizes: Sequence[int], state: State) -> list[list[WriteItem]]:
    """Return what torch's own checkpoints would have each rank write."""
    plans = []
    for rank in range(math.prod(sizes)):
        held = {
            name: as_held(whole_tensor(spec, n), spec, sizes, rank)
            for n, (name, spec) in enumerate(state.items())
        }
        plans.append(create_default_local_save_plan(held, rank == 0))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    return [plan.items for plan in planner.create_global_plan(plans)[0]]


def box_of(leaf: Leaf) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return leaf.key, leaf.box.offsets, leaf.box.sizes


def chunk_of(item: WriteItem) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes)


def num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@settings(max_examples=60, deadline=None)
@given(layout=states())
def test_pieces_are_those_of_torchs_own_plan(layout: tuple[tuple[int, ...], State]) -> None:
    """Two planners that share no code: the same boxes in all, each from one rank that has it."""
    sizes, state = layout
    by_rank = packed_by_rank(sizes, state)
    ours = Counter(box_of(leaf) for leaves in shares(by_rank) for leaf in leaves)
    theirs = Counter(chunk_of(item) for items in dcp_plans(sizes, state) for item in items)
    whole_and_empty = {name for name, spec in state.items() if 0 in spec.shape}
    assert {box: n for box, n in ours.items() if 0 not in box[2]} == {
        box: n for box, n in theirs.items() if 0 not in box[2]
    }
    assert {box[0] for box in ours if 0 in box[2]} == whole_and_empty
    for rank, leaves in enumerate(shares(by_rank)):
        held = {box_of(leaf) for leaf in by_rank[rank][0].leaves}
        assert {box_of(leaf) for leaf in leaves} <= held


def loads(sizes: Sequence[int], state: State) -> tuple[list[int], list[int]]:
    """Return the bytes that each rank writes: ours, and those of torch's plan."""
    ours = [
        sum(leaf.num_bytes for leaf in leaves) for leaves in shares(packed_by_rank(sizes, state))
    ]
    theirs = [sum(map(num_bytes, items)) for items in dcp_plans(sizes, state)]
    return ours, theirs


@settings(max_examples=30, deadline=None)
@given(layout=states())
def test_no_rank_gets_more_than_its_share_and_one_piece(
    layout: tuple[tuple[int, ...], State],
) -> None:
    """Of what the same ranks hold, each writes the average and at most one piece more."""
    sizes, state = layout
    by_rank = packed_by_rank(sizes, state)
    everyone = tuple(range(len(by_rank)))
    for rank, leaves in enumerate(shares(by_rank)):
        held: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for leaf in by_rank[rank][0].leaves:
            held[leaf.replicas or everyone].append(leaf.num_bytes)
        allowed = sum(sum(own) / len(ranks) + max(own) for ranks, own in held.items())
        assert sum(leaf.num_bytes for leaf in leaves) <= allowed


LAYERS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "embed": ((96, 16), (0, 0)),
    **{f"{n}.qkv": ((48, 16), (0, 0)) for n in range(4)},
    **{f"{n}.proj": ((16, 16), (0, 1)) for n in range(4)},
    **{f"{n}.norm": ((16,), (0, None)) for n in range(4)},
    **{f"{n}.up": ((64, 16), (0, 0)) for n in range(4)},
    **{f"{n}.down": ((16, 64), (0, 1)) for n in range(4)},
}


def test_shares_of_a_transformer_are_as_even_as_torchs() -> None:
    """In the usual layouts the slowest rank writes no more, within a twentieth."""
    for sizes, tile in [
        ((4,), lambda how: how[:1]),  # FSDP
        ((8,), lambda how: (None,)),  # replicas
        ((2, 4), lambda how: (None, how[0])),  # HSDP
        ((2, 2), lambda how: how),  # FSDP and tensor parallel
    ]:
        state = {
            name: Spec(shape, torch.float32, tile(how)) for name, (shape, how) in LAYERS.items()
        }
        ours, theirs = loads(sizes, state)
        assert sum(ours) == sum(theirs)
        assert max(ours) <= 1.05 * max(theirs)


def test_shares_of_random_states_are_not_much_less_even_than_torchs() -> None:
    """Random layouts with a fixed seed: the sums over all of what the slowest rank writes.

    Ours knows no other rank's shards, so that pieces held by different sets of ranks are shared out
    apart; torch's gathers all plans in one place. That costs something, and not more than this.
    """
    draw = random.Random(4)
    sum_ours = sum_theirs = 0
    for _ in range(40):
        sizes = draw.choice([(2,), (3,), (8,), (2, 2), (2, 4), (3, 2)])
        state = {}
        for n in range(draw.randrange(2, 12)):
            shape = tuple(draw.randrange(1, 12) for _ in range(draw.randrange(1, 4)))
            dims = [None, *range(len(shape))]
            how = tuple(draw.choice(dims) for _ in sizes)
            state[f"t{n}"] = Spec(shape, torch.float32, draw.choice([how, how, None]))
        ours, theirs = loads(sizes, state)
        sum_ours, sum_theirs = sum_ours + max(ours), sum_theirs + max(theirs)
    assert sum_ours <= 1.15 * sum_theirs


def save(sizes: Sequence[int], state: State) -> CheckpointSource:
    """Save as all ranks of a run do, one after the other, into memory."""
    store, entries = MemoryStore(), []
    by_rank = packed_by_rank(sizes, state)
    for rank, whole in enumerate(by_rank):
        own = own_share(whole, rank=rank, world_size=len(by_rank))
        plan = make_plan(own, rank=rank)
        stager = Stager(Arena())
        stager.stage(plan, own)
        places = {
            (part.item, entry.key): (part.file, entry.start, entry.stop)
            for part in plan.parts
            for entry in part.tensors
        }
        share = Share.of(whole, own, name="c", said={})
        documents = share.documents(places, rank=rank, team=len(by_rank))
        jobs = [
            file_job(f"c/{p.file}", p.file, stager.arena.view(p.arena_start, p.arena_stop))
            for p in plan.parts
        ]
        for path, data in documents.items():
            memory = page_memory(len(data))
            memory[: len(data)] = data
            jobs.append(file_job(f"c/{path}", path, memoryview(memory)[: len(data)]))
        written = write_files(store, jobs)
        # Through the text that ranks send each other.
        entries += [
            FileEntry.from_json(json.loads(json.dumps(e.to_json())), where="r") for e in written
        ]
    manifest = Manifest(
        name="c", run_id="0" * 32, session=1, attempt=1, write_id="0" * 32, parent=None,
        reason="manual", is_final=False, created_s=0.0, time={}, metrics={},
        world_size=len(by_rank), layout="milepost", items=("model",), files=tuple(entries),
        software={},
    )  # fmt: skip
    return CheckpointSource(store, "c", manifest)


def again(source: CheckpointSource) -> CheckpointSource:
    """Return the same checkpoint as another reader opens it."""
    return CheckpointSource(source._store, "c", source.manifest)


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], State, tuple[int, ...], State]:
    """The same tensors on two meshes, the first of at least two ranks."""
    first, second = draw(mesh_sizes.filter(lambda s: math.prod(s) > 1)), draw(mesh_sizes)
    made = draw(st.lists(shapes(), min_size=1, max_size=4))
    saved = {f"t{n}": draw(placed(*one, len(first))) for n, one in enumerate(made)}
    loaded = {f"t{n}": draw(placed(*one, len(second))) for n, one in enumerate(made)}
    return first, saved, second, loaded


@settings(max_examples=60, deadline=None)
@given(layouts=two_layouts())
def test_any_layout_is_loaded_bit_for_bit_in_any_other(
    layouts: tuple[tuple[int, ...], State, tuple[int, ...], State],
) -> None:
    """Each rank of the second layout gets the bytes that it would have cut out of the whole."""
    first, saved, second, loaded = layouts
    stored = save(first, saved)
    for rank in range(math.prod(second)):
        source = again(stored)
        wholes = {name: whole_tensor(spec, n) for n, (name, spec) in enumerate(loaded.items())}
        right = {name: as_held(wholes[name], spec, second, rank) for name, spec in loaded.items()}
        held = {
            name: as_held(torch.zeros_like(wholes[name]), spec, second, rank)
            for name, spec in loaded.items()
        }
        # What the index says is enough to find everything.
        with mock.patch.object(RankTables, "read_all", side_effect=AssertionError):
            source.read([("model", name, tensor) for name, tensor in held.items()])
        for name in loaded:
            found, wanted = (one[name] for one in (held, right))
            if loaded[name].placements is not None:
                found, wanted = found.to_local(), wanted.to_local()
            assert (
                found.contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .equal(wanted.contiguous().reshape(-1).view(torch.uint8))
            ), name


def test_an_index_that_leads_astray_costs_time_and_no_more() -> None:
    """What the ranks say of what they wrote decides."""
    state = {"a": Spec((6, 2), torch.float32, (0,)), "b": Spec((5000,), torch.float32, (None,))}
    source = save((3,), state)
    tables = source._of_ranks()
    tables._where["model"] = {"a": {"rank": 1}, "b": {"rank": 2}}
    for n, name in enumerate(state):
        whole = whole_tensor(state[name], n)
        found = torch.zeros_like(whole)
        source.read([("model", name, found)])
        assert found.view(torch.uint8).equal(whole.view(torch.uint8))


def test_of_a_thousand_ranks_a_reader_opens_the_tables_it_needs() -> None:
    """Its own for what it saved itself, one more for the counters, two where pieces are cut."""
    mesh = mesh_at((1024,), 0)
    state: dict[str, Tensor] = {
        f"w{n}": DTensor.from_local(
            torch.zeros(2, 3), mesh, [Shard(0)], run_check=False,
            shape=torch.Size((2048, 3)), stride=(3, 1),
        )
        for n in range(3000)
    }  # fmt: skip
    state |= {f"step{n}": torch.zeros(()) for n in range(3000)}
    item = pack_item("model", state)
    grids, tensors = directory([item], world_size=1024)
    index = {"items": {"model": {"home": "all", "tensors": tensors["model"]}}, "grids": grids}
    read: list[int] = []

    def table(rank: int) -> dict[str, Any]:
        read.append(rank)
        return {"model": {"pieces": []}}

    def opened(*wanted: tuple[str, Box]) -> list[int]:
        read.clear()
        RankTables("c", json.loads(json.dumps(index)), 1024, table).locate(
            ("model", key, box) for key, box in wanted
        )
        return read

    own = [(f"w{n}", Box((1400, 0), (2, 3))) for n in range(3000)]
    assert opened(*own) == [700]
    counters = [(f"step{n}", Box((), ())) for n in range(3000)]
    assert opened(*own, *counters) == [0, 700]
    assert opened(("w5", Box((1401, 1), (2, 1)))) == [700, 701]
    assert len(opened(("w5", Box((0, 0), (2048, 3))))) == 1024


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["grids"].append([[2], [0], [[0, 0]]]),
        lambda index: index["grids"].append([[2], [0, 9], [[0, 0]]]),
        lambda index: index["grids"].append([[2], [0, 1], [[1, 0]]]),
        lambda index: index["grids"].append([[2], [0, 1], [[0, 0], [0, 0]]]),
        lambda index: index.update(grids={}),
        lambda index: index["items"]["model"].update(tensors={}),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F32", [2]]),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F99", [2], None]),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F32", [-2], None]),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F32", [2], {"rank": 2}]),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F32", [2], {"grid": 1}]),
        lambda index: index["items"]["model"]["tensors"].append(["x", "F32", [], {"grid": 0}]),
        lambda index: index["items"]["model"]["tensors"].append(["a", "F32", [2], None]),
    ],
    ids=[
        "fewer ranks", "ranks that are none", "a cut of no dimension", "two cuts by one", "no list",
        "no list of tensors", "a short entry", "a code that is none", "a negative length",
        "a rank that is none", "a grid that is none", "a cut of no dimension of it", "a name twice",
    ],
)  # fmt: skip
def test_a_malformed_index_is_refused(change: Callable[[Any], None]) -> None:
    """Whoever wrote it: the error is ours."""
    index: dict[str, Any] = {
        "items": {"model": {"home": "all", "tensors": [["a", "F32", [2], {"grid": 0}]]}},
        "grids": [[[2], [0, 1], [[0, 0]]]],
    }
    RankTables("c", index, 2, lambda _: {})
    change(index)
    with pytest.raises(FormatError):
        RankTables("c", index, 2, lambda _: {})
