"""When one rank fails, the others learn of it, and say so when they end.

A rank that fails writes down why, if it is the first. The others may be waiting for it in the
middle of a step, where nothing reaches them; they wake when its process ends, with an error that
only says that a connection was closed. A thread of each rank listens all the while, so that by then
the rank knows what happened first, even if the leader, whose process holds the notes, is gone too.
"""

from __future__ import annotations

import logging
import threading
import time

import torch.distributed as dist

from ..errors import CheckpointError, DeadlineError, NonFiniteLossError, Preempted, RankFailedError
from ..ranks.outcome import Outcome
from .group import Group
from .notes import attach_note

__all__ = ["Alarm"]

_log = logging.getLogger(__name__)

_LISTEN_S = 3600.0
_JOIN_S = 5.0
_ANSWER_S = 5.0


class Alarm:
    """Knows of the first failure on any rank.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._world_size = group.world_size
        self._notes = group.notes
        self._first: Outcome | None = None
        self._thread: threading.Thread | None = None
        self._count = 0

    def listen(self) -> None:
        """Begin to listen, at the start of ``fit``."""
        if self._notes is None:
            return
        self._count += 1
        # A daemon: it waits for the leader, who may never answer.
        self._thread = threading.Thread(
            target=self._wait, args=(self._bell(self._rank),), name="milepost-alarm", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        thread, self._thread = self._thread, None
        if thread is None or self._notes is None:
            return
        try:
            self._notes.note(self._bell(self._rank), "-")
        except CheckpointError as error:
            _log.info("The other ranks are gone: %s", error)
        thread.join(_JOIN_S)

    def report(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an error that ends the training, if it is the first.

        Args:
            error: What ended it here.

        Returns:
            What to raise: where the error is only what another rank's failure led to, that
            failure, the same on every rank.
        """
        if self._notes is None or isinstance(error, Preempted | NonFiniteLossError):
            return error
        first = self._find_first(error)
        if first is None or first.rank == self._rank:
            return error
        said = f"Rank {first.rank} failed first: {first.error}: {first.what}"
        if not _is_consequence(error):
            attach_note(error, said)
            return error
        failed = RankFailedError(
            f"{said}\n{first.trace}".strip(),
            safe="Nothing was committed since; earlier checkpoints are intact.",
            hint=first.hint or "Mend it and start all ranks again: with resume they go on.",
            ranks=[first.rank],
            errors={first.rank: first.error},
        )
        failed.__cause__ = error
        return failed

    def is_rank_gone(self, error: BaseException) -> bool:
        """Return whether some rank has died, once a failure was reported here.

        A rank whose thread has heard of the failure says so, whatever else it is doing.

        Args:
            error: Gets a note of the ranks that do not answer.
        """
        if self._notes is None or self._first is None:
            return False
        deadline_s = time.monotonic() + _ANSWER_S
        gone: list[int] = []
        for rank in range(self._world_size):
            try:
                left_s = deadline_s - time.monotonic()
                self._notes.wait_for_note(self._here(rank), timeout_s=left_s)
            except DeadlineError:
                gone.append(rank)
            except RankFailedError:
                gone = [0]
                break
        if gone:
            named = ", ".join(map(str, gone))
            attach_note(error, f"Rank {named} does not answer any more: did its process end?")
        return bool(gone)

    def _find_first(self, error: BaseException) -> Outcome | None:
        """Return the first failure, which is written down now if there was none."""
        if self._first is not None:
            return self._first
        assert self._notes is not None
        mine = Outcome.of_error(self._rank, "train", error)
        try:
            text = self._notes.note_first(f"failed/{self._count}", mine.to_bytes().decode("ascii"))
            self._first = Outcome.from_bytes(text.encode("ascii"))
            if self._first.rank == self._rank:
                for rank in range(self._world_size):
                    self._notes.note(self._bell(rank), text)
        except RankFailedError as gone:
            # The thread may have heard of it before the leader went.
            self._first = self._first or Outcome.of_error(0, "train", gone)
        return self._first

    def _wait(self, bell: str) -> None:
        assert self._notes is not None
        while True:
            try:
                text = self._notes.wait_for_note(bell, timeout_s=_LISTEN_S)
            except DeadlineError:
                continue
            except RankFailedError as gone:
                self._first = self._first or Outcome.of_error(0, "train", gone)
                return
            if text != "-":
                self._first = Outcome.from_bytes(text.encode("ascii"))
                self._say_here()
            return

    def _say_here(self) -> None:
        assert self._notes is not None
        try:
            self._notes.note(self._here(self._rank), "-")
        except RankFailedError as gone:
            _log.info("The leader went before it could be answered: %s", gone)

    def _here(self, rank: int) -> str:
        return f"here/{self._count}/{rank}"

    def _bell(self, rank: int) -> str:
        return f"bell/{self._count}/{rank}"


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error is one that the failure of another rank leads to.

    Torch raises a bare ``RuntimeError`` when a rank is gone in the middle of a collective.
    """
    return type(error) is RuntimeError or isinstance(
        error, dist.DistError | DeadlineError | RankFailedError
    )
