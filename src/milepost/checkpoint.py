"""The handles people hold: a checkpoint, a run.

Importing this loads no torch; the engine comes in when tensors are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any

from .convert.dcp_trees import DCP_METADATA
from .copies.cached import CachedStore
from .copies.own import copy_to
from .copies.shared import STALL_TIMEOUT_S, shared_copy
from .errors import FormatError, MissingError, UsageError
from .fetching import Fetching
from .format import canonical, tree
from .format.layout import HIDDEN, MANIFEST, METADATA, RUN, SESSIONS
from .format.manifest import Manifest
from .runs.nearby import missing_run
from .runs.readers import hold
from .runs.scan import Found, RunView, State, read_manifest, scan
from .runs.validations import Validation
from .runs.verify import Level, VerifyReport, verify
from .stores.base import Store
from .stores.local import LocalStore
from .stores.prefix import PrefixStore
from .stores.url import is_address, open_store, path_at, trimmed
from .visible import SUFFIXES, VisibleFiles

if TYPE_CHECKING:
    from torch import nn

    from .state.report import LoadReport
    from .state.source import StateSource

__all__ = ["Checkpoint", "Run", "open_checkpoint", "open_run", "open_source", "run_store"]

Place = str | os.PathLike[str]
_MAX_METADATA_BYTES = 16 * 1024 * 1024


class Checkpoint:
    """A checkpoint folder, committed or (from a directory) the user's own.

    Args:
        store: Where it is.
        folder: Its folder in the store; ``""`` if the store begins there.
        state: What it is to its run, if that is known.
        validation: What is known of its validation, if one was asked for and its run was looked at.
        stats: What its save has cost, where more is known than its manifest says.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        state: State | None = None,
        validation: Validation | None = None,
        stats: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = store
        self.folder = folder
        self.state = state
        self.validation = validation
        self._stats = stats
        self._manifest: Manifest | None = None

    @classmethod
    def from_directory(cls, path: Place) -> Checkpoint:
        """Return a handle on a folder of any files.

        Args:
            path: A local folder, or the address of one in an object store.

        Raises:
            MissingError: There is no such folder.
        """
        address = os.fspath(path)
        if is_address(address):
            store = open_store(address)
            if next(iter(store.list()), None) is None:
                raise MissingError(f"There are no files at {address}.", path=address)
            return cls(store, "")
        if not path_at(path).is_dir():
            raise MissingError(f"{path} is not a folder.", path=str(path))
        return cls(LocalStore(path_at(path)), "")

    @property
    def url(self) -> str:
        """Return where it is."""
        return f"{self.store.url}/{self.folder}" if self.folder else self.store.url

    @property
    def name(self) -> str:
        """Return its name."""
        return self.folder or self.url.rstrip("/").rpartition("/")[2]

    @property
    def manifest(self) -> Manifest:
        """Return its commit.

        Raises:
            MissingError: It is not committed.
            DamagedError: The commit is torn or altered.
        """
        if self._manifest is None:
            self._manifest = read_manifest(self.store, self.folder)
        return self._manifest

    @property
    def is_committed(self) -> bool:
        """Return whether there is a commit."""
        try:
            self.store.head(self._key(MANIFEST))
        except MissingError:
            return False
        return True

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Return the numbers that were logged with it, and those that its validation has found."""
        logged = self.manifest.metrics
        return logged if self.validation is None else {**logged, **self.validation.metrics}

    @property
    def time(self) -> Mapping[str, Any]:
        """Return the progress counters: epoch, batch, sample, token, ..."""
        return self.manifest.time

    @property
    def stats(self) -> Mapping[str, Any]:
        """Return what its save has cost, in bytes and seconds by name; of several ranks together.

        What came after the manifest was written, such as ``commit_s``, is known only to the process
        that has saved it, and only to the handle that it got from the save.
        """
        return self.manifest.stats if self._stats is None else self._stats

    @property
    def is_final(self) -> bool:
        """Return whether training had ended."""
        return self.manifest.is_final

    def load(self, items: Collection[str] | None = None) -> dict[str, Any]:
        """Read the state into memory.

        Args:
            items: Only these parts of the state, such as ``["model"]``; ``None`` for all.

        Returns:
            ``{"state": {"model": ..., "optimizers": ..., ...}, "rng": [...]}``, every tensor on the
            CPU with the dtype, shape and bits it had.

        Raises:
            MissingError: No such item.
            DamagedError: Bytes that do not match their checksum.
        """
        from .engine.documents import layout_state
        from .state.source import load_item

        source = self.source()
        names = list(source.trees) if items is None else list(items)
        found = {name: load_item(source, name) for name in names}
        if "rng" in found and self.manifest.layout != "torch":  # a single file has them all
            for rank in range(1, self.manifest.world_size):
                found["rng"] += load_item(self.source(rank=rank), "rng")
        return layout_state(found)

    def load_weights(
        self,
        model: nn.Module,
        *,
        strict: bool = True,
        item: str | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> LoadReport:
        """Load only the weights of a model, straight into its tensors.

        Args:
            model: The live model.
            strict: Whether names, shapes and dtypes must all be equal. A lenient load takes what
                fits; that nothing at all fits is an error all the same.
            item: Name of the model in the checkpoint, if it is not ``model``; ``item/member`` of a
                group.
            rename: Maps a stored name to the live one.

        Returns:
            What was loaded, missing, unexpected and converted.

        Raises:
            MissingError: There is no such item.
            MismatchError: It does not fit. The model was not changed.
            DamagedError: Bytes that do not match their checksum.
        """
        from .state.model import load_weights

        return load_weights(self.source(), item or "model", model, strict=strict, rename=rename)

    def map_weights(self, item: str = "model", *, verify: bool = False) -> dict[str, Any]:
        """Return the weights of a model over the file they are in, to use and not to train.

        Nothing is read before it is used, and processes that map one checkpoint share its pages.
        The tensors may be written to: what is written stays with them, and the file as it is. On a
        local disk they stay as they are when the checkpoint is deleted.

        On a machine that fails, read instead: a page that the disk cannot give, or that is gone
        because somebody cut the file short, ends the process (SIGBUS) without an error.

        Args:
            item: Name of the model in the checkpoint.
            verify: Whether to read every byte once and compare it with its checksum. Otherwise only
                sizes and names are checked. A page that the system has dropped and reads again is
                not compared again.

        Returns:
            Tensors by name, for ``model.load_state_dict(weights, assign=True)``. Classes that bring
            older forms of their state into the present one, by the versions that torch keeps beside
            a state dict, want :meth:`load_weights`, which tells them theirs.

        Raises:
            UsageError: It is not in files of this machine, is compressed, is a single file, or its
                tensors are in pieces that several ranks wrote.
            MissingError: No such item.
            DamagedError: A file of another size than was written; with ``verify`` also bytes that
                do not match their checksum.
        """
        from .engine.mapped import map_item
        from .engine.read import CheckpointSource

        with self.held():  # from here on it may be deleted
            source = self.source()
            if not isinstance(source, CheckpointSource):
                raise UsageError(
                    f"{self.url} is a single file, which has to be taken apart.",
                    safe="Nothing was changed.",
                    hint="Read it with load or load_weights.",
                    path=self.url,
                )
            found = map_item(source, item, store=self.store, folder=self.folder, verify=verify)
        return dict(found)

    def source(
        self,
        *,
        progress: Callable[[int], None] | None = None,
        fetching: Fetching | None = None,
        rank: int = 0,
    ) -> StateSource:
        """Return the stored state without reading any tensor yet.

        Args:
            progress: Called with the bytes of each block that is read.
            fetching: How blocks come from a bucket.
            rank: Whose part to show of what every rank has saved for itself.
        """
        if self.manifest.layout == "files":
            raise UsageError(
                f"{self.url} holds files of the user's own, and no state that Milepost knows.",
                safe="Nothing was changed.",
                hint="Copy them with: milepost cp. In Python read them with: "
                "with checkpoint.as_directory() as folder.",
                path=self.url,
            )
        if self.manifest.layout == "torch":
            return self._single_source(rank)
        from .engine.read import CheckpointSource

        return CheckpointSource(
            self.store,
            self.folder,
            self.manifest,
            progress=progress,
            fetching=fetching,
            rank=rank,
        )

    def verify(
        self, level: Level | str = Level.FULL, *, progress: Callable[[int], None] | None = None
    ) -> VerifyReport:
        """Check it against its commit.

        Args:
            level: ``quick`` compares records and sizes; ``full`` reads every byte.
            progress: Called with the bytes of each block that was compared, by several threads.
        """
        # Copies on this machine say nothing of what is there.
        store = self.store.store if isinstance(self.store, CachedStore) else self.store
        return verify(store, self.folder, Level(level), progress=progress)

    @contextmanager
    def as_directory(self, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> Iterator[str]:
        """Give its files as a local folder, to read only.

        On a local disk it is the checkpoint's own folder: nothing is copied, and retention leaves
        it alone until the block ends. From elsewhere the files are downloaded and checked, once
        for all processes and threads of this machine that read them at the time, and removed with
        the last reader.

        Args:
            stall_timeout_s: How long the download of another process, which is waited for, may
                stand still.

        Raises:
            MissingError: It was deleted, or is being deleted.
            DamagedError: Bytes that do not match their checksum.
            DeadlineError: Another process was downloading it and came to a standstill.
        """
        path = self.store.local_path(self.folder) if self.folder else self._local_root()
        if path is None:
            with shared_copy(self.store, self.folder, stall_timeout_s=stall_timeout_s) as copy:
                yield copy
        else:
            with self.held():
                yield path

    def to_directory(self, path: Place | None = None) -> str:
        """Copy its files to a new local folder, checked; the commit comes last.

        Args:
            path: The folder; ``None`` for a new, private one, which is the caller's to remove.

        Returns:
            The folder, a checkpoint that :func:`open_checkpoint` opens.

        Raises:
            ExistsError: There are files in the folder already.
            DamagedError: Bytes that do not match their checksum. Nothing of the copy is left.
        """
        with self.held():
            return copy_to(self.store, self.folder, path, name=self.name)

    def get_metadata(self) -> dict[str, Any]:
        """Return what users added to it; empty if nothing.

        Raises:
            FormatError: The record is malformed; the state does not depend on it.
        """
        key = self._key(METADATA)
        try:
            data = self.store.get(key, max_bytes=_MAX_METADATA_BYTES)
        except MissingError:
            return {}
        metadata = tree.decode(canonical.load_record(data, where=key).get("metadata", {}))
        if not isinstance(metadata, dict):
            raise FormatError(f"{self.url}/{METADATA} is not a record of metadata.", path=key)
        return dict(metadata)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace what users added to it. The commit does not change.

        Raises:
            MissingError: It was deleted.
            UnsupportedStateError: A value that cannot be stored without running code on load.
        """
        if not self.is_committed and not self._is_plain_folder():
            raise MissingError(f"There is no checkpoint at {self.url} any more.", path=self.url)
        body = {"metadata": tree.encode(dict(metadata), path=("metadata",))}
        self.store.put(self._key(METADATA), canonical.dump_record(body))

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to what users added to it.

        The threads of one process add one after the other. Between processes nothing is held: of
        two that add at the same moment the last one wins, and what the other added may be lost. So
        let one process add, such as rank 0.
        """
        with _updates.lock:
            self.set_metadata({**self.get_metadata(), **metadata})

    def _key(self, file: str) -> str:
        return f"{self.folder}/{file}" if self.folder else file

    def _local_root(self) -> str | None:
        """Return the folder that the store begins in, if it keeps files."""
        path = self.store.local_path(MANIFEST)
        return None if path is None else path.rpartition("/")[0]

    def held(self) -> AbstractContextManager[None]:
        """Keep it from being deleted; a user's own folder without a commit is not deleted by us."""
        if self._is_plain_folder() and not self.is_committed:
            return nullcontext()
        return hold(self.store, self.folder)

    def _is_plain_folder(self) -> bool:
        """Return whether this is a user's own folder, which needs no commit."""
        return not self.folder and self.state is None

    def _single_source(self, rank: int) -> StateSource:
        """Read a checkpoint of one file, checked, and take it apart."""
        import io

        from .convert.torch_file import load_torch_file
        from .engine.read import read_file
        from .state.source import MemorySource

        (entry,) = self.manifest.files
        data = read_file(self.store, self._key(entry.path), entry)
        # Our own file, as its checksum says: nothing in it is guessed at, as in foreign ones.
        value = load_torch_file(io.BytesIO(data))
        state = value.get("state") if isinstance(value, Mapping) else None
        if not isinstance(state, Mapping) or "rng" in state:
            raise FormatError(f"{self.url} does not hold a state.", path=self.url)
        return MemorySource(self.name, _of_rank(value, rank))

    def __repr__(self) -> str:
        return f"Checkpoint({self.url!r})"


