"""Loaders whose samples a :class:`ResumableSampler` deals: their position is that of all ranks.

The position is the number of samples of the epoch that all ranks have used, and it is the same on
every rank, so one copy of it is saved. To get back, the sampler deals the rest of the epoch, to as
many ranks as there are now: nothing is stepped over and no data is read.

A plain loader on one rank that takes its samples as they lie has used a beginning of such an order,
so its position is taken over. An order that torch drew is not ours, and cannot be dealt further.

What a rank has of its own beside that is the state of generators that belong to its loader or data
set. It goes with the rank's random generators, and a rank that was not there has none of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ..errors import UsageError
from ..tensors.generators import byte_tensors
from ..tensors.pack import Home
from .dealing import Deal
from .loader import ResumableLoader
from .position import is_torchdata
from .resumable_sampler import ResumableSampler
from .rng import preserve_rng
from .samplers import order_words

__all__ = ["DealtLoader", "resumable"]


_AS_THEY_LIE = order_words(BatchSampler(SequentialSampler(()), 1, drop_last=False))


def resumable(loader: Iterable[Any]) -> ResumableLoader:
    """Return what iterates over a loader and can come back to the middle of an epoch.

    Raises:
        UsageError: It has a :class:`ResumableSampler` in the wrong place.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ResumableLoader(loader)
    is_plain = type(loader) is DataLoader
    # The data set of a torchdata loader may have a state, which only that loader knows to keep.
    is_known = is_plain or (is_torchdata(loader) and not hasattr(loader.dataset, "state_dict"))
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(batches, ResumableSampler):
        _require_batches(batches)
        return (
            DealtLoader(loader, batches, num_per_batch=1) if is_known else ResumableLoader(loader)
        )
    if not isinstance(sampler, ResumableSampler):
        return ResumableLoader(loader)
    if batches is None:
        return (
            DealtLoader(loader, sampler, num_per_batch=1) if is_known else ResumableLoader(loader)
        )
    _require_singles(sampler)
    cuts_alike = type(batches) is BatchSampler or is_torchdata(batches)
    if is_known and cuts_alike and isinstance(batches, BatchSampler):
        return DealtLoader(loader, sampler, num_per_batch=batches.batch_size)
    return ResumableLoader(loader)


