"""The team: the ranks that write one run together, and how they agree.

Three ways to agree, each with a deadline, and each safe to use in a background thread:

``lead``     the leader (rank 0) does something, and every rank gets its result.
``collect``  every rank does something, and every rank gets all results.
``gather``   every rank does something, the leader makes one answer of it, and every rank gets that.

An error on any rank comes out on every rank as the same summary, also where a rank does not come:
whoever waits for it says for whom. Every rank must ask for the same things in the same order; each
is known by its number and its task, and a rank that asks for another thing is told so.

The messages go through a key-value server of our own, which lives in the leader's process. A save
and the training use it at the same time, each thread through a connection of its own for that time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

if dist.is_available():
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _get_default_store

from ..errors import CheckpointError, DeadlineError, RankFailedError, UsageError
from .outcome import Outcome, raise_failures
from .server import JOIN_TIMEOUT_S, Server, ServerBoard, open_server
from .solo import Solo, Team

__all__ = ["Solo", "StoreTeam", "Team", "find_rank", "join_team", "num_ranks"]

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger("milepost")

_KEPT_TASKS = 64
_FOLLOWER_MARGIN_S = 10.0
_LOST_WAIT_S = 2.0
_UNREACHABLE = (RankFailedError, DeadlineError)
_num_joined = 0


class StoreTeam:
    """A team that talks through a key-value server.

    Args:
        server: The server.
        rank: This rank.
        world_size: The number of ranks.
        name: Prefix of all keys.
    """

    def __init__(self, server: Server, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._server = server
        self._name = name
        self._count = 0
        self._posted: deque[str] = deque()
        self._has_left = False
        self._awaited: str | None = None

    @property
    def host(self) -> str:
        """Return the name of the leader's machine; see :class:`Team`."""
        return self._server.host

    def for_thread(self, name: str) -> StoreTeam:
        """Return a team of the same ranks whose tasks are counted apart."""
        return StoreTeam(self._server, self.rank, self.world_size, f"{self._name}/{name}")

    def board(self, name: str) -> ServerBoard:
        """Return a board of the same ranks; closing it closes the team's server."""
        return ServerBoard(self._server, self.rank, self.world_size, f"{self._name}/{name}")

    def lead(self, task: str, work: Callable[[], T], *, timeout_s: float) -> T:
        """Have the leader do something; see :class:`Team`."""
        key = self._next_key()
        if self.rank != 0:
            outcome = self._wait_for_leader(key, task, timeout_s)
            if outcome.is_failure:
                raise outcome.exception()
            return outcome.value  # type: ignore[no-any-return]
        try:
            value = work()
            answer = Outcome(0, value, task=task).to_bytes()
        except BaseException as error:
            self._post(key, Outcome.of_error(0, task, error).to_bytes())
            raise
        self._post(key, answer)
        return value

    def collect(self, task: str, work: Callable[[], T], *, timeout_s: float) -> list[T]:
        """Do something on every rank; see :class:`Team`."""
        return self._join(task, work, lambda results: results, timeout_s, _FOLLOWER_MARGIN_S)

    def gather(
        self,
        task: str,
        work: Callable[[], T],
        conclude: Callable[[list[T]], R],
        *,
        timeout_s: float,
    ) -> R:
        """Do something on every rank, and conclude on the leader; see :class:`Team`."""
        return self._join(task, work, conclude, timeout_s, timeout_s + _FOLLOWER_MARGIN_S)

    def _join(
        self,
        task: str,
        work: Callable[[], T],
        conclude: Callable[[list[T]], R],
        timeout_s: float,
        margin_s: float,
    ) -> R:
        """Do the work; on the leader conclude and answer, elsewhere wait for the answer."""
        key = self._next_key()
        own: BaseException | None = None
        try:
            outcome = Outcome(self.rank, work(), task=task)
            said = outcome.to_bytes()
        except BaseException as error:  # noqa: BLE001 - told to every rank, and raised on each
            own, outcome = error, Outcome.of_error(self.rank, task, error)
            said = outcome.to_bytes()
        if self.rank != 0:
            self._post(f"{key}/{self.rank}", said)
            answer = self._wait_for_leader(key, task, timeout_s + margin_s)
            if answer.is_failure:
                raise _as_told(answer.exception(), own)
            return answer.value  # type: ignore[no-any-return]
        try:
            answers = self._gather(key, task, outcome, timeout_s, own)
            raise_failures(task, answers)
            value = conclude([one.value for one in answers])
            concluded = Outcome(0, value, task=task).to_bytes()
        except BaseException as error:  # noqa: BLE001 - told to every rank, and raised on each
            self._post(key, Outcome.of_error(0, task, error).to_bytes())
            raise _as_told(error, own)  # noqa: B904 - it has its cause
        self._post(key, concluded)
        return value

    def note(self, key: str, text: str) -> None:
        """Write something down for the others to find."""
        self._server.set(f"{self._name}/note/{key}", text.encode("ascii"))

    def notes(self, keys: Sequence[str]) -> list[str] | None:
        """Return what was written down under some keys, or ``None`` if any is not there yet."""
        places = [f"{self._name}/note/{key}" for key in keys]
        if not self._server.has(places):
            return None
        return [self._server.get(place, JOIN_TIMEOUT_S).decode("ascii") for place in places]

    def note_first(self, key: str, text: str) -> str:
        """Write something down unless another rank was first; return what stands there."""
        place = f"{self._name}/note/{key}"
        return self._server.set_first(place, text.encode("ascii")).decode("ascii")

    def wait_for_note(self, key: str, *, timeout_s: float) -> str:
        """Return what is written down under a key, as soon as it is.

        Raises:
            DeadlineError: Nothing was, within ``timeout_s`` seconds.
            RankFailedError: The leader is gone.
        """
        return self._server.get(f"{self._name}/note/{key}", timeout_s).decode("ascii")

    def give_up(self, error: BaseException) -> None:
        """Let the next task fail with an error on all ranks; see :class:`Team`."""
        key = self._next_key()
        place = key if self.rank == 0 else f"{key}/{self.rank}"
        self._post(place, Outcome.of_error(self.rank, "", error).to_bytes())

    def stop_waiting(self, error: BaseException) -> None:
        """End a wait of the leader, in another thread; see :class:`Team`."""
        key = self._awaited
        if key is None:
            return
        for rank in range(1, self.world_size):
            gone = DeadlineError(f"Rank {rank} did not answer any more after {error!r}.", rank=rank)
            answer = Outcome.of_error(rank, "", gone)
            self._server.put_first(f"{key}/{rank}", answer.to_bytes())

    def leave(self, *, timeout_s: float) -> None:
        """Leave for good; see :class:`Team`."""
        if self._has_left:
            return
        self._has_left = True
        deadline_s = time.monotonic() + timeout_s
        try:
            if self.rank != 0:
                self._server.set(f"{self._name}/left/{self.rank}", b"")
            else:
                for rank in range(1, self.world_size):
                    self._server.get(f"{self._name}/left/{rank}", deadline_s - time.monotonic())
        except CheckpointError as error:
            _log.info("Left the other ranks without a goodbye: %s", error)
        self._server.close()

    def _gather(
        self, key: str, task: str, own: Outcome, timeout_s: float, error: BaseException | None
    ) -> list[Outcome]:
        deadline_s = time.monotonic() + timeout_s
        # Whoever could not be reached in the work will hardly answer now.
        lost = error.facts.get("ranks", []) if isinstance(error, _UNREACHABLE) else []
        answers: list[bytes] = [own.to_bytes()]
        missing: list[int] = []
        self._awaited = key
        try:
            for rank in range(1, self.world_size):
                place = f"{key}/{rank}"
                left_s = deadline_s - time.monotonic()
                try:
                    left_s = min(left_s, _LOST_WAIT_S) if rank in lost else left_s
                    answers.append(self._server.take(place, left_s))
                    self._server.forget(place)
                except DeadlineError:
                    missing.append(rank)
        finally:
            self._awaited = None
        if missing and error is not None and set(missing) <= set(lost):
            raise error
        if missing:
            raise _missing(task, missing, timeout_s, own)
        outcomes = [Outcome.from_bytes(data) for data in answers]
        others = {one.rank: one.task for one in outcomes if one.task not in (task, "")}
        if others:
            raise _apart(task, others)
        return outcomes

    def _wait_for_leader(self, key: str, task: str, timeout_s: float) -> Outcome:
        try:
            outcome = Outcome.from_bytes(self._server.take(key, timeout_s))
        except DeadlineError:
            raise _missing(task, [0], timeout_s, None) from None
        if outcome.task not in (task, ""):
            raise _apart(task, {0: outcome.task})
        return outcome

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._name}/{self._count}"

    def _post(self, key: str, data: bytes) -> None:
        """Post a message, and take back one that every rank has read long ago."""
        self._server.put(key, data)
        self._posted.append(key)
        if len(self._posted) > _KEPT_TASKS:
            self._server.forget(self._posted.popleft())


