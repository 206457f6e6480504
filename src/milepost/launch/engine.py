"""What the recovery loop asks of whatever runs the workers, and what it hears from there.

The loop (``recovery.py``) decides whether there is another attempt; the watch over one attempt
(``attempt.py``) decides when it has failed, hangs, or has to be killed. Neither knows where the
workers run. An :class:`Engine` does: it says how many can be started, starts them as a
:class:`Group`, and puts what happens to them into a queue.

What workers write down (beats, commits, errors, logs) is found in the folder of the attempt, on the
machine of the launcher. An engine whose workers are elsewhere brings it there, and always before
the event that it belongs to.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias

__all__ = ["Asked", "Ended", "Engine", "Event", "Events", "Group", "Plan", "Told"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has ended.

    Attributes:
        attempt: Number of the attempt that it belonged to.
        rank: Its rank.
        code: Its exit code; negative for a signal, ``None`` if nobody saw it end.
        why: What is known if nobody saw it end.
    """

    attempt: int
    rank: int
    code: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's code has failed, or left with ``code``; its process may still be there."""

    attempt: int
    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The launcher has received a signal."""

    number: int


Event: TypeAlias = Ended | Told | Asked
Events: TypeAlias = "queue.SimpleQueue[Event]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The workers of one attempt.

    Attributes:
        number: Number of the attempt, from 1.
        num_workers: How many there are.
        arguments: Arguments of ``python -m milepost.launch.worker``.
        folder: Folder of the launch, with ``config.json`` in it.
        place: Where the run is kept: a folder or a URL.
        max_failures: As in ``FailureConfig``; told to the workers.
        variables: More variables for the environment of every worker.
    """

    number: int
    num_workers: int
    arguments: tuple[str, ...]
    folder: Path
    place: str
    max_failures: int
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def attempt_folder(self) -> Path:
        """Return where the workers of this attempt write things down. Exists."""
        return self.folder / f"attempt-{self.number}"

    @property
    def script(self) -> str | None:
        """Return the path of the script that the workers run; ``None`` for a function."""
        return self.arguments[1] if self.arguments[0] == "--script" else None

    @property
    def run_id(self) -> str:
        """Return a name for the launch: that of the run, and the launch's number in it."""
        return f"{self.folder.parent.parent.name}-{self.folder.name}"


class Group(Protocol):
    """The workers of one attempt."""

    @property
    def running(self) -> set[int]:
        """Return the ranks whose end has not been taken from the events yet; ours to change."""

    def start(self) -> None:
        """Start them all. If it raises, none is left."""

    def close(self) -> None:
        """Kill what is left, and wait until it is gone. Must be called once they were started."""

    def signal(self, number: int, *, but: int | None = None) -> None:
        """Send a signal to every worker that runs, and to nothing that it has started.

        Args:
            number: The signal.
            but: The rank that does not get it.
        """

    def kill(self) -> None:
        """Kill every worker and all that it has started."""


class Engine(Protocol):
    """Runs workers. A context manager that is entered once for all attempts of a launch."""

    def __enter__(self) -> Engine:  # noqa: PYI034 - Self is younger than 3.10
        """Get ready."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give back everything."""

    def reserve(self, fewest: int, most: int) -> int:
        """Return how many workers can be started now, and keep room for them.

        Args:
            fewest: How many are needed at least. What is returned may be less.
            most: How many are wanted at most.
        """

    def group(self, plan: Plan, events: Events) -> Group:
        """Return the workers of an attempt, not started yet.

        Args:
            plan: What to start, within what was reserved.
            events: Where :class:`Ended` and :class:`Told` are put. Those of an earlier attempt, of
                which a machine may tell late, count for nothing.
        """
