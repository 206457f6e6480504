"""Counters, learning rates and the order of the data, when a run goes on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.train import ResumableSampler

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Ids(list):
    """The samples of each batch, in the order of training."""

    def flat(self):
        return [one for batch in self for one in batch]


def new_regression(num_samples, *, batch_size, **options):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(float(num_samples)))
    return model, optimizer, DataLoader(data, batch_size=batch_size, **options)


def step_on(model, optimizer, inputs):
    optimizer.zero_grad()
    loss = (model(inputs.unsqueeze(1) / 40) - 1).square().mean()
    loss.backward()
    optimizer.step()


def train(
    folder, objects, *, epochs, ids, stop_at=None, every=None, in_body=None, after_epoch=None
):
    """Train until ``stop_at`` batches are counted, or to the end; return the checkpointer."""
    model, optimizer, loader = objects
    run = mp.Checkpointer(folder, every=every, model=model, optimizer=optimizer, loader=loader)
    with run:
        for epoch in run.epochs(epochs):
            for (inputs,) in run.batches(loader):
                if run.timer.batch == stop_at:
                    return run
                ids.append([int(one) for one in inputs])
                step_on(model, optimizer, inputs)
                if in_body is not None:
                    in_body(run)
            if after_epoch is not None and after_epoch(run, epoch):
                return run
    return run


@pytest.mark.parametrize("how", ["interval", "by hand"])
def test_h01_counters_and_position_agree_after_a_resume_in_mid_epoch(tmp_path, scramble, how):
    """A batch counted too early or too late is trained twice, and names every later save wrongly.

    By hand, the save is asked for at the end of the loop's body, before the batch is over.
    """

    def save_every_third(run):
        if (run.timer.batch + 1) % 3 == 0:
            run.save()

    options = {"every": "3ba"} if how == "interval" else {"in_body": save_every_third}
    straight, straight_ids = new_regression(40, batch_size=4), Ids()
    train(tmp_path / "straight", straight, epochs=2, ids=straight_ids, **options)

    ids = Ids()
    train(tmp_path / "a", new_regression(40, batch_size=4), epochs=2, ids=ids, stop_at=6, **options)
    scramble()
    rest, rest_ids = new_regression(40, batch_size=4), Ids()
    model, optimizer, loader = rest
    with mp.Checkpointer(tmp_path / "a", model=model, optimizer=optimizer, loader=loader) as run:
        assert run.resumed_from == "ba6"
        counters = run.timer.snapshot()
        assert (counters["epoch"], counters["batch_in_epoch"]) == (0, 6)
        assert (counters["batch"], counters["sample"]) == (6, 24)
    scramble()
    rest = new_regression(40, batch_size=4)
    last = train(tmp_path / "a", rest, epochs=2, ids=rest_ids, **options)

    assert rest_ids[0] == [24, 25, 26, 27]
    assert len(ids) + len(rest_ids) == 20
    assert ids + rest_ids == straight_ids
    names = [one.name for one in last.run.checkpoints()]
    assert names[:3] == ["ba3", "ba6", "ba9"]
    assert last.run.get("ba9").time["batch"] == 9
    assert_equal_states(rest[0].state_dict(), straight[0].state_dict())


@pytest.mark.parametrize("when", ["last batch", "before the end of the epoch", "after it"])
@pytest.mark.parametrize("kind", ["generator", "dealt", "stateful", "stateful workers"])
def test_h02_a_checkpoint_at_the_end_of_an_epoch_neither_skips_nor_repeats_one(
    tmp_path, scramble, when, kind
):
    """The loader is exhausted there: a resume must begin the next epoch, in its own order."""

    def objects():
        generator = torch.Generator().manual_seed(5)
        if kind == "dealt":
            return new_regression(32, batch_size=4, sampler=ResumableSampler(32, seed=5))
        if kind == "generator":
            data = TensorDataset(torch.arange(32.0))
            return new_regression(
                32, batch_size=4, sampler=RandomSampler(data, generator=generator)
            )
        from torchdata.stateful_dataloader import StatefulDataLoader

        model, optimizer, loader = new_regression(32, batch_size=4)
        workers = 2 if kind == "stateful workers" else 0
        loader = StatefulDataLoader(
            loader.dataset, 4, shuffle=True, generator=generator, num_workers=workers
        )
        return model, optimizer, loader

    straight, straight_ids = objects(), Ids()
    train(tmp_path / "straight", straight, epochs=3, ids=straight_ids)

    def save_at_batch_8(run):
        if when == "last batch" and run.timer.batch == 7:
            run.save("cut")

    def end_of_epoch(run, epoch):
        if when == "before the end of the epoch" and epoch == 0:
            run.save("cut")
        return epoch == 0 and when != "after it"

    ids = Ids()
    train(
        tmp_path / "a",
        objects(),
        epochs=3,
        ids=ids,
        in_body=save_at_batch_8,
        after_epoch=end_of_epoch,
        every="1ep" if when == "after it" else None,
        stop_at=8 if when == "after it" else None,
    )
    assert len(ids) == 8
    scramble()
    rest, rest_ids = objects(), Ids()
    model, optimizer, loader = rest
    with mp.Checkpointer(tmp_path / "a", model=model, optimizer=optimizer, loader=loader) as run:
        position = (run.timer.epoch, run.timer.batch_in_epoch)
        assert position == ((1, 0) if when == "after it" else (0, 8))
    scramble()
    rest = objects()
    train(tmp_path / "a", rest, epochs=3, ids=rest_ids)
    assert len(rest_ids) == 16
    assert rest_ids == straight_ids[8:]
    assert rest_ids[:8] != straight_ids[:8]
    assert_equal_states(rest[0].state_dict(), straight[0].state_dict())


RATES = {44: 5.936906572928625e-4, 45: 5.782172325201156e-4, 46: 5.626666167821523e-4}


@pytest.mark.parametrize("built", ["before the restore", "after it"])
def test_h03_the_learning_rate_does_not_jump_at_a_resume(tmp_path, scramble, built):
    """A scheduler built upon a restored optimizer puts the base rate back, once or for good."""

    def life(folder, *, until, late, rates):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        early = {} if late else {"scheduler": CosineAnnealingLR(optimizer, T_max=100)}
        with mp.Checkpointer(folder, model=model, optimizer=optimizer, **early) as run:
            scheduler = early.get("scheduler")
            if scheduler is None:
                scheduler = CosineAnnealingLR(optimizer, T_max=100)
                run.track(scheduler=scheduler)
            for _ in run.epochs(100):
                if run.timer.epoch == until:
                    run.save()
                    return
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()

    straight, first, rest = [], [], []
    life(tmp_path / "straight", until=None, late=False, rates=straight)
    life(tmp_path / "a", until=45, late=False, rates=first)
    scramble()
    life(tmp_path / "a", until=None, late=built == "after it", rates=rest)
    assert rest[0] == RATES[45]
    assert len(rest) == 55
    assert first + rest == straight
    assert {epoch: straight[epoch] for epoch in RATES} == pytest.approx(RATES, rel=1e-14)


@pytest.mark.parametrize("draws_between", [False, True])
def test_h04_every_generator_comes_back_and_nothing_before_the_first_batch_draws(
    tmp_path, scramble, draws_between
):
    """Python, NumPy and torch go on with the numbers they would have drawn."""

    def draw():
        return (
            [random.random() for _ in range(3)],
            np.random.rand(3).tolist(),
            torch.rand(3).tolist(),
        )

    random.seed(100), np.random.seed(100), torch.manual_seed(100)
    random.random(), np.random.rand(), torch.rand(1)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    with mp.Checkpointer(tmp_path, loader=loader) as run:
        for _ in run.batches(loader):
            break
        run.save("start", wait=True)
        expected = draw()
    scramble()
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    with mp.Checkpointer(tmp_path, loader=loader) as run:
        if draws_between:
            iter(DataLoader(TensorDataset(torch.arange(6.0)), shuffle=True))
            torch.rand(10), random.random(), np.random.rand(2)
            for _ in run.batches(loader):
                found = draw()
                break
        else:
            found = draw()
    assert found == expected


class EpochSampler:
    """An order of its own for every epoch, from the number of the epoch alone."""

    def __init__(self, length, seed):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


ORDERS = [
    [5, 0, 3, 4, 1, 7, 9, 6, 8, 2],
    [3, 5, 0, 1, 2, 6, 4, 7, 8, 9],
    [0, 5, 8, 7, 6, 2, 9, 1, 4, 3],
]


@pytest.mark.parametrize("workers", [0, 2])
def test_h05_the_order_is_right_when_the_stop_was_in_a_later_epoch(tmp_path, scramble, workers):
    """Skipping within the order of the first epoch is right in the first epoch only."""

    def objects():
        sampler = EpochSampler(10, 7)
        return new_regression(10, batch_size=2, sampler=sampler, num_workers=workers)

    ids, rest = Ids(), Ids()
    train(tmp_path, objects(), epochs=3, ids=ids, every="8ba", stop_at=8)
    scramble()
    train(tmp_path, objects(), epochs=3, ids=rest)
    assert rest == [[4, 7], [8, 9], [0, 5], [8, 7], [6, 2], [9, 1], [4, 3]]
    assert (ids + rest)[5:10] == [ORDERS[1][at : at + 2] for at in range(0, 10, 2)]
    assert sorted(Ids((ids + rest)[5:10]).flat()) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_at", [5, 14])
def test_h05_a_dealt_order_is_that_of_its_epoch(tmp_path, scramble, workers, stop_at):
    """Nobody tells the epoch but the checkpointer, and each has an order of its own."""

    def objects():
        sampler = ResumableSampler(10, seed=7)
        return new_regression(10, batch_size=2, sampler=sampler, num_workers=workers)

    straight, ids, rest = Ids(), Ids(), Ids()
    train(tmp_path / "straight", objects(), epochs=3, ids=straight)
    train(tmp_path / "a", objects(), epochs=3, ids=ids, every=f"{stop_at}ba", stop_at=stop_at)
    scramble()
    train(tmp_path / "a", objects(), epochs=3, ids=rest)
    assert ids + rest == straight
    orders = [Ids(straight[at : at + 5]).flat() for at in (0, 5, 10)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_at", [1, 5, 8, 14])
def test_h05_a_plain_shuffle_goes_on_in_its_order(tmp_path, scramble, workers, stop_at):
    """Its only seed is the global generator, which dropout and everything else draw from too."""

    def objects():
        return new_regression(10, batch_size=2, shuffle=True, num_workers=workers)

    straight, ids, rest = Ids(), Ids(), Ids()
    train(tmp_path / "straight", objects(), epochs=3, ids=straight)
    train(tmp_path / "a", objects(), epochs=3, ids=ids, every=f"{stop_at}ba", stop_at=stop_at)
    scramble()
    train(tmp_path / "a", objects(), epochs=3, ids=rest)
    assert ids + rest == straight
    assert straight[:5] != straight[5:10]


@pytest.mark.parametrize("kind", ["plain", "dealt", "stateful"])
@pytest.mark.parametrize("workers_after", [2, 0])
def test_h06_workers_that_run_ahead_do_not_move_the_position(
    tmp_path, scramble, kind, workers_after
):
    """The sampler is several batches ahead of the training; those must not be lost.

    A loader that keeps its own position may refuse another number of workers; then it must say so.
    """

    def objects(workers):
        extra = {"prefetch_factor": 2} if workers else {}
        if kind == "plain":
            return new_regression(64, batch_size=4, num_workers=workers, **extra)
        if kind == "dealt":
            sampler = ResumableSampler(64, shuffle=False)
            return new_regression(64, batch_size=4, sampler=sampler, num_workers=workers, **extra)
        from torchdata.stateful_dataloader import StatefulDataLoader

        model, optimizer, loader = new_regression(64, batch_size=4)
        loader = StatefulDataLoader(loader.dataset, 4, num_workers=workers, **extra)
        return model, optimizer, loader

    ids, rest = Ids(), Ids()
    train(tmp_path, objects(2), epochs=1, ids=ids, every="5ba", stop_at=5)
    assert ids.flat() == list(range(20))
    scramble()
    if kind == "stateful" and workers_after != 2:
        with pytest.raises(mp.MismatchError, match="workers"):
            train(tmp_path, objects(workers_after), epochs=1, ids=rest)
        assert rest == []
        return
    train(tmp_path, objects(workers_after), epochs=1, ids=rest)
    assert rest[0] == [20, 21, 22, 23]
    assert ids.flat() + rest.flat() == list(range(64))
