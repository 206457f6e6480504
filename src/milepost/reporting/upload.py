"""One rank's part of a report with files: wait for the word, write, tell, wait for the end."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import Checkpoint
from ..copies.cached import CachedStore
from ..errors import CheckpointError, UsageError
from ..format.manifest import FileEntry
from ..ranks.board import Board
from ..ranks.outcome import Outcome
from ..runs.publish import Claim, withdraw
from ..runs.scan import State
from ..stores.base import Store
from .config import CheckpointConfig
from .files import LocalFile, checksum_stored, find_files, upload

__all__ = ["Upload", "UploadFn", "Uploader", "local_folder"]

_log = logging.getLogger("milepost")

UploadFn = Callable[[Checkpoint, str], Checkpoint]

_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What one rank gives to a report.

    Attributes:
        number: The report.
        mode: ``upload``, ``function`` or ``place``.
        checkpoint: What the user reported.
        files: The files to write.
        place: The folder in the run that the user has written already.
        function: The user's own way to upload.
        delete: A local folder to delete once the checkpoint is committed, or empty.
    """

    number: int
    mode: str
    checkpoint: Checkpoint
    files: Sequence[LocalFile] = field(default_factory=tuple)
    place: str = ""
    function: UploadFn | None = None
    delete: str = ""

    @property
    def offer(self) -> dict[str, Any]:
        """Return what the leader must know of it."""
        files = [[one.path, one.size_bytes] for one in self.files]
        return {"mode": self.mode, "files": files, "place": self.place}


