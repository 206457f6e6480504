"""The leader's side of reports: a thread that hears the ranks and settles report by report.

Each rank numbers its reports. For report n every rank says that it has come to it, with files or
without. A report without files on any rank is over with that: nobody waits for anybody. If any rank
has files, report n goes through these phases, one report at a time, in the order of the numbers:

    phase     it ends when                        posted          a stop leaves
    meeting   every rank has come to report n     -               nothing
    placing   the users' upload functions say     go/n: a name    the user's files, not claimed
              where they put the files
    writing   every rank with files has written   go/n: a claim   an attempt, swept by the next
              and checksummed its own                             session; adopted files stay
    -         the manifest is published           settled/n       the checkpoint

"placing" is there only for uploads by a function of the user's, and then the claim is posted under
``share/n``. Whatever goes wrong in any phase, on any rank, ends the report on every rank with one
error, posted under all its keys; so does a deadline, which names the ranks that were waited for and
how many reports each has made. A later report is not touched by that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from ..errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    MismatchError,
    RankFailedError,
)
from ..format.manifest import FileEntry, Manifest
from ..ranks.board import Board
from ..ranks.outcome import Outcome
from ..runs.publish import Claim
from .commit import Committer
from .config import CheckpointConfig
from .history import History
from .lateness import ended_early, listed, not_known, summary, too_late
from .sharing import merged, share_out
from .validating import Validator

__all__ = ["Coordinator"]

_log = logging.getLogger("milepost")

_KEPT_ANSWERS = 64
_KEPT_METRICS = 100_000
_LEAVE_S = 10.0


@dataclass(slots=True)
class _Report:
    """A report that is not settled.

    Attributes:
        number: Its number.
        offers: What each rank with files has, by rank.
        errors: Why a rank has nothing to give.
        opened_s: When the first rank came to it.
        phase: See the module.
        deadline_s: When the phase must be over.
        waiting: The ranks that the phase waits for.
        held: The claim.
        places: Where the users' functions put the files, by rank.
        files: What was written, by rank.
        started_s: When the ranks were told to write.
    """

    number: int
    opened_s: float
    offers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: list[Outcome] = field(default_factory=list)
    phase: str = "meeting"
    deadline_s: float = 0.0
    waiting: set[int] = field(default_factory=set)
    held: Claim | None = None
    places: dict[int, str] = field(default_factory=dict)
    files: dict[int, list[FileEntry]] = field(default_factory=dict)
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Ask:
    """A rank that wants to know what was committed up to one of its reports."""

    key: str
    up_to: int
    is_validated: bool
    deadline_s: float
    timeout_s: float


class Coordinator:
    """Settles the reports of a run.

    Args:
        board: Where the ranks are heard and answered.
        committer: Does the work on the store.
        history: Keeps the metrics.
        config: How long things may take.
        base_number: Number of the last report of the sessions before.
        clock: Returns seconds that never go back.

    Attributes:
        validator: Takes on validations, if any can be asked for.
        error: What broke the coordinator itself, if anything did.
    """

    def __init__(
        self,
        board: Board,
        committer: Committer,
        history: History,
        *,
        config: CheckpointConfig,
        base_number: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._committer = committer
        self._history = history
        self._config = config
        self._base = base_number
        self._clock = clock
        self._counts = dict.fromkeys(range(board.world_size), 0)
        self._ended: dict[int, bool] = {}
        self._metrics: dict[int, Mapping[str, Any]] = {}
        self._open: dict[int, _Report] = {}
        self._settled: dict[int, None] = {}  # in the order in which it came to that
        self._settled_s = 0.0
        self._asks: list[_Ask] = []
        self._leave_by_s: float | None = None
        self._fenced: FencedError | None = None
        self.validator: Validator | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="milepost-coordinator", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every rank has left, or was given up.

        Raises:
            DeadlineError: It is still at work.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"The reports of the run were not settled within {timeout_s:g} s.",
                safe="What was committed counts.",
                hint="Look at the place of the run with: milepost doctor.",
            )

    @property
    def are_all_well(self) -> bool:
        """Return whether every rank has left, and none after an error."""
        return len(self._ended) == self._board.world_size and all(self._ended.values())

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                for message in self._board.receive(self._next_due_s()):
                    self._attempt(partial(self._take, message))
                self._attempt(self._advance)
        except BaseException as error:  # noqa: BLE001 - kept for whoever closes the run
            self.error = error
            _log.error("Reports can be settled no more: %s", error)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - told to every rank that waits, and kept
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Fail whatever is asked from now on: what this thread knows may be wrong."""
        if self.error is None:
            self.error = error
            _log.error("Reports can be settled no more: %s", error, exc_info=error)
        answers = [partial(self._fail, report, error) for report in self._open.values()]
        answers += [partial(self._board.post, ask.key, error=error) for ask in self._asks]
        self._asks = []
        for answer in answers:
            try:
                answer()
            except Exception as second:  # noqa: BLE001 - the others must be answered all the same
                _log.error("While failing what was asked: %s", second)

    def _is_over(self) -> bool:
        if len(self._ended) == self._board.world_size and not self._open:
            return True
        if self._leave_by_s is None or self._clock() < self._leave_by_s:
            return False
        if self._ended.get(0) and any(one.phase != "meeting" for one in self._open.values()):
            return False  # it has a deadline of its own
        missing = [rank for rank in self._counts if rank not in self._ended]
        _log.warning("Left the run before these ranks did: %s", listed(missing))
        return True

    def _next_due_s(self) -> float | None:
        """Return how long there is nothing to do but listen; ``None``: for as long as it takes."""
        dues = [ask.deadline_s for ask in self._asks]
        head = self._head()
        if head is not None:
            dues.append(self._deadline_s(head))
        if self._leave_by_s is not None and self._leave_by_s > self._clock():
            dues.append(self._leave_by_s)
        return max(0.001, min(dues) - self._clock()) if dues else None

    def _head(self) -> _Report | None:
        """Return the report to settle next."""
        at_work = [one for one in self._open.values() if one.phase != "meeting"]
        return at_work[0] if at_work else self._open.get(min(self._open, default=0))

    def _deadline_s(self, report: _Report) -> float:
        if report.phase != "meeting":
            return report.deadline_s
        # A rank that was busy with the report before cannot have come earlier.
        return max(report.opened_s, self._settled_s) + self._config.report_timeout_s

    # -- what ranks say ------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        kind, rank = message["kind"], message["rank"]
        if kind == "report":
            self._take_report(rank, message)
        elif kind == "wrote":
            self._take_work(rank, message)
        elif kind == "ask":
            timeout_s = message["timeout_s"]
            deadline_s = self._clock() + timeout_s
            ask = _Ask(
                message["key"], message["up_to"], message["is_validated"], deadline_s, timeout_s
            )
            self._asks.append(ask)
        elif kind == "verdict":
            self._prune()
        elif kind == "validated" and message["error"] is not None:
            self._board.post(message["key"], error=Outcome.from_bytes(message["error"]).exception())
        elif kind == "validated":
            self._board.post(message["key"], {"name": self._committer.newest})
        elif kind == "end":
            self._ended[rank] = message["is_well"]
            if rank == 0:
                is_well = message["is_well"]
                wait_s = self._config.report_timeout_s if is_well else _LEAVE_S
                self._leave_by_s = self._clock() + wait_s

    def _take_report(self, rank: int, message: Mapping[str, Any]) -> None:
        number = message["n"]
        self._counts[rank] = number
        # First, so that whoever waits for it is answered also if its metrics cannot be kept.
        self._take_offer(rank, number, message)
        if rank == 0 and message.get("metrics") is not None:
            self._metrics[number] = message["metrics"]
            self._history.add(self._base + number, message["metrics"])
            if len(self._metrics) > _KEPT_METRICS:
                self._metrics.pop(next(iter(self._metrics)))

    def _take_offer(self, rank: int, number: int, message: Mapping[str, Any]) -> None:
        offer, error = message.get("offer"), message.get("error")
        if (offer is None and error is None) or number in self._settled:
            return  # or it came too late: what became of it is posted
        if number not in self._open:
            self._open[number] = _Report(number, self._clock())
        report = self._open[number]
        if error is not None:
            report.errors.append(Outcome.from_bytes(error))
        elif offer is not None:
            report.offers[rank] = offer

    def _take_work(self, rank: int, message: Mapping[str, Any]) -> None:
        report = self._open.get(message["n"])
        if report is None or rank not in report.waiting:
            return  # it was given up meanwhile
        report.waiting.discard(rank)
        if message.get("error") is not None:
            report.errors.append(Outcome.from_bytes(message["error"]))
        elif report.phase == "placing":
            report.places[rank] = message["place"]
        else:
            where = f"rank {rank}"
            report.files[rank] = [FileEntry.from_json(one, where=where) for one in message["files"]]

    # -- what becomes of it --------------------------------------------------------------------

    def _advance(self) -> None:
        """Go on with the reports as far as what is known allows."""
        while True:
            for failed in [one for one in self._open.values() if one.errors]:
                self._fail(
                    failed, summary(failed.number, failed.errors, world_size=self._board.world_size)
                )
            report = self._head()
            if report is None or not self._step(report):
                break
        known = min(self._counts.values())
        for number in [*takewhile(lambda one: one <= known, self._metrics)]:
            if number not in self._open:
                del self._metrics[number]
        self._answer(known)

    def _step(self, report: _Report) -> bool:
        """Take a report one phase further; return whether there is more to do."""
        if report.phase == "meeting":
            missing = [rank for rank, count in self._counts.items() if count < report.number]
        else:
            missing = sorted(report.waiting)
        gone = [rank for rank in missing if rank in self._ended]
        try:
            if gone:
                raise ended_early(report.number, gone, self._counts)
            if missing and self._clock() >= self._deadline_s(report):
                raise self._too_late(report, missing)
            if missing:
                return False
            self._next_phase(report)
        except (CheckpointError, OSError) as error:
            self._fail(report, error)
        return True

    def _next_phase(self, report: _Report) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self.error is not None:
            raise self.error
        modes = {offer["mode"] for offer in report.offers.values()}
        if len(modes) > 1:
            raise MismatchError(
                f"In report {report.number} the ranks get their files to the run in different "
                f"ways: {', '.join(sorted(modes))}.",
                safe="Nothing was committed; earlier checkpoints are intact.",
                hint="Use the same checkpoint_upload_mode and checkpoint_upload_fn on every rank.",
            )
        (mode,) = modes
        if report.phase == "writing":
            self._commit(report)
        elif mode == "upload":
            self._begin_upload(report)
        elif mode == "function" and report.phase == "meeting":
            name = self._committer.free_name(self._name(report))
            self._begin(report, "placing")
            self._board.post(f"go/{report.number}", {"name": name})
        else:
            self._begin_adopting(report, mode)

    def _begin(self, report: _Report, phase: str) -> None:
        now_s = self._clock()
        report.phase, report.waiting = phase, set(report.offers)
        report.deadline_s = now_s + self._config.upload_timeout_s
        report.started_s = report.started_s or now_s

    def _begin_upload(self, report: _Report) -> None:
        skip = share_out(report.offers)
        held = report.held = self._committer.claim(self._name(report))
        self._begin(report, "writing")
        self._board.post(f"go/{report.number}", {"claim": asdict(held), "skip": skip})

    def _begin_adopting(self, report: _Report, mode: str) -> None:
        places = report.places or {r: offer["place"] for r, offer in report.offers.items()}
        if len(set(places.values())) > 1:
            listed = ", ".join(f"{place} on rank {rank}" for rank, place in sorted(places.items()))
            raise MismatchError(
                f"In report {report.number} the ranks name different places: {listed}.",
                safe="Nothing was committed, and nothing was deleted.",
                hint="All ranks with files write them into one folder.",
            )
        report.held, paths = self._committer.adopt(next(iter(places.values())))
        ranks = sorted(report.offers)
        shares = [[rank, paths[n :: len(ranks)]] for n, rank in enumerate(ranks)]
        self._begin(report, "writing")
        key = "share" if mode == "function" else "go"
        answer = {"claim": asdict(report.held), "shares": shares}
        self._board.post(f"{key}/{report.number}", answer)

    def _commit(self, report: _Report) -> None:
        assert report.held is not None
        number = report.number
        if number not in self._metrics:
            raise RankFailedError(
                f"The metrics of report {number} are not known any more: rank 0 is more than "
                f"{_KEPT_METRICS:,} reports ahead.",
                hint="Every rank must report equally often.",
            )
        seconds = self._clock() - report.started_s
        # The lowest rank with files says whether, as it does for the name.
        validation = report.offers[min(report.offers)].get("validation")
        manifest = self._committer.publish(
            report.held,
            merged(report.files),
            number=number,
            metrics=self._metrics[number],
            stats={"write_s": seconds},
            validation=validation,
        )
        report.held = None  # whatever comes now, there is nothing to abandon
        if validation is not None and self.validator is not None:
            self._validate(manifest, validation, self.validator)
        try:
            self._committer.after_commit(manifest)
        except FencedError as error:
            self._fenced = error  # the commit itself was acknowledged before
        self._settle(report)
        self._board.post(f"settled/{number}", {"name": manifest.name})

    def _validate(self, manifest: Manifest, asked: Mapping[str, Any], validator: Validator) -> None:
        try:
            validator.submit(manifest.name, manifest.write_id, asked)
        except CheckpointError as error:
            # The checkpoint itself is committed, and says what it was to be asked.
            _log.warning("%s will be validated at the next start: %s", manifest.name, error)

    def _prune(self) -> None:
        """Let retention act on a verdict."""
        try:
            self._committer.prune()
        except FencedError as error:
            self._fenced = error

    def _settle(self, report: _Report) -> None:
        del self._open[report.number]
        self._settled[report.number] = None
        self._settled_s = self._clock()
        while len(self._settled) > _KEPT_ANSWERS:
            old = next(iter(self._settled))
            if any(n < old for rank, n in self._counts.items() if rank not in self._ended):
                break  # this rank has yet to come to it, and must not open it again
            del self._settled[old]
            for key in ("go", "share", "settled"):
                self._board.forget(f"{key}/{old}")

    def _fail(self, report: _Report, error: BaseException) -> None:
        if isinstance(error, FencedError):
            self._fenced = error
        try:
            if report.held is not None:
                self._committer.abandon(report.held, error)
        finally:
            self._settle(report)
            for key in ("go", "share", "settled"):
                self._board.post(f"{key}/{report.number}", error=error)

    def _answer(self, known: int) -> None:
        """Tell ranks that asked what the newest checkpoint is, once that is certain."""
        waiting = []
        for ask in self._asks:
            unsettled = [number for number in self._open if number <= ask.up_to]
            if ask.up_to <= known and not unsettled:
                self._tell_newest(ask)
            elif self._clock() >= ask.deadline_s:
                late = [rank for rank, count in self._counts.items() if count < ask.up_to]
                error = not_known(ask.up_to, late, self._counts, timeout_s=ask.timeout_s)
                self._board.post(ask.key, error=error)
            else:
                waiting.append(ask)
        self._asks = waiting

    def _tell_newest(self, ask: _Ask) -> None:
        answer = {"name": self._committer.newest}
        if not ask.is_validated or self.validator is None or self.validator.is_idle:
            self._board.post(ask.key, answer)
            return

        def then(error: CheckpointError | None) -> None:
            # Back through this thread, which first acts on the verdicts that came before.
            told = None if error is None else Outcome.of_error(0, "validate", error).to_bytes()
            self._board.send({"kind": "validated", "rank": 0, "key": ask.key, "error": told})

        left_s = max(0.001, ask.deadline_s - self._clock())
        self.validator.call_when_idle(then, timeout_s=left_s)

    def _name(self, report: _Report) -> str:
        names = [offer.get("name") for _, offer in sorted(report.offers.items())]
        name = next((one for one in names if one is not None), None)
        return self._committer.default_name(report.number) if name is None else str(name)

    def _too_late(self, report: _Report, missing: Collection[int]) -> DeadlineError:
        if report.phase == "meeting":
            what, timeout_s = "come to", self._config.report_timeout_s
        else:
            what, timeout_s = "write its files for", self._config.upload_timeout_s
        return too_late(report.number, missing, self._counts, what=what, timeout_s=timeout_s)
