"""An epoch that goes on on other numbers of ranks: killed, resumed, and no sample lost or doubled.

Each rank writes down the samples of every batch before it trains on it. What the training has used
of an epoch is what was written down for batches that the next life does not repeat.
"""

from __future__ import annotations

import json
import os
import random
import textwrap
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from milepost.launch import FailureConfig, RunConfig, ScalingConfig, launch
from milepost.testing.ranks import Ranks, run_ranks

TRAIN = """
    import json, os, random, signal
    from pathlib import Path
    import milepost as mp
    import numpy as np
    from milepost.train import ResumableSampler
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(rank)
        def __len__(self):
            return 50
        def __getitem__(self, index):
            noise = torch.rand(1).item() + random.random() + float(np.random.rand())
            if torch.utils.data.get_worker_info() is None:  # a worker has a copy of it
                noise += torch.rand(1, generator=self.generator).item()
            return index, noise

    def train(
        folder, life, victim=None, stop_at=None, batch_size=2, num_workers=0, is_batched=True
    ):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        data = Data()
        if is_batched:
            sampler = ResumableSampler(data, batch_size=batch_size, seed=7)
            loader = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
        else:
            loader = DataLoader(
                data, batch_size, sampler=ResumableSampler(data, seed=7), num_workers=num_workers
            )
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2),
                                    torch.nn.Linear(4, 1))
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        log = Path(folder, f"log-{life}-{rank}").open("w")
        with mp.Checkpointer(
            Path(folder, "run"), every="1ba", model=model, optimizer=optimizer, loader=loader
        ) as run:
            report = run.load_report
            give(came=run.resumed_from, notes=report.notes if report else [],
                 draw=[torch.rand(1).item(), random.random(), float(np.random.rand())])
            for epoch in run.epochs(2):
                for index, noise in run.batches(loader):
                    if run.timer.batch == stop_at:
                        return
                    row = [run.timer.epoch, run.timer.batch, index.tolist(), noise.tolist()]
                    print(json.dumps(row), file=log, flush=True)
                    if run.timer.batch == victim:
                        run.wait()
                        dist.barrier()
                        os.kill(os.getpid(), signal.SIGKILL)
                    x = torch.stack([index / 50, noise], 1).float()
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
            counters = run.timer.snapshot()
            give(end=[p.tolist() for p in model.parameters()], sample=counters["sample"])
"""


def rows(folder: Path, life: int, num_ranks: int) -> list[list[Any]]:
    """Return what each rank wrote down: epoch, batches counted before, samples, noise."""
    logs = [(folder / f"log-{life}-{rank}").read_text() for rank in range(num_ranks)]
    return [[json.loads(line) for line in log.splitlines()] for log in logs]


def killed(folder: Path, life: int, num_ranks: int, victim: int, **options: Any) -> list[Any]:
    call = f"    train({str(folder)!r}, {life}, {victim}, **{options!r})\n"
    results = Ranks(TRAIN + call, num_ranks).wait(60)
    assert [one.code for one in results] == [-9] * num_ranks, results
    return [one.given for one in results]


def test_h19_an_epoch_goes_on_on_four_two_and_three_ranks(tmp_path: Path) -> None:
    """Killed twice within one epoch, and going on with another batch size and a worker.

    The counters count samples of all ranks, and no rank draws what another one draws.
    """
    killed(tmp_path, 1, 4, 2, batch_size=2)
    second = killed(tmp_path, 2, 2, 6, batch_size=3, num_workers=1)
    call = f"    train({str(tmp_path)!r}, 3, batch_size=2)\n"
    third = run_ranks(TRAIN + call, 3, timeout_s=60)

    assert {one["came"] for one in second} == {"ba2"}
    assert {one["came"] for one in third} == {"ba6"}
    assert any("are dealt to 2" in note for note in second[0]["notes"])
    seen: dict[int, list[int]] = defaultdict(list)
    for life, num_ranks, end in ((1, 4, 2), (2, 2, 6), (3, 3, 1000)):
        for epoch, batch, samples, _ in chain.from_iterable(rows(tmp_path, life, num_ranks)):
            if batch < end:
                seen[epoch] += samples
    for epoch in (0, 1):
        assert sorted(seen[epoch]) == list(range(50))
    assert seen[0] != seen[1]
    assert all(one["end"] == third[0]["end"] for one in third)
    assert {one["sample"] for one in third} == {100}
    for given in (second, third):
        draws = [tuple(one["draw"]) for one in given]
        assert len(set(draws)) == len(draws)
    state = mp.open_run(tmp_path / "run").get("ba6").load(["loader"])["state"]["loader"]
    assert (state["samples"], state["position"]) == (2 * 8 + 4 * 6, 6)