class Uploader:
    """Makes offers of what users report, and carries them out.

    Args:
        store: The run's store.
        board: Where the leader is told, and answers.
        config: How long things may take.
        cached: The same store, where copies of what is written are kept.
    """

    def __init__(
        self,
        store: Store,
        board: Board,
        config: CheckpointConfig,
        *,
        cached: CachedStore | None = None,
    ) -> None:
        self._store = store
        self._cached = cached
        self._board = board
        self._write_s = config.upload_timeout_s + _MARGIN_S
        # The others may be busy with the report before.
        self._meet_s = config.report_timeout_s + self._write_s

    def prepare(
        self,
        number: int,
        checkpoint: Checkpoint,
        *,
        is_uploaded: bool,
        function: UploadFn | None,
        delete: bool,
    ) -> Upload:
        """Look at what is to be reported.

        Args:
            number: The report.
            checkpoint: What the user reports.
            is_uploaded: Whether it is in the run already.
            function: The user's own way to upload.
            delete: Whether to delete the local folder in the end.

        Raises:
            UsageError: It cannot be reported.
            MissingError: The folder is not there.
        """
        if is_uploaded:
            place = self._place(checkpoint)
            return Upload(number=number, mode="place", checkpoint=checkpoint, place=place)
        folder = local_folder(checkpoint)
        if folder is None and (function is None or delete):
            raise UsageError(
                f"{checkpoint.url} is not a local folder.",
                hint="Report Checkpoint.from_directory(folder), or pass a checkpoint_upload_fn.",
                path=checkpoint.url,
            )
        if delete and folder is not None:
            self._refuse_deleting_run(folder)
        gone = folder if delete and folder is not None else ""
        if function is not None:
            return Upload(
                number=number,
                mode="function",
                checkpoint=checkpoint,
                function=function,
                delete=gone,
            )
        assert folder is not None
        files = find_files(folder)
        return Upload(number=number, mode="upload", checkpoint=checkpoint, files=files, delete=gone)

    def carry_out(self, work: Upload) -> Checkpoint:
        """Do this rank's part, and wait until the report is settled.

        Raises:
            CheckpointError: It was not committed; alike on every rank.
        """
        number = work.number
        # An error here was told to every rank by the leader.
        answer = self._board.read(f"go/{number}", task=f"Report {number}", timeout_s=self._meet_s)
        own: BaseException | None = None
        held: Claim | None = None
        try:
            if work.function is not None:
                answer = self._place_by_function(work, answer["name"])
            held = Claim(**answer["claim"])
            entries = self._write(work, held, answer)
            self._say(number, files=[entry.to_json() for entry in entries])
        except BaseException as error:  # noqa: BLE001 - told to every rank, and raised below
            own = error
            outcome = Outcome.of_error(self._board.rank, f"make report {number}", error)
            self._say(number, error=outcome.to_bytes())
        name = self._end_of(work, held, own)
        checkpoint = Checkpoint(self._cached or self._store, name, state=State.COMMITTED)
        if self._cached is not None:
            self._keep(self._cached, checkpoint)
        if work.delete:
            _delete(work.delete)
        return checkpoint

    def _keep(self, cached: CachedStore, checkpoint: Checkpoint) -> None:
        try:
            cached.keep(checkpoint.manifest)
        except CheckpointError as error:  # committed it is, and perhaps deleted again
            _log.info("No copy of %s is kept: %s", checkpoint.name, error)

    def _end_of(self, work: Upload, held: Claim | None, own: BaseException | None) -> str:
        """Return the name of the checkpoint, or raise what all ranks raise."""
        number = work.number
        try:
            settled = self._board.read(
                f"settled/{number}", task=f"The end of report {number}", timeout_s=self._meet_s
            )
        except CheckpointError as error:
            if held is not None and work.mode == "upload":
                self._withdraw(held, [one.path for one in work.files])
            if own is None or own is error:
                raise
            if self._board.world_size == 1 or not isinstance(own, Exception):
                raise own from None
            raise error from own
        if own is not None:
            raise own  # it came too late to matter to the others
        return str(settled["name"])

    def _place_by_function(self, work: Upload, name: str) -> Mapping[str, Any]:
        assert work.function is not None
        placed = work.function(work.checkpoint, name)
        if not isinstance(placed, Checkpoint):
            raise UsageError(
                f"checkpoint_upload_fn returned a {type(placed).__qualname__}.",
                hint="Return a Checkpoint of the folder in the run that it has written.",
            )
        self._say(work.number, place=self._place(placed))
        task = f"Report {work.number}"
        answer: Mapping[str, Any] = self._board.read(
            f"share/{work.number}", task=task, timeout_s=self._write_s
        )
        return answer

    def _write(self, work: Upload, held: Claim, answer: Mapping[str, Any]) -> list[FileEntry]:
        rank = self._board.rank
        if work.mode != "upload":
            shares = dict(answer["shares"])
            return checksum_stored(self._store, held.folder, shares[rank])
        skip = dict(answer["skip"])
        store = self._cached or self._store
        return upload(store, held.folder, work.files, skip=skip[rank])

    def _say(self, number: int, **facts: Any) -> None:
        self._board.send({"kind": "wrote", "rank": self._board.rank, "n": number, **facts})

    def _withdraw(self, held: Claim, paths: Sequence[str]) -> None:
        try:
            withdraw(self._store, held, paths)
        except CheckpointError as error:
            _log.warning("Files of a failed report were left in %s: %s", held.folder, error)

    def _place(self, checkpoint: Checkpoint) -> str:
        """Return the folder in the run that a checkpoint is."""
        run, folder = self._run_folder(), local_folder(checkpoint)
        if run is not None and folder is not None:
            name = os.path.relpath(os.path.realpath(folder), run)
        else:
            name = checkpoint.url.removeprefix(self._store.url + "/")
        if "/" in name or name in (".", "..") or not name:
            raise UsageError(
                f"{checkpoint.url} is not a folder right in the run at {self._store.url}.",
                safe="Nothing was committed, and nothing was deleted.",
                hint="Write it to a folder of its own in the run; get_context().get_run_path() "
                "says where that is.",
                path=checkpoint.url,
            )
        return name

    def _run_folder(self) -> str | None:
        url = self._store.url
        is_local = self._store.traits.is_local and url.startswith("file://")
        return os.path.realpath(url.removeprefix("file://")) if is_local else None

    def _refuse_deleting_run(self, folder: str) -> None:
        run, doomed = self._run_folder(), os.path.realpath(folder)
        if run is not None and os.path.commonpath([run, doomed]) == doomed:
            raise UsageError(
                f"The run at {run} lies in {folder}, which would be deleted after the upload.",
                safe="Nothing was deleted.",
                hint="Report a folder of its own, or use delete_local_checkpoint_after_upload="
                "False.",
                path=folder,
            )


def local_folder(checkpoint: Checkpoint) -> str | None:
    """Return the folder of a checkpoint on this machine, or ``None``."""
    if checkpoint.folder:
        return checkpoint.store.local_path(checkpoint.folder)
    url = checkpoint.store.url
    is_local = checkpoint.store.traits.is_local and url.startswith("file://")
    return url.removeprefix("file://") if is_local else None


def _delete(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another rank of this machine reported the same folder
    except OSError as error:
        _log.warning("The reported folder %s could not be deleted: %s", folder, error)
