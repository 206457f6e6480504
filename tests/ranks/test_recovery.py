"""A training on several workers, killed, comes back without a hand and ends the same."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import milepost as mp
from milepost.launch import FailureConfig, RunConfig, ScalingConfig, launch

SCRIPT = """
    import json, os, pathlib, random, signal, sys
    import milepost as mp
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    folder, victims = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.arange(120.0).reshape(40, 3) / 100
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, world_size, rank))
    attempt = int(os.environ["MILEPOST_ATTEMPT"])
    with mp.Checkpointer(
        folder, every="3ba", model=model, optimizer=optimizer, loader=loader
    ) as run:
        pathlib.Path(folder, f"from-{attempt}-{rank}").write_text(str(run.resumed_from))
        for epoch in run.epochs(2):
            for x in run.batches(loader):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                if [attempt, rank, run.timer.batch] in victims:
                    run.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
    end = [p.tolist() for p in model.parameters()]
    pathlib.Path(folder, f"end-{rank}").write_text(json.dumps(end))
    dist.destroy_process_group()
"""


def train(folder: Path, victims: list[list[int]], max_failures: int) -> mp.LaunchResult:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    policy = FailureConfig(max_failures=max_failures, backoff_s=0.01)
    return launch(
        str(script),
        [str(folder / "run"), json.dumps(victims)],
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage_path=folder, name="launched", failure_config=policy),
    )


def test_killed_workers_come_back_and_end_the_same(tmp_path: Path) -> None:
    """One worker, then the other, in the middle of epochs; nobody starts anything by hand."""
    train(tmp_path / "a", [], 0)
    result = train(tmp_path / "b", [[1, 1, 7], [2, 0, 14]], 3)
    assert len(result.attempts) == 3
    for rank in range(2):
        ends = [json.loads((tmp_path / x / f"run/end-{rank}").read_text()) for x in "ab"]
        assert ends[0] == ends[1]
        came = [(tmp_path / f"b/run/from-{n}-{rank}").read_text() for n in (1, 2, 3)]
        assert came[0] == "None"
        assert came[1] in ("ba3", "ba6")
        assert came[2] in ("ba12", "ba9", "ep1")
    assert mp.open_run(tmp_path / "b/run").latest() is not None


def test_workers_that_always_die_end_with_a_diagnosis(tmp_path: Path) -> None:
    """No one is served by a training that starts again for ever."""
    victims = [[attempt, 0, 1] for attempt in range(1, 10)]
    with pytest.raises(mp.LaunchFailedError) as caught:
        train(tmp_path / "a", victims, -1)
    assert len(caught.value.facts["result"].attempts) == 3