def _as_told(error: BaseException, own: BaseException | None) -> BaseException:
    """Return the error to raise on this rank, with its own error as the cause.

    Where they are of one kind it is its own: that has facts and a cause which were not sent. But
    that another rank could not be reached tells less than what that rank has told since.
    """
    if own is None or error is own:
        return error
    if type(own) is type(error) and not isinstance(own, RankFailedError):
        return own
    error.__cause__ = own
    return error


def _apart(task: str, others: dict[int, str]) -> RankFailedError:
    rank, other = next(iter(others.items()))
    return RankFailedError(
        f"The ranks do not do the same: here it is to {task}, and on rank {rank} to {other}.",
        safe="Nothing was committed by this attempt; earlier checkpoints are intact.",
        hint="Every rank must save and restore at the same points, in the same order.",
        ranks=list(others),
    )


def _missing(task: str, ranks: list[int], timeout_s: float, own: Outcome | None) -> DeadlineError:
    named = ", ".join(map(str, ranks))
    also = f" Rank 0 itself failed: {own.what}" if own is not None and own.is_failure else ""
    safe = "Nothing was committed by this attempt; earlier checkpoints are intact."
    if ranks == [0]:  # it may still be about to commit
        safe = "Earlier checkpoints are intact; whether this one was committed shows in the run."
    return DeadlineError(
        f"Rank {named} did not come within {timeout_s:g} s to {task}.{also}",
        safe=safe,
        hint="Every rank must save and restore at the same points; a rank that failed says so in "
        "its own log.",
        ranks=ranks,
        task=task,
    )


