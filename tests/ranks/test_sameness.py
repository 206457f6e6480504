"""What all ranks should have alike, and do not: found, named, and not committed."""

from __future__ import annotations

from pathlib import Path

import torch

import milepost as mp
from milepost.testing.ranks import run_ranks

BODY = """
    import milepost as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    def attempt(run, name):
        try:
            run.save(name, wait=True)
        except Exception as error:
            said[name] = [type(error).__name__, error.facts.get("names")]
        else:
            said[name] = "ok"

    said = {}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    other = nn.Linear(30, 3)
    own = torch.full((5,), float(rank))
    with mp.Checkpointer(FOLDER, model=model, optimizer=optimizer) as run:
        attempt(run, "ddp")
        with torch.no_grad():
            plain[0].weight += rank
        optimizer.state[plain[2].bias]["exp_avg"].add_(rank)
        attempt(run, "apart")
        for shared in (plain[0].weight.data, optimizer.state[plain[2].bias]["exp_avg"]):
            dist.broadcast(shared, 0)
        run.track(own=mp.PerRank(mp.Value(lambda: own, lambda value: None)))
        run.track(metric=mp.Value(lambda: own, lambda value: None))
        attempt(run, "metric")
        own = torch.zeros(5)
        attempt(run, "again")
    with mp.Checkpointer(FOLDER + "-off", rank_check="none", other=nn.Linear(2, 2)) as run:
        attempt(run, "off")
    with mp.Checkpointer(FOLDER + "-full", rank_check="full", model=plain) as run:
        attempt(run, "full")

    # Tensor parallelism: the norm is on both ranks.
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    parallelize_module(sharded, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with mp.Checkpointer(FOLDER + "-tp", model=sharded) as run:
        attempt(run, "tp")
        with torch.no_grad():
            sharded[1].weight += rank
        attempt(run, "tp-apart")

    # A weight that two stages share by name.
    torch.manual_seed(rank)
    stage = nn.ModuleDict({"tied": nn.Linear(3, 3), f"own{rank}": nn.Linear(2, 2)})
    with mp.Checkpointer(FOLDER + "-stages", model=mp.Stage(stage)) as run:
        attempt(run, "untied")
        for p in stage["tied"].parameters():
            dist.broadcast(p.data, 0)
        attempt(run, "tied")
    give(said=said)
"""


def test_ranks_that_differ_where_they_should_not_commit_nothing(tmp_path: Path) -> None:
    """Of a mixture of what several ranks had nobody would ever know."""
    folder = tmp_path / "run"
    given = run_ranks(BODY.replace("FOLDER", repr(str(folder))), 2)
    expected = {
        "ddp": "ok",
        "apart": ["MismatchError", ["model/0.weight", "optimizer/state/2.bias/exp_avg"]],
        "metric": ["MismatchError", ["metric/value"]],
        "again": "ok",
        "off": "ok",
        "full": "ok",
        "tp": "ok",
        "tp-apart": ["MismatchError", ["model/1.weight"]],
        "untied": ["MismatchError", ["model/tied.bias", "model/tied.weight"]],
        "tied": "ok",
    }
    assert [one["said"] for one in given] == [expected, expected]
    run = mp.open_run(folder)
    assert [one.name for one in run.checkpoints()] == ["ddp", "again"]
    assert not (folder / "apart").exists()
    buffers = run.get("ddp").load(["model"])["state"]["model"]
    assert not torch.equal(buffers["1.running_mean"], torch.zeros(50))
