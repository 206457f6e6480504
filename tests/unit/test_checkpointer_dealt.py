"""Samples that are dealt, in loops where something else happens than batch after batch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import milepost as mp
from milepost.fetching import Fetching
from milepost.resumption import Resumption
from milepost.state.batch_in_hand import BatchInHand
from milepost.state.report import LoadReport
from milepost.state.rng import capture_rng, derived_rng
from milepost.state.source import MemorySource
from milepost.state.tracked import Tracked
from milepost.train import ResumableSampler


class Noisy(Dataset):
    """Draws from a generator of its own and from that of the process; fails at some fetch."""

    def __init__(self, seed=1, fail_at=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.fail_at, self.num_read = fail_at, 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = torch.rand(1, generator=self.generator).item() + torch.rand(1).item()
        if self.num_read == self.fail_at:
            raise ConnectionError("by hand")
        self.num_read += 1
        return torch.tensor([index, noise], dtype=torch.float64)


def new_loader(data=None, **options):
    data = Noisy() if data is None else data
    sampler = ResumableSampler(data, batch_size=3, seed=2, **options)
    return DataLoader(data, batch_sampler=sampler)


def train(folder, loader, *, stop_at=None, every="2ba", tracked=True, body=None, **options):
    """Train two epochs; return the rows that were read, in order."""
    torch.manual_seed(0 if stop_at is None else 1)
    objects = {"loader": loader} if tracked else {}
    seen = []
    with mp.Checkpointer(folder, every=every, **objects, **options) as run:
        for _ in run.epochs(2):
            for batch in run.batches(loader):
                if run.timer.batch == stop_at:
                    return seen
                seen += batch.tolist()
                torch.rand(1)
                if body is not None:
                    body(run)
    return seen


@pytest.fixture
def straight(tmp_path):
    """What a training reads that nothing happens to."""
    torch.manual_seed(0)
    return train(tmp_path / "straight", new_loader())


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_a_loader_that_is_tracked_late_gets_its_place_and_its_generators(
    tmp_path, straight, save_format
):
    """batches() tracks a loader that nobody gave: the resume is long over then."""

    def stopped(run):
        if run.timer.batch == 3:
            run.save("cut", wait=True)
            raise KeyboardInterrupt

    options = {"tracked": False, "save_format": save_format, "every": None}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", new_loader(), body=stopped, **options)
    rest = train(tmp_path / "a", new_loader(Noisy(seed=9)), **options)
    assert straight[9:] == rest  # the batch in hand was given back: nothing was computed from it


@pytest.mark.parametrize("fail_at", [1, 7, 20, 31])
def test_an_error_while_a_batch_is_fetched_repeats_its_draws(tmp_path, straight, fail_at):
    """The batch is fetched again, with the numbers it had, from every generator."""
    seen = []

    def note(run):
        seen.append(run.timer.batch)

    loader = new_loader(Noisy(fail_at=fail_at))
    with pytest.raises(ConnectionError):
        train(tmp_path / "a", loader, every=None, body=note)
    num_rows = sum(3 if batch % 7 != 6 else 2 for batch in seen)
    rest = train(tmp_path / "a", new_loader(Noisy(seed=9)))
    assert straight[num_rows:] == rest


def test_going_back_in_the_body_reads_the_same_samples_again(tmp_path):
    """restore() leads to another place in the epoch, or in an earlier one."""
    seen, is_done = [], []

    def back(run):
        seen.append(run.timer.batch)
        if run.timer.batch == 9 and not is_done:
            is_done.append(True)
            run.wait()
            run.restore("ba2")

    rows = train(tmp_path, new_loader(), body=back)
    assert seen == [*range(10), *range(2, 14)]
    ids = [int(row[0]) for row in rows]
    assert sorted(ids[:6] + ids[29:43]) == list(range(20))
    assert rows[29:52] == rows[6:29]


def test_a_save_before_the_batch_is_used_does_not_count_it(tmp_path, straight):
    """The position is given back with the batch."""
    cut = []

    with mp.Checkpointer(tmp_path / "a", loader=(loader := new_loader())) as run:
        torch.manual_seed(0)
        for _ in run.epochs(2):
            for batch in run.batches(loader):
                if run.timer.batch == 4:
                    run.save("cut", wait=True)
                    break
                cut += batch.tolist()
                torch.rand(1)
            break
    state = mp.open_run(tmp_path / "a").get("cut").load(["loader"])["state"]["loader"]
    assert (state["position"], state["samples"]) == (4, 12)
    assert cut + train(tmp_path / "a", new_loader(Noisy(seed=9))) == straight


def test_a_position_of_another_data_set_is_refused_before_anything_changes(tmp_path):
    """It would lead to other samples."""
    train(tmp_path, new_loader(), stop_at=2)

    class Longer(Noisy):
        def __len__(self):
            return 21

    with pytest.raises(mp.MismatchError, match="20 samples"):
        train(tmp_path, new_loader(Longer()))


def test_no_two_ranks_share_a_stream_after_the_number_of_ranks_has_grown():
    """From two to four and to eight: each new rank has numbers that no other rank draws."""

    def seeded(rank):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        return capture_rng()

    def draws(state):
        generator = torch.Generator()
        generator.set_state(state["torch"])
        python = random.Random()
        python.setstate(state["python"])
        keys = state["numpy"]["keys"].tolist()
        return [torch.rand(1, generator=generator).item(), python.random(), tuple(keys)]

    states = [seeded(rank) for rank in range(2)]
    for num_ranks in (4, 8):
        states += [derived_rng(states[0], rank) for rank in range(len(states), num_ranks)]
    drawn = [draws(state) for state in states]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 8


@pytest.mark.parametrize(("num_stored", "is_own"), [(1, False), (2, True)])
def test_a_rank_that_a_source_does_not_know_draws_its_own_numbers(num_stored, is_own):
    """Also where a running training is led back, to a checkpoint of fewer ranks."""
    states = []
    for seed in range(num_stored):
        torch.manual_seed(seed)
        states.append(capture_rng())
    tracked = Tracked()
    team = SimpleNamespace(rank=1, world_size=2)
    writer = SimpleNamespace(team=team)
    resumption = Resumption(tracked, writer, BatchInHand(), strict=True, fetching=Fetching())
    torch.manual_seed(77)
    resumption.restore(MemorySource("a file", {"rng": states}), items=None, strict=None)
    found = torch.rand(1).item()
    torch.manual_seed(1)
    assert (found == torch.rand(1).item()) is is_own
    torch.manual_seed(0)
    assert found != torch.rand(1).item()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_accumulated_gradients_of_other_ranks_are_told(num_ranks):
    """Those of a rank that is gone are lost, and nobody can see whether they mattered."""
    team = SimpleNamespace(rank=0, world_size=2)
    resumption = Resumption(
        Tracked(), SimpleNamespace(team=team), BatchInHand(), strict=True, fetching=Fetching()
    )
    stored = {"rng": [capture_rng()], "gradients": {"0.weight": torch.ones(1)}}
    resumption.restore(MemorySource("a file", stored), items=None, strict=None)
    report = LoadReport("a file")
    resumption._note_other_ranks(report, num_ranks)
    assert any("Gradients were being" in note for note in report.notes) is (num_ranks == 3)