class Run:
    """A run: the checkpoints of one training.

    Args:
        store: Where its records are.

    Attributes:
        visible: The files that people see, when the records are hidden; else ``None``.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        above, _, name = store.url.removeprefix("file://").rpartition("/")
        is_hidden = store.traits.is_local and name == HIDDEN
        self.visible = VisibleFiles(LocalStore(above)) if is_hidden else None
        self._view: RunView | None = None

    @property
    def url(self) -> str:
        """Return where it is."""
        return self.store.url

    @property
    def view(self) -> RunView:
        """Return the run as it was when it was last looked at."""
        if self._view is None:
            self.refresh()
        assert self._view is not None
        return self._view

    def refresh(self) -> None:
        """Look at the store again."""
        self._view = scan(self.store)

    def checkpoints(self, *, all: bool = False) -> list[Checkpoint]:  # noqa: A002
        """Return the checkpoints, oldest first, with their commits as they were read with the run.

        Args:
            all: Also those that do not count: orphaned, diagnostic, damaged.
        """
        found = [f for f in self.view.found if f.manifest is not None or f.state is State.DAMAGED]
        handles = []
        for one in found if all else self.view.lineage():
            handle = self._handle(one)
            handle._manifest = one.manifest  # noqa: SLF001 - of this module; a thousand reads less
            handles.append(handle)
        return handles

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that counts, or ``None``."""
        found = self.view.latest()
        return None if found is None else self._handle(found)

    def best(self, metric: str, mode: str = "min") -> Checkpoint | None:
        """Return the checkpoint with the best value of a metric, or ``None`` if none has one."""
        found = self.view.best(metric, mode)
        return None if found is None else self._handle(found)

    def get(self, name: str) -> Checkpoint:
        """Return a checkpoint by name.

        Raises:
            MissingError: There is none; the message lists the names there are.
        """
        return self._handle(self.view.get(name))

    def _handle(self, found: Found) -> Checkpoint:
        return Checkpoint(self.store, found.name, state=found.state, validation=found.validation)

    def __repr__(self) -> str:
        return f"Run({self.url!r})"


