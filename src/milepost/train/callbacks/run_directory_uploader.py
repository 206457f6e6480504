"""Upload what a training leaves in its run directory, while it trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ...engine.pending import PendingSave
from ...errors import DeadlineError, FormatError, UsageError
from ...format.layout import check_key
from ...ranks.team import find_rank
from ...stores.url import AnyPlace
from ...uploads.background import Rounds
from ...uploads.changes import Changes
from ...uploads.destination import Destination
from ...uploads.lanes import Lanes
from ...uploads.mirror import SMALL_BYTES, Mirror
from ..callback import Callback
from ..state import State

__all__ = ["RunDirectoryUploader"]

_log = logging.getLogger("milepost")

_SAVE_S = 10.0
"""How long the last round waits for a save on its way. ``fit`` itself has waited for good ones."""


class RunDirectoryUploader(Callback):
    """Upload new and changed files of the run directory, checkpoints when they are committed.

    The files are looked for and uploaded in the background: every so many batches, at the end of
    every epoch, and when ``fit`` ends, which waits for it. A checkpoint that is saved at such a
    point is uploaded with it, as soon as it is committed. What is uploaded is a run that
    :func:`milepost.open_run` opens, and never shows half a checkpoint. What is deleted locally
    stays there.

    Of several ranks each uploads the folder ``rank_<its number>`` of the run directory, and rank 0
    everything else.

    Args:
        object_store_provider_hparams: Where to: an ``ObjectStoreProviderHparams``, a provider, an
            address such as ``s3://bucket/prefix``, or a store.
        object_name_prefix: What the names of objects begin with, before the path below the run
            directory; a slash is added. ``None``: the name of the run directory. Empty: nothing.
        num_concurrent_uploads: How many files are uploaded at once.
        upload_staging_folder: Where files that may still change are copied to for the time of
            their upload. ``None``: a temporary folder.
        use_procs: Whether large files are uploaded by processes of their own, not by threads.
        upload_every_n_batches: How often to look for files.
        on_upload_error: What failed is tried again at the next point in any case. ``"raise"``: the
            error ends the training, whose checkpoints are safe on this machine. ``"warn"``: it is
            logged.
        upload_timeout_s: How long the end of ``fit`` waits for the last uploads.

    Raises:
        UsageError: An argument makes no sense, or a credential is not in the environment.
        StorageError: There is no such container.
        AccessError: It may not be looked at.
    """

    def __init__(
        self,
        object_store_provider_hparams: AnyPlace,
        object_name_prefix: str | None = None,
        num_concurrent_uploads: int = 4,
        upload_staging_folder: str | os.PathLike[str] | None = None,
        use_procs: bool = True,  # noqa: FBT001, FBT002 - in the order people know
        upload_every_n_batches: int = 100,
        *,
        on_upload_error: Literal["raise", "warn"] = "raise",
        upload_timeout_s: float = 600.0,
    ) -> None:
        counts = {
            "num_concurrent_uploads": num_concurrent_uploads,
            "upload_every_n_batches": upload_every_n_batches,
        }
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise UsageError(f"{name}={count!r} is not a whole number of at least 1.")
        if on_upload_error not in ("raise", "warn"):
            raise UsageError(f"on_upload_error={on_upload_error!r} is neither 'raise' nor 'warn'.")
        self._given_prefix = None if object_name_prefix is None else _prefix(object_name_prefix)
        self._destination = Destination(object_store_provider_hparams)
        if use_procs:
            self._destination.recipe()  # what cannot be told to a process is said now
        staging = upload_staging_folder
        self._staging_folder = None if staging is None else os.fspath(staging)
        self._changes: Changes | None = None
        self._num_lanes = num_concurrent_uploads
        self._use_procs = use_procs
        self._every = upload_every_n_batches
        self._on_error: Literal["raise", "warn"] = on_upload_error
        self._timeout_s = upload_timeout_s
        self._root: Path | None = None
        self._mirror: Mirror | None = None
        self._rounds: Rounds | None = None
        self._saves: list[PendingSave[Any]] = []
        self._due_at: tuple[int, int] | None = None

    def get_uri_for_uploaded_file(self, local_filepath: str | os.PathLike[str]) -> str:
        """Return the address that a file of the run directory is, or will be, uploaded to.

        Args:
            local_filepath: The file. It need not be there yet.

        Raises:
            UsageError: It is not in the run directory, or no trainer was made with this callback.
        """
        root = self._known_root()
        path = Path(os.path.abspath(local_filepath))  # noqa: PTH100 - links are not followed
        if not path.is_relative_to(root) or path == root:
            raise UsageError(
                f"{path} is not in the run directory {root}.",
                hint="Only files of the run directory are uploaded.",
                path=str(path),
            )
        return self._destination.uri(self._prefix + path.relative_to(root).as_posix())

    def init(self, state: State) -> None:
        """Learn where the run directory is.

        Raises:
            UsageError: There is none.
        """
        if state.run_directory is None:
            raise UsageError(
                "There is no run directory on this machine that could be uploaded.",
                hint="Give the trainer a save_folder that is a folder. One that is an address is "
                "in an object store already.",
            )
        root = Path(state.run_directory)
        if self._root not in (None, root):
            raise UsageError(
                f"This RunDirectoryUploader uploads {self._root} already.",
                hint="Make one for each trainer.",
            )
        self._root = root
        self._check_prefix()

    def fit_start(self, state: State) -> None:
        """Start, with all that is there already."""
        if self._mirror is None:
            rank, num_ranks = find_rank()
            self._changes = Changes(self._staging_folder, small_bytes=SMALL_BYTES)
            self._mirror = Mirror(
                str(self._known_root()),
                self._destination,
                prefix=self._prefix,
                changes=self._changes,
                is_wanted=_wanted_by(rank, num_ranks),
            )
        lanes = Lanes(self._destination, num_lanes=self._num_lanes, use_procs=self._use_procs)
        self._rounds = Rounds(self._mirror, lanes, on_error=self._on_error)
        self._ask(state)

    def batch_end(self, state: State) -> None:
        """Upload, every so many batches."""
        if state.timer.batch % self._every == 0:
            self._ask(state)
        elif self._rounds is not None:
            self._rounds.check()

    def epoch_end(self, state: State) -> None:
        """Upload."""
        self._ask(state)

    def save_started(self, state: State, pending: PendingSave[Any]) -> None:
        """Note a save. At a point of uploading it is uploaded as soon as it is committed."""
        if self._rounds is None:
            return
        self._saves = [one for one in self._saves if not one.done()]
        self._saves.append(pending)
        if self._due_at == _point(state):
            pending.when_done(self._rounds.ask)

    def post_close(self) -> None:
        """Upload what is left, what other callbacks wrote last included, and wait for it.

        Raises:
            CheckpointError: Something could not be uploaded.
        """
        rounds, self._rounds = self._rounds, None
        saves, self._saves = self._saves, []
        if rounds is None:
            return
        for save in saves:
            try:
                save.check_done(_SAVE_S)
            except DeadlineError as late:
                _log.warning("Not uploaded: %s", late)
                break
        error = rounds.finish(timeout_s=self._timeout_s)
        if self._changes is not None:
            self._changes.close()
        if error is None:
            return
        if isinstance(error, DeadlineError):
            self._mirror = None  # a request of its own may still be on its way
        if self._on_error == "raise":
            raise error
        _log.error("The run directory was not uploaded in full: %s", error)

    def _ask(self, state: State) -> None:
        if self._rounds is None:
            return
        self._rounds.check()
        self._due_at = _point(state)
        self._rounds.ask()
        self._saves = [one for one in self._saves if not one.done()]
        for save in self._saves:
            save.when_done(self._rounds.ask)

    def _known_root(self) -> Path:
        if self._root is None:
            raise UsageError(
                "The run directory is not known yet.", hint="Make the trainer with this callback."
            )
        return self._root

    @property
    def _prefix(self) -> str:
        return (
            _prefix(self._known_root().name) if self._given_prefix is None else self._given_prefix
        )

    def _check_prefix(self) -> None:
        if self._prefix:
            _check_prefix(self._prefix)


def _prefix(text: str) -> str:
    prefix = text if not text or text.endswith("/") else f"{text}/"
    if prefix:
        _check_prefix(prefix)
    return prefix


def _check_prefix(prefix: str) -> None:
    try:
        check_key(prefix[:-1], where="object_name_prefix")
    except FormatError as error:
        raise UsageError(
            f"object_name_prefix={prefix!r} cannot begin the name of an object.",
            hint="Use letters, digits and '._+=@,~-', with single slashes between.",
        ) from error


def _wanted_by(rank: int, num_ranks: int) -> Callable[[str], bool]:
    """Return what says of a name in the run directory whether a rank uploads it."""
    owners = {f"rank_{number}": number for number in range(num_ranks)}
    return lambda name: owners.get(name, 0) == rank


def _point(state: State) -> tuple[int, int]:
    return state.timer.batch, state.timer.epoch
