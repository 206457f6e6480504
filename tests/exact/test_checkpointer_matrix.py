"""A loop that is cut anywhere and goes on ends with the same bytes as one that was never cut.

Each life has new objects and scrambled generators, as a new process would. What is compared: the
samples of every batch, weights, averages, optimizer, scheduler, scaler, counters, generators.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.train import ResumableSampler

from ..places import Place

pytestmark = [
    # torchdata calls a function that torch has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    # A scheduler that steps on every batch comes before the first of the accumulated steps.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before"),
]

EPOCHS, BATCHES, BATCH_SIZE = 3, 10, 4
BATCH_CUTS = [("batch", number) for number in range(1, EPOCHS * BATCHES)]
EPOCH_CUTS = [("epoch", number * BATCHES) for number in range(1, EPOCHS)]
ALL_CUTS = [*BATCH_CUTS, *EPOCH_CUTS]
# First batch, between two accumulated ones, the last of an epoch, its end, the first of the next.
SOME_CUTS = [("batch", 1), ("batch", 7), ("batch", 10), ("epoch", 10), ("batch", 11)]
FEW_CUTS = [("batch", 7), ("batch", 20)]


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    loader: str
    dropout: float
    workers: int
    accumulated: int

    def __str__(self):
        return f"{self.loader}-dropout{self.dropout}-workers{self.workers}-by{self.accumulated}"


CELLS = [
    Cell(loader, dropout, workers, accumulated)
    for loader in ("shuffle", "sampler", "dealt", "stateful", "stateful-generator")
    for dropout in (0.5, 0.0)
    for workers in (0, 2)
    for accumulated in (2, 1)
]
WHOLE = [c for c in CELLS if c.dropout and not c.workers and c.accumulated == 2]


class Samples(Dataset):
    """Numbers with their ids; augmented from the global generator where there are no workers."""

    def __init__(self, is_augmented):
        generator = torch.Generator().manual_seed(3)
        self.values = torch.randn(BATCHES * BATCH_SIZE, 5, generator=generator)
        self.is_augmented = is_augmented

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        value = self.values[index]
        if self.is_augmented:
            value = value + torch.rand(5) * random.random() + float(np.random.rand())
        return value, index


def new_loader(cell):
    data = Samples(is_augmented=not cell.workers)
    generator = torch.Generator().manual_seed(5)
    options = {"batch_size": BATCH_SIZE, "num_workers": cell.workers}
    if cell.loader == "shuffle":
        return DataLoader(data, shuffle=True, **options)
    if cell.loader == "sampler":
        return DataLoader(data, sampler=RandomSampler(data, generator=generator), **options)
    if cell.loader == "dealt":
        sampler = ResumableSampler(data, batch_size=BATCH_SIZE, seed=5)
        return DataLoader(data, batch_sampler=sampler, num_workers=cell.workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    if cell.loader == "stateful":
        return StatefulDataLoader(data, shuffle=True, **options)
    return StatefulDataLoader(data, shuffle=True, generator=generator, **options)


class Scaler:
    """A loss scale that grows, as that of mixed precision does."""

    def __init__(self):
        self.scale, self.streak = 8.0, 0

    def update(self):
        self.streak += 1
        if self.streak == 3:
            self.scale, self.streak = self.scale * 2, 0

    def state_dict(self):
        return {"scale": self.scale, "streak": self.streak}

    def load_state_dict(self, state):
        self.scale, self.streak = state["scale"], state["streak"]


class Meter:
    """A running sum; there are two of this class, with different states."""

    def __init__(self, factor):
        self.factor, self.total = factor, torch.zeros(1, dtype=torch.float64)

    def state_dict(self):
        return {"factor": self.factor, "total": self.total}

    def load_state_dict(self, state):
        self.factor, self.total = state["factor"], state["total"]


class Average:
    """An exponential average of the weights."""

    def __init__(self, model):
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.shadow[name].mul_(0.9).add_(parameter, alpha=0.1)

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        self.shadow = {name: value.clone() for name, value in state.items()}


class Training:
    """Everything that one process of the training makes."""

    def __init__(self, cell, *, seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.cell = cell
        self.model = nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(cell.dropout),
            nn.Linear(8, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=EPOCHS * BATCHES + 1
        )
        self.scaler = Scaler()
        self.average = Average(self.model)
        self.meters = {"a": Meter(1.0), "b": Meter(2.0)}
        self.loader = new_loader(cell)
        self.ids = []

    def tracked(self):
        names = ("model", "optimizer", "scheduler", "scaler", "average", "meters", "loader")
        return {name: getattr(self, name) for name in names}

    def train_on(self, values, ids, number):
        self.ids.append(ids.tolist())
        values = values + 0.01 * torch.randn_like(values) * random.random()
        loss = (self.model(values) - float(np.random.rand())).square().mean()
        (loss * self.scaler.scale).backward()
        for meter in self.meters.values():
            meter.total = meter.total + meter.factor * loss.detach().double()
        if (number + 1) % self.cell.accumulated == 0:
            for parameter in self.model.parameters():
                parameter.grad.div_(self.scaler.scale)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scaler.update()
            self.average.update()
        self.scheduler.step()


def live(folder, cell, *, cut, seed):
    """Live until the cut or the end; return the training and the checkpointer."""
    training = Training(cell, seed=seed)
    moment, number = cut or (None, None)

    def is_due(run, now):
        return (now, run.timer.batch) == (moment, number)

    with mp.Checkpointer(folder, every=is_due, **training.tracked()) as run:
        for _ in run.epochs(EPOCHS):
            if cut and run.last_save is not None:
                break
            for values, ids in run.batches(training.loader):
                if cut and run.last_save is not None:
                    return training, run
                training.train_on(values, ids, run.timer.batch)
            if cut and run.last_save is not None:
                return training, run
    return training, run


def state_of(training, run):
    """What must be equal at the end."""
    stored = run.run.latest().load()
    stored["state"]["timer"].pop("wall_s")
    return {
        "model": dict(training.model.state_dict()),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "counters": {k: v for k, v in run.timer.snapshot().items() if k != "wall_s"},
        "stored": stored,
    }


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Sums of floats depend on how many threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder():
    """A folder in memory where there is one: nothing here is about disks."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        yield Path(path)


