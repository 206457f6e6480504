"""Samplers: which generators an order comes from, and whether it is certain to come back.

To get back into an epoch its order is derived again. Samplers of torch draw it at once when the
epoch begins, or from a generator of their own. One of another maker may draw a piece at a time from
a global generator, between the draws of the training; that cannot be seen from outside.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
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

from ..tensors.memory import host_bytes
from .resumable_sampler import ResumableSampler

__all__ = ["data_note", "generators_of", "order_note", "order_of", "order_words", "share_of"]

_KNOWN = (
    SequentialSampler.__iter__,
    SubsetRandomSampler.__iter__,
    WeightedRandomSampler.__iter__,
    DistributedSampler.__iter__,
    ResumableSampler.__iter__,
)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that belong to a loader, each once, in a fixed order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


def share_of(loader: Any) -> tuple[int, int]:
    """Return which share of the data a loader reads, of how many: 0 of 1 if it reads all."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "sampler", None),
    ):
        if isinstance(sampler, DistributedSampler | ResumableSampler):
            return sampler.rank, sampler.num_replicas
    return 0, 1


def order_note(loader: Any) -> str | None:
    """Return what to know of a loader whose order may not come back; ``None`` if it does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = _unknown(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    if sampler is None:
        return None
    return (
        f"The order of the data comes from a sampler ({type(sampler).__qualname__}) whose ways are "
        "not known. A resume within an epoch repeats it only if the sampler draws it at the start "
        "of the epoch, or from a generator of its own that it seeds anew for every epoch. Give the "
        "loader state_dict and load_state_dict to be exact in any case."
    )


def order_of(loader: Any) -> str | None:
    """Return what the order of the data is made by, in words; ``None`` if that is not to be seen.

    Two loaders whose words differ do not go through their data alike, whatever the random state.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return order_words(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def data_note(loader: Any) -> str | None:
    """Return what to know of a data set that has generators of its own, or ``None``."""
    if not isinstance(loader, DataLoader):
        return None
    dataset = loader.dataset
    kept = getattr(dataset, "__dict__", {})
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    # That of the data set in this process is restored; workers have copies.
    restored = () if loader.num_workers else ("generator",)
    names = [name for name, v in kept.items() if isinstance(v, kinds) and name not in restored]
    if not names:
        return None
    return (
        f"The data set ({type(dataset).__qualname__}) has random generators of its own "
        f"({', '.join(names)}), which a resume within an epoch does not restore. It repeats the "
        "numbers only if each sample seeds the generator that it draws from."
    )


def order_words(sampler: Any) -> str:
    """Return what a sampler makes an order by, in words."""
    name = type(sampler).__qualname__
    if isinstance(sampler, list | tuple | range):
        return f"{name} {_digest(sampler)}"
    if isinstance(sampler, BatchSampler):
        return f"{name} of {order_words(sampler.sampler)}"
    if isinstance(sampler, RandomSampler):
        return f"{name} with replacement" if sampler.replacement else name
    if isinstance(sampler, WeightedRandomSampler):
        return f"{name} of the weights {_digest(sampler.weights)}"
    if isinstance(sampler, SubsetRandomSampler):
        return f"{name} of the indices {_digest(sampler.indices)}"
    if isinstance(sampler, DistributedSampler | ResumableSampler):
        return f"{name} with shuffle={sampler.shuffle}, seed={sampler.seed}"
    return name


def _digest(values: Any) -> str:
    """Return a few letters that tell sequences of numbers apart."""
    if isinstance(values, torch.Tensor):
        data = host_bytes(values.detach().cpu().contiguous()).tobytes()
    elif isinstance(values, range):
        data = repr(values).encode()
    else:
        data = "\n".join(map(repr, values)).encode()
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def _unknown(sampler: Any) -> Any:
    """Return the sampler, of one and what it is built upon, whose ways are not known."""
    cls = type(sampler)
    is_torchdata = cls.__module__.startswith("torchdata.")
    if isinstance(sampler, BatchSampler) and (
        is_torchdata or cls.__iter__ is BatchSampler.__iter__
    ):
        return _unknown(sampler.sampler)
    if cls.__iter__ is RandomSampler.__iter__:
        draws_late = sampler.replacement or len(sampler) > len(sampler.data_source)
        return sampler if draws_late and sampler.generator is torch.default_generator else None
    is_known = isinstance(sampler, list | tuple | range) or cls.__iter__ in _KNOWN
    return None if is_known or is_torchdata else sampler
