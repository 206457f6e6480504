"""Loaders whose samples are dealt to ranks: one position for all, and the rest to any number."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from milepost.errors import MismatchError, UsageError
from milepost.state.dealt_loader import DealtLoader, resumable
from milepost.state.rng import capture_rng
from milepost.testing.asserts import assert_equal_states
from milepost.train import ResumableSampler

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

HOW = ["sampler", "batch sampler", "torchdata", "torchdata batch sampler", "one by one"]


def ranks(length, num_ranks, *, batch_size=2, how="sampler", dataset=None, seed=4, **options):
    """Return the loaders of all ranks, in one process."""
    dataset = list(range(length)) if dataset is None else dataset
    cls = DataLoader
    if how.startswith("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader as cls  # noqa: N813
    made = []
    for rank in range(num_ranks):
        place = {"num_replicas": num_ranks, "rank": rank, "seed": seed}
        if how.endswith("batch sampler"):
            sampler = ResumableSampler(dataset, batch_size=batch_size, **place)
            loader = cls(dataset, batch_sampler=sampler, **options)
        elif how == "one by one":
            loader = cls(dataset, batch_size=None, sampler=ResumableSampler(dataset, **place))
        else:
            loader = cls(dataset, batch_size, sampler=ResumableSampler(dataset, **place), **options)
        made.append(resumable(loader))
    assert {type(one) for one in made} == {DealtLoader}
    return made


def take(loaders, num_steps=None, *, epoch=0):
    """Make steps on all ranks; return the samples of each, and the state after them."""
    for one in loaders:
        one.set_epoch(epoch)
    iterators = [one.iterate() for one in loaders]
    steps, states = [], []
    while num_steps is None or len(steps) < num_steps:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert batches == [None] * len(loaders)
            break
        steps.append([torch.atleast_1d(torch.as_tensor(batch)).tolist() for batch in batches])
    states = [one.state_dict() for one in loaders]
    assert all(state == states[0] for state in states)
    for iterator in iterators:
        iterator.close()
    return steps, states[0]


def flat(steps):
    return list(chain.from_iterable(chain.from_iterable(steps)))


@pytest.mark.parametrize("how", HOW)
def test_an_epoch_goes_on_on_other_numbers_of_ranks(how):
    """H05, H19: four, two, then three ranks, in the second epoch, with other batch sizes."""
    seen, state, position = [], None, 0
    for num_ranks, batch_size, num_steps in ((4, 2, 2), (2, 3, 3), (3, 2, None)):
        loaders = ranks(48, num_ranks, batch_size=batch_size, how=how)
        if state is not None:
            for one in loaders:
                assert one.misfit(state) is None
                assert one.remarks(state)[0].endswith(f"are dealt to {num_ranks}.")
                one.load_state_dict(state)
                assert one.state_dict() == state
        left = 48 - len(seen)
        steps, state = take(loaders, num_steps, epoch=1)
        seen += flat(steps)
        position += len(steps)
        assert state["position"] == position
        assert state["samples"] == min(len(seen), 48)
    assert {one.num_batches for one in loaders} == {position}
    assert set(seen) == set(range(48))
    assert len(seen) == (48 if how.endswith("batch sampler") else 48 + -left % 3)


@pytest.mark.parametrize("how", HOW)
def test_a_resume_on_as_many_ranks_is_the_rest_of_the_epoch(how):
    """Batch for batch, and the length is that of the whole epoch."""
    straight, _ = take(ranks(23, 3, how=how), epoch=2)
    for cut in range(len(straight) + 1):
        first, state = take(ranks(23, 3, how=how), cut, epoch=2)
        loaders = ranks(23, 3, how=how)
        for one in loaders:
            one.load_state_dict(state)
            assert one.num_batches == len(straight)
        rest, _ = take(loaders, epoch=2)
        assert first + rest == straight


def test_after_the_end_of_an_epoch_comes_the_next_one():
    """H02: the position there is the end, and none of the next epoch is left out."""
    (loader,) = ranks(8, 1)
    steps, _ = take([loader], epoch=0)
    at_end = loader.state_dict()
    loader.end_epoch()
    after = loader.state_dict()
    assert after["samples"] == after["position"] == 0
    expected, _ = take(ranks(8, 1), epoch=1)
    for state in (at_end, after):
        (resumed,) = ranks(8, 1)
        resumed.load_state_dict(state)
        if state is at_end:
            assert take([resumed], epoch=0)[0] == []
            resumed.end_epoch()
        assert take([resumed], epoch=1)[0] == expected
        assert len(resumed.loader) == 4
    assert expected != steps


@pytest.mark.parametrize("how", ["sampler", "torchdata batch sampler"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_read_ahead_do_not_move_the_position(how, persistent):
    """H06: what was fetched and not used yet must be fetched again, by any number of workers."""
    options = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent}
    loaders = ranks(40, 2, how=how, **options)
    first, state = take(loaders, 3)
    assert state["samples"] == 12
    resumed = ranks(40, 1, how=how, batch_size=4)
    resumed[0].load_state_dict(state)
    rest, _ = take(resumed)
    assert sorted(flat(first + rest)) == list(range(40))


class Noisy(Dataset):
    """Draws for each sample from the three generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))
        return torch.tensor([index, *drawn], dtype=torch.float64)


