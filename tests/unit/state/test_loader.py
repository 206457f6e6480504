"""Loaders: positions of every kind, and workers that end when the loop is left."""

from __future__ import annotations

import gc
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import milepost as mp
from milepost.state.batch_in_hand import num_samples
from milepost.state.loader import ResumableLoader
from milepost.state.rng import apply_rng, capture_rng

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA = TensorDataset(torch.arange(24.0))


def generator():
    return torch.Generator().manual_seed(5)


class Stream(IterableDataset):
    """Data that can only be read from the beginning."""

    def __iter__(self):
        order = torch.randperm(24)
        return iter(order.tolist())


class OwnPosition:
    """A loader of somebody's own, with a position and an order for every epoch."""

    def __init__(self):
        self.epoch, self.at = 0, 0

    def __iter__(self):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < 6:
            self.at += 1
            yield torch.tensor(order[4 * self.at - 4 : 4 * self.at])
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class EachTime:
    """Anything that can be iterated again."""

    def __iter__(self):
        for _ in range(6):
            yield torch.rand(4)


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(DATA, 4, **options)


WEIGHTS = torch.arange(24.0)
LOADERS = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "one by one": lambda: DataLoader(DATA, None, shuffle=True),
    "dropped last": lambda: DataLoader(DATA, 5, shuffle=True, drop_last=True),
    "a short last": lambda: DataLoader(DATA, 5, shuffle=True),
    "own generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, generator=generator())
    ),
    "with replacement": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, replacement=True, generator=generator())
    ),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(WEIGHTS, 24)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(list(range(12)))),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    ),
    "list of batches": lambda: DataLoader(DATA, batch_sampler=[[3, 1], [2], [9, 8, 7]]),
    "two workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
    "lasting workers": lambda: DataLoader(
        DATA, 4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), 4),
    "own position": OwnPosition,
    "any iterable": EachTime,
    "torchdata": lambda: stateful(shuffle=True),
    "torchdata generator": lambda: stateful(shuffle=True, generator=generator()),
    "torchdata in order": stateful,
}


def flat(batch):
    batch = batch[0] if isinstance(batch, list) else batch
    return torch.atleast_1d(batch).tolist()


