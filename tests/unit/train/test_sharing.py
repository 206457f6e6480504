"""Who trains on what: every sample on one rank, or a refusal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import milepost as mp
from milepost.ranks.server import Server
from milepost.ranks.solo import Solo
from milepost.ranks.team import StoreTeam
from milepost.train.data import DataSpec
from milepost.train.evaluator import Evaluator
from milepost.train.group import Group
from milepost.train.parallel import Layout
from milepost.train.sharing import Share, share_evaluations, share_training


def on_two_ranks(body: Callable[[Group], Any]) -> list[Any]:
    """Run a body as two ranks in threads; return what each returned or raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = Server("127.0.0.1", store.port, store)
    ended: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            ended[rank] = body(Group(StoreTeam(server, rank, 2, "t"), timeout_s=30, is_ours=False))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


def share(loader: Any, *, layout: Layout = Layout.WHOLE) -> list[Any]:
    return on_two_ranks(
        lambda group: share_training(loader, group=group, layout=layout, seed=5).dataloader
    )


def ids(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


NUMBERS = torch.arange(21)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_plain_loader_is_dealt_out(shuffle: bool, drop_last: bool) -> None:
    """As many steps on both ranks, no sample on two of them, and all else as it was."""
    plain = DataLoader(
        NUMBERS, 4, shuffle=shuffle, drop_last=drop_last, collate_fn=lambda x: torch.stack(x) + 100
    )
    first, second = (ids(one) for one in share(plain))
    assert len(first) == len(second) == (2 if drop_last else 3)
    seen = sorted(number - 100 for batch in first + second for number in batch)
    assert len(seen) == len(set(seen)) == (16 if drop_last else 21)
    order = [number for batch in first for number in batch]
    assert (order == sorted(order)) is not shuffle


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, 4, sampler=WeightedRandomSampler([1.0] * 21, 21)),
        DataLoader(NUMBERS, 4, sampler=SubsetRandomSampler([1, 2, 3])),
        DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, replacement=True)),
        DataLoader(NUMBERS, batch_sampler=[[1, 2], [3, 4]]),
        DataLoader(NUMBERS, batch_size=None),
    ],
    ids=["weighted", "subset", "replacement", "batches", "no batches"],
)
def test_samplers_that_every_rank_follows_by_itself_are_refused(loader: Any) -> None:
    """Ranks on the same data train no faster than one, and nobody would notice."""
    for error in share(loader):
        assert isinstance(error, mp.UsageError)
        assert "ResumableSampler" in error.hint


def test_only_the_user_knows_the_shares_of_a_model_on_a_mesh() -> None:
    """Ranks of tensor parallelism must see the same samples, and those of FSDP others."""
    assert all(
        isinstance(one, mp.UsageError) for one in share(DataLoader(NUMBERS, 4), layout=Layout.OTHER)
    )
    alike = DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 1, 0))
    assert share(alike, layout=Layout.OTHER) == [alike, alike]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("loader", [[NUMBERS], DataLoader(Endless())], ids=["list", "iterable"])
def test_what_only_yields_is_taken_as_it_is(loader: Any) -> None:
    """Whoever made it chose what it yields on which rank."""
    assert share(loader) == [loader, loader]


def test_shares_that_name_one_place_are_refused() -> None:
    """A sampler that was made before the process group says rank 0 everywhere."""
    loader = DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, 0))
    for error in share(loader):
        assert isinstance(error, mp.UsageError)
        assert "0 of 2, 0 of 2" in error.what


@pytest.mark.parametrize("length", [2, 3, 20, 21])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_an_evaluation_sees_each_sample_once(length: int, num_replicas: int) -> None:
    """No sample is repeated to make the shares alike."""
    shares = [Share(range(length), num_replicas=num_replicas, rank=r) for r in range(num_replicas)]
    assert sorted(index for one in shares for index in one) == list(range(length))
    assert sum(map(len, shares)) == length
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def shared_evaluation(loader: Any) -> list[Any]:
    def body(group: Group) -> Any:
        evaluator = Evaluator("test", loader)
        share_evaluations([evaluator], group=group, layout=Layout.WHOLE)
        return evaluator.data.dataloader

    return on_two_ranks(body)


def test_evaluations_are_shared_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """What counts twice is said; and no rank is left without a sample."""
    caplog.set_level(logging.WARNING)
    found = [ids(one) for one in shared_evaluation(DataLoader(NUMBERS, 4, shuffle=True))]
    assert sorted(n for one in found for batch in one for n in batch) == list(range(21))
    assert not caplog.records
    single = DataLoader(NUMBERS[:1], 4)
    assert shared_evaluation(single) == [single, single]
    padded = DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, 0, shuffle=False))
    assert shared_evaluation(padded) == [padded, padded]
    assert "repeats 1 of its 21 samples" in caplog.text
    batches = BatchSampler(SequentialSampler(NUMBERS), 4, drop_last=False)
    odd = DataLoader(NUMBERS, batch_sampler=_Mine(batches))
    assert shared_evaluation(odd) == [odd, odd]
    assert "Every rank evaluates all of 'test'" in caplog.text


class _Mine:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_alone_everything_is_taken_as_it_is() -> None:
    """Also what several ranks would be refused."""
    group = Group(Solo(), timeout_s=1, is_ours=False)
    data = DataSpec(DataLoader(NUMBERS, batch_sampler=[[1, 2]]))
    assert share_training(data, group=group, layout=Layout.WHOLE, seed=0) is data