WAYS: dict[str, dict[str, Any]] = {
    "batches": {"num_workers": 0},
    "singles": {"num_workers": 1, "is_batched": False},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks gave that trained straight, cut twice, and with batch sizes that differ."""
    place = tmp_path_factory.mktemp("pair")
    body = f"""
    def new_folder(*parts):
        folder = Path({str(place)!r}, *parts)
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        return folder

    for name, options in {WAYS!r}.items():
        for kind, stops in (("straight", [None]), ("split", [4, 5, None])):
            folder = new_folder(name, kind)
            for life, stop in enumerate(stops):
                train(folder, life, stop_at=stop, **options)
            give(**{{name + kind: results["end"]}})
    try:
        train(new_folder("apart"), 0, batch_size=2 + rank)
    except Exception as error:
        give(apart=[type(error).__name__, str(error)])
    """
    return place, run_ranks(TRAIN + body, 2)


def test_as_many_ranks_go_on_bit_for_bit(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """Weights, samples, and whatever is drawn by the training, the data set and a worker.

    The samples are given in batches or one by one, and the rest of the epoch is dealt twice.
    """
    place, given = pair
    for name in WAYS:
        assert given[0][f"{name}split"] == given[0][f"{name}straight"]
        whole = rows(place / name / "straight", 0, 2)
        lives = [rows(place / name / "split", life, 2) for life in range(3)]
        for rank in range(2):
            assert list(chain.from_iterable(life[rank] for life in lives)) == whole[rank]


def test_ranks_whose_positions_differ_cannot_save(pair: tuple[Path, list[dict[str, Any]]]) -> None:
    """A position that is right on one rank only would lose samples of the others."""
    place, given = pair
    for one in given:
        kind, said = one["apart"]
        assert kind == "MismatchError"
        assert "loader" in said
    assert mp.open_run(place / "apart" / "run").checkpoints() == []


FLEETING = """
    import json, os, random, signal, sys, threading
    from pathlib import Path
    import milepost as mp
    import torch
    import torch.distributed as dist
    from milepost.train import ResumableSampler
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["MILEPOST_ATTEMPT"])
    chance = random.Random(f"{seed} {attempt}")
    batch_size, num_workers = chance.choice([2, 3]), chance.choice([0, 1])
    victim, wait_s = chance.randrange(world_size), chance.uniform(0.0, 1.5)
    sampler = ResumableSampler(203, batch_size=batch_size, seed=seed)
    loader = DataLoader(range(203), batch_sampler=sampler, num_workers=num_workers)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    log = (folder / f"log-{attempt}-{rank}").open("w")
    with mp.Checkpointer(
        folder / "run", every=chance.choice(["1ba", "3ba"]), model=model, optimizer=optimizer,
        loader=loader,
    ) as run:
        print(json.dumps([world_size, run.timer.batch]), file=log, flush=True)
        if rank == victim:
            timer = threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        for epoch in run.epochs(3):
            for x in run.batches(loader):
                row = [run.timer.epoch, run.timer.batch, x.tolist()]
                print(json.dumps(row), file=log, flush=True)
                optimizer.zero_grad()
                model(x.float()[:, None] / 203).square().mean().backward()
                optimizer.step()
                threading.Event().wait(0.02)
    dist.destroy_process_group()
    os._exit(0)