_STRAIGHT = {}


def straight(cell):
    """The ids and the end of the training that was never cut."""
    if cell not in _STRAIGHT:
        with tempfile.TemporaryDirectory() as path:
            training, run = live(path, cell, cut=None, seed=17)
            _STRAIGHT[cell] = (training.ids, state_of(training, run))
    return _STRAIGHT[cell]


def check(folder, cell, cuts):
    """Cut at each of the points in turn, then train to the end, and compare."""
    expected_ids, expected = straight(cell)
    ids = []
    for number, cut in enumerate([*cuts, None]):
        seed = 17 if number == 0 else 900 + number
        training, run = live(folder, cell, cut=cut, seed=seed)
        ids += training.ids
        if cut is not None:
            assert run.timer.batch == cut[1]
    assert ids == expected_ids
    assert_equal_states(state_of(training, run), expected)


def test_the_training_depends_on_everything_that_is_compared(folder):
    """A matrix that would pass without a restore proves nothing."""
    cell = WHOLE[0]
    expected_ids, expected = straight(cell)
    assert len(expected_ids) == EPOCHS * BATCHES
    training, run = live(folder, cell, cut=None, seed=18)
    found = state_of(training, run)
    assert training.ids != expected_ids
    for name in ("model", "optimizer", "python", "numpy", "torch"):
        with pytest.raises(AssertionError):
            assert_equal_states(found[name], expected[name])


@pytest.mark.parametrize("cell", WHOLE, ids=str)
def test_any_cut_is_exact(cell):
    """Every batch and every end of an epoch, with dropout and accumulated gradients."""
    for cut in ALL_CUTS:
        with tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as f:
            try:
                check(Path(f), cell, [cut])
            except BaseException as error:
                raise AssertionError(f"cut at {cut}: {error}") from error


