"""Runs of several ranks: saved in any layout, loaded in any other, and exact where they go on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import app
from milepost.testing.ranks import run_ranks

BUILD = """
    import hashlib
    import milepost as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    def build(layout):
        torch.manual_seed(0)
        plain = model = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, dtype=torch.float32), nn.Linear(3, 1)
        )
        plain[3].weight.requires_grad_(False)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        if layout == "ddp":
            model = DistributedDataParallel(plain)
        elif layout == "fsdp":
            for layer in (plain[0], plain[2]):
                fully_shard(layer)
            fully_shard(plain)
        elif layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
            fully_shard(plain[0], mesh=mesh)
            fully_shard(plain, mesh=mesh)
        elif layout == "tp":
            parallelize_module(plain, init_device_mesh("cpu", (world_size,)), plan)
        elif layout == "2d":
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(plain, mesh["tp"], plan)
            fully_shard(plain, mesh=mesh["dp"])
        trained = [p for p in model.parameters() if p.requires_grad]
        return plain, model, torch.optim.AdamW(trained, lr=0.1)

    def digest(tensor):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()

    def state_of(plain, optimizer):
        found = [digest(p) for p in plain.parameters()]
        for group in optimizer.param_groups:
            for p in group["params"]:
                found += [digest(v) for _, v in sorted(optimizer.state[p].items())]
        return found

    def step(model, optimizer, seed=5):
        torch.manual_seed(seed)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

LEAVE = """
    # After full_tensor torch's own threads now and then abort the process as it ends.
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
"""

LAYOUTS = {"solo": 1, "ddp": 2, "fsdp": 2, "tp": 2, "hsdp": 4, "2d": 4, "fsdp-3": 3}


def save(folder: Path, layout: str) -> list[Any]:
    body = f"""
    plain, model, optimizer = build({layout.partition("-")[0]!r})
    with mp.Checkpointer({str(folder)!r}, model=model, optimizer=optimizer) as run:
        for _ in range(2):
            step(model, optimizer)
            run.step(num_samples=4)
        run.save(wait=True)
        give(state=state_of(plain, optimizer))
    """
    return [one["state"] for one in run_ranks(BUILD + body + LEAVE, LAYOUTS[layout])]


def load(folder: Path, layout: str) -> list[Any]:
    body = f"""
    plain, model, optimizer = build({layout.partition("-")[0]!r})
    with mp.Checkpointer({str(folder)!r}, model=model, optimizer=optimizer, resume="must") as run:
        before = state_of(plain, optimizer)
        step(model, optimizer)
        run.step(num_samples=4)
        run.save(wait=True)
        give(state=before, name=run.resumed_from)
    """
    found = run_ranks(BUILD + body + LEAVE, LAYOUTS[layout])
    assert {one["name"] for one in found} == {"ba2"}
    return [one["state"] for one in found]


PAIRS = [
    ("fsdp", "ddp"),
    ("ddp", "fsdp-3"),
    ("fsdp-3", "tp"),
    ("tp", "2d"),
    ("2d", "solo"),
    ("solo", "fsdp"),
    ("hsdp", "fsdp"),
]


@pytest.mark.parametrize(("then", "now"), PAIRS, ids=["-to-".join(p) for p in PAIRS])
def test_any_layout_goes_on_in_any_other(tmp_path: Path, then: str, now: str) -> None:
    """Weights, frozen ones, moments and steps, bit for bit, and a further step and save."""
    saved = save(tmp_path, then)
    assert all(one == saved[0] for one in saved)
    whole = mp.open_run(tmp_path).get("ba2")
    assert whole.verify().is_good
    loaded = load(tmp_path, now)
    assert all(one == saved[0] for one in loaded)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["ba2", "ba3"]


def test_replicated_state_is_written_once(tmp_path: Path) -> None:
    """The sum over all ranks is that of one copy."""
    save(tmp_path, "ddp")
    manifest = mp.open_run(tmp_path).get("ba2").manifest
    assert manifest.world_size == 2
    parts = [one.path for one in manifest.files if re.match(r"model.*\.safetensors$", one.path)]
    headers = [safe_open(tmp_path / "ba2" / path, framework="pt") for path in parts]
    found = sorted((key, tuple(one.get_tensor(key).shape)) for one in headers for key in one.keys())  # noqa: SIM118
    assert found == [
        ("0.bias", (8,)),
        ("0.weight", (8, 6)),
        ("2.bias", (3,)),
        ("2.weight", (3, 8)),
        ("3.bias", (1,)),
        ("3.weight", (1, 3)),
    ]


