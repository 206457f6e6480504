"""Points of a loader where something goes wrong, or does not fit: in a fetch, at an opening."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import milepost as mp
from milepost.state.loader import ResumableLoader
from milepost.state.rng import capture_rng

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA = TensorDataset(torch.arange(24.0))


class Noisy(Dataset):
    """Draws for each sample, from the global generator and from one of its own."""

    def __init__(self, broken_at=None):
        self.generator = torch.Generator().manual_seed(3)
        self.broken_at = broken_at

    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = torch.rand(1, generator=self.generator), torch.rand(1), torch.tensor([index])
        if index == self.broken_at:
            raise OSError("stale file handle")
        return torch.cat(drawn)


NOISY = {
    "in order": lambda data: DataLoader(data, 4),
    "shuffled": lambda data: DataLoader(data, 4, shuffle=True),
    "own generator": lambda data: DataLoader(
        data, 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "the data's generator": lambda data: DataLoader(
        data, 4, shuffle=True, generator=data.generator
    ),
    "with replacement": lambda data: DataLoader(
        data,
        4,
        sampler=RandomSampler(data, True, 90, generator=torch.Generator().manual_seed(5)),
    ),
}


def whole_epochs(resumable, rng=None, num_epochs=1):
    seen = []
    for _ in range(num_epochs):
        for batch in resumable.iterate(rng):
            seen.append(batch.tolist())
            torch.rand(2)
        rng = None
        resumable.end_epoch()
    return seen


def start_over(loader, state):
    """Return the loader of a process that was just started, at a stored position."""
    torch.manual_seed(99)
    resumable = ResumableLoader(loader)
    resumable.load_state_dict(state)
    return resumable


@pytest.mark.parametrize("kind", list(NOISY))
@pytest.mark.parametrize("cut", [1, 3, "given back", "end"])
def test_data_that_draws_from_its_own_generator_goes_on(kind, cut):
    """The generator has moved with every sample, and skipping samples does not move it."""
    make = NOISY[kind]
    torch.manual_seed(1)
    whole = whole_epochs(ResumableLoader(make(Noisy())), num_epochs=2)
    torch.manual_seed(1)
    resumable, seen = ResumableLoader(make(Noisy())), []
    for batch in resumable.iterate():
        if cut == "given back" and len(seen) == 2:
            assert resumable.unread()
            break
        seen.append(batch.tolist())
        torch.rand(2)
        if len(seen) == cut:
            break
    state = resumable.state_dict()
    rng = resumable.fetch_rng if cut == "given back" else capture_rng()
    again = start_over(make(Noisy()), state)
    assert seen + whole_epochs(again, rng, num_epochs=2) == whole


@pytest.mark.parametrize("kind", list(NOISY))
def test_a_fetch_that_fails_leaves_a_point_to_go_on_from(kind):
    """The position and the generators of the data are those before it; fetch_rng goes with them."""
    make = NOISY[kind]
    torch.manual_seed(1)
    whole = whole_epochs(ResumableLoader(make(Noisy())))
    torch.manual_seed(1)
    resumable, seen = ResumableLoader(make(Noisy(broken_at=9))), []
    with pytest.raises(OSError, match="stale"):
        for batch in resumable.iterate():
            assert not resumable.is_fetching
            seen.append(batch.tolist())
            torch.rand(2)
    assert resumable.is_fetching
    assert resumable.position == len(seen)
    again = start_over(make(Noisy()), resumable.state_dict())
    assert seen + whole_epochs(again, resumable.fetch_rng) == whole


def test_nothing_is_being_fetched_at_the_end_or_after_it():
    """An error of the loop's own must not be taken for one of the loader."""
    resumable = ResumableLoader(DataLoader(DATA, 4))
    assert not resumable.is_fetching
    assert len(list(resumable.iterate())) == 6
    assert not resumable.is_fetching
    broken = ResumableLoader(DataLoader(Noisy(broken_at=1), 4))
    with pytest.raises(OSError, match="stale"):
        next(broken.iterate())
    broken.end_epoch()
    assert not broken.is_fetching


class Once:
    """Can be iterated, but not the first time."""

    def __init__(self, what):
        self.what = what
        self.num_tries = 0

    def __len__(self):
        return len(self.what)

    def __iter__(self):
        torch.rand(1), random.random()
        self.num_tries += 1
        if self.num_tries == 1:
            raise OSError("not yet")
        return iter(self.what)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_an_epoch_that_cannot_be_opened_was_not_opened(is_resumed):
    """A checkpoint made after that must lead to the same place as the one before."""

    def loader(sampler):
        return DataLoader(DATA, 4, sampler=sampler)

    order = list(range(24))[::-1]
    torch.manual_seed(1)
    once = Once(order)
    with pytest.raises(OSError, match="not yet"):
        iter(once)
    first = ResumableLoader(loader(once))
    batches = first.iterate()
    seen = [next(batches)[0].tolist(), next(batches)[0].tolist()]
    stored, rng = first.state_dict(), capture_rng()
    expected = [one[0].tolist() for one in batches]
    if not is_resumed:
        stored, rng, expected = None, None, seen + expected
    torch.manual_seed(99)
    resumable = ResumableLoader(loader(Once(order)) if is_resumed else Once(list(loader(order))))
    if stored is not None:
        resumable.load_state_dict(stored)
    before, state = capture_rng() if rng is None else rng, resumable.state_dict()
    with pytest.raises(OSError, match="not yet"):
        next(resumable.iterate(rng))
    assert torch.equal(capture_rng()["torch"], before["torch"])
    assert capture_rng()["python"] == before["python"]
    assert {**resumable.state_dict(), "start": None} == {**state, "start": None}
    assert [one[0].tolist() for one in resumable.iterate(rng)] == expected