def test_no_two_batches_draw_the_same_in_their_workers():
    """Ranks are often seeded alike; augmentation that repeats between them would be less of it."""

    def draws(num_ranks, epoch):
        loaders = ranks(24, num_ranks, dataset=Noisy(), num_workers=1)
        found = {}
        for one in loaders:
            torch.manual_seed(0)
            one.set_epoch(epoch)
            for batch in one.iterate():
                found.update({tuple(row[1:]): int(row[0]) for row in batch.tolist()})
        return found

    first, second = draws(2, 0), draws(2, 1)
    assert len(first) == len(second) == 24
    assert not first.keys() & second.keys()
    assert draws(2, 0) == first


def test_ranks_of_a_distributed_sampler_draw_other_numbers_in_their_workers():
    """They are often seeded alike, and read other samples."""
    found = []
    for rank in range(2):
        torch.manual_seed(0)
        sampler = DistributedSampler(range(24), num_replicas=2, rank=rank)
        loader = resumable(DataLoader(Noisy(), 2, sampler=sampler, num_workers=1))
        found += [tuple(row[1:]) for batch in loader.iterate() for row in batch.tolist()]
    assert len(set(found)) == len(found) == 24


def test_draws_in_workers_come_back():
    """On another number of workers too, as long as the ranks are as many."""

    def read(num_workers, state=None, num_steps=None):
        (loader,) = ranks(24, 1, dataset=Noisy(), num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for batch in loader.iterate(capture_rng()):
            found += batch.tolist()
            if len(found) == num_steps:
                break
        return found, loader.state_dict()

    straight, _ = read(2)
    first, state = read(2, num_steps=10)
    rest, _ = read(1, state=state)
    assert first + rest == straight


def test_nothing_is_drawn_by_going_back():
    """The position is all there is to it: no generator of the process moves, nor any other."""
    (loader,) = ranks(24, 1, num_workers=1, generator=torch.Generator().manual_seed(1))
    _, state = take([loader], 2)
    own = loader.rank_state()
    generator = torch.Generator().manual_seed(2)
    (resumed,) = ranks(24, 1, num_workers=1, generator=generator)
    before = capture_rng()
    resumed.load_state_dict(state)
    resumed.load_rank_state(own)
    iterator = resumed.open_epoch()
    assert_equal_states(capture_rng(), before)
    assert torch.equal(generator.get_state(), own["generators"][0])
    del iterator


class Own(Dataset):
    """Draws from a generator of its own."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.rand(1, generator=self.generator)


def test_a_generator_of_the_data_set_is_the_ranks_own():
    """The position says nothing of it, and a rank that has none goes on with what it was given."""
    loaders = ranks(16, 2, dataset=Own(3))
    other = ranks(16, 2, dataset=Own(4))[1]
    straight = [batch.tolist() for batch in loaders[0].iterate()]
    loader = ranks(16, 2, dataset=Own(3))[0]
    iterator = loader.iterate()
    first = [next(iterator).tolist(), next(iterator).tolist()]
    state, own = loader.state_dict(), loader.rank_state()
    (resumed, fresh) = (ranks(16, 2, dataset=Own(9))[0] for _ in range(2))
    resumed.load_state_dict(state)
    resumed.load_rank_state(own)
    assert_equal_states(resumed.rank_state(), own)
    assert first + [batch.tolist() for batch in resumed.iterate()] == straight
    fresh.load_state_dict(state)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(9)).item()
    assert next(fresh.iterate())[0].item() == expected
    assert other.state_dict()["samples"] == 0


def test_counts_are_those_of_all_ranks():
    """Ranks that count alike save at the same points; a repeated sample is not counted."""
    for how, expected in (("sampler", [6, 6, 2]), ("batch sampler", [6, 5, 3])):
        for loader in ranks(14, 3, how=how):
            found = [loader.of_all_ranks(len(batch)) for batch in loader.iterate()]
            assert found == expected
    shared = DistributedSampler(range(14), num_replicas=3, rank=1)
    assert resumable(DataLoader(range(14), 2, sampler=shared)).of_all_ranks(2) == 6
    assert resumable(DataLoader(range(14), 2)).of_all_ranks(2) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 5}, "seed=5"),
        ({"length": 21}, "20 samples in the data set"),
        ({"stored": {"samples": -1}}, "malformed"),
        ({"stored": {"samples": 21}}, "malformed"),
        ({"stored": {"samples": 0}}, "malformed"),
        ({"stored": {"position": 0}}, "malformed"),
        ({"stored": {"position": -1}}, "malformed"),
        ({"stored": {"epoch": None}}, "malformed"),
        ({"stored": {"start": {}}}, "malformed"),
        ({"stored": {"position": "2"}}, "malformed"),
        ({"stored": {"kind": "indexed"}}, "between two epochs"),
    ],
)
def test_a_position_that_means_another_place_is_refused(change, said):
    """Other data or another order make a position in it mean nothing."""
    _, state = take(ranks(20, 2), 2)
    state.update(change.pop("stored", {}))
    length = change.pop("length", 20)
    (loader,) = ranks(length, 1, **change)
    with pytest.raises(MismatchError, match=said):
        loader.load_state_dict(state)
    assert take([loader])[1]["samples"] == length


def test_another_kind_of_loader_cannot_take_over_within_an_epoch():
    """Its order is another one."""
    _, state = take(ranks(20, 2), 2)
    loader = resumable(DataLoader(range(20), 2))
    with pytest.raises(MismatchError, match="a ResumableSampler dealt"):
        loader.load_state_dict(state)


def test_a_sampler_in_the_wrong_place_is_told():
    """Torch would fail in the first batch, with another message, or in a worker."""
    singles, batches = ResumableSampler(8), ResumableSampler(8, batch_size=2)
    with pytest.raises(UsageError, match="batch_size"):
        resumable(DataLoader(range(8), batch_sampler=singles))
    with pytest.raises(UsageError, match="batch_sampler"):
        resumable(DataLoader(range(8), 2, sampler=batches))


def test_batches_that_another_sampler_makes_are_not_dealt():
    """Nobody knows how many samples each of its batches takes."""

    class Mine(BatchSampler):
        def __iter__(self):
            return iter([[0], [1, 2]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("milepost.state.loader._log.warning", lambda *_: None)
        loader = resumable(DataLoader(range(8), batch_sampler=Mine(ResumableSampler(8), 2, False)))
    assert loader.kind == "indexed"
    assert any("Mine" in note for note in loader.notes)


def test_a_data_set_with_a_state_stays_with_its_torchdata_loader():
    """Only that loader knows to save it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class WithState(Noisy):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    data = WithState()
    assert resumable(StatefulDataLoader(data, 2, sampler=ResumableSampler(data))).kind == "stateful"
