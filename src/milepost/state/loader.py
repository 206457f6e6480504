"""Data loaders: where in the epoch a run is, and how to get there again without reading data.

Three kinds, found out by looking:

``stateful``  the loader has ``state_dict`` and ``load_state_dict``; it knows its own position.
``indexed``   a plain map-style ``DataLoader``. At the start of an epoch the random generators that
              its order comes from are noted. To get back, they are put into that state, the order
              is derived again, and the indices already used are stepped over. No data is read.
``replayed``  anything else that can be iterated. The batches already used are read again and
              dropped; the load report says so.

A fourth kind, ``dealt``, is in ``dealt_loader``.

The generators of the whole process go back to their state at the checkpoint after that, at the last
moment before the first new batch, so that nothing done in between can disturb them.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import MismatchError
from ..tensors.generators import set_generator
from ..tensors.pack import Home
from .position import is_torchdata, measures, misfit, num_batches, remarks
from .report import restoring
from .rng import apply_rng, capture_rng
from .samplers import data_note, generators_of, order_note, order_of, share_of
from .skipping import SkippingLoader

__all__ = ["ResumableLoader"]

_log = logging.getLogger("milepost")


class ResumableLoader:
    """Iterate over a loader epoch by epoch, and come back to the middle of one.

    Args:
        loader: A ``DataLoader``, anything with ``state_dict``/``load_state_dict``, or any iterable
            that starts anew each time it is iterated.
        kind: What it is; ``None``: found out by looking.

    Attributes:
        home: Whose the position is, of several ranks: here each rank has its own.
    """

    home: Home = "each"

    def __init__(self, loader: Iterable[Any], *, kind: str | None = None) -> None:
        self.loader = loader
        self.kind = _kind(loader) if kind is None else kind
        self._skipping = SkippingLoader(loader) if self.kind in _BY_INDEX else None
        self._position = 0
        self._start: dict[str, Any] | None = None
        self._pending: Mapping[str, Any] | None = None
        self._was_iterated = False
        self._num_begun = 0
        self._epoch: int | None = None
        self._is_before_fetch = False
        self._fetch_generators: list[Tensor] = []
        self.fetch_rng: dict[str, Any] | None = None
        """The random state right before the newest batch was fetched."""
        self.is_fetching = False
        """Whether a batch is being fetched; still so when an error ended the fetch. The position
        and the state are those before it then, and ``fetch_rng`` is what belongs to them. A loader
        that keeps its own position may have moved on, though."""
        note = self._order_note()
        if note is not None:
            _log.warning(note)

    @property
    def is_read_by_us(self) -> bool:
        """Return whether the position is known only if the batches are taken from here."""
        return self.kind != "stateful"

    @property
    def num_batches(self) -> int | None:
        """Return the batches of an epoch, or ``None`` if the loader cannot tell."""
        return num_batches(self.loader)

    @property
    def position(self) -> int:
        """Return how many batches of the current epoch were handed out."""
        return self._position

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a resume cannot reproduce exactly, or only at a cost."""
        notes = []
        if self.kind == "replayed" and not isinstance(self.loader, Sequence):
            notes.append(
                f"The loader ({type(self.loader).__qualname__}) cannot tell its position: a resume "
                "reads the batches already used once more, and is exact only if their order is "
                "drawn at the start of the epoch. Give it state_dict and load_state_dict to avoid "
                "that."
            )
        has_workers = bool(getattr(self.loader, "num_workers", 0))
        if has_workers and self.kind == "stateful" and self._is_torchdata:
            notes.append(
                "Random numbers that the workers of a StatefulDataLoader draw are others after a "
                "resume within an epoch, unless each sample seeds the generators that it draws "
                "from. Those of a plain DataLoader come back."
            )
        draws = None if self.kind == "stateful" else data_note(self.loader)
        notes += [note for note in (self._order_note(), draws) if note is not None]
        return tuple(notes)

    def _order_note(self) -> str | None:
        is_its_own = self.kind == "stateful" and not self._is_torchdata
        return None if is_its_own else order_note(self.loader)

    def of_all_ranks(self, num_samples: int) -> int:
        """Return how many samples all ranks use while this one uses the newest batch.

        Args:
            num_samples: Samples of that batch.
        """
        return num_samples * share_of(self.loader)[1]

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the data set which epoch begins, where they want to know."""
        self._epoch = epoch
        loader = self.loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        targets = (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        )
        done: set[int] = set()
        for target in targets:
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch) and id(target) not in done:
                done.add(id(target))
                set_epoch(epoch)

    def iterate(self, rng: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Yield the batches of one epoch, from a loaded position on.

        Args:
            rng: The state of the random generators at the checkpoint. Applied once, at the last
                moment before the first batch is fetched.
        """
        iterator = self.open_epoch(rng)
        # Held here only: workers end at once when the loop is left, and not when some garbage
        # collection comes by.
        self._was_iterated = True
        while True:
            self._note_fetch()
            try:
                batch = next(iterator)
            except StopIteration:
                self.is_fetching = False
                return
            self._position += 1
            self.is_fetching = self._is_before_fetch = False
            yield batch

    def open_epoch(self, rng: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Begin an epoch, or go back into one, without fetching; see :meth:`iterate`.

        Where that fails, it has not happened.
        """
        before = capture_rng() if rng is None else rng
        generators, num_begun = self._generator_states(), self._num_begun
        self.fetch_rng, self.is_fetching, self._is_before_fetch = None, False, False
        pending = self._pending
        try:
            if pending is not None and self._is_within_epoch(pending):
                iterator = self._return_to(pending)
                apply_rng(before)  # a second loader of an epoch begins where the first has ended
            else:
                if pending is not None:
                    self._return_between_epochs(pending)
                if rng is not None:
                    apply_rng(rng)
                self._position, self._start = 0, self._note_start()
                self._num_begun += 1
                iterator = self._begin(0)
        except BaseException:
            self._position, self._start, self._num_begun = 0, None, num_begun
            self._set_generators(generators)
            apply_rng(before)
            raise
        self._pending = None
        return iterator

    def _note_fetch(self) -> None:
        self.fetch_rng = capture_rng()
        if self._reads_here:
            self._fetch_generators = self._generator_states()
        self.is_fetching = self._is_before_fetch = True

    def unread(self) -> bool:
        """Count the batch that was handed out last as not used.

        Returns:
            Whether that is possible; a loader that keeps its own position cannot go back.
        """
        if self.kind == "stateful" or self._position == 0:
            return False
        self._position -= 1
        self._is_before_fetch = True
        return True

    def reread(self) -> None:
        """Undo :meth:`unread`."""
        self._position += 1
        self._is_before_fetch = False

    def end_epoch(self) -> None:
        """Forget the position: the next :meth:`iterate` begins an epoch."""
        self._position, self._start, self._pending = 0, None, None
        self.is_fetching = self._is_before_fetch = False

    def mark(self) -> Any:
        """Return something that differs once the loader was iterated, by other hands too.

        Of a loader that keeps its own position it always differs.
        """
        if self.kind == "stateful":
            return object()
        return self._position, self._num_begun, [s.tolist() for s in self._generator_states()]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it takes to get there again."""
        if self._pending is not None:
            return dict(self._pending)
        state: dict[str, Any] = {
            "kind": self.kind,
            "position": self._position,
            "is_open": self._start is not None,
            "num_begun": self._num_begun,
            "epoch": self._epoch,
            "start": self._start,
            "num_workers": getattr(self.loader, "num_workers", 0),
            **measures(self.loader),
        }
        if self._start is None or self.kind == "stateful":
            state["generators"] = self._generator_states()
        elif self._reads_here:
            # At the end of an epoch a sampler may draw once more. It does so again when it is asked
            # for more than there is, so that this is a point before a fetch, too.
            now = not self._is_before_fetch
            state["generators"] = self._generator_states() if now else self._fetch_generators
        # Torchdata's would begin to iterate, and draw random numbers for it.
        is_begun = self._was_iterated or getattr(self.loader, "_iterator", None) is not None
        if self.kind == "stateful" and (is_begun or not self._is_torchdata):
            state["is_elsewhere"] = not self._was_iterated
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank has of its own beside :meth:`state_dict`."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what this rank saved; called after :meth:`load_state_dict`."""

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Return why a stored position does not fit this loader, or ``None`` if it does."""
        epoch, length = state.get("epoch"), self.num_batches
        if state["position"] and type(epoch) is int and state.get("num_batches") != length:
            # A sampler may make another number of batches in every epoch.
            self.set_epoch(epoch)
        return misfit(self.loader, self.kind, state)

    def remarks(self, state: Mapping[str, Any]) -> list[str]:
        """Return what to know of going on from a stored position that fits, each in a sentence."""
        return remarks(self.loader, self.kind, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a stored position at the next :meth:`iterate`.

        Raises:
            MismatchError: The position was taken with another kind of loader, or lies beyond the
                end of this one.
        """
        reason = self.misfit(state)
        if reason is not None:
            raise MismatchError(
                reason,
                hint="Use the loader, data set and batch size that the run was started with, or "
                "resume from the end of an epoch.",
            )
        self._num_begun = state.get("num_begun", 0)
        is_elsewhere = bool(state.get("is_elsewhere"))
        self._pending = None if is_elsewhere else dict(state)
        is_stored = self.kind == "stateful" and "loader" in state
        if is_stored and (is_elsewhere or not self._is_torchdata):
            # It may be looked at, or iterated by other hands, before it is iterated here.
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]

    @property
    def _reads_here(self) -> bool:
        """Return whether samples are read in this process, none of them ahead of the training."""
        return self.kind in _BY_INDEX and not getattr(self.loader, "num_workers", 0)

    def _is_within_epoch(self, state: Mapping[str, Any]) -> bool:
        # A loader of another kind may take over an epoch that was begun and not read from.
        is_open = state.get("is_open") and state["kind"] == self.kind
        return bool(state["position"] or is_open)

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in generators_of(self.loader)]

    def _note_start(self) -> dict[str, Any]:
        """Note every generator that the order of the coming epoch may be drawn from."""
        return {
            "rng": capture_rng(),
            "generators": self._generator_states(),
            "order": order_of(self.loader),
        }

    def _set_generators(self, states: Iterable[Any]) -> None:
        for generator, saved in zip(generators_of(self.loader), states, strict=False):
            set_generator(generator, saved)

    def _begin(self, skip: int) -> Iterator[Any]:
        if self._skipping is not None:
            seed = self._seed_of_epoch()
            return self._skipping.start(skip, is_first=self._num_begun == 1, seed=seed)
        return iter(self.loader)

    def _seed_of_epoch(self) -> bytes:
        """Return bytes that every start of this epoch has, and no start of another one."""
        assert self._start is not None
        digest = hashlib.blake2b(self._num_begun.to_bytes(8, "little"), digest_size=32)
        for state in (self._start["rng"]["torch"], *self._start["generators"]):
            digest.update(state.numpy().tobytes())
        rank, _ = share_of(self.loader)
        if rank:
            # Ranks are often seeded alike, and must not draw the same for other samples.
            digest.update(rank.to_bytes(8, "little"))
        return digest.digest()

    def _return_to(self, state: Mapping[str, Any]) -> Iterator[Any]:
        self._position, self._start = state["position"], state["start"]
        assert self._start is not None
        with restoring("the checkpoint", "loader"):
            # A torchdata loader does not keep what samplers of torch draw their order from.
            apply_rng(self._start["rng"])
            self._set_generators(self._start["generators"])
            if self.kind == "stateful":
                return self._return_stateful(state)
        iterator = self._begin(self._position)
        if self.kind == "replayed":
            deque(itertools.islice(iterator, self._position), maxlen=0)
        elif self._reads_here:
            # The data set may draw from one, and was not read from now.
            self._set_generators(state.get("generators", ()))
        return iterator

    @property
    def _is_torchdata(self) -> bool:
        return is_torchdata(self.loader)

    def _return_stateful(self, state: Mapping[str, Any]) -> Iterator[Any]:
        if not self._is_torchdata:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            return iter(self.loader)
        if state["loader"].get("_iterator_finished"):
            # It would take the end of an epoch for the beginning of the next one.
            self._return_between_epochs(state)
            return iter(())
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        iterator = iter(self.loader)
        if not state["num_workers"]:
            # It restores the order but not the draw that followed it, for the workers' seed.
            self._set_generators(state["generators"])
        return iterator

    def _return_between_epochs(self, state: Mapping[str, Any]) -> None:
        """Restore what a loader and the generators of its samplers carry from epoch to epoch."""
        is_kept = self.kind == "stateful" and "loader" in state
        if is_kept and not (self._is_torchdata and state["num_workers"]):
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            if self._is_torchdata:
                iter(self.loader)  # restores the data set; the epoch that it begins is dropped
        self._set_generators(state.get("generators", ()))


_BY_INDEX = ("indexed", "dealt")
"""Kinds whose samples are read here by the indices that a sampler yields."""


def _kind(loader: Iterable[Any]) -> str:
    if callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    ):
        return "stateful"
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
        return "indexed"
    return "replayed"
