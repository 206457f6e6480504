"""What an earlier part of the training says of the order of its data, before loaders are made.

The order of an epoch that was dealt to ranks comes from the seed of that training, whatever seed is
given now; and an epoch that was dealt goes on dealt, also on one rank. Whether the position fits is
not judged here: it is compared with the loader before anything is restored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint import Checkpoint, Run, open_source, run_store
from ..copies.cached import CachedStore
from ..copies.kept import KeptCopies
from ..errors import CheckpointError
from ..state.source import load_item
from .group import Group
from .loading import Place, check_place, the_newest
from .places import fill_ranks

__all__ = ["Earlier", "find_earlier"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the training said that is gone on from.

    Attributes:
        seed: That of rank 0; ``None``: there was none before, or it is not known.
        is_dealt: Whether its data was dealt to ranks by a ``ResumableSampler``.
    """

    seed: int | None = None
    is_dealt: bool = False


def find_earlier(
    path_format: Place | None,
    *,
    folder: str | None,
    resume: str,
    local_cache: str | os.PathLike[str] | None,
    group: Group,
) -> Earlier:
    """Look at what is gone on from, on one rank for all.

    Args:
        path_format: What the first start goes on from; ``None``: from the beginning.
        folder: The run, whose newest checkpoint comes first with ``resume``; ``None``: no run.
        resume: ``"never"``, ``"auto"`` or ``"must"``.
        local_cache: Where this machine has copies of what is in a bucket, if it keeps any.
        group: The ranks, all of which must ask.

    Returns:
        What it says. Where it cannot be read it says nothing; the load that follows tells why.
    """

    def find() -> tuple[int | None, bool]:
        try:
            place = check_place(path_format)
            store = None if folder is None or resume == "never" else run_store(folder)
            if store is not None and local_cache is not None and not store.traits.is_local:
                store = CachedStore(store, KeptCopies(local_cache))
            newest = None if store is None else Run(store).latest()
            return _look(place if newest is None else newest)
        except CheckpointError as error:
            _log.info("The order of the data is not known yet: %s", error)
            return None, False

    seed, is_dealt = group.lead("find the order of the data", find)
    return Earlier(seed, is_dealt)


def _look(place: Place | None) -> tuple[int | None, bool]:
    if place is None:
        return None, False
    source = open_source(_the_newest_of(place))
    loader = load_item(source, "loader") if "loader" in source.trees else None
    seed = load_item(source, "rank_zero_seed") if "rank_zero_seed" in source.trees else None
    is_dealt = isinstance(loader, Mapping) and loader.get("kind") == "dealt"
    return None if seed is None else int(seed), is_dealt


def _the_newest_of(place: Place) -> str | Checkpoint:
    if isinstance(place, Checkpoint | Run):
        return the_newest(place)
    return fill_ranks(place)
