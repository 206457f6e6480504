"""``Reports``: one process's hold on a run that is reported to.

    with Reports("runs/a", checkpoint_config=CheckpointConfig(num_to_keep=2)):
        ...
        report({"loss": 0.1}, checkpoint=Checkpoint.from_directory(folder))

Rank 0 opens the run, as any writer does (see ``opening.py``), and settles what all ranks report
(see ``coordinator.py``). The others take from it which session it is. No rank waits for another but
where it must: at the opening for rank 0, and in a report with files for the report to be settled.
The training's process group is used for nothing but finding rank 0.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..checkpoint import Checkpoint, Place
from ..copies.cached import CachedStore
from ..copies.kept import KeptCopies, check_remote
from ..engine.pending import PendingSave
from ..errors import (
    FencedError,
    SaveFailedError,
    UsageError,
)
from ..exit_check import unwatch, watch
from ..liveness import beat
from ..metrics import flatten, plain_metrics
from ..opening import Resume, WriterOptions
from ..ranks.board import Board, LocalBoard
from ..ranks.outcome import Outcome
from ..runs.scan import State, scan
from ..stores.base import Store
from ..stores.url import folder_of, is_address, open_store
from ..validation.config import ValidationConfig, ValidationTaskConfig
from .commit import RunFacts
from .config import CheckpointConfig, CheckpointConsistencyMode, CheckpointUploadMode
from .context import TrainContext, ranks_here
from .leader import Leader, leave, leave_unopened, refuse_finished, see_opened
from .result import ReportedCheckpoint, Result, reported_checkpoints
from .stack import Stack
from .upload import Upload, Uploader, UploadFn
from .validating import asked_with

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Reports", "in_use"]

_log = logging.getLogger("milepost")

_MARGIN_S = 2.0
_OPEN_S = 60.0


class Reports:
    """A run that is reported to, in a script of one process or several.

    Args:
        folder: Folder of the run, or a store.
        checkpoint_config: What is kept, and how long things may take.
        validation: How checkpoints are validated that are reported with ``validation=True``.
        resume: ``"auto"`` goes on from the newest whole checkpoint or starts afresh; ``"must"``
            refuses to start afresh; ``"never"`` refuses a run that holds checkpoints.
        if_finished: What is done about a run that has come to its end: ``"error"``, or
            ``"continue"`` to report more to it.
        local_cache: For a run in an object store: a folder on this machine where copies of the
            files of the newest two checkpoints are kept.

    Raises:
        UsageError: An option that makes no sense.
    """

    def __init__(
        self,
        folder: Place | Store,
        *,
        checkpoint_config: CheckpointConfig | None = None,
        validation: ValidationConfig | None = None,
        resume: Resume = "auto",
        if_finished: str = "error",
        local_cache: str | os.PathLike[str] | None = None,
        meet: tuple[str, int] | None = None,
    ) -> None:
        if if_finished not in ("error", "continue"):
            raise UsageError(
                f"if_finished={if_finished!r} is not known.", hint="Use 'error' or 'continue'."
            )
        self.config = checkpoint_config or CheckpointConfig()
        self.store = open_store(_absolute(folder))
        self._source: Store = self.store
        self._cached: CachedStore | None = None
        if local_cache is not None:
            check_remote(self.store)
            self._source = self._cached = CachedStore(self.store, KeptCopies(local_cache))
        self._options = WriterOptions(resume=resume)
        self._validation = validation
        self._if_finished = if_finished
        self._meet = meet
        self._pid = os.getpid()
        self._board: Board | None = None
        self._facts: RunFacts | None = None
        self._uploader: Uploader | None = None
        self._leader: Leader | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._num_asked = 0
        self._num_failed = 0
        self._only_warned: BaseException | None = None
        self._newest: tuple[int, str | None] = (-1, None)
        self._unsettled: list[PendingSave[Checkpoint]] = []
        self._is_closed = False

    # -- opening and closing -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return whether the run is open in this process."""
        return self._facts is not None and not self._is_closed

    @property
    def context(self) -> TrainContext:
        """Return who this worker is."""
        url = self.store.url
        return ranks_here(url.removeprefix("file://") if self.store.traits.is_local else url)

    @property
    def resumed_from(self) -> str | None:
        """Return the name of the checkpoint that the run went on from, or ``None``."""
        return None if self._facts is None else self._facts.resumed_from

    def open(self) -> Self:
        """Open the run. Every rank must; those but rank 0 wait for it.

        Raises:
            ExistsError: The run is finished; or it holds checkpoints and ``resume="never"``.
            DamagedError: It holds checkpoints, and none of them is whole.
            UsageError: There are several workers and no process group yet.
            DeadlineError: Rank 0 did not open it.
        """
        if self._facts is not None:
            self._require_open()
            return self
        self._require_same_process()
        board = self._board = self._join()
        try:
            facts = self._open_here(board)
        except BaseException as error:
            self._board = None
            leave_unopened(board, error)
            raise
        self._facts = facts
        if self._cached is not None:
            self._cached.begin(facts.session.run_id)
        self._uploader = Uploader(self.store, board, self.config, cached=self._cached)
        watch(self._unsettled, is_fatal=self.config.on_save_error == "raise")
        return self

    def close(self, *, is_well: bool = True, value: Any = None) -> None:
        """Wait for what is on its way, and leave the run. Closing twice is no error.

        Args:
            is_well: Whether the training ended well here. If it did on all ranks, the run counts
                as finished.
            value: What the training returned; that of rank 0 is kept with a finished run.

        Raises:
            CheckpointError: A report failed that nobody was told about yet.
            SaveFailedError: With ``on_save_error="warn"``: the newest checkpoint failed, and none
                comes after it.
        """
        if self._facts is None or self._is_closed:
            return
        self._is_closed = True
        failure: BaseException | None = None
        try:
            self._settle_ended(wait=True)
            if is_well:
                self._require_newest()
        except BaseException as error:  # noqa: BLE001 - raised once the other ranks know
            failure = error
        try:
            self._leave(value, is_well=is_well and failure is None)
        finally:
            unwatch(self._unsettled)
            if self._cached is not None:
                self._cached.close()
            if failure is not None:
                raise failure

    def __enter__(self) -> Self:
        self.open()
        in_use.push(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        in_use.pop(self)
        if error is None:
            self.close()
        else:
            self.close_after(error)

    def close_after(self, error: BaseException) -> None:
        """Leave the run after an error, which is the one to see; what fails now is told beside it.

        Args:
            error: What ended the training.
        """
        try:
            self.close(is_well=False)
        except Exception as second:  # noqa: BLE001 - told beside the error that matters
            _log.error("While ending after %s: %s", type(error).__name__, second)
            if hasattr(error, "add_note"):
                error.add_note(f"milepost: {second}")

    # -- reporting -----------------------------------------------------------------------------

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        *,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: UploadFn | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> PendingSave[Checkpoint] | None:
        """Report metrics, and perhaps a checkpoint; see :func:`milepost.report`."""
        self._require_open()
        mode = CheckpointUploadMode(checkpoint_upload_mode)
        with self._lock:
            earlier = self._earlier_error(wait=checkpoint is not None)
            # From here on the report counts, also if it fails: ranks that have nothing to complain
            # of go on with the next one, and the numbers must stay alike.
            self._count += 1
            number = self._count
            plain: dict[str, Any] | None = None
            offer: dict[str, Any] | None = None
            work: Upload | None = None
            try:
                plain = plain_metrics(metrics)
                flatten(plain)
                if earlier is not None:
                    raise earlier  # noqa: TRY301 - told to the leader below
                _check_options(checkpoint, mode, checkpoint_upload_fn)
                asked = asked_with(validation)
                if asked is not None:
                    self._check_validation(checkpoint)
                if checkpoint is not None:
                    assert self._uploader is not None
                    delete = delete_local_checkpoint_after_upload
                    work = self._uploader.prepare(
                        number,
                        checkpoint,
                        is_uploaded=mode is CheckpointUploadMode.NO_UPLOAD,
                        function=checkpoint_upload_fn,
                        delete=mode is CheckpointUploadMode.ASYNC if delete is None else delete,
                    )
                    offer = {**work.offer, "name": checkpoint_dir_name, "validation": asked}
                self._tell(number, metrics=plain, offer=offer)
            except BaseException as error:
                self._tell(number, metrics=plain, error=error)
                if earlier is None or error is earlier:
                    raise
                raise error from earlier
        beat()
        if work is None:
            return None
        return self._begin(work, checkpoint_dir_name or f"report {number}", mode)

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint; see :func:`milepost.get_checkpoint`."""
        self._require_open()
        if self._newest[0] != self._count:
            self._newest = (self._count, self._ask(None))
        name = self._newest[1]
        return None if name is None else Checkpoint(self._source, name, state=State.COMMITTED)

    def get_all_reported_checkpoints(
        self,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """Return what was reported; see :func:`milepost.get_all_reported_checkpoints`."""
        self._require_open()
        mode = CheckpointConsistencyMode(consistency_mode)
        self._ask(timeout_s, is_validated=mode is CheckpointConsistencyMode.VALIDATED)
        return reported_checkpoints(self.store, scan(self.store))

    def result(self) -> Result:
        """Return the run as it is now."""
        return Result.from_store(self.store, config=self.config)

    # -- inside --------------------------------------------------------------------------------

    def _join(self) -> Board:
        """Find the other ranks."""
        if self._meet is not None:
            context = ranks_here("")
            if context.world_size == 1:
                return LocalBoard()
            from ..ranks.server import ServerBoard, meet_at

            server = meet_at(*self._meet, rank=context.world_rank)
            return ServerBoard(server, context.world_rank, context.world_size, "reports")
        world_size = int(os.environ.get("WORLD_SIZE", "1") or "1")
        if world_size == 1 and "torch" not in sys.modules:
            return LocalBoard()  # there can be no process group
        from ..ranks.team import StoreTeam, join_team

        team = join_team()
        return team.board("reports") if isinstance(team, StoreTeam) else LocalBoard()

    def _open_here(self, board: Board) -> RunFacts:
        if board.rank != 0:
            return see_opened(
                self.store, board, timeout_s=max(self.config.report_timeout_s, _OPEN_S)
            )
        if self._if_finished == "error":
            refuse_finished(self.store)
        self._leader = Leader(self.store, board, self.config, validation=self._validation)
        return self._leader.open(self._options)

    def _leave(self, value: Any, *, is_well: bool) -> None:
        board = self._board
        assert board is not None
        try:
            leave(board, is_well=is_well)
            if self._leader is not None:
                self._leader.close(value, is_well=is_well)
        finally:
            board.close()

    def _tell(
        self,
        number: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        offer: Mapping[str, Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        board = self._board
        assert board is not None
        message: dict[str, Any] = {"kind": "report", "rank": board.rank, "n": number}
        if board.rank == 0 and metrics is not None:
            message["metrics"] = metrics
        if offer is not None:
            message["offer"] = offer
        if error is not None:
            outcome = Outcome.of_error(board.rank, f"make report {number}", error)
            message["error"] = outcome.to_bytes()
        board.send(message)

    def _begin(
        self, work: Upload, name: str, mode: CheckpointUploadMode
    ) -> PendingSave[Checkpoint]:
        pending: PendingSave[Checkpoint] = PendingSave(name)
        self._unsettled.append(pending)
        if mode is CheckpointUploadMode.ASYNC:
            try:
                threading.Thread(
                    target=self._carry_out, args=(work, pending), name="milepost-report"
                ).start()
            except BaseException as error:
                pending.was_reported = True  # by the error itself
                pending.fail(error)  # or whoever waits for it would wait for ever
                self._tell(work.number, error=error)  # and the other ranks for its files
                raise
            return pending
        self._carry_out(work, pending)
        if isinstance(pending.unreported_error, Exception):
            self._settle_ended()
        elif pending.has_failed:
            pending.wait()  # an interrupt
        return pending

    def _carry_out(self, work: Upload, pending: PendingSave[Checkpoint]) -> None:
        assert self._uploader is not None
        try:
            checkpoint = self._uploader.carry_out(work)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            pending.fail(error)
        else:
            pending.name = checkpoint.name
            pending.succeed(checkpoint)

    def _earlier_error(self, *, wait: bool) -> Exception | None:
        """Return what is to be raised about reports before this one, if anything."""
        try:
            self._settle_ended(wait=wait)
        except Exception as error:  # noqa: BLE001 - raised by the report that is being made
            return error
        return None

    def _settle_ended(self, *, wait: bool = False) -> None:
        """Act on uploads that have ended, as ``on_save_error`` says.

        Raises:
            CheckpointError: With ``raise``: the error of the first one that failed.
            SaveFailedError: With ``warn``: too many in a row failed.
        """
        if wait:
            for pending in list(self._unsettled):
                pending.check_done(2 * self.config.upload_timeout_s)
        while self._unsettled and self._unsettled[0].done():
            pending = self._unsettled.pop(0)
            error = pending.unreported_error
            if error is None:
                self._note_end(pending)
                continue
            pending.exception()
            self._num_failed += 1
            self._only_warned = None
            if self.config.on_save_error == "raise" or isinstance(error, FencedError):
                raise error
            _log.warning("The checkpoint of %s was not committed: %s", pending.name, error)
            self._only_warned = error
            if self._num_failed > self.config.max_failed_saves:
                self._only_warned = None
                raise SaveFailedError(
                    f"{self._num_failed} reports in a row failed; the last one was {pending.name}.",
                    safe="Checkpoints that were committed before are intact.",
                    hint=f"The place is {self.store.url}.",
                ) from error

    def _note_end(self, pending: PendingSave[Checkpoint]) -> None:
        """Take note of a report that needs no word, and say so where earlier ones did."""
        if pending.has_failed:
            return  # told to whoever waited for it
        if self._only_warned is not None:
            _log.warning("Reports succeed again; %d in a row had failed.", self._num_failed)
        self._num_failed, self._only_warned = 0, None

    def _require_newest(self) -> None:
        """Refuse to end well without the newest checkpoint: there is no training to go on with."""
        if self._only_warned is not None:
            raise SaveFailedError(
                "The training ends and its newest checkpoint is not committed.",
                safe="Checkpoints that were committed before are intact.",
                hint=f"The place is {self.store.url}. Start again from the newest checkpoint.",
            ) from self._only_warned

    def _ask(self, timeout_s: float | None, *, is_validated: bool = False) -> str | None:
        """Return the newest checkpoint once it is known what came of this rank's reports."""
        assert self._facts is not None
        if self._count == 0 and not is_validated:
            return self._facts.resumed_from
        board = self._board
        assert board is not None
        if timeout_s is None:
            timeout_s = self.config.report_timeout_s + self.config.upload_timeout_s
            timeout_s += self.config.validation_timeout_s if is_validated else 0.0
        self._num_asked += 1
        key = f"answer/{board.rank}/{self._num_asked}"
        message = {"kind": "ask", "rank": board.rank, "key": key, "up_to": self._count}
        board.send({**message, "timeout_s": timeout_s, "is_validated": is_validated})
        try:
            answer = board.read(
                key, task="What came of the reports so far", timeout_s=timeout_s + _MARGIN_S
            )
        finally:
            board.forget(key)
        name: str | None = answer["name"]
        return name

    def _check_validation(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            raise UsageError("There is no checkpoint to validate.", hint="Report it with one.")
        if self._validation is None:
            raise UsageError(
                "There is nothing to validate with.",
                hint="Pass a ValidationConfig to Reports or launch, as validation=.",
            )

    def _require_open(self) -> None:
        self._require_same_process()
        if not self.is_open:
            raise UsageError(
                "The run is not open.", hint="Use Reports in a with block, or call open()."
            )

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "A forked child of the process that opened the run cannot report to it.",
                safe="Nothing was written.",
                hint="Report from the process that opened the run.",
            )


def _absolute(folder: Place | Store) -> Place | Store:
    if isinstance(folder, Store):
        return folder
    text = os.fspath(folder)
    return text if is_address(text) else folder_of(text)


def _check_options(
    checkpoint: Checkpoint | None,
    mode: CheckpointUploadMode,
    function: UploadFn | None,
) -> None:
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise UsageError(
            f"checkpoint is a {type(checkpoint).__qualname__}.",
            hint="Use Checkpoint.from_directory(folder).",
        )
    if function is not None and mode is CheckpointUploadMode.NO_UPLOAD:
        raise UsageError(
            "With NO_UPLOAD nothing is uploaded, and checkpoint_upload_fn would not be called.",
            hint="Leave out one of the two.",
        )


in_use: Stack[Reports] = Stack()
"""What this process reports to."""