"""


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_ranks_that_come_and_go_at_random_use_each_sample_once(tmp_path: Path) -> None:
    """One rank is killed at any moment of each life, and the next life has another number.

    Where fewer samples than ranks are left, the last step of the epoch may repeat some.
    """
    seed = int(os.environ.get("MILEPOST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"MILEPOST_SEED={seed}")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(FLEETING))
    chance = random.Random(seed)
    result = launch(
        str(script),
        [str(tmp_path), str(seed)],
        scaling=ScalingConfig(num_workers=(1, 4)),
        run=RunConfig(
            storage_path=tmp_path / "launched",
            failure_config=FailureConfig(max_failures=60, backoff_s=0.01),
        ),
        available=lambda: chance.randint(1, 4),
    )
    lives: list[tuple[int, int, list[list[Any]]]] = []
    for number in range(1, len(result.attempts) + 1):
        logs = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(tmp_path.glob(f"log-{number}-*"))
        ]
        begun = [log for log in logs if log]
        if begun:
            assert all(log[0] == begun[0][0] for log in begun)
            num_ranks, batch = begun[0][0]
            lives.append((num_ranks, batch, [row for log in begun for row in log[1:]]))
    used: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for at, (num_ranks, _, found) in enumerate(lives):
        end = lives[at + 1][1] if at + 1 < len(lives) else 1 << 30
        for epoch, batch, samples in found:
            if batch < end:
                used[epoch] += [(batch, sample) for sample in samples]
        print(f"{num_ranks} ranks, batches {lives[at][1]} to {min(end, 9999)}")
    for epoch in range(3):
        samples = [sample for _, sample in used[epoch]]
        assert set(samples) == set(range(203))
        last = max(batch for batch, _ in used[epoch])
        before = [sample for batch, sample in used[epoch] if batch < last]
        assert len(before) == len(set(before))
        assert len(samples) - 203 < 4


TRAINER = """
    import json
    from pathlib import Path
    from milepost.train import Callback, Event, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
        def forward(self, batch):
            return self.layer(batch[0][:, None].float() / 50)
        def loss(self, outputs, batch):
            return (outputs - 1).square().mean()

    class Log(Callback):
        def __init__(self, file):
            self.file = file
        def run_event(self, event, state):
            if event is Event.BATCH_START:
                row = [state.timer.epoch, state.timer.batch, state.batch[0].tolist()]
                print(json.dumps(row), file=self.file, flush=True)

    def train(folder, life, until, batch_size):
        net = Net()
        with Path(folder, f"log-{life}-{rank}").open("w") as file:
            trainer = Trainer(
                model=net,
                train_dataloader=DataLoader(TensorDataset(torch.arange(50)), batch_size,
                                            shuffle=True),
                max_duration=until,
                optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
                callbacks=Log(file),
                save_folder=folder + "/run",
                save_interval="1ba",
                resume="auto",
                progress_bar=False,
                seed=5,
            )
            trainer.fit()
            give(timer=trainer.state.timer.snapshot(), steps=trainer.state.steps_per_epoch)
            trainer.close()
"""


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_trainer_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """A plain loader that shuffles is dealt out too, and an epoch's steps are told as they are."""
    seen: dict[int, list[int]] = defaultdict(list)
    lives = ((3, "3ba", 2, 9), (2, "6ba", 3, 9), (4, "8ba", 2, 7), (2, "2ep", 4, 7))
    for life, (num_ranks, until, batch_size, num_steps) in enumerate(lives):
        call = f"    train({str(tmp_path)!r}, {life}, {until!r}, {batch_size})\n"
        given = run_ranks(TRAINER + call, num_ranks)
        assert {one["steps"] for one in given} == {num_steps}
        for epoch, _, samples in chain.from_iterable(rows(tmp_path, life, num_ranks)):
            seen[epoch] += samples
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(50))
    assert seen[0] != seen[1]
    assert given[0]["timer"]["sample"] == 100
