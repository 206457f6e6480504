"""Going on from a checkpoint: what is restored, from where, and what wins.

With ``resume`` the newest checkpoint of the run in the save folder wins over ``load_path_format``:
that path says where the very first start comes from, and a restart must not go back there.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint import Checkpoint, Run, open_run, open_source
from ..display import loading_bar
from ..errors import MissingError, UsageError
from ..fetching import Fetching
from ..format.layout import MANIFEST
from ..state.model import load_weights
from ..state.report import LoadReport
from ..state.rng import rng_of_rank
from ..state.source import load_item
from ..state.tracked import Tracked
from ..stores.prefix import PrefixStore
from ..stores.provider import ObjectStoreProvider, ObjectStoreProviderHparams
from .places import fill_ranks

__all__ = [
    "ObjectStore",
    "Place",
    "check_place",
    "open_place",
    "restore_all",
    "restore_weights",
    "the_newest",
]

_log = logging.getLogger(__name__)

Place = str | os.PathLike[str] | Checkpoint | Run
"""What users name a checkpoint by."""


class ObjectStore(Protocol):
    """What ``load_object_store`` must be able to do."""

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes."""

    def download_object_as_stream(self, object_name: str, chunk_size: int) -> Iterator[bytes]:
        """Yield an object piece by piece."""


def check_place(named: Any) -> Place | None:
    """Return what ``load_path_format`` names, if it can name a checkpoint.

    Raises:
        UsageError: It is of another kind.
    """
    is_path = isinstance(named, os.PathLike) and isinstance(os.fspath(named), str)
    if named is None or is_path or isinstance(named, str | Checkpoint | Run):
        return named  # type: ignore[no-any-return]
    raise UsageError(
        f"load_path_format is of the type {type(named).__qualname__}, which names no checkpoint.",
        hint="Give text, a pathlib.Path, or what open_run() returned or a checkpoint of it.",
    )


def the_newest(handle: Checkpoint | Run) -> Checkpoint:
    """Return a checkpoint itself, and of a run the newest one.

    Raises:
        MissingError: The run has none.
    """
    if isinstance(handle, Checkpoint):
        return handle
    newest = handle.latest()
    if newest is None:
        raise MissingError(f"The run {handle.url} holds no checkpoint that counts.")
    return newest


@contextmanager
def open_place(
    named: Place,
    *,
    object_store: ObjectStore | ObjectStoreProviderHparams | None,
    fetching: Fetching,
) -> Iterator[str | Checkpoint]:
    """Give the checkpoint to load as a handle or a local path.

    Args:
        named: A handle, or a path with ranks in braces; with ``object_store`` the name of an
            object.
        object_store: Where to download it from; ``None``: it is a path. Of a provider it may also
            be a checkpoint folder or a run, of which no more is read than is needed.
        fetching: How an object is downloaded.
    """
    if isinstance(named, Checkpoint | Run):
        if object_store is not None:
            raise UsageError(
                f"load_object_store cannot download {named!r}.",
                hint="Name the object as text, or drop load_object_store.",
            )
        yield the_newest(named)
        return
    path = fill_ranks(named)
    if isinstance(object_store, ObjectStoreProviderHparams):
        object_store = object_store.initialize_object()
    if object_store is None:
        yield path
        return
    if isinstance(object_store, ObjectStoreProvider):
        checkpoint = _find_folder(object_store, path)
        if checkpoint is not None:
            yield checkpoint
            return
    with tempfile.TemporaryDirectory(prefix="milepost-") as folder:
        target = Path(folder) / Path(path).name
        size_bytes, done_bytes = object_store.get_object_size(path), 0
        with (
            loading_bar(path, total_bytes=size_bytes, is_shown=fetching.is_bar_shown) as bar,
            target.open("wb") as file,
        ):
            for piece in object_store.download_object_as_stream(path, fetching.chunk_bytes):
                file.write(piece)
                done_bytes += len(piece)
                bar.update(done_bytes)
        yield str(target)


def _find_folder(provider: ObjectStoreProvider, path: str) -> Checkpoint | None:
    """Return the checkpoint that lies below a name, or the newest of the run that does."""
    name = path.strip("/")
    if next(iter(provider.store.list(name)), None) is None:
        return None  # an object, or nothing
    place = PrefixStore(provider.store, name)
    try:
        place.head(MANIFEST)
    except MissingError:
        return the_newest(open_run(place))
    return Checkpoint(place, "")


def restore_all(
    place: str | Checkpoint,
    objects: Mapping[str, Any],
    *,
    items: Collection[str] | None,
    rank: int = 0,
    fetching: Fetching | None = None,
) -> tuple[LoadReport, Any]:
    """Restore everything without a run of one's own, where nothing is saved.

    Args:
        place: A checkpoint, a run or a ``.pt`` file, as a path or as a handle.
        objects: What to restore, as it would be tracked.
        items: Restore only these; ``None``: the place must hold nothing else.
        rank: This rank: it gets what it has saved for itself.
        fetching: How it comes from a bucket.

    Returns:
        What was restored, and the state of the random generators, ``None`` if there is none.

    Raises:
        MismatchError: What is stored does not fit; nothing was changed.
    """
    source = open_source(place, rank=rank, fetching=fetching)
    tracked = Tracked(strict=True)
    for name, target in objects.items():
        tracked.add(name, target)
    report = tracked.restore(source, items=items)
    ranks = load_item(source, "rng") if "rng" in source.trees else []
    rng, is_own = rng_of_rank(ranks, rank, shown=getattr(source, "rank", None))
    if rng is not None and is_own:
        tracked.load_rank_states(rng.get("loaders", {}))
    return report, rng


def restore_weights(
    place: str | Checkpoint, model: Any, *, strict: bool, fetching: Fetching | None = None
) -> LoadReport:
    """Load only the weights of the model.

    Args:
        place: A checkpoint, a run or a ``.pt`` file, as a path or as a handle.
        model: The live model.
        strict: Whether the names must match exactly.
        fetching: How they come from a bucket.

    Raises:
        MismatchError: They do not, or nothing at all fits.
    """
    source = open_source(place, fetching=fetching)
    report = load_weights(source, "model", model, strict=strict)
    level = logging.INFO if report.is_exact else logging.WARNING
    _log.log(level, "Weights only: %s", report.summary())
    return report
