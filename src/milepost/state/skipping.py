"""Plain map-style loaders that can start an epoch some batches in, without reading data.

Random numbers drawn in workers come back too. Torch seeds a worker once, and what it draws for a
batch then depends on which batches it had before: in the middle of an epoch nobody can get there
again without reading them. Here every batch carries a seed of its own to its worker, made from the
random state at the start of the epoch and the number of the batch. So it does not even matter how
many workers there are.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from .rng import apply_rng, capture_rng

__all__ = ["SkippingLoader"]


class SkippingLoader:
    """A twin of a map-style loader that can start its epoch some batches in.

    The twin reads through the same data set, sampler, collation and workers; only the sampler's
    indices pass through one more hand, which drops those already used. It is used from the first
    epoch on, so that a resumed run and an uninterrupted one take the same path.
    """

    def __init__(self, loader: Any) -> None:
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "persistent_workers": loader.persistent_workers,
        }
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        if getattr(loader, "pin_memory_device", ""):
            options["pin_memory_device"] = loader.pin_memory_device
        if getattr(loader, "in_order", True) is not True:
            options["in_order"] = loader.in_order
        if loader.batch_sampler is not None:
            self._skip = _SkippingSampler(loader.batch_sampler)
            self._twin = DataLoader(loader.dataset, batch_sampler=self._skip, **options)
        else:
            self._skip = _SkippingSampler(loader.sampler)
            self._twin = DataLoader(loader.dataset, batch_size=None, sampler=self._skip, **options)
        self._has_workers = False

    def start(
        self,
        num_batches: int,
        *,
        is_first: bool,
        seed: bytes,
        number_of: Callable[[int], int] = int,
    ) -> Iterator[Any]:
        """Begin an epoch.

        Args:
            num_batches: How many batches to leave out.
            is_first: Whether it is the first epoch of the run with this loader.
            seed: What the random numbers drawn in workers come from; another one in every epoch.
            number_of: Makes a number from the place of a batch in the epoch, 0 for the first: that
                number and the seed say what is drawn for it.
        """
        self._skip.num_skipped, self._skip.number_of = num_batches, number_of
        self._skip.seed = seed if self._twin.num_workers else None
        if self._twin.persistent_workers and not is_first and not self._has_workers:
            # Workers that last draw their seed in the first epoch of the run only, and these are
            # new: the order must be drawn as if they had not drawn it again.
            self._skip.before_order = _restorer(self._twin.generator)
        self._has_workers = True
        iterator = iter(self._twin)
        # Torch draws the seed of the workers when the iterator is made, and the order when the
        # first batch is asked for. Stepping over batches asks for the order, so it comes after
        # that, and before the caller puts the random state of the checkpoint in place.
        self._skip.step_over()
        return iterator


class _SkippingSampler:
    """Yields what another sampler yields, without the first few."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.num_skipped = 0
        self.seed: bytes | None = None
        self.number_of: Callable[[int], int] = int
        self.before_order: Callable[[], None] | None = None
        self._rest: _Skipped | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks for this twice before it reads anything.
        if not self.num_skipped and self.before_order is None:
            return self._seeded(iter(self.sampler))
        self._rest = _Skipped(self.sampler, self.num_skipped, self._begin_order)
        return self._seeded(self._rest)

    def _seeded(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self.seed is None:
            return batches
        numbers = map(self.number_of, itertools.count(self.num_skipped))
        return map(_SeededBatch, batches, numbers, itertools.repeat(self.seed))

    def _begin_order(self) -> None:
        if self.before_order is not None:
            self.before_order()
            self.before_order = None

    def step_over(self) -> None:
        """Leave out the first few now, if that has not happened yet."""
        if self._rest is not None:
            self._rest.step_over()
            self._rest = None


class _Skipped:
    """The rest of a sampler, behind some batches."""

    def __init__(self, sampler: Any, num_skipped: int, begin: Callable[[], None]) -> None:
        self._sampler = sampler
        self._num_skipped = num_skipped
        self._begin = begin
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.step_over())

    def step_over(self) -> Iterator[Any]:
        if self._batches is None:
            self._begin()
            self._batches = self._behind()
        return self._batches

    def _behind(self) -> Iterator[Any]:
        sampler = self._sampler
        if type(sampler) is BatchSampler and _is_indexed(sampler.sampler):
            # Step over single indices at C speed instead of building the batches.
            indices = iter(sampler.sampler)
            deque(itertools.islice(indices, self._num_skipped * sampler.batch_size), maxlen=0)
            rest = BatchSampler(_Rest(indices), sampler.batch_size, sampler.drop_last)
            return iter(rest)
        batches: Iterator[Any] = iter(sampler)
        deque(itertools.islice(batches, self._num_skipped), maxlen=0)
        return batches


class _Rest:
    """The rest of an iterator, as something a batch sampler takes."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self._rest


class _SeededBatch:
    """The indices of a batch on their way to a worker, which is seeded when they arrive there."""

    def __init__(self, indices: Any, number: int, seed: bytes) -> None:
        self._indices = indices
        self._number = number
        self._seed = seed

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, int, bytes]]:
        return _arrive, (self._indices, self._number, self._seed)


def _arrive(indices: Any, number: int, seed: bytes) -> Any:
    """Seed the generators of this worker for one batch, and return its indices."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), key=seed, digest_size=32).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(digest[8:16])
    np.random.seed(np.frombuffer(digest[16:], dtype="<u4"))
    return indices


def _restorer(generator: torch.Generator | None) -> Callable[[], None]:
    """Return a function that undoes every draw made since from the generators of a loader."""
    rng = capture_rng()
    own = None if generator is None else generator.get_state()

    def restore() -> None:
        apply_rng(rng)
        if generator is not None and own is not None:
            generator.set_state(own)

    return restore


def _is_indexed(sampler: Any) -> bool:
    return type(sampler) in (RandomSampler, SequentialSampler)
