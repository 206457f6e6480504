"""Who trains on what: each rank on a share of the data, never all of them on the same unawares.

A plain ``DataLoader`` with one of torch's plain samplers would give every rank the same samples, or
samples chosen without the others' knowledge. It is replaced by one that deals its data set to the
ranks. A loader that shares its data already is taken as it is, and so is anything that only yields:
what that yields on each rank is up to whoever made it. What can be neither shared nor recognised as
shared is refused.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..errors import UsageError
from ..state.resumable_sampler import ResumableSampler
from ..tensors.memory import host_bytes
from .data import DataSpec, tensors_of
from .earlier import Earlier
from .evaluator import Evaluator
from .group import Group
from .parallel import Layout
from .state import State, loader_length

__all__ = [
    "Share",
    "agree_on_length",
    "is_left_to_the_user",
    "num_alike",
    "place_of",
    "share_evaluations",
    "share_training",
    "warn_if_alike",
]

_log = logging.getLogger(__name__)

_HINT = (
    "Pass DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=...)) of "
    "milepost.train, with num_replicas and rank for models that are sharded in more ways than one; "
    "or a sampler of your own that chooses this rank's samples and has these two attributes."
)


class Share(Sampler[int]):
    """Every ``num_replicas``-th sample from ``rank`` on: each sample on one rank, none twice.

    Args:
        dataset: What is shared.
        num_replicas: Among how many ranks.
        rank: This one.
    """

    def __init__(self, dataset: Sized, *, num_replicas: int, rank: int) -> None:
        self.num_replicas = num_replicas
        self.rank = rank
        self._places = range(rank, len(dataset), num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def place_of(loader: Any) -> tuple[int, int] | None:
    """Return ``(rank, num_replicas)`` of the sampler of a loader, if it says so."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for one in (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ):
        rank, num_replicas = getattr(one, "rank", None), getattr(one, "num_replicas", None)
        if type(rank) is int and type(num_replicas) is int:
            return rank, num_replicas
    return None


