"""Going on from a checkpoint: what was restored, what is still to be claimed, and the random state.

Objects may be tracked after the resume, a scheduler that is built on the restored optimizer for
example. The stored state of such an object waits until the object comes; training does not begin
before everything stored has found its object.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .checkpoint import Checkpoint, Place, open_source
from .errors import FormatError, MismatchError, MissingError
from .fetching import Fetching
from .state.batch_in_hand import BatchInHand
from .state.report import LoadReport, restoring
from .state.rng import apply_rng, rng_of_rank
from .state.source import StateSource, load_item
from .state.tracked import RESERVED_ITEMS, Tracked
from .visible import SUFFIXES
from .writer import RunWriter

__all__ = ["Resumption"]

_log = logging.getLogger("milepost")


class Resumption:
    """Restores tracked objects, those that come late included.

    Args:
        tracked: The objects.
        writer: The run.
        hand: Takes gradients that were being accumulated.
        strict: Whether stored state and objects must fit exactly.

    Attributes:
        report: What the resume restored; ``None`` after a fresh start.
        rng: Random state of the checkpoint, until somebody begins to iterate.
        is_final: Whether the checkpoint was made at the end of a training.
        interval: What it says about the interval it was made at.
    """

    def __init__(
        self,
        tracked: Tracked,
        writer: RunWriter,
        hand: BatchInHand,
        *,
        strict: bool,
        fetching: Fetching,
    ) -> None:
        self._tracked = tracked
        self._writer = writer
        self._hand = hand
        self._strict = strict
        self._fetching = fetching
        self._source: StateSource | None = None
        self._compared: tuple[Checkpoint, StateSource] | None = None
        self._unclaimed: set[str] = set()
        self.report: LoadReport | None = None
        self.rng: Mapping[str, Any] | None = None
        self.is_final = False
        self.interval: Mapping[str, Any] = {}
        self._gradients: Mapping[str, Any] = {}
        self._unused_gradients: Mapping[str, Any] = {}
        self._own: Mapping[str, Any] = {}
        self._broken_off: list[LoadReport] = []

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare a checkpoint with the tracked objects, before a session is opened for it.

        Raises:
            MismatchError: It does not fit.
        """
        source = self._source_of(checkpoint)
        late = set(source.trees) - set(self._tracked) - set(RESERVED_ITEMS)
        self._tracked.check(source, expected=late)
        self._compared = checkpoint, source

    def tell(self) -> None:
        """Put into the report, and into the log, what a user should know about the resume."""
        if self.report is None:
            return
        self.report.notes.extend(self._writer.notes)
        _log.info("%s", self.report.summary())

    def covers(self, newer: Checkpoint, older: Checkpoint) -> bool:
        """Return whether restoring an older checkpoint changes all that a newer one changes.

        Only then may the newer one be restored without a look at all of its bytes before: if one of
        them turns out damaged half way, nothing of it is left behind.
        """
        try:
            if newer.manifest.layout != "milepost":
                return True  # a single file is read whole before anything is changed
            if older.manifest.layout != "milepost":
                return False
            new, old = self._source_of(newer), self._source_of(older)
            return all(
                item in old.trees
                and _keys(new.trees[item]) <= _keys(old.trees[item])
                and new.tensors(item).items() <= old.tensors(item).items()
                for item in new.trees
            )
        except (FormatError, MissingError) as error:
            _log.info("%s and %s could not be compared: %s", newer.name, older.name, error)
            return False

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything tracked so far.

        Raises:
            MismatchError: It does not fit; nothing was changed. Or it lacks what a checkpoint
                that was damaged half way has changed before.
            DamagedError: Bytes that do not match their checksum; another checkpoint must be
                restored over what was changed.
        """
        source = self._source_to_restore(checkpoint)
        late = set(source.trees) - set(self._tracked) - set(RESERVED_ITEMS)
        before = tuple(self._broken_off)
        self.report = self._tracked.restore(source, expected=late, on_begin=self._broken_off.append)
        self._restore_extras(source)
        _refuse_mixture(self.report, before)
        self._broken_off.clear()
        self._source, self._unclaimed = source, late
        self.report.notes.extend(checkpoint.manifest.notes)
        self._note_other_ranks(self.report, checkpoint.manifest.world_size)
        self.is_final = checkpoint.is_final
        self.interval = checkpoint.manifest.interval
        if late:
            self._writer.protected.add(checkpoint.manifest.name)

    def _source_to_restore(self, checkpoint: Checkpoint) -> StateSource:
        """Return the source that was compared before, if it is the very same checkpoint.

        What it has read by now was held against the checksums in that commit.
        """
        compared, self._compared = self._compared, None
        if compared is not None:
            before, source = compared
            is_same = before.manifest == checkpoint.manifest and before.url == checkpoint.url
            if is_same and before.manifest.layout == "milepost":
                return source
        return self._source_of(checkpoint)

    def claim(self, name: str, target: Any) -> None:
        """Restore an object that was tracked after the resume; before it, do nothing.

        Raises:
            MismatchError: The checkpoint does not hold it, or what it holds does not fit.
        """
        if self._source is None:
            return
        if name not in self._source.trees:
            if self._strict:
                raise MismatchError(
                    f"{self._source.name}, which the run goes on from, holds no {name!r}.",
                    hint="Track it from the first start on, or use strict=False.",
                    name=name,
                )
            return
        self._tracked.restore(self._source, items={name})
        if name in self._own:
            self._tracked.load_rank_states({name: self._own[name]})
        self._unclaimed.discard(name)
        if hasattr(target, "get_last_lr"):
            # Building a scheduler on a restored optimizer changed its learning rates.
            self._tracked.reapply_optimizer_options(self._source)

    def claim_gradients(self) -> None:
        """Restore gradients of optimizers that were tracked after the resume, and watched since."""
        if self._source is not None and self._unused_gradients:
            self._unused_gradients = self._hand.add_gradients(
                self._unused_gradients, self._tracked.parameter_names()
            )

    def leave_behind(self, names: Iterable[str]) -> None:
        """Do without some of the stored items: nobody will claim them."""
        self._unclaimed.difference_update(names)

    def settle(self, *, but: Collection[str] = ()) -> None:
        """Refuse to go on while the checkpoint holds state that nobody asked for.

        Args:
            but: Items that may still be claimed later.

        Raises:
            MismatchError: Naming the items.
        """
        unclaimed = self._unclaimed.difference(but)
        if unclaimed and self._strict:
            names = ", ".join(sorted(unclaimed))
            raise MismatchError(
                f"The run goes on from {self._writer.resumed_from}, which also holds {names}.",
                safe="Nothing was trained or saved.",
                hint="Track objects under these names before the first batch, or use "
                "strict=False to leave them behind.",
                names=sorted(unclaimed),
            )
        if unclaimed != self._unclaimed:
            return
        self._unclaimed, self._source, self._own = set(), None, {}
        self._gradients, self._unused_gradients = {}, {}
        self._writer.protected.clear()

    def restore(
        self, source: StateSource, *, items: Iterable[str] | None, strict: bool | None
    ) -> LoadReport:
        """Restore tracked objects from any source; see ``Checkpointer.restore``."""
        wanted = None if items is None else set(items)
        report = self._tracked.restore(source, items=wanted, strict=strict)
        if wanted is None or "rng" in wanted:
            self._restore_extras(source)
        return report

    def find(self, source: Place | Checkpoint | None, *, trust: bool) -> StateSource:
        """Return the source that a user named: a checkpoint of this run, a path, or a handle.

        Raises:
            MissingError: There is none.
        """
        run = self._writer.source
        if source is None:
            latest = run.latest()
            if latest is None:
                raise MissingError(f"The run at {run.url} holds no checkpoint.", path=run.url)
            return self._source_of(latest)
        # A plain word is never looked for in the working directory: a run may lie there by chance.
        is_file = isinstance(source, str) and source.endswith(tuple(SUFFIXES.values()))
        is_name = isinstance(source, str) and "/" not in source and not is_file
        if is_name and self._writer.session is not None:
            return self._source_of(run.get(str(source)))
        return self._source_of(source, trust=trust)

    def _source_of(self, place: Place | Checkpoint, *, trust: bool = False) -> StateSource:
        rank, fetching = self._writer.team.rank, self._fetching
        if rank:
            fetching = replace(fetching, is_bar_shown=False)
        return open_source(place, trust=trust, rank=rank, fetching=fetching)

    def take_rng(self) -> Mapping[str, Any] | None:
        """Return the random state of the checkpoint, once."""
        rng, self.rng = self.rng, None
        return rng

    def _note_other_ranks(self, report: LoadReport, num_ranks: int) -> None:
        """Say what is not as it would have been if another number of ranks goes on."""
        team = self._writer.team
        if num_ranks == team.world_size:
            return
        report.notes.append(
            f"{num_ranks} ranks made the checkpoint, and {team.world_size} go on from it: what "
            "each rank draws at random is not what it would have drawn."
        )
        if self._gradients:
            report.notes.append(
                "Gradients were being accumulated. Each rank goes on with those that it had, and a "
                "new rank with those of rank 0: they are right only if every rank had the same."
            )

    def _restore_extras(self, source: StateSource) -> None:
        """Restore what a run saves beside the tracked objects.

        A rank that the source does not know gets random numbers of its own.
        """
        with restoring(source.name, "gradients"):
            self._gradients = load_item(source, "gradients") if "gradients" in source.trees else {}
            self._unused_gradients = self._hand.restore_gradients(
                self._gradients, self._tracked.parameter_names()
            )
        with restoring(source.name, "rng"):
            states = load_item(source, "rng") if "rng" in source.trees else []
            rank = self._writer.team.rank
            state, is_own = rng_of_rank(states, rank, shown=getattr(source, "rank", None))
            if state is None:
                return
            self._own = state.get("loaders", {}) if is_own else {}
            self.rng = state
            apply_rng(state)
            self._tracked.load_rank_states(self._own)


def _keys(tree: Any) -> frozenset[str]:
    return frozenset(tree) if isinstance(tree, Mapping) else frozenset()


def _refuse_mixture(report: LoadReport, before: Iterable[LoadReport]) -> None:
    """Refuse what a damaged checkpoint has changed half way, and this one did not overwrite."""
    names = sorted({name for one in before for name in _gaps(report) - _gaps(one)})
    if names:
        broken = ", ".join(one.source for one in before)
        raise MismatchError(
            f"{broken} turned out damaged while it was restored, and {report.source}, which was "
            f"restored in its place, lacks what it may have changed by then: "
            f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}.",
            safe="Nothing was trained or saved.",
            hint=f"Move {broken} out of the run, and start again.",
            names=names,
        )


def _gaps(report: LoadReport) -> set[str]:
    return {*report.missing, *report.mis_shaped, *report.mis_typed}
