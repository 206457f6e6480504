"""A board: ranks tell the leader things without waiting, and look up what it has answered.

Unlike a task of the team nothing here brings all ranks together: a rank sends a message and goes
on, the leader takes the messages in the order in which they came, and posts answers under keys.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Protocol

from ..errors import DeadlineError

__all__ = ["Board", "LocalBoard"]


class Board(Protocol):
    """What ranks tell the leader, and what it answers."""

    rank: int
    world_size: int

    def send(self, message: dict[str, Any]) -> None:
        """Send the leader a message. Never waits, and keeps the order of this rank's messages.

        Raises:
            UnsupportedStateError: It holds something that cannot be sent. It was not sent then.
            RankFailedError: The leader could not be reached with an earlier one.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything that was sent has reached the leader's process.

        Raises:
            DeadlineError: It has not in time.
            RankFailedError: The leader cannot be reached.
        """

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return the next messages; empty if none came in time. For the leader."""

    def post(self, key: str, value: Any = None, *, error: BaseException | None = None) -> None:
        """Answer under a key, with a value or an error. For the leader."""

    def read(self, key: str, *, task: str, timeout_s: float) -> Any:
        """Return the value under a key, or raise the error, as soon as one is there.

        Args:
            key: The key.
            task: What is waited for, for the message.
            timeout_s: How long to wait.

        Raises:
            DeadlineError: Nothing was posted in time.
        """

    def forget(self, key: str) -> None:
        """Take back what was posted."""

    def close(self) -> None:
        """Let go of everything. Messages that are still on their way are lost."""


class LocalBoard:
    """The board of a process that is alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._posted: dict[str, tuple[Any, BaseException | None]] = {}
        self._changed = threading.Condition()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; see :class:`Board`."""
        self._inbox.put(message)

    def flush(self, timeout_s: float) -> None:
        """Return: what was sent is there."""
        del timeout_s

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return the next message; see :class:`Board`."""
        try:
            return [self._inbox.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def post(self, key: str, value: Any = None, *, error: BaseException | None = None) -> None:
        """Answer under a key; the error is raised as it is."""
        with self._changed:
            self._posted[key] = (value, error)
            self._changed.notify_all()

    def read(self, key: str, *, task: str, timeout_s: float) -> Any:
        """Return what was posted; see :class:`Board`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._posted:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(f"{task} did not come within {timeout_s:g} s.", task=task)
                self._changed.wait(left_s)
            value, error = self._posted[key]
        if error is not None:
            raise error
        return value

    def forget(self, key: str) -> None:
        """Take back what was posted."""
        with self._changed:
            self._posted.pop(key, None)

    def close(self) -> None:
        """Do nothing."""
