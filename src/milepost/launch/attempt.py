"""One attempt: all workers started, watched, and gone when it ends.

    running --a worker fails or was preempted--> ending: SIGTERM to the others, grace
            --a worker stops beating-----------> dumping: SIGUSR2 to all, 1 s for their stacks
            --the launcher gets a signal-------> ending: the same signal to all, grace
    ending  --all gone, or the grace is over---> killed
    dumping --1 s------------------------------> killed: a worker that hangs cannot save

The loop sleeps until something happens or the next moment is due; there is no polling.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..liveness import Commit, read_batch, read_commit
from .beats import Beats
from .engine import Asked, Ended, Events, Group
from .failures import (
    PREEMPTED_CODES,
    WorkerFailure,
    exit_text,
    first_of,
    log_tail,
    read_failure,
)
from .policy import Ending

__all__ = ["AttemptResult", "Limits", "run_attempt"]

_DUMP_S = 1.0
_KILLED_S = 5.0
_TAIL_LINES = 20
_STACK_LINES = 80
_BY_US = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1, -signal.SIGUSR2, -9})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take.

    Attributes:
        grace_s: Seconds to end after the launcher was asked to end, or a worker was preempted.
        failure_grace_s: Seconds to end after another worker failed.
        hang_timeout_s: Seconds without a beat; ``None``: for ever.
        start_timeout_s: Seconds to the first beat; ``None``: for ever.
    """

    grace_s: float
    failure_grace_s: float
    hang_timeout_s: float | None
    start_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """How an attempt went.

    Attributes:
        number: Counted from 1.
        num_workers: How many workers it had.
        ending: How it ended.
        duration_s: How long it took, in seconds.
        failures: What went wrong, the cause first. Workers that only followed come after it.
        commit: The newest checkpoint that was acknowledged during it.
        num_batches: How many batches were done at its end, counted from the beginning of the
            training; ``None`` if not known.
        signal_number: The signal that asked the launcher, or a preempted worker, to end.
        folder: Its logs.
    """

    number: int
    num_workers: int
    ending: Ending
    duration_s: float
    failures: tuple[WorkerFailure, ...]
    commit: Commit | None
    num_batches: int | None
    signal_number: int | None
    folder: Path

    @property
    def cause(self) -> WorkerFailure | None:
        """Return what went wrong first."""
        return self.failures[0] if self.failures else None


def run_attempt(
    group: Group, *, number: int, num_workers: int, folder: Path, limits: Limits, events: Events
) -> AttemptResult:
    """Watch the workers of one attempt until none is left.

    Args:
        group: The workers, which were started just now.
        number: Number of the attempt, from 1.
        num_workers: How many they are.
        folder: Where they write things down.
        limits: How long things may take.
        events: Carries what happens to them, and the launcher's signals.
    """
    started_s = time.monotonic()
    try:
        watch = _Watch(group, number, folder, limits)
        while group.running:
            watch.step(events)
    finally:
        group.close()
    commits = [read_commit(folder / f"rank-{rank}.commit") for rank in range(num_workers)]
    batches = [read_batch(folder / f"rank-{rank}.beat") for rank in range(num_workers)]
    known = [one for one in commits if one is not None]
    return AttemptResult(
        number=number,
        num_workers=num_workers,
        ending=watch.ending,
        duration_s=time.monotonic() - started_s,
        failures=tuple(watch.failures()),
        commit=max(known, key=lambda one: one.at_s, default=None),
        num_batches=max((one for one in batches if one is not None), default=None),
        signal_number=watch.signal_number,
        folder=folder,
    )


@dataclass(frozen=True, slots=True)
class _End:
    """How a worker's process ended, when, and whether that was a signal of ours."""

    event: Ended
    at_s: float
    is_by_us: bool