def two_epochs(loader, *, until=None, draws=True):
    """Read two epochs, drawing in between; return the batches, and the state at a position."""
    resumable, seen = ResumableLoader(loader), []
    for epoch in range(2):
        resumable.set_epoch(epoch)
        for batch in resumable.iterate():
            seen.append(flat(batch))
            if draws:
                torch.rand(3)
            if len(seen) == until:
                return seen, resumable.state_dict(), capture_rng()
        resumable.end_epoch()
        if len(seen) == until or (until == "end" and epoch == 0):
            return seen, resumable.state_dict(), capture_rng()
    return seen, None, capture_rng()


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("cut", [1, 2, "end", 7])
def test_any_loader_goes_on_where_it_was(kind, cut):
    """Within an epoch, between two, and in the second; with the numbers it would have drawn."""
    make = LOADERS[kind]
    torch.manual_seed(11)
    whole, _, end = two_epochs(make())
    torch.manual_seed(11)
    per_epoch = len(whole) // 2
    cut = cut if cut == "end" or cut < len(whole) else len(whole) - 1
    first, state, rng = two_epochs(make(), until=cut)
    torch.manual_seed(4)
    torch.rand(9)
    resumable = ResumableLoader(make())
    resumable.load_state_dict(state)
    seen = list(first)
    pending = rng
    for epoch in range(len(first) // per_epoch if cut != "end" else 1, 2):
        resumable.set_epoch(epoch)
        for batch in resumable.iterate(pending):
            seen.append(flat(batch))
            torch.rand(3)
        pending = None
        resumable.end_epoch()
    assert seen == whole
    assert torch.equal(capture_rng()["torch"], end["torch"])


@pytest.mark.parametrize("kind", ["shuffled", "two workers", "torchdata generator"])
def test_a_position_at_the_last_batch_leaves_nothing_and_the_next_epoch_is_right(kind):
    """Between the last batch and the end of the epoch there is a place to stop at, too."""
    make = LOADERS[kind]
    torch.manual_seed(11)
    whole, _, _ = two_epochs(make())
    torch.manual_seed(11)
    first, state, rng = two_epochs(make(), until=6)
    assert state["position"] == 6
    torch.manual_seed(4)
    resumable = ResumableLoader(make())
    resumable.load_state_dict(state)
    assert list(resumable.iterate(rng)) == []
    resumable.end_epoch()
    seen = []
    for batch in resumable.iterate():
        seen.append(flat(batch))
        torch.rand(3)
    assert first + seen == whole


def test_only_what_has_no_position_is_read_again_and_says_so():
    """The cost is named in every checkpoint, and nothing is said where there is none."""
    reads = []

    class Noted(Stream):
        def __iter__(self):
            for one in super().__iter__():
                reads.append(one)
                yield one

    resumable = ResumableLoader(DataLoader(Noted(), 4))
    assert "reads the batches already used once more" in resumable.notes[0]
    iterator = resumable.iterate()
    next(iterator), next(iterator)
    state = resumable.state_dict()
    reads.clear()
    again = ResumableLoader(DataLoader(Noted(), 4))
    again.load_state_dict(state)
    next(again.iterate(capture_rng()))
    assert len(reads) == 12
    for kind in ("in order", "shuffled", "own position", "torchdata", "two workers"):
        assert ResumableLoader(LOADERS[kind]()).notes == ()
    assert "workers" in ResumableLoader(stateful(num_workers=2)).notes[0]


def test_a_batch_may_be_given_back_and_taken_again():
    """After an error the batch in hand is trained again, with the numbers that it had."""
    loader = DataLoader(DATA, 4, shuffle=True)
    torch.manual_seed(3)
    resumable = ResumableLoader(loader)
    iterator = resumable.iterate()
    next(iterator)
    second = flat(next(iterator))
    assert resumable.position == 2
    assert resumable.unread()
    state, rng = resumable.state_dict(), resumable.fetch_rng
    resumable.reread()
    assert resumable.position == 2
    again = ResumableLoader(DataLoader(DATA, 4, shuffle=True))
    torch.manual_seed(99)
    again.load_state_dict(state)
    assert flat(next(again.iterate(rng))) == second
    kept = ResumableLoader(OwnPosition())
    next(kept.iterate())
    assert not kept.unread()


@pytest.mark.parametrize(
    ("stored", "live", "word"),
    [
        ("shuffled", "own position", "kind"),
        ("shuffled", "short", "only 2 batches"),
        ("stream", "shuffled", "kind"),
    ],
)
def test_a_position_that_does_not_fit_is_refused_before_anything_changes(
    tmp_path, stored, live, word
):
    """Going on in another place of other data would look like success."""
    makers = {**LOADERS, "short": lambda: DataLoader(TensorDataset(torch.arange(8.0)), 4)}
    model, loader = torch.nn.Linear(1, 1), makers[stored]()
    with mp.Checkpointer(tmp_path, every="3ba", model=model, loader=loader) as run:
        for _ in run.batches(loader):
            if run.timer.batch == 3:
                break
    other = torch.nn.Linear(1, 1)
    before = other.weight.detach().clone()
    with pytest.raises(mp.MismatchError, match=word):
        mp.Checkpointer(tmp_path, model=other, loader=makers[live]()).open()
    assert torch.equal(other.weight, before)


def test_a_loader_of_another_kind_may_take_over_between_two_epochs(tmp_path):
    """There is no position then that would have to fit."""
    loader = LOADERS["shuffled"]()
    with mp.Checkpointer(tmp_path, every="1ep", loader=loader) as run:
        for _ in run.epochs(1):
            for _ in run.batches(loader):
                pass
    loader = LOADERS["own position"]()
    with mp.Checkpointer(tmp_path, loader=loader) as run:
        assert [epoch for epoch in run.epochs(2) if list(run.batches(loader))] == [1]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_when_the_loop_is_left(tmp_path, persistent):
    """Without the help of a garbage collection, which comes at any time and in any thread."""
    gc.collect()
    gc.disable()
    try:

        def life():
            loader = DataLoader(DATA, 4, num_workers=2, persistent_workers=persistent)
            with mp.Checkpointer(tmp_path, every="2ba", loader=loader) as run:
                for _ in run.batches(loader):
                    if run.timer.batch == 3:
                        return

        before = set(multiprocessing.active_children())
        life()
        left = [child for child in multiprocessing.active_children() if child not in before]
        for child in left:
            child.join(timeout=30)  # asked to end; on a busy machine that takes a while
        assert not any(child.is_alive() for child in left)
    finally:
        gc.enable()


def test_an_empty_loader_is_an_error(tmp_path):
    """An epoch of no steps must not look like success."""
    empty = iter([])
    run = mp.Checkpointer(tmp_path, handle_signals=False).open()
    with pytest.raises(mp.UsageError, match="no batch"):
        next(run.batches(empty))
    run.close()


def test_samplers_and_data_are_told_the_epoch_once():
    """A distributed sampler shuffles by it; a data set may."""

    class Told(SequentialSampler):
        def __init__(self, data):
            super().__init__(data)
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    sampler = Told(DATA)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    ResumableLoader(loader).set_epoch(3)
    assert sampler.epochs == [3]


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ([torch.zeros(3), torch.zeros(4)], 3),
        ({"x": "text", "y": torch.zeros(2)}, 2),
        (["a", ("b", {"c": torch.zeros(7)})], 7),
        ("text", 0),
        (None, 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch, count):
    """The counters of samples are what schedules and people read."""
    assert num_samples(batch) == count


def test_random_state_comes_back_whole():
    """Python, NumPy with its cached normal, and torch."""
    import random

    import numpy as np

    np.random.seed(1)
    np.random.standard_normal()
    random.gauss(0, 1)
    state = capture_rng()

    def draw():
        return random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    expected = draw()
    draw()
    apply_rng(state)
    assert draw() == expected
    for broken in ({}, {**state, "numpy": {}}, {**state, "torch": 5}, {**state, "python": 1}):
        with pytest.raises(mp.FormatError):
            apply_rng(broken)


class Noisy(Dataset):
    """Augments what it reads, with each of the generators that people use for it."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = torch.rand(()), random.random(), np.random.rand()
        return torch.tensor([index, *drawn])


def noisy(num_workers, **options):
    return DataLoader(Noisy(), 4, shuffle=True, num_workers=num_workers, **options)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["", "lasting"])
@pytest.mark.parametrize("cut", [2, 8])
def test_numbers_drawn_in_workers_come_back(num_workers, options, cut):
    """On any number of workers: torch seeds each once, and where it is then nobody knows."""
    torch.manual_seed(3)
    whole, _, _ = two_epochs(noisy(2, **options))
    torch.manual_seed(3)
    first, state, rng = two_epochs(noisy(2, **options), until=cut)
    torch.manual_seed(99)
    resumable = ResumableLoader(noisy(num_workers, **options))
    resumable.load_state_dict(state)
    seen = []
    for epoch in range(cut // 6, 2):
        resumable.set_epoch(epoch)
        for batch in resumable.iterate(rng):
            seen.append(flat(batch))
            torch.rand(3)
        rng = None
        resumable.end_epoch()
    assert first + seen == whole
    drawn = [tuple(sample[1:]) for batch in whole for sample in batch]
    assert len(set(drawn)) == 48
    flat_numbers = [number for numbers in drawn for number in numbers]
    assert len(set(flat_numbers)) == 3 * 48


def test_samples_without_batches_are_seeded_too():
    """A loader may hand out single samples; its workers get single indices."""
    torch.manual_seed(3)
    resumable = ResumableLoader(DataLoader(Noisy(), None, num_workers=2))
    whole = [one.tolist() for one in resumable.iterate()]
    torch.manual_seed(3)
    again = ResumableLoader(DataLoader(Noisy(), None, num_workers=1))
    assert [one.tolist() for one in again.iterate()] == whole


def test_going_on_without_workers_is_told_of():
    """Numbers that workers drew are then drawn in the process of the training."""
    first = ResumableLoader(noisy(2))
    batches = first.iterate()
    next(batches)
    state = first.state_dict()
    assert "2 loader workers" in ResumableLoader(noisy(0)).remarks(state)[0]
    assert ResumableLoader(noisy(1)).remarks(state) == []


def test_a_second_loader_of_an_epoch_goes_on_with_the_random_numbers_of_the_first(tmp_path):
    """And not with those that its own order was drawn from."""
    data = torch.arange(64.0).view(16, 4) / 100

    def train(folder, stop=None):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = (DataLoader(one, batch_size=4, shuffle=True) for one in (data, -data))
        with mp.Checkpointer(
            folder, every="1ba", model=model, optimizer=optimizer, loader=first, other=second
        ) as run:
            for _ in run.epochs(2):
                for loader in (first, second):
                    for batch in run.batches(loader):
                        if run.timer.batch == stop:
                            return None
                        optimizer.zero_grad()
                        (model(batch) - batch).square().mean().backward()
                        optimizer.step()
        return model[0].weight.detach().clone()

    straight = train(tmp_path / "straight")
    for stop in (2, 4, 6, 8, 14):
        train(tmp_path / str(stop), stop)
        assert torch.equal(train(tmp_path / str(stop)), straight)