@pytest.mark.parametrize("cut", SOME_CUTS, ids=str)
@pytest.mark.parametrize("cell", [c for c in CELLS if not c.workers and c not in WHOLE], ids=str)
def test_some_cuts_are_exact(folder, cell, cut):
    """The other ways to train, at the points where something changes."""
    check(folder, cell, [cut])


@pytest.mark.parametrize("cut", FEW_CUTS, ids=str)
@pytest.mark.parametrize(
    "cell", [c for c in CELLS if c.workers and c.dropout and c.accumulated == 2], ids=str
)
def test_cuts_are_exact_with_workers(folder, cell, cut):
    """Workers run ahead of the training; their lead is not a part of the position."""
    check(folder, cell, [cut])


@pytest.mark.parametrize("cell", WHOLE, ids=str)
@pytest.mark.parametrize(
    "cuts",
    [
        [("batch", 3), ("batch", 5), ("batch", 9)],
        [("batch", 10), ("epoch", 10), ("batch", 11)],
        [("batch", 9), ("batch", 21), ("batch", 29)],
    ],
    ids=str,
)
def test_three_resumes_in_a_row_are_exact(folder, cell, cuts):
    """An error too small to see in one resume adds up."""
    check(folder, cell, cuts)


@pytest.mark.campaign
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cut_of_every_cell_is_exact(cell):
    """The whole matrix, and a random series of cuts for each cell."""
    source = random.Random(str(cell))
    series = [[cut] for cut in ALL_CUTS]
    for _ in range(10):
        chosen = sorted(source.sample(BATCH_CUTS, 3), key=lambda cut: cut[1])
        series.append(chosen)
    for cuts in series:
        with tempfile.TemporaryDirectory() as path:
            check(Path(path), cell, cuts)


@pytest.mark.cloud
@pytest.mark.parametrize("place", ["moto", "juicefs"], indirect=True)
def test_cuts_are_exact_in_a_bucket(place: Place):
    """What comes back from a bucket is what came back from a disk."""
    check(place.run("a"), WHOLE[0], [("batch", 9), ("batch", 21)])


@pytest.mark.cloud
@pytest.mark.campaign
@pytest.mark.parametrize("place", ["moto", "juicefs"], indirect=True)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_is_exact_in_a_bucket(place: Place, cell):
    """The matrix: every cut of those with all that may go wrong, some of the others."""
    for number, cut in enumerate(ALL_CUTS if cell in WHOLE else SOME_CUTS):
        check(place.run(f"run{number}"), cell, [cut])
    check(place.run("thrice"), cell, [("batch", 3), ("batch", 5), ("batch", 9)])


class Counting(Dataset):
    """Ten million samples, none of which exists until somebody asks for it."""

    def __init__(self):
        self.num_read = 0

    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        self.num_read += 1
        return index


def test_a_far_position_is_reached_without_reading_data(folder):
    """A resume at batch 1,000,000 must not cost what the training up to there did."""

    def new():
        data = Counting()
        return data, DataLoader(data, batch_size=8)

    _, loader = new()
    with mp.Checkpointer(folder, loader=loader) as run:
        for _ in run.batches(loader):
            # One more than is meant: the batch in hand is given back, nothing was done with it.
            run._loaders[id(loader)]._position = 1_000_001
            run.save("far", wait=True)
            break
    data, loader = new()
    with mp.Checkpointer(folder, loader=loader) as run:
        assert run.resumed_from == "far"
        batches = run.batches(loader)
        resumable = run._loaders[id(loader)]
        original = resumable._begin
        seen = []

        def begin(skip):
            iterator = original(skip)
            seen.append((skip, data.num_read))
            return iterator

        resumable._begin = begin
        first = next(batches)
    assert seen == [(1_000_000, 0)]
    assert first.tolist() == list(range(8_000_000, 8_000_008))
    assert data.num_read == 8
