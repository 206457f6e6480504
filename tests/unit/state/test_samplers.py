"""Samplers whose order may not come back are named; those of torch are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import milepost as mp
from milepost.state.loader import ResumableLoader

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA = TensorDataset(torch.arange(24.0))


class Windows(Sampler):
    """Shuffles one part of the data after the other, when it is its turn."""

    def __len__(self):
        return 24

    def __iter__(self):
        for start in (0, 12):
            part = list(range(start, start + 12))
            random.shuffle(part)
            yield from part


class InBatches(Windows):
    """The same in batches."""

    def __iter__(self):
        return iter(BatchSampler(Windows(), 4, False))


class Named(SequentialSampler):
    """Differs from torch's in nothing that matters."""


class Backwards(SequentialSampler):
    """Goes its own way."""

    def __iter__(self):
        return iter(range(23, -1, -1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(24))


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(DATA, **options)


class OwnPosition:
    sampler = Windows()

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state


class Sub(DataLoader):
    """A loader that is read again."""


def pick(sampler, **options):
    return lambda: DataLoader(DATA, 4, sampler=sampler, **options)


OWN = torch.Generator()
KNOWN = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "no batches": lambda: DataLoader(DATA, None, shuffle=True),
    "in order, given": pick(SequentialSampler(DATA)),
    "subset": pick(SubsetRandomSampler([1, 2])),
    "weighted": pick(WeightedRandomSampler([1.0, 2.0], 2)),
    "distributed": pick(DistributedSampler(DATA, num_replicas=2, rank=0)),
    "with replacement": pick(RandomSampler(DATA, True)),
    "own generator": pick(RandomSampler(DATA, True, generator=OWN)),
    "drawn at once": pick(RandomSampler(DATA, generator=torch.default_generator)),
    "inherited": pick(Named(DATA)),
    "a list": pick([3, 1, 2]),
    "a range": pick(range(5)),
    "list of batches": lambda: DataLoader(DATA, batch_sampler=[[1], [2, 3]]),
    "batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "stream": lambda: DataLoader(Stream(), 4),
    "own position": OwnPosition,
    "any iterable": lambda: [1, 2],
    "torchdata": lambda: stateful(batch_size=4, shuffle=True),
    "torchdata, given": lambda: stateful(batch_size=4, sampler=RandomSampler(DATA)),
}
UNKNOWN = {
    "windows": (pick(Windows()), "Windows"),
    "batches": (lambda: DataLoader(DATA, batch_sampler=InBatches()), "InBatches"),
    "in batches of torch": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(Windows(), 4, False)),
        "Windows",
    ),
    "overridden": (pick(Backwards(DATA)), "Backwards"),
    "no batches": (lambda: DataLoader(DATA, None, sampler=Windows()), "Windows"),
    "draws late": (pick(RandomSampler(DATA, True, generator=torch.default_generator)), "Random"),
    "draws again": (
        pick(RandomSampler(DATA, False, 50, generator=torch.default_generator)),
        "Random",
    ),
    "subclass": (lambda: Sub(DATA, 4, sampler=Windows()), "Windows"),
    "torchdata": (lambda: stateful(batch_size=4, sampler=Windows()), "Windows"),
}


def order_notes(resumable):
    return [note for note in resumable.notes if "comes from a sampler" in note]


@pytest.mark.parametrize("kind", list(KNOWN))
def test_an_order_that_comes_back_is_not_doubted(kind, caplog):
    """A note that everyone gets is a note that nobody reads."""
    assert order_notes(ResumableLoader(KNOWN[kind]())) == []
    assert caplog.text == ""


@pytest.mark.parametrize("kind", list(UNKNOWN))
def test_an_order_that_may_not_come_back_is_told_once_and_noted_always(kind, caplog):
    """Nothing else shows it: a resumed run simply sees some samples twice and others never."""
    make, name = UNKNOWN[kind]
    resumable = ResumableLoader(make())
    for _ in range(2):
        (note,) = order_notes(resumable)
    assert name in note
    assert "state_dict" in note
    assert [record.message for record in caplog.records] == [note]


def test_the_note_is_in_every_checkpoint(tmp_path):
    """It is the checkpoint that cannot be resumed from exactly."""
    loader = DataLoader(DATA, 4, sampler=Windows())
    with mp.Checkpointer(tmp_path, every="1ba", loader=loader, handle_signals=False) as run:
        for _ in run.batches(loader):
            if run.timer.batch == 1:
                break
    (note,) = mp.open_run(tmp_path).latest().manifest.notes
    assert "Windows" in note


class Drawing(Dataset):
    """Has generators of its own."""

    def __init__(self, **generators):
        self.__dict__.update(generators)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    "drawn",
    [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()],
    ids=lambda one: type(one).__name__,
)
def test_data_with_a_generator_that_is_not_restored_is_noted(drawn):
    """Only one that is called ``generator`` is looked for and put back."""
    (note,) = ResumableLoader(DataLoader(Drawing(noise=drawn), 4)).notes
    assert "Drawing" in note
    assert "noise" in note
    kept = ResumableLoader(DataLoader(Drawing(generator=torch.Generator()), 4))
    assert kept.notes == ()
    (workers,) = ResumableLoader(DataLoader(Drawing(noise=drawn), 4, num_workers=2)).notes
    assert "noise" in workers
    (copied,) = ResumableLoader(DataLoader(Drawing(generator=drawn), 4, num_workers=2)).notes
    assert "generator" in copied


SHUFFLED = lambda: DataLoader(DATA, 4, shuffle=True)  # noqa: E731
OTHER_ORDERS = {
    "not shuffled": (SHUFFLED, lambda: DataLoader(DATA, 4)),
    "with replacement": (SHUFFLED, pick(RandomSampler(DATA, True))),
    "other weights": (
        pick(WeightedRandomSampler([1.0, 2.0] * 12, 24)),
        pick(WeightedRandomSampler([2.0, 1.0] * 12, 24)),
    ),
    "other indices": (
        pick(SubsetRandomSampler(range(4, 24))),
        pick(SubsetRandomSampler(range(20))),
    ),
    "another seed": (
        pick(DistributedSampler(DATA, 1, 0, seed=1)),
        pick(DistributedSampler(DATA, 1, 0, seed=2)),
    ),
    "another list": (pick(list(range(24))), pick(list(range(24))[::-1])),
    "another class": (pick(Backwards(DATA)), pick(Named(DATA))),
}


@pytest.mark.parametrize(("then", "now"), OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_another_order_within_an_epoch_is_refused(then, now):
    """Some samples would be seen twice and others never, and nothing would show it."""
    first = ResumableLoader(then())
    batches = first.iterate()
    next(batches)
    state = first.state_dict()
    with pytest.raises(mp.MismatchError, match="whose order comes from"):
        ResumableLoader(now()).load_state_dict(state)
    ResumableLoader(then()).load_state_dict(state)
    first.end_epoch()
    ResumableLoader(now()).load_state_dict(first.state_dict())
