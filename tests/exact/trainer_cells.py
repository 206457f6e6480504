"""One cell of the exactness matrix, and a server that runs cells in processes of their own.

Imported by the tests, and started by them as a program: torch is loaded once, and each job is run
in a fork of that clean process, with fresh objects, its own seeds and its own random state.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import MulticlassAccuracy

from milepost.runs.keep import KeepLast
from milepost.state.rng import capture_rng
from milepost.train import EMA, Callback, Event, ResumableSampler, Trainer
from milepost.train.seeding import seed_everything

NUM_SAMPLES, BATCH, EPOCHS = 40, 4, 3
BATCHES = NUM_SAMPLES // BATCH


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    sampler: str  # plain | seeded | dealt | stateful
    dropout: float
    workers: int
    grad_accum: int

    def __str__(self) -> str:
        return f"{self.sampler}-dropout{self.dropout}-workers{self.workers}-accum{self.grad_accum}"


def all_cells() -> list[Cell]:
    return [
        Cell(sampler, dropout, workers, grad_accum)
        for sampler in ("plain", "seeded", "stateful")
        for dropout in (0.0, 0.5)
        for workers in (0, 2)
        for grad_accum in (1, 2)
    ] + [Cell("dealt", 0.5, workers, 2) for workers in (0, 2)]


class Digits(Dataset):
    """Samples with their ids. Read in this process, each also draws noise from its generator."""

    def __init__(self, *, is_noisy: bool) -> None:
        made = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=made)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        sample = self.inputs[index]
        if self.is_noisy:
            sample = (
                sample + 0.1 * torch.randn(6) + random.random() * 0.01 + np.random.rand() * 0.01
            )
        return sample, self.targets[index], index


class Net(nn.Module):
    """Dropout, batch norm, and a loss of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def targets(self, batch: Any) -> torch.Tensor:
        return batch[1]


class ScalerStub:
    """Scales like a gradient scaler, by powers of two, with a state that matters."""

    def __init__(self) -> None:
        self.scale_now, self.steps = 1.0, 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale_now

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.scale_now)
        optimizer.step()

    def update(self) -> None:
        self.steps += 1
        if self.steps % 4 == 0:
            self.scale_now = self.scale_now * 2 if self.scale_now < 64 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale_now": self.scale_now, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale_now, self.steps = state["scale_now"], state["steps"]


_UNCOUNTED = {Event.INIT, Event.FIT_START, Event.FIT_END}


