"""The sampler whose epoch can go on on another number of ranks.

Its order is a function of seed, epoch and length alone, so that every rank derives the same one and
nothing of it has to be saved. How far the epoch has come is one number, the same on every rank:
samples of that order that were used. See ``dealing`` for who gets which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..errors import UsageError
from ..ranks.team import find_rank
from .dealing import Deal

__all__ = ["ResumableSampler"]

_CHUNK = 65536
"""Indices that are turned into numbers at a time."""


class ResumableSampler(Sampler[Any]):
    """Deal one global order of the samples to all ranks, from any position on.

    With ``batch_size`` it is a batch sampler: ``DataLoader(data, batch_sampler=sampler)``. Every
    rank makes the same number of steps, and every sample of the epoch is used exactly once: where
    the samples do not come out even, the last batches are smaller. Only where a rank would get
    nothing are samples repeated: fewer samples than ranks are left, or the batch size is 1.

    Without, it takes the place of ``DistributedSampler``: ``DataLoader(data, 4, sampler=sampler)``.
    Every rank gets the same number of samples, so up to ``num_replicas - 1`` are repeated at the
    end of the epoch, those from its beginning.

    :class:`Checkpointer` and :class:`Trainer` know it: they tell it the epoch, save how many
    samples of the epoch were used by all ranks together, and go on from there on any number of
    ranks. In a loop without them call :meth:`set_epoch` and :meth:`start_at`.

    Args:
        dataset: The data set, or the number of its samples.
        batch_size: Samples of a batch on one rank; ``None`` yields single samples.
        shuffle: Whether the order is a random one, another in each epoch.
        seed: What the order comes from.
        drop_last: Whether to leave out what does not come out even: with ``batch_size`` a last step
            that is not full, without it up to ``num_replicas - 1`` samples.
        num_replicas: Among how many ranks to deal; ``None``: those of the process group. Ranks that
            train on the same samples, as those of tensor parallelism, count as one.
        rank: Which of them this process is.

    Raises:
        UsageError: A number that makes no sense.

    Examples:
        >>> [list(ResumableSampler(5, shuffle=False, num_replicas=2, rank=r)) for r in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
        >>> batches = ResumableSampler(5, batch_size=2, shuffle=False, num_replicas=2, rank=1)
        >>> list(batches)
        [[1], [4]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise UsageError("num_replicas and rank belong together: give both, or none.")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise UsageError(f"There is no rank {rank} of {num_replicas}.")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, and must be 1 or more.")
        if isinstance(dataset, int) and dataset < 0:
            raise UsageError(f"A data set cannot have {dataset} samples.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._given = None if rank is None or num_replicas is None else (rank, num_replicas)
        self._epoch = 0
        self._position = 0
        self._num_before = 0

    @property
    def num_replicas(self) -> int:
        """Return among how many ranks the samples are dealt."""
        return self._place[1]

    @property
    def rank(self) -> int:
        """Return which of them this process is."""
        return self._place[0]

    @property
    def length(self) -> int:
        """Return the samples of an epoch, those of all ranks."""
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    @property
    def epoch(self) -> int:
        """Return the epoch that the order is of."""
        return self._epoch

    @property
    def position(self) -> int:
        """Return how many samples of the epoch were used before the next iteration begins."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. The epoch that it is in already goes on where it is."""
        if epoch != self._epoch:
            self.start_at(0, epoch=epoch)

    def start_at(self, position: int, *, epoch: int | None = None, num_before: int = 0) -> None:
        """Make the next iteration begin within an epoch.

        Args:
            position: How many samples of the epoch were used, by all ranks together.
            epoch: Which epoch; ``None``: the one it is in.
            num_before: What to count as yielded before, in ``len()``: batches with ``batch_size``,
                else samples of this rank.

        Raises:
            UsageError: The data set has not so many samples.
        """
        if not 0 <= position <= self.length:
            raise UsageError(f"There is no position {position} in {self.length} samples.")
        self._epoch = self._epoch if epoch is None else epoch
        self._position, self._num_before = position, num_before

    def position_after(self, num_yielded: int) -> int:
        """Return the position once every rank has used so much of the next iteration.

        Args:
            num_yielded: Batches with ``batch_size``, else samples of each rank.
        """
        return self.deal().used_after(num_yielded)

    def deal(self) -> Deal:
        """Return the steps of the next iteration, on all ranks."""
        return Deal(
            start=self._position,
            length=self.length,
            num_ranks=self.num_replicas,
            batch_size=1 if self.batch_size is None else self.batch_size,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        return self._num_before + self.deal().num_steps

    def __iter__(self) -> Iterator[Any]:
        deal, (rank, num_ranks) = self.deal(), self._place
        order = self._order()
        if self.batch_size is None:
            end = deal.bounds(deal.num_steps - 1)[1] if deal.num_steps else deal.start
            return _singles(order, range(deal.start + rank, end, num_ranks))
        return _batches(order, deal, rank)

    @property
    def _place(self) -> tuple[int, int]:
        return find_rank() if self._given is None else self._given

    def _order(self) -> Tensor:
        """Return the order of the epoch: [num_samples] int64."""
        if not self.shuffle:
            return torch.arange(self.length)
        # Not the sum of both: epoch 1 of one seed would be epoch 0 of the next.
        text = f"{self.seed} {self._epoch}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        generator = torch.Generator().manual_seed(number)
        return torch.randperm(self.length, generator=generator)


def _singles(order: Tensor, places: range) -> Iterator[int]:
    for begin in range(0, len(places), _CHUNK):
        yield from _at(order, places[begin : begin + _CHUNK])


def _batches(order: Tensor, deal: Deal, rank: int) -> Iterator[list[int]]:
    for step in range(deal.num_steps):
        begin, end = deal.bounds(step)
        yield _at(order, range(begin + rank, end, deal.num_ranks))


def _at(order: Tensor, places: range) -> list[int]:
    """Return the samples at some places; places beyond the end are those from the beginning."""
    length = len(order)
    found: list[int] = order[places.start : min(places.stop, length) : places.step].tolist()
    beyond = places[len(found) :]
    return [*found, *(int(order[(place - length) % length]) for place in beyond)]