class _Watch:
    """What has happened to the workers so far, and what is due next."""

    def __init__(
        self,
        group: Group,
        number: int,
        folder: Path,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ending = Ending.DONE
        self.signal_number: int | None = None
        self._group = group
        self._number = number
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._beats = Beats(
            folder,
            timeout_s=limits.hang_timeout_s,
            start_timeout_s=limits.start_timeout_s,
            clock=clock,
        )
        self._kill_at_s: float | None = None
        self._num_interrupts = 0
        self._is_killed = False
        self._ends: dict[int, _End] = {}
        self._followers: set[int] = set()
        self._hung: dict[int, float] = {}
        self._hung_at_s = 0.0

    def step(self, events: Events) -> None:
        """Wait for the next event or moment, and act on it."""
        due_s = self._kill_at_s
        if self.ending is Ending.DONE:
            due_s = self._beats.next_look_s(self._group.running)
        try:
            left_s = None if due_s is None else max(0.0, due_s - self._clock())
            event = events.get(timeout=left_s)
        except queue.Empty:
            self._on_time()
            return
        if isinstance(event, Asked):
            self._on_signal(event.number)
        elif event.attempt != self._number:
            return  # told late, of workers that are gone
        elif isinstance(event, Ended):
            self._on_end(event)
        elif event.rank in self._group.running:
            self._begin_after(event.rank, event.code)

    def failures(self) -> list[WorkerFailure]:
        """Return what went wrong in each worker, the cause first."""
        found = [self._failure(rank, end) for rank, end in self._ends.items()]
        if self._hung:
            at_s = self._hung_at_s
            found += [self._hang(rank, age_s, at_s) for rank, age_s in self._hung.items()]
        return first_of(one for one in found if one is not None)

    def _on_end(self, event: Ended) -> None:
        self._group.running.discard(event.rank)
        is_by_us = event.code in _BY_US and event.rank in self._followers
        if event.code == -signal.SIGKILL and not self._is_killed:
            is_by_us = False
        self._ends[event.rank] = _End(event, time.time(), is_by_us)
        if event.code != 0:
            self._begin_after(event.rank, event.code)

    def _on_signal(self, number: int) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self._kill()  # Ctrl-C twice: a person does not want to wait
        elif self.ending is Ending.ASKED_TO_END:
            self._group.signal(number)  # the grace is that of the first one
        else:
            is_first = self.ending is Ending.DONE
            self.ending, self.signal_number = Ending.ASKED_TO_END, number
            self._group.signal(number)
            if is_first:
                self._follow(self._limits.grace_s)

    def _on_time(self) -> None:
        if self._is_killed:
            self._group.running.clear()  # stuck in the kernel; the end of the block says so
            return
        if self.ending is not Ending.DONE:
            self._kill()
            return
        self._hung = self._beats.overdue(sorted(self._group.running))
        if self._hung:
            self._hung_at_s = time.time()
            self.ending = Ending.HUNG
            self._group.signal(signal.SIGUSR2)
            self._follow(_DUMP_S)

    def _begin_after(self, rank: int, code: int | None) -> None:
        """End the others after one has failed, or has saved and left."""
        if self.ending is not Ending.DONE:
            return
        if code in PREEMPTED_CODES:
            self.ending, self.signal_number = Ending.PREEMPTED, code - 128
            grace_s = self._limits.grace_s
        else:
            self.ending, grace_s = Ending.FAILED, self._limits.failure_grace_s
        # Not this one, which may still have a save to wait for on its way out.
        self._group.signal(signal.SIGTERM, but=rank)
        self._follow(grace_s)

    def _follow(self, grace_s: float) -> None:
        self._followers = set(self._group.running)
        self._kill_at_s = self._clock() + grace_s

    def _kill(self) -> None:
        self._is_killed = True
        self._kill_at_s = self._clock() + _KILLED_S
        self._group.kill()

    def _failure(self, rank: int, end: _End) -> WorkerFailure | None:
        code = end.event.code
        told = read_failure(self._folder / f"rank-{rank}.error.json")
        if told is not None:
            return replace(told, code=code)
        if code == 0 or end.is_by_us or code in PREEMPTED_CODES:
            return None
        return WorkerFailure(
            rank=rank,
            at_s=end.at_s,
            type="",
            message=end.event.why or f"the process {exit_text(code)}",
            traceback=log_tail(self._folder / f"rank-{rank}.log", num_lines=_TAIL_LINES),
            code=code,
            is_lost=bool(end.event.why),
        )

    def _hang(self, rank: int, age_s: float, at_s: float) -> WorkerFailure:
        if self._beats.has_beaten(rank):
            message = f"no beat for {age_s:.1f} s: the process hangs"
        else:
            message = f"no first beat within {age_s:.1f} s: the process hangs"
        return WorkerFailure(
            rank=rank,
            at_s=at_s - age_s,
            type="",
            message=message,
            traceback=log_tail(self._folder / f"rank-{rank}.log", num_lines=_STACK_LINES),
        )