def test_the_command_line_and_readers_see_the_whole(tmp_path: Path) -> None:
    """One tensor is one tensor, in however many pieces it was written."""
    save(tmp_path, "fsdp")
    place = str(tmp_path / "ba2")
    shown = CliRunner().invoke(app, ["show", place, "--tensors", "--json"])
    assert shown.exit_code == 0, shown.output
    tensors = {
        one["name"]: one for one in json.loads(shown.output)["tensors"] if one["item"] == "model"
    }
    assert tensors["0.weight"]["shape"] == [8, 6]
    assert CliRunner().invoke(app, ["diff", place, place]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", place, "--level", "full"]).exit_code == 0
    loaded = mp.open_run(tmp_path).get("ba2").load()
    assert len(loaded["rng"]) == 2
    assert loaded["state"]["model"]["0.weight"].shape == (8, 6)


LOOP = """
    import random
    import milepost as mp
    import numpy as np
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    def train(folder, stop_at):
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        np.random.seed(100 + rank)
        data = torch.arange(48.0).reshape(24, 2)
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
        loader = DataLoader(data, 2, sampler=sampler)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.5))
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        with mp.Checkpointer(
            folder, every="1ba", model=model, optimizer=optimizer, loader=loader
        ) as run:
            for epoch in run.epochs(2):
                for x in run.batches(loader):
                    if run.timer.batch == stop_at:
                        run.wait()
                        return seen, None
                    noise = random.random() + float(np.random.rand())
                    model(x + noise).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append([x.tolist(), noise])
            last = [p.tolist() for p in model.parameters()]
        return seen, last
"""


def test_a_run_of_two_ranks_goes_on_exactly(tmp_path: Path) -> None:
    """In the middle of an epoch, each rank with random numbers and samples of its own (H04)."""
    body = f"""
    straight = train({str(tmp_path / "a")!r}, None)
    first, _ = train({str(tmp_path / "b")!r}, 8)
    rest, last = train({str(tmp_path / "b")!r}, None)
    give(straight=straight[0], split=first + rest, ends=[straight[1], last])
    """
    given = run_ranks(LOOP + body, 2)
    for one in given:
        assert one["split"] == one["straight"]
        assert one["ends"][0] == one["ends"][1]
    assert given[0]["straight"] != given[1]["straight"]
    assert given[0]["ends"] == given[1]["ends"]


def test_another_number_of_ranks_within_an_epoch_is_refused(tmp_path: Path) -> None:
    """Each rank has its own share of the epoch: with another number samples would be lost."""
    run_ranks(LOOP + f"    train({str(tmp_path)!r}, 4)\n", 2)
    refused = """
    try:
        train({!r}, None)
    except mp.MismatchError as error:
        give(said=str(error))
    """
    (given,) = run_ranks(LOOP + refused.format(str(tmp_path)), 1)
    assert "an epoch that 2 ranks shared, and here are 1" in given["said"]
    assert "ResumableSampler" in given["said"]


FAULTS = """
    import os
    import milepost as mp

    class Bad:
        def __init__(self, bad):
            self.bad = bad
        def state_dict(self):
            if self.bad:
                raise ZeroDivisionError("by hand")
            return {"x": 1}
        def load_state_dict(self, state):
            pass

    model = torch.nn.Linear(2, 2)
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    bad = Bad(False)
    box = {"value": 1}
    own = {"value": rank}
    said = []

    def attempt(name, **options):
        try:
            run.save(name, wait=True)
        except Exception as error:
            said.append([type(error).__name__, str(error)])
        else:
            said.append("ok")
"""


def test_an_error_on_one_rank_in_any_phase_is_told_to_all(tmp_path: Path) -> None:
    """Nothing is committed, nobody hangs, and the next save works."""
    body = f"""
    def opened():
        return mp.Checkpointer(
            {str(tmp_path)!r},
            model=model,
            bad=bad,
            box=mp.Value(lambda: box["value"], lambda value: None),
            own=mp.PerRank(mp.Value(lambda: own["value"], lambda value: own.update(value=value))),
        )

    with opened() as run:
        attempt("a")
        bad.bad = rank == 1
        attempt("capture")
        bad.bad = False
        attempt("b")
        box["value"] = rank
        attempt("apart")
        box["value"] = 2
        committer = run._writer._saver._committer
        if rank == 1:
            write, committer._write_share = committer._write_share, None
        attempt("write")
        if rank == 1:
            committer._write_share = write
        attempt("c")
    late = opened()
    if rank == 1:
        late._watch = lambda: 1 / 0
    try:
        late.open()
    except Exception as error:
        give(early=[type(error).__name__, str(error)])
    own["value"] = 77
    with opened() as run:
        give(said=said, came=run.resumed_from, own=own["value"])
    """
    given = run_ranks(FAULTS + body, 2)
    for rank, one in enumerate(given):
        assert [said == "ok" for said in one["said"]] == [True, False, True, False, False, True]
        assert one["came"] == "c"
        assert one["own"] == rank
    early = [one["early"] for one in given]
    assert [kind for kind, _ in early] == ["RankFailedError", "ZeroDivisionError"]
    assert "rank 1: ZeroDivisionError" in early[0][1]
    zero, one = (given[rank]["said"] for rank in range(2))
    assert zero[1][0] == "RankFailedError"
    assert "rank 1: ZeroDivisionError: by hand" in zero[1][1]
    assert one[1][0] == "ZeroDivisionError"
    assert zero[3] == one[3]
    assert zero[3][0] == "MismatchError"
    assert "box" in zero[3][1]
    assert zero[4][0] == one[4][0] == "RankFailedError"
    names = [found.name for found in mp.open_run(tmp_path).checkpoints()]
    assert names == ["a", "b", "c"]
    assert not (tmp_path / "write").exists()


def test_h18_a_save_from_one_rank_alone_ends(tmp_path: Path) -> None:
    """It says that every rank must save; no rank hangs."""
    body = f"""
    with mp.Checkpointer({str(tmp_path)!r}, model=model, rank_timeout_s=2.0) as run:
        if rank == 0:
            attempt("alone")
        give(said=said)
    """
    given = run_ranks(FAULTS + body, 2, timeout_s=60)
    ((kind, text),) = given[0]["said"]
    assert kind == "DeadlineError"
    assert "Every rank must save" in text
    assert mp.open_run(tmp_path).checkpoints() == []


def test_a_rank_that_writes_too_late_takes_it_back(tmp_path: Path) -> None:
    """The leader gave the save up; files that nobody claims would stay for ever."""
    body = f"""
    import time
    with mp.Checkpointer({str(tmp_path)!r}, model=model, share_timeout_s=1.0) as run:
        saver = run._writer._saver._committer
        write = saver._write_share
        def late(held, work):
            entries = write(held, work)
            time.sleep(4)
            return entries
        if rank == 1:
            saver._write_share = late
        attempt("late")
        saver._write_share = write
        give(left=os.path.exists({str(tmp_path)!r} + "/late"))
        attempt("late")
        give(said=said)
    """
    given = run_ranks(FAULTS + body, 2, timeout_s=60)
    for one in given:
        (kind, text), again = one["said"]
        assert kind == "DeadlineError"
        assert "Rank 1 did not come within 1 s to write its share" in text
        assert again == "ok"
    assert given[1]["left"] is False
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["late"]


def test_a_rank_that_sees_another_folder_is_told(tmp_path: Path) -> None:
    """Its part would be missing from every checkpoint."""
    body = f"""
    try:
        mp.Checkpointer({str(tmp_path)!r} + f"/{{rank}}", model=model).open()
    except Exception as error:
        give(said=str(error))
    """
    for one in run_ranks(FAULTS + body, 2):
        assert "not the same place on every rank" in one["said"]


@pytest.mark.parametrize("signalled", [[1], [0, 1]], ids=["one", "all"])
def test_a_signal_stops_all_ranks_at_one_batch(tmp_path: Path, signalled: list[int]) -> None:
    """Also those that got none: a rank that went on would wait for the others for ever."""
    body = f"""
    import os, signal
    give(started=True)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    loader = [torch.ones(1, 2)] * 100000
    with mp.Checkpointer({str(tmp_path)!r}, model=model, loader=loader) as run:
        for _ in run.epochs(1):
            for x in run.batches(loader):
                model(x).sum().backward()
                if run.timer.batch == 20 + rank and rank in {signalled!r}:
                    os.kill(os.getpid(), signal.SIGTERM)
    """
    run_ranks(LOOP + body, 2, codes=[143, 143])
    (checkpoint,) = mp.open_run(tmp_path).checkpoints()
    assert checkpoint.manifest.reason == "signal"
    assert 21 < checkpoint.time["batch"] < 100000


def test_ranks_that_are_not_in_step_cannot_save(tmp_path: Path) -> None:
    """A checkpoint must be of one moment."""
    body = f"""
    with mp.Checkpointer({str(tmp_path)!r}, model=model) as run:
        for _ in range(2 + rank):
            run.step(num_samples=1)
        attempt("apart")
        give(said=said)
    """
    for one in run_ranks(FAULTS + body, 2):
        ((kind, text),) = one["said"]
        assert kind == "MismatchError"
        assert "at is" in text
    assert mp.open_run(tmp_path).checkpoints() == []
