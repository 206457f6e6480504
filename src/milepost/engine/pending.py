"""A save on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from ..errors import DeadlineError
from ..options import wait_s

__all__ = ["PendingSave"]

T = TypeVar("T")


class _Copy(Protocol):
    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the end; see ``copying.py``."""


class PendingSave(Generic[T]):
    """The handle of a save that is being written in the background.

    The state was copied before the handle was returned, or goes on to be copied while the next
    forward and backward pass run: training may go on. The checkpoint is committed once :meth:`wait`
    returns.

    Args:
        name: Wanted name.
        copy: What is still being copied, if anything.

    Attributes:
        name: Name of the checkpoint. It gets a suffix when its folder was taken.
        stats: Bytes and seconds of the save, complete once it is done.
    """

    def __init__(self, name: str, *, copy: _Copy | None = None) -> None:
        self.name = name
        self._copy = copy
        self.stats: Mapping[str, Any] = {}
        self.was_reported = False
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the save has ended, well or badly."""
        return self._done.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end and return the error of the save, or ``None`` if it was committed.

        Raises:
            DeadlineError: It did not end within ``timeout_s`` seconds.
        """
        self.check_done(timeout_s)
        self.was_reported = True
        return self._error

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the checkpoint is committed and return it.

        Args:
            timeout_s: How long to wait, in seconds; ``None`` waits for as long as it takes.

        Raises:
            DeadlineError: It did not end in time; it goes on in the background.
            CheckpointError: The save failed; earlier checkpoints are intact.
        """
        self.check_done(timeout_s)
        self.was_reported = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def wait_until_copied(self, timeout_s: float | None = None) -> None:
        """Wait until the state may be changed by anything, not by the step of an optimizer only.

        Needed only where ``staging`` is not ``"eager"``, before something else writes to parameters
        or to what optimizers keep. How the copy went is told by the save.

        Args:
            timeout_s: How long to wait, in seconds; ``None`` waits for as long as it takes.

        Raises:
            DeadlineError: It was not copied in time.
        """
        if self._copy is not None:
            self._copy.settle(wait_s(timeout_s))

    @property
    def has_failed(self) -> bool:
        """Return whether the save has ended badly. Does not count as having been told."""
        return self.done() and self._error is not None

    @property
    def unreported_error(self) -> BaseException | None:
        """Return the error of a save that has failed and that nobody was told about yet."""
        return None if self.was_reported or not self.done() else self._error

    def succeed(self, result: T) -> None:
        """End well. For the engine."""
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        """End badly. For the engine."""
        self._error = error
        self._end()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have something called once the save has ended: at once, if it has.

        It is called by the thread that ends the save, so it must return quickly and not raise.
        """
        with self._lock:
            if not self._done.is_set():
                self._calls.append(call)
                return
        call()

    def check_done(self, timeout_s: float | None) -> None:
        """Wait for the end, without taking note of how it ended. For the engine.

        Raises:
            DeadlineError: It did not end within ``timeout_s`` seconds.
        """
        if not self._done.wait(wait_s(timeout_s)):
            raise DeadlineError(
                f"The save of {self.name} was not committed within {timeout_s:g} s.",
                safe="It goes on in the background; earlier checkpoints are intact.",
                hint="Wait longer, or look at the place it is written to with: milepost doctor.",
                name=self.name,
            )

    def _end(self) -> None:
        with self._lock:
            self._done.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def __repr__(self) -> str:
        state = "on its way"
        if self.done():
            state = "failed" if self._error is not None else "committed"
        return f"<PendingSave {self.name}: {state}>"