def at(loader, num_batches):
    resumable = ResumableLoader(loader)
    batches = resumable.iterate()
    for _ in range(num_batches):
        next(batches)
    return resumable.state_dict()


def generator():
    return torch.Generator().manual_seed(5)


OTHERS = {
    "smaller batches": (lambda: DataLoader(DATA, 2), "4 samples in a batch; this loader has 2"),
    "more data": (
        lambda: DataLoader(TensorDataset(torch.arange(23.0)), 4),
        "24 samples in the data set; this loader has 23",
    ),
    "a sampler of more": (
        lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(list(range(20)))),
        "6 batches in an epoch; this loader has 5",
    ),
    "a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
        "4 samples in a batch; this loader has 3",
    ),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_a_position_counts_only_in_an_epoch_that_is_cut_alike(case):
    """The batch of that number begins at another sample."""
    make, text = OTHERS[case]
    state = at(DataLoader(DATA, 4), 3)
    with pytest.raises(mp.MismatchError, match=text):
        ResumableLoader(make()).load_state_dict(state)
    state = at(DataLoader(DATA, 4), 0)
    ResumableLoader(make()).load_state_dict(state)
    opened = ResumableLoader(DataLoader(DATA, 4))
    next(opened.iterate())
    opened.unread()
    again = ResumableLoader(make())
    again.load_state_dict(opened.state_dict())
    assert len(list(again.iterate())) == len(make())


def test_a_position_of_an_earlier_version_still_counts():
    """It told the number of batches only."""
    state = at(DataLoader(DATA, 4), 3)
    for name in ("batch_size", "num_samples", "epoch", "generators"):
        del state[name]
    again = ResumableLoader(DataLoader(DATA, 4))
    again.load_state_dict(state)
    assert len(list(again.iterate())) == 3


class LongerEachEpoch(BatchSampler):
    """Makes another number of batches in every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 + self.epoch

    def __iter__(self):
        return iter([[index] for index in range(len(self))])


def test_a_number_of_batches_that_depends_on_the_epoch_fits():
    """A new loader stands at its first epoch until it is told otherwise."""

    def make():
        return DataLoader(DATA, batch_sampler=LongerEachEpoch(SequentialSampler(DATA), 1, False))

    resumable = ResumableLoader(make())
    resumable.set_epoch(5)
    batches = resumable.iterate()
    for _ in range(7):
        next(batches)
    again = ResumableLoader(make())
    again.load_state_dict(resumable.state_dict())
    again.set_epoch(5)
    assert [one[0].tolist() for one in again.iterate()] == [[7.0], [8.0]]


class Elastic:
    """Knows its position in samples, whatever the size of its batches."""

    def __init__(self, batch_size):
        self.batch_size, self.at = batch_size, 0

    def __len__(self):
        return 24 // self.batch_size

    def __iter__(self):
        while self.at < 24:
            self.at += self.batch_size
            yield torch.arange(self.at - self.batch_size, self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_loader_that_keeps_its_own_position_judges_for_itself():
    """It may well go on with batches of another size."""
    again = ResumableLoader(Elastic(2))
    again.load_state_dict(at(Elastic(4), 2))
    assert next(again.iterate()).tolist() == [8, 9]


@pytest.mark.parametrize("num_batches", [0, "given back", "end"])
def test_a_plain_loader_may_take_over_from_one_with_a_position(num_batches):
    """Between two epochs, or where nothing was read of one, there is no position to keep."""
    resumable = ResumableLoader(Elastic(4) if num_batches != "given back" else DataLoader(DATA, 4))
    batches = resumable.iterate()
    if num_batches == "given back":
        next(batches)
        resumable.unread()
    if num_batches == "end":
        list(batches)
        resumable.end_epoch()
    other = DataLoader(DATA, 4) if num_batches != "given back" else Elastic(4)
    again = ResumableLoader(other)
    again.load_state_dict(resumable.state_dict())
    assert len(list(again.iterate())) == 6


SAMPLERS = {
    "random": lambda: RandomSampler(DATA),
    "weighted": lambda: WeightedRandomSampler(torch.arange(24.0), 24),
    "subset": lambda: SubsetRandomSampler(list(range(24))),
    "own generator": lambda: RandomSampler(DATA, generator=generator()),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_torchdata_goes_on_with_the_samplers_of_torch(kind, num_workers):
    """It draws their order anew, from the generators as they are then."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        return StatefulDataLoader(DATA, 4, sampler=SAMPLERS[kind](), num_workers=num_workers)

    def epoch(batches):
        return [(one[0].tolist(), torch.rand(1).item()) for one in batches]

    torch.manual_seed(1)
    resumable = ResumableLoader(make())
    whole = epoch(resumable.iterate())
    resumable.end_epoch()
    whole += epoch(resumable.iterate())
    torch.manual_seed(1)
    resumable, seen = ResumableLoader(make()), []
    for batch in resumable.iterate():
        seen.append((batch[0].tolist(), torch.rand(1).item()))
        if len(seen) == 2:
            break
    state, rng = resumable.state_dict(), capture_rng()
    again = start_over(make(), state)
    seen += epoch(again.iterate(rng))
    again.end_epoch()
    seen += epoch(again.iterate())
    assert seen == whole


def test_the_generators_of_a_loader_are_looked_at_before_they_are_set():
    """They come from a checkpoint that somebody else may have made."""
    state = at(NOISY["own generator"](Noisy()), 2)
    state["generators"] = [torch.zeros(3)]
    rng = capture_rng()
    again = ResumableLoader(NOISY["own generator"](Noisy()))
    again.load_state_dict(state)
    torch.rand(3)
    with pytest.raises(mp.FormatError):
        next(again.iterate(rng))
    assert torch.equal(capture_rng()["torch"], rng["torch"])