def num_alike(loader: Any, group: Group) -> int:
    """Return how many ranks train on the same samples, as far as the loader tells."""
    place = place_of(loader)
    return 1 if place is None else max(1, group.world_size // place[1])


def share_training(
    given: Any,
    *,
    group: Group,
    layout: Layout,
    seed: int,
    earlier: Callable[[], Earlier] = Earlier,
) -> DataSpec:
    """Return the training data as this rank trains on it.

    On one rank that is the data as it was given, in the order that torch draws. Only where the
    training goes on from one whose data was dealt to ranks is it dealt here, too.

    Args:
        given: A loader, a spec or its arguments, as the user gave it, the same on all ranks.
        group: The ranks.
        layout: How the model lies on them.
        seed: What the order of a loader that shuffles comes from, if no earlier one is known.
        earlier: Finds what the training that is gone on from says. Asked on all ranks or on none.

    Raises:
        UsageError: A loader that would give every rank the same samples.
    """
    data = DataSpec.of(given)
    loader: Any = data.dataloader
    if group.is_alone:
        is_dealt = place_of(loader) is None and _can_be_shared(loader) and earlier().is_dealt
        if not is_dealt:
            return data
    if _only_yields(loader) or place_of(loader) is not None:
        shared = loader
    elif layout is Layout.OTHER or not _can_be_shared(loader):
        raise UsageError(
            f"The training loader ({_words(loader)}) would give each of {group.world_size} ranks "
            "samples of its own choice, not a share.",
            safe="Nothing was trained.",
            hint=_HINT,
        )
    else:
        stored = earlier().seed
        batches = ResumableSampler(
            loader.dataset,
            batch_size=loader.batch_size,
            shuffle=isinstance(loader.sampler, RandomSampler),
            seed=seed if stored is None else stored,
            drop_last=loader.drop_last,
            num_replicas=group.world_size,
            rank=group.rank,
        )
        shared = _rebuilt(loader, batch_sampler=batches)
    _check_shares(shared, group)
    return _with_loader(data, shared)


def _share_evaluation(data: DataSpec, *, group: Group, layout: Layout, label: str) -> DataSpec:
    loader: Any = data.dataloader
    if group.is_alone or _only_yields(loader):
        return data
    place = place_of(loader)
    if place is not None:
        _warn_of_repeats(loader, label)
        return data
    if layout is Layout.OTHER or not _can_be_shared(loader):
        _log.warning(
            "Every rank evaluates all of %r: its loader (%s) cannot be shared out. Means are what "
            "they would be on one rank, and what is counted is counted %d times.",
            label,
            _words(loader),
            group.world_size,
        )
        return data
    if len(loader.dataset) < group.world_size:
        return data  # a rank without a sample could not take part
    share = Share(loader.dataset, num_replicas=group.world_size, rank=group.rank)
    return _with_loader(
        data,
        _rebuilt(loader, batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=share),
    )


def share_evaluations(evaluators: Iterable[Evaluator], *, group: Group, layout: Layout) -> None:
    """Give this rank its share of the data of evaluators."""
    for one in evaluators:
        one.data = _share_evaluation(one.data, group=group, layout=layout, label=one.label)


def is_left_to_the_user(loader: Any) -> bool:
    """Return whether nobody but its maker knows what a loader yields on which rank."""
    return _only_yields(loader) and place_of(loader) is None


def warn_if_alike(batch: Any, group: Group) -> None:
    """Warn if all ranks have the same batch.

    Args:
        batch: The first batch of this rank.
        group: The ranks, all of which must ask.
    """
    digest = 0
    for tensor in tensors_of(batch):
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest = zlib.crc32(host_bytes(dense).data, digest)
    found = group.collect("compare its first batch", lambda: digest)
    if digest and len(set(found)) == 1 and group.rank == 0:
        _log.warning(
            "All ranks have the same first batch. The training loader only yields, so what it "
            "yields on which rank is its own choice: give each rank other samples, unless the "
            "ranks share one model and must see the same."
        )


def agree_on_length(state: State, group: Group) -> bool:
    """Give every rank an epoch of the same length, as far as the loaders tell theirs.

    Returns:
        Whether they do not, so that the ranks must ask each other before every batch.
    """
    if group.is_alone:
        return False
    length = loader_length(state.train_dataloader)
    lengths = group.collect("compare the length of its data", lambda: length)
    known = [one for one in lengths if one is not None]
    if len(known) < len(lengths):
        return True
    if min(known) < max(known):
        _log.warning(
            "The training loaders of the ranks have from %d to %d batches; an epoch ends with the "
            "shortest.",
            min(known),
            max(known),
        )
        steps = state.steps_per_epoch
        state.steps_per_epoch = min(known) if steps is None else min(steps, *known)
    return False


def _check_shares(loader: Any, group: Group) -> None:
    """Refuse shares that overlap by mistake.

    Raises:
        UsageError: Every rank names the same place.
    """
    places = group.collect("compare its share of the data", lambda: place_of(loader))
    known = [place for place in places if place is not None]
    if len(known) < group.world_size:
        return
    num_replicas = {place[1] for place in known}
    is_full = num_replicas == {group.world_size}
    if len(num_replicas) > 1 or (is_full and len({tuple(one) for one in known}) < len(known)):
        said = ", ".join(f"{rank} of {count}" for rank, count in known)
        raise UsageError(
            f"The training loaders of the ranks are not shares of one whole: they say {said}.",
            safe="Nothing was trained.",
            hint="Make the sampler once the process group is there, or give it its rank.",
        )


def _only_yields(loader: Any) -> bool:
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def _can_be_shared(loader: Any) -> bool:
    """Return whether a loader with another sampler does the same for another choice of samples."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _rebuilt(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "persistent_workers",
        )
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    for name, usual in (("pin_memory_device", ""), ("in_order", True)):
        if getattr(loader, name, usual) != usual:
            options[name] = getattr(loader, name)
    return DataLoader(loader.dataset, **order, **options)


def _with_loader(data: DataSpec, loader: Any) -> DataSpec:
    shared = copy.copy(data)
    shared.dataloader = loader
    return shared


def _warn_of_repeats(loader: Any, label: str) -> None:
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if repeated:
        _log.warning(
            "The DistributedSampler of %r repeats %d of its %d samples to fill up its batches, and "
            "they count twice. Without a sampler the Trainer shares the data out by itself, each "
            "sample once.",
            label,
            repeated,
            len(sampler.dataset),  # type: ignore[arg-type]
        )


def _words(loader: Any) -> str:
    kind = type(loader).__qualname__
    batch_sampler = loader.batch_sampler
    sampler = loader.sampler if type(batch_sampler) in (BatchSampler, type(None)) else batch_sampler
    return f"{kind} with {type(sampler).__qualname__}"