class Count(Callback):
    """Counts events and notes samples; its start tells two of the class apart."""

    def __init__(self, start: int) -> None:
        self.total = start
        self.events: dict[str, int] = {}
        self.samples: list[list[int]] = []

    def run_event(self, event: Event, state: Any) -> None:
        if event in _UNCOUNTED:
            return
        self.total += 1
        self.events[event.value] = self.events.get(event.value, 0) + 1
        if event is Event.BATCH_START:
            self.samples.append(state.batch[2].tolist())
        elif event is Event.EPOCH_START and self.total % 2:
            torch.rand(1)  # a callback that draws must not matter either

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "events": dict(self.events), "samples": list(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.events = state["total"], dict(state["events"])
        self.samples = list(state["samples"])


def make_trainer(cell: Cell, *, scramble: int, **options: Any) -> Trainer:
    """Make a trainer with fresh objects, in a process whose generators are anywhere."""
    random.seed(scramble)
    np.random.seed(scramble)
    torch.manual_seed(scramble)
    model = Net(cell.dropout)
    if scramble == 0:
        options.setdefault("seed", 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data = Digits(is_noisy=cell.workers == 0)
    loader_options: dict[str, Any] = {"batch_size": BATCH, "num_workers": cell.workers}
    if cell.sampler == "seeded":
        generator = torch.Generator().manual_seed(5)
        loader_options["sampler"] = RandomSampler(data, generator=generator)
    elif cell.sampler == "dealt":
        loader_options["sampler"] = ResumableSampler(data, seed=5)
    else:
        loader_options["shuffle"] = True
    kind = StatefulDataLoader if cell.sampler == "stateful" else DataLoader
    options.setdefault("max_duration", f"{EPOCHS}ep")
    return Trainer(
        model=model,
        train_dataloader=kind(data, **loader_options),
        eval_dataloader=DataLoader(Digits(is_noisy=True), batch_size=20, shuffle=True),
        eval_metrics=MulticlassAccuracy(num_classes=2),
        eval_interval=["1ep", "7ba"],
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * BATCHES),
        step_schedulers_every="batch",
        scaler=ScalerStub(),
        grad_accum=cell.grad_accum,
        algorithms=EMA(0.9),
        callbacks=[Count(0), Count(100)],
        compute_training_metrics=True,
        train_metrics=MulticlassAccuracy(num_classes=2),
        progress_bar=False,
        **options,
    )


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return all that must be equal at the end of a training."""
    state = trainer.state
    found = state.state_dict()
    del found["timer"]["wall_s"]
    return {"state": found, "rng": capture_rng()}


class AtPoints:
    """Save at these points."""

    def __init__(self, points: list[str]) -> None:
        self.points = points

    def __call__(self, state: Any, event: Event) -> bool:
        timer = state.timer
        is_batch = event is Event.BATCH_CHECKPOINT
        return (f"ba{timer.batch}" if is_batch else f"ep{timer.epoch}") in self.points


def every_point(state: Any, event: Event) -> bool:
    """Save after every batch and after every epoch."""
    return True


def straight(
    cell: Cell, folder: str | None = None, points: list[str] | None = None
) -> dict[str, Any]:
    """Train without a stop, saving at every point, or at some, if there is a folder."""
    options: dict[str, Any] = {}
    if folder is not None:
        interval = every_point if points is None else AtPoints(points)
        options = {"save_folder": folder, "save_interval": interval}
    trainer = make_trainer(cell, scramble=0, **options)
    trainer.fit()
    trainer.close()
    return outcome(trainer)


def resume(cell: Cell, checkpoint: str, *, scramble: int, **options: Any) -> dict[str, Any]:
    """Train from a checkpoint to the end, with fresh objects and scrambled generators."""
    trainer = make_trainer(cell, scramble=scramble, load_path_format=checkpoint, **options)
    torch.rand(scramble % 7 + 1)
    random.random()
    trainer.fit()
    trainer.close()
    return outcome(trainer)


class Tell(Callback):
    """Tells through a pipe that the training has come to its n-th event, and waits a little.

    The parent sends its signal then or a moment later, so some signals come at a known place and
    others anywhere, in a write of a background thread for example.
    """

    def __init__(self, told: int, num_events: int) -> None:
        self.told, self.num_events = told, num_events

    def run_event(self, event: Event, state: Any) -> None:
        self.num_events -= 1
        if self.num_events == 0:
            os.write(self.told, b"!")
            time.sleep(0.05)


def whole(cell: Cell, folder: str, *, told: int, num_events: int) -> dict[str, Any]:
    """Train the run in a folder to its end, from wherever it is."""
    trainer = make_trainer(
        cell,
        scramble=os.getpid() % 1000,
        seed=3,
        save_folder=folder,
        save_interval=["3ba", "1ep"],
        keep=[KeepLast(3)],
        resume="auto",
    )
    if trainer.state.timer.batch == 0:
        # The first start must begin as the straight run did, with the weights of its seed.
        fresh = make_trainer(cell, scramble=0)
        trainer.state.model.load_state_dict(fresh.state.model.state_dict())
        trainer.state.algorithms[0].apply(Event.INIT, trainer.state)
        seed_everything(3)
    trainer.state.callbacks.append(Tell(told, num_events))
    trainer.fit()
    trainer.state.callbacks.pop()
    trainer.close()
    return outcome(trainer)


def train_part(cell: Cell, folder: str, until: str, *, scramble: int) -> None:
    """Train the run in a folder up to a point, from wherever it is."""
    trainer = make_trainer(
        cell, scramble=scramble, save_folder=folder, resume="auto", max_duration=until
    )
    trainer.fit()
    trainer.close()


def main() -> None:
    """Run the jobs that come in as lines of JSON, each in a fork; answer with its exit code."""
    torch.set_num_threads(1)
    straight(Cell("plain", 0.0, 0, 1))  # loads what torch loads on first use, once for all jobs
    for line in sys.stdin:
        job = json.loads(line)
        ready, told = os.pipe()
        process = os.fork()
        if process == 0:
            code = 1
            os.close(ready)
            job["told"] = told
            try:
                run_job(job)
                code = 0
            except SystemExit as stop:
                code = stop.code
            except BaseException:  # noqa: BLE001 - told by the exit code
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        os.close(told)
        if "signal" in job:
            os.read(ready, 1)  # the training has begun, or the process has ended
            time.sleep(job["after_s"])
            os.kill(process, job["signal"])
        status = os.waitpid(process, 0)[1]
        os.close(ready)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def run_job(job: dict[str, Any]) -> None:
    """Do one job and leave its outcome in a file."""
    os.environ.update(job.get("environment", {}))
    os.chdir(job.get("directory", "."))
    cell = Cell(**job["cell"])
    if job["kind"] == "straight":
        result: Any = straight(cell, job.get("folder"), job.get("points"))
    elif job["kind"] == "resume":
        result = [
            resume(cell, f"{job['folder']}/{point}", scramble=number + 1)
            for number, point in enumerate(job["points"])
        ]
    elif job["kind"] == "whole":
        result = whole(cell, job["folder"], told=job["told"], num_events=job.get("num_events", 0))
    else:
        result = train_part(cell, job["folder"], job["until"], scramble=job["scramble"])
    if "result" in job:
        torch.save(result, Path(job["result"]))


if __name__ == "__main__":
    main()
