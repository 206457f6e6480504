"""Copies on this machine of runs in a bucket: what is downloaded, and what kills leave."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import milepost as mp
from milepost.stores import open_store
from milepost.testing import fault_proxy
from milepost.testing.proxy import Answer, Forward, Request

from .conftest import KEY, SECRET

TRAIN = """
import sys
import torch
import milepost as mp

place, cache = sys.argv[1], sys.argv[2] or None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1700, 1700), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(model.parameters())
with mp.Checkpointer(
    place, every="1ba", keep=mp.KeepLast(3), local_cache=cache, model=model, optimizer=optimizer
) as run:
    print("from", run.resumed_from, flush=True)
    while run.timer.batch < 20:
        model(torch.randn(2, 1700)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(num_samples=2)
    run.save("end", wait=True)
"""


@pytest.fixture
def place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a run of its own; credentials are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://runs/{tmp_path.name}"


@pytest.mark.cloud
def test_a_trainer_that_starts_again_downloads_records_only(
    place: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one file for each checkpoint or in parts; the weights are those of before."""
    received: dict[str, int] = {}

    def count(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.method == "GET":
            received[request.path] = received.get(request.path, 0) + len(answer.body)
        return answer

    def trainer(save_format: str, **options: object) -> mp.Trainer:
        torch.manual_seed(1)
        model = torch.nn.Linear(1500, 1500)
        options.setdefault("save_folder", f"{place}/{save_format}")
        return mp.Trainer(
            model=model,
            loss_fn=torch.nn.functional.mse_loss,
            train_dataloader=DataLoader([(torch.ones(1500), torch.ones(1500))] * 4, batch_size=2),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            save_format=save_format,  # type: ignore[arg-type]
            local_cache=tmp_path / "cache",
            progress_bar=False,
            **options,  # type: ignore[arg-type]
        )

    with fault_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.rule = count
        for save_format in ("milepost", "torch"):
            first = trainer(save_format, max_duration="2ep")
            first.fit()
            first.close()
            received.clear()
            second = trainer(save_format, max_duration="3ep", resume="must")
            assert sum(received.values()) < 200_000, received
            assert second.state.timer.epoch == 2
            for now, before in zip(
                second.state.model.parameters(), first.state.model.parameters(), strict=True
            ):
                assert now.equal(before)
            second.close()
        with pytest.raises(mp.UsageError, match="needs a save_folder"):
            trainer("milepost", max_duration="1ep", save_folder=None)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_time_leave_copies_that_are_right_or_unused(
    place: str, tmp_path: Path, seed: int
) -> None:
    """Each start goes on bit for bit, and what is kept equals what is in the bucket."""
    chance, cache = random.Random(seed), tmp_path / "cache"
    for number in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, place, str(cache)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        if number < 7:
            time.sleep(chance.uniform(0.05, 1.5))
            process.kill()
        process.communicate(timeout=100)
    assert process.returncode == 0
    assert not list(cache.glob("*/part-*"))
    straight = str(tmp_path / "straight")
    subprocess.run([sys.executable, "-c", TRAIN, straight, ""], check=True, env={**os.environ})
    found, right = (mp.open_run(one).get("end").load() for one in (place, straight))
    assert torch.equal(found["rng"][0]["torch"], right["rng"][0]["torch"])
    for name, value in right["state"]["model"].items():
        assert found["state"]["model"][name].equal(value)
    for name, moments in right["state"]["optimizer"]["state"].items():
        for kind, value in moments.items():
            assert found["state"]["optimizer"]["state"][name][kind].equal(value)
    store, num_kept = open_store(place), 0
    for one in mp.open_run(place).checkpoints():
        for entry in one.manifest.files:
            for path in cache.glob(f"*/*/*-{one.manifest.write_id}/{entry.path}"):
                assert path.read_bytes() == store.get(f"{one.manifest.name}/{entry.path}")
                num_kept += 1
    assert num_kept > 0
