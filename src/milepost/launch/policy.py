"""What happens after an attempt that did not finish: again, or not. Pure: no clock, no process.

Three rules, in this order:

1. What cannot come right by itself (the function cannot be imported, the result cannot be stored)
   is not tried again.
2. After ``max_attempts_without_progress`` attempts in a row without a new checkpoint the training
   is going round in circles, and it stops.
3. At most ``max_failures`` failures within ``window_s`` are forgiven. A new checkpoint since the
   failure before wipes the slate clean, for the budget and for the pause before the next attempt.

A preemption (the worker was asked to end, saved its state and left) is no failure: rule 3 and the
pause do not apply to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..options import check_count, check_seconds, longest_wait_s

__all__ = ["AttemptEnd", "Ending", "FailureConfig", "FailurePolicy", "Restart", "Stop"]


class Ending(str, Enum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    HUNG = "hung"
    PREEMPTED = "preempted"
    ASKED_TO_END = "asked to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What is done about workers that fail.

    Attributes:
        max_failures: How many failures within ``window_s`` are followed by a new attempt. 0: none.
            -1: any number.
        window_s: Seconds after which a failure is forgotten; ``None``: never. Failures are also
            forgotten when a new checkpoint was made after them.
        backoff_s: Seconds to wait before the first new attempt. Doubled for each further failure
            that is remembered.
        max_backoff_s: The longest wait, in seconds.
        max_attempts_without_progress: How many attempts in a row may end without a new
            checkpoint, whatever ``max_failures`` says. At least 1.
        grace_s: Seconds that the other workers get to end by themselves when one has failed.
        hang_timeout_s: Seconds without a beat of some rank after which all are restarted;
            ``None``: for ever. Must be longer than the longest step, evaluation or save.
        start_timeout_s: The same for the first beat, counted from the start of the workers. Must be
            longer than it takes to start, to meet the other ranks, to load, and to do one batch.
    """

    max_failures: int = 0
    window_s: float | None = None
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    max_attempts_without_progress: int = 3
    grace_s: float = 5.0
    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_count("max_failures", self.max_failures, least=-1)
        check_count("max_attempts_without_progress", self.max_attempts_without_progress, least=1)
        for name in ("window_s", "hang_timeout_s", "start_timeout_s"):
            check_seconds(name, getattr(self, name), may_be_none=True)
        for name in ("backoff_s", "max_backoff_s", "grace_s"):
            check_seconds(name, getattr(self, name), is_zero_fine=True)
            object.__setattr__(self, name, longest_wait_s(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """What the policy has to know of an attempt.

    Attributes:
        ending: How it ended.
        has_new_checkpoint: Whether a checkpoint was acknowledged during it that is further than
            all before.
        is_final: Whether another attempt would end just the same.
        signature: What went wrong, in a form in which two failures for one reason are equal.
    """

    ending: Ending
    has_new_checkpoint: bool
    is_final: bool = False
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Try again.

    Attributes:
        delay_s: Seconds to wait before.
        reason: Why it is tried again.
    """

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Do not try again.

    Attributes:
        reason: Why not, as a sentence.
        hint: What to do about it.
    """

    reason: str
    hint: str


class FailurePolicy:
    """Decides after each attempt that did not finish.

    Args:
        config: The limits.
    """

    def __init__(self, config: FailureConfig) -> None:
        self._config = config
        self._failures_s: list[float] = []
        self._num_fruitless = 0
        self._num_alike = 0
        self._signature = ""

    def decide(self, end: AttemptEnd, *, now_s: float) -> Restart | Stop:
        """Return what to do now.

        Args:
            end: The attempt that has just ended.
            now_s: Seconds on a clock that never goes back.
        """
        self._remember(end, now_s)
        if end.is_final:
            return Stop("Another attempt would end the same way.", "Mend the cause first.")
        if self._num_fruitless >= self._config.max_attempts_without_progress:
            return self._circles()
        if end.ending is Ending.PREEMPTED:
            return Restart(0.0, "a preemption is no failure")
        num, limit = len(self._failures_s), self._config.max_failures
        if limit >= 0 and num > limit:
            return self._spent(num)
        delay_s = min(self._config.backoff_s * 2.0 ** min(num - 1, 60), self._config.max_backoff_s)
        allowed = "any number" if limit < 0 else f"{limit} in a row"
        return Restart(delay_s, f"failure {num} since the newest checkpoint; {allowed} allowed")

    def _remember(self, end: AttemptEnd, now_s: float) -> None:
        is_alike = end.signature == self._signature and not end.has_new_checkpoint
        self._num_alike = self._num_alike + 1 if is_alike else 1
        self._signature = end.signature
        if end.has_new_checkpoint:
            self._failures_s.clear()
            self._num_fruitless = 0
        else:
            self._num_fruitless += 1
        if end.ending is not Ending.PREEMPTED:
            self._failures_s.append(now_s)
        if self._config.window_s is not None:
            oldest_s = now_s - self._config.window_s
            self._failures_s = [at_s for at_s in self._failures_s if at_s > oldest_s]

    def _circles(self) -> Stop:
        num = self._num_fruitless
        attempts = "1 attempt" if num == 1 else f"{num} attempts in a row"
        alike = num > 1 and self._num_alike >= num
        why = "all for the same reason" if alike else "and so nothing was gained"
        reason = f"{attempts} ended without a new checkpoint{', ' + why if num > 1 else ''}."
        if alike:
            return Stop(reason, "It will fail each time it gets there: mend the cause first.")
        return Stop(
            reason,
            "Save more often than the training fails. A loop that saves by itself tells of it "
            "with milepost.liveness.note_commit.",
        )

    def _spent(self, num: int) -> Stop:
        limit, window_s = self._config.max_failures, self._config.window_s
        times = "There was 1 failure" if num == 1 else f"There were {num} failures"
        within = "" if window_s is None else f" within {window_s:g} s"
        between = " with no new checkpoint in between" if num > 1 else ""
        again = self._num_alike > 1
        alike = f" The last {self._num_alike} were for the same reason." if again else ""
        return Stop(
            f"{times}{within}{between}, and max_failures is {limit}.{alike}",
            f"Mend the cause, or allow {'more' if limit else 'new attempts'} with max_failures.",
        )