class _Updates:
    """What lets one thread at a time add to metadata."""

    def __init__(self) -> None:
        self.lock = Lock()


_updates = _Updates()
# A thread that is not in the child may have held it when the process was forked.
os.register_at_fork(after_in_child=_updates.__init__)  # type: ignore[misc]


def _of_rank(value: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the items of a single file; to another rank than the first, with what is its own."""
    ranks = value.get("ranks", [])
    own = ranks[rank] if 0 < rank < len(ranks) else {}
    return {**value["state"], **own, "rng": value.get("rng", [])}


def run_store(place: Place | Store) -> Store | None:
    """Return the store with the records of the run at a place, or ``None`` if there is none.

    A run that shows single files to people keeps its records in a hidden folder.
    """
    base = open_store(place)
    stores = (base, PrefixStore(base, HIDDEN))
    for store in stores:
        try:
            store.head(RUN)
        except MissingError:
            continue
        return store
    # A lost run.json makes no other run of it.
    return next((store for store in stores if next(iter(store.list(SESSIONS)), None)), None)


def open_run(place: Place | Store) -> Run:
    """Open a run.

    Raises:
        MissingError: There is no run and no checkpoint at the place; it says where there is one
            below it.
    """
    store = run_store(place)
    run = Run(open_store(place) if store is None else store)
    try:
        run.refresh()
    except MissingError as error:
        raise missing_run(run.store) from error
    return run


def open_checkpoint(place: Place) -> Checkpoint:
    """Open a checkpoint.

    Args:
        place: The folder of a checkpoint, a run (its newest one is taken), a run and a name joined
            by a slash, or the file of a checkpoint that was saved as a single file; on a local disk
            or, as an address such as ``s3://bucket/run/ep1``, in an object store.

    Raises:
        MissingError: There is none.
    """
    address = os.fspath(place)
    if is_address(address):
        return _open_remote(trimmed(address))
    path = path_at(place)
    if (path / MANIFEST).is_file():
        return Checkpoint(LocalStore(path), "")
    hidden = path.parent / HIDDEN
    for suffix in ("", *sorted(SUFFIXES.values(), key=len, reverse=True)):
        name = path.name.removesuffix(suffix) if path.name.endswith(suffix) else ""
        if name and (hidden / name / MANIFEST).is_file():
            # A file of that name that somebody put there is not what the records tell of.
            visible = VisibleFiles(LocalStore(path.parent))
            if not path.is_file() or visible.is_ours(name, path.name):
                return Checkpoint(LocalStore(hidden), name)
    if path.is_dir():
        latest = open_run(path).latest()
        if latest is not None:
            return latest
    if path.is_file():
        raise MissingError(
            f"{place} is a file that is no checkpoint of Milepost.",
            hint="One of another tool can be loaded from there; milepost import makes a run of it, "
            "and milepost export another file.",
            path=str(place),
        )
    raise MissingError(
        f"There is no checkpoint at {place}.",
        hint="Give the folder of a checkpoint, a run (its newest), or RUN/NAME.",
        path=str(place),
    )


def _open_remote(address: str) -> Checkpoint:
    store = open_store(address)
    alone = Checkpoint(store, "")
    if alone.is_committed:
        return alone
    if run_store(store) is not None:
        latest = open_run(store).latest()
        if latest is not None:
            return latest
    above, _, name = address.rpartition("/")
    if not above.endswith(":/"):
        records = run_store(above)
        if records is not None:
            stem = next((name.removesuffix(s) for s in SUFFIXES.values() if name.endswith(s)), name)
            return Run(records).get(stem)
    raise missing_run(
        store,
        what=f"There is no checkpoint at {address}.",
        hint="Give the address of a checkpoint, of a run, or RUN/NAME.",
    )


def open_source(
    place: Place | Checkpoint,
    *,
    trust: bool = False,
    rank: int = 0,
    progress: Callable[[int], None] | None = None,
    fetching: Fetching | None = None,
) -> StateSource:
    """Open the state at a place, whatever wrote it.

    Args:
        place: What :func:`open_checkpoint` takes, any ``.pt`` file, or a folder that
            ``torch.distributed.checkpoint`` wrote.
        trust: Whether what is no checkpoint of ours may run code when it is opened.
        rank: Whose state, where each rank has its own.
        progress: Called with the bytes of each block that is read.
        fetching: How blocks come from a bucket.

    Raises:
        MissingError: There is nothing.
    """
    if isinstance(place, Checkpoint):
        return place.source(rank=rank, progress=progress, fetching=fetching)
    try:
        return open_checkpoint(place).source(rank=rank, progress=progress, fetching=fetching)
    except MissingError:
        if is_address(os.fspath(place)):
            raise
        path = path_at(place)
        if (path / DCP_METADATA).is_file():
            from .convert.dcp import DcpSource

            return DcpSource(path, trust=trust)
        if not path.is_file():
            raise
    from .convert.torch_file import torch_file_source

    return torch_file_source(path, trust=trust)
