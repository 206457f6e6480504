"""What a team of ranks can do, and the team of one.

Free of torch: a process that is alone talks to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

__all__ = ["Deadlines", "RankCheck", "Solo", "Team"]

RankCheck = Literal["sample", "full", "none"]
"""How tensors are compared that several ranks hold: by samples, by all their bytes, not at all."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long ranks wait for each other, in seconds.

    Attributes:
        meet_s: For a rank that has not come to the same save or restore yet.
        write_s: For a rank that reads or writes its share.
    """

    meet_s: float = 45.0
    write_s: float = 1800.0


class Team(Protocol):
    """The ranks that write one run."""

    rank: int
    world_size: int

    @property
    def host(self) -> str:
        """Return the name of the leader's machine, as the other ranks know it."""

    def lead(self, task: str, work: Callable[[], T], *, timeout_s: float) -> T:
        """Have the leader do something; return its result, or raise its error, on every rank."""

    def collect(self, task: str, work: Callable[[], T], *, timeout_s: float) -> list[T]:
        """Do something on every rank; return every result by rank, or raise for those that failed.

        Raises:
            RankFailedError: Some ranks failed, the same error on every rank.
            DeadlineError: Some ranks did not come within ``timeout_s`` seconds.
        """

    def gather(
        self,
        task: str,
        work: Callable[[], T],
        conclude: Callable[[list[T]], R],
        *,
        timeout_s: float,
    ) -> R:
        """Do something on every rank, and have the leader make one answer of the results.

        It is one way there and one back, and what comes back is as large as the answer.

        Args:
            task: What is done, for messages.
            work: Done on every rank.
            conclude: Called on the leader with the results by rank.
            timeout_s: How long the leader waits for the last rank. What it does with the results
                may take as long again.

        Raises:
            RankFailedError: Some ranks failed, the same error on every rank.
            DeadlineError: Some ranks did not come within ``timeout_s`` seconds.
        """

    def for_thread(self, name: str) -> Team:
        """Return a team of the same ranks whose tasks are counted apart, for another thread."""

    def give_up(self, error: BaseException) -> None:
        """Let the next task fail with an error on all ranks, whatever task it is. Never waits.

        Of a task that only the leader does, the others cannot make a failure.

        Args:
            error: Why this rank takes part in nothing any more.
        """

    def stop_waiting(self, error: BaseException) -> None:
        """Let the task fail in which the leader waits for other ranks, in another thread.

        Args:
            error: Why nobody is waited for any more.
        """

    def leave(self, *, timeout_s: float) -> None:
        """Leave for good. The leader stays until the others have left, or the time is over."""


class Solo:
    """A team of one."""

    rank = 0
    world_size = 1
    host = "localhost"

    def lead(self, task: str, work: Callable[[], T], *, timeout_s: float) -> T:
        """Do it."""
        del task, timeout_s
        return work()

    def collect(self, task: str, work: Callable[[], T], *, timeout_s: float) -> list[T]:
        """Do it."""
        del task, timeout_s
        return [work()]

    def gather(
        self,
        task: str,
        work: Callable[[], T],
        conclude: Callable[[list[T]], R],
        *,
        timeout_s: float,
    ) -> R:
        """Do it."""
        del task, timeout_s
        return conclude([work()])

    def for_thread(self, name: str) -> Solo:
        """Return itself."""
        del name
        return self

    def give_up(self, error: BaseException) -> None:
        """Do nothing."""
        del error

    def stop_waiting(self, error: BaseException) -> None:
        """Do nothing."""
        del error

    def leave(self, *, timeout_s: float) -> None:
        """Do nothing."""
        del timeout_s