class DealtLoader(ResumableLoader):
    """A loader whose position is the same on every rank.

    Args:
        loader: The loader.
        sampler: Its sampler.
        num_per_batch: How much of the sampler makes a batch.
    """

    home: Home = "all"

    def __init__(
        self, loader: DataLoader[Any], sampler: ResumableSampler, *, num_per_batch: int
    ) -> None:
        super().__init__(loader, kind="dealt")
        self._sampler = sampler
        self._num_per_batch = num_per_batch
        self._deal: Deal | None = None
        self._num_before = 0
        self._pending_own: Mapping[str, Any] | None = None

    def of_all_ranks(self, num_samples: int) -> int:
        """Return how many samples all ranks use while this one uses the newest batch.

        Repeated samples are not counted; how many a batch has is not asked.
        """
        del num_samples
        return self._used_after(self._position) - self._used_after(self._position - 1)

    def end_epoch(self) -> None:
        """Forget the position: the next :meth:`iterate` begins an epoch."""
        super().end_epoch()
        self._sampler.start_at(0)
        self._deal, self._pending_own = None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank."""
        if self._pending is not None:
            return dict(self._pending)
        is_open = self._start is not None
        return {
            "kind": self.kind,
            "position": self._position,
            "samples": self._used_after(self._position) if is_open else 0,
            "is_open": is_open,
            "num_begun": self._num_begun,
            "epoch": self._sampler.epoch,
            "start": {"order": order_words(self._sampler)},
            "length": self._sampler.length,
            "num_replicas": self._sampler.num_replicas,
        }

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank has of its own."""
        if self._pending is not None and self._pending_own is not None:
            return dict(self._pending_own)
        is_earlier = self._start is not None and self._reads_here and self._is_before_fetch
        generators = self._fetch_generators if is_earlier else self._generator_states()
        return {"generators": generators}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank saved, at the next :meth:`iterate`."""
        self._pending_own = {"generators": byte_tensors(state["generators"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a stored position at the next :meth:`iterate`; see the base."""
        state = self._as_dealt(state)
        super().load_state_dict(state)
        self._pending_own = None
        if self._is_within_epoch(state):
            self._move_sampler(state)  # at once: whoever asks for the length gets that of the epoch
        else:
            self._sampler.start_at(0)

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Return why a stored position does not fit this loader, or ``None`` if it does."""
        position, kind = state["position"], state["kind"]
        is_counted = type(position) is int and position >= 0
        if not is_counted or (kind == self.kind and not _is_whole(state)):
            return "The stored position of a loader is malformed."
        if not position:
            return None
        state = self._as_dealt(state)
        kind = state["kind"]
        if kind == "indexed" and state.get("num_ranks") == 1 < self._sampler.num_replicas:
            return (
                f"The checkpoint is at batch {position} of an epoch that one rank went through in "
                "another order than that of a ResumableSampler; within it no other number of ranks "
                "can go on. Go on on one rank to the end of the epoch, from where any number can; "
                "or, to be free within an epoch, pass DataLoader(dataset, batch_sampler="
                "ResumableSampler(dataset, batch_size=...)) of milepost.train on one rank, too, "
                "from the first start on."
            )
        if kind != self.kind:
            return (
                f"The checkpoint is at batch {position} of an epoch of a loader of the kind "
                f"{kind!r}; a ResumableSampler can take over only between two epochs."
            )
        where = f"The checkpoint is at sample {state['samples']} of an epoch"
        stored, live = state["start"]["order"], order_words(self._sampler)
        if stored != live:
            return (
                f"{where} whose order comes from {stored}; that of this loader comes from {live}."
            )
        length = self._sampler.length
        if state["length"] != length:
            return (
                f"{where} with {state['length']} samples in the data set; this loader has {length}."
            )
        return None

    def remarks(self, state: Mapping[str, Any]) -> list[str]:
        """Return what to know of going on from a stored position that fits, each in a sentence."""
        now, state = self._sampler.num_replicas, self._as_dealt(state)
        if not state["position"] or state["kind"] != self.kind or state["num_replicas"] == now:
            return []
        remark = (
            f"{state['samples']} samples of the epoch were used, at last on "
            f"{state['num_replicas']} ranks; the {state['length'] - state['samples']} that are "
            f"left are dealt to {now}."
        )
        return [remark]

    def _as_dealt(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the position of one rank that took the samples as they lie as one of this kind."""
        start, sampler = state.get("start"), self._sampler
        if (
            state["kind"] != "indexed"
            or not state["position"]
            or sampler.shuffle
            or state.get("num_ranks") != 1
            or state.get("num_samples") != sampler.length
            or any(type(state.get(name)) is not int for name in ("batch_size", "epoch"))
            or not isinstance(start, Mapping)
            or start.get("order") != _AS_THEY_LIE
        ):
            return state
        return {
            "kind": self.kind,
            "position": state["position"],
            "samples": min(state["position"] * state["batch_size"], sampler.length),
            "is_open": True,
            "num_begun": state.get("num_begun", 0),
            "epoch": state["epoch"],
            "start": {"order": order_words(sampler)},
            "length": sampler.length,
            "num_replicas": 1,
        }

    def _note_start(self) -> dict[str, Any]:
        self._sampler.start_at(0)
        self._num_before = 0
        return {"order": order_words(self._sampler)}

    def _return_to(self, state: Mapping[str, Any]) -> Iterator[Any]:
        self._position = self._num_before = state["position"]
        self._start = state["start"]
        self._move_sampler(state)
        own = self._own_generators()
        if own is None:
            own = self._generator_states()
        with preserve_rng():  # torch draws a seed for the workers
            iterator = self._begin(0)
        self._set_generators(own)
        return iterator

    def _return_between_epochs(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != self.kind:
            super()._return_between_epochs(state)
        self._set_generators(self._own_generators() or ())

    def _begin(self, skip: int) -> Iterator[Any]:
        assert self._skipping is not None
        sampler, num_per_batch = self._sampler, self._num_per_batch
        deal, rank = sampler.deal(), sampler.rank
        self._deal = deal
        text = f"{sampler.seed} {sampler.epoch}".encode()
        return self._skipping.start(
            skip,
            is_first=self._num_begun == 1,
            seed=hashlib.blake2b(text, digest_size=32).digest(),
            # The place of its first sample, in the order of all ranks: no two batches share it.
            number_of=lambda batch: deal.bounds(batch * num_per_batch)[0] + rank,
        )

    def _own_generators(self) -> Any:
        return None if self._pending_own is None else self._pending_own["generators"]

    def _move_sampler(self, state: Mapping[str, Any]) -> None:
        self._sampler.start_at(
            state["samples"],
            epoch=state["epoch"],
            num_before=state["position"] * self._num_per_batch,
        )

    def _used_after(self, num_batches: int) -> int:
        """Return how many samples of the epoch are used after so many of its batches."""
        if self._deal is None:
            return self._sampler.position
        return self._deal.used_after((num_batches - self._num_before) * self._num_per_batch)


def _is_whole(state: Mapping[str, Any]) -> bool:
    numbers = [state.get(name) for name in ("samples", "epoch", "length", "num_replicas")]
    start = state.get("start")
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    is_begun = bool(state["position"])
    is_within = state["samples"] <= state["length"] and bool(state["samples"]) is is_begun
    return is_within and isinstance(start, Mapping) and "order" in start


def _require_batches(sampler: ResumableSampler) -> None:
    if sampler.batch_size is None:
        raise UsageError(
            "A ResumableSampler without batch_size yields single samples, and is given as "
            "batch_sampler.",
            hint="Give it batch_size, or pass it as sampler.",
        )


def _require_singles(sampler: ResumableSampler) -> None:
    if sampler.batch_size is not None:
        raise UsageError(
            "A ResumableSampler with batch_size yields whole batches, and is given as sampler.",
            hint="Pass it as batch_sampler.",
        )