def num_ranks() -> int:
    """Return how many ranks the process group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and how many there are: 0 of 1 without a process group.

    Raises:
        UsageError: The environment says that there are several workers, and there is no process
            group.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    expected = int(os.environ.get("WORLD_SIZE", "1") or "1")
    if expected > 1:
        raise UsageError(
            f"This is one of {expected} workers (WORLD_SIZE), and they have no process group.",
            safe="Nothing was touched.",
            hint="Call torch.distributed.init_process_group() before the run is opened.",
        )
    return 0, 1


def join_team() -> Team:
    """Join the ranks of the process group, or be alone where there is none.

    Every rank must call it. The leader opens a server on a free port of its machine.

    Raises:
        UsageError: See :func:`find_rank`.
    """
    global _num_joined  # noqa: PLW0603 - as many times on every rank, so that it names the team
    rank, world_size = find_rank()
    if world_size == 1:
        return Solo()
    _num_joined += 1
    meeting = PrefixStore(f"milepost/{_num_joined}", _get_default_store())
    server: TCPStore | None = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR", "") or "127.0.0.1"
        server = open_server(host)
        meeting.set("address", json.dumps([host, server.port]))
    try:
        meeting.wait(["address"], timedelta(seconds=JOIN_TIMEOUT_S))
    except dist.DistStoreError as error:
        raise _missing("open the run", [0], JOIN_TIMEOUT_S, None) from error
    host, port = json.loads(meeting.get("address"))
    return StoreTeam(Server(host, port, server), rank, world_size, "team")
