"""What went wrong in a worker: written by it, read by the launcher, and put in order.

A worker that fails takes the others with it: they lose their connection, or are stopped. What
people need is the first one. A worker whose code raised writes down what and when before anything
else; for one that was killed there is only the moment when the launcher saw it end.
"""

from __future__ import annotations

import json
import runpy
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..processes import functions
from ..processes.ends import exit_text, log_tail

__all__ = [
    "PREEMPTED_CODES",
    "WorkerFailure",
    "exit_text",
    "first_of",
    "log_tail",
    "own_frames",
    "read_failure",
    "signature_of",
    "write_failure",
]

PREEMPTED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""What a worker ends with that was asked to end, and has saved its state: 143 and 138."""

_HARD = frozenset({-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL})
_HARD_LEAD_S = 0.5
_RUNNERS = frozenset(
    {
        runpy.__file__,
        functions.__file__,
        *(str(Path(__file__).with_name(name)) for name in ("worker.py", "entry.py")),
    }
)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What went wrong in one worker.

    Attributes:
        rank: Its rank.
        at_s: When, in seconds since 1970.
        type: Name of the exception's class, or ``""`` if there was no exception.
        message: Text of the exception, or how the process ended.
        traceback: The traceback, or the end of the log.
        code: Exit code of the process; negative for a signal, ``None`` if it did not end by itself.
        is_final: Whether it would fail in the same way again.
        is_lost: Whether it went with its machine.
    """

    rank: int
    at_s: float
    type: str
    message: str
    traceback: str
    code: int | None = None
    is_final: bool = False
    is_lost: bool = False

    @property
    def text(self) -> str:
        """Return one line that says what happened."""
        return f"{self.type}: {self.message}" if self.type else self.message


def write_failure(path: Path, error: BaseException, *, rank: int, is_final: bool = False) -> None:
    """Write down what was raised in this worker, at once."""
    kind = type(error)
    lines = traceback.format_exception(kind, error, own_frames(error.__traceback__))
    failure = WorkerFailure(
        rank=rank,
        at_s=time.time(),
        type=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        message=str(error),
        traceback="".join(lines),
        is_final=is_final,
    )
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    scratch.replace(path)


def read_failure(path: Path) -> WorkerFailure | None:
    """Return what a worker wrote down, or ``None`` if it wrote nothing."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return WorkerFailure(**found)


def first_of(failures: Iterable[WorkerFailure]) -> list[WorkerFailure]:
    """Put failures in the order of their causes: what came first is first.

    A process that the kernel killed is noticed a moment after its peers have lost their connection
    to it, and no peer's exception ever kills a process that way. So such an end counts as half a
    second earlier. That a whole machine is gone is noticed long after, and comes before all else.
    """

    def order(one: WorkerFailure) -> tuple[bool, float, int]:
        return not one.is_lost, one.at_s - _HARD_LEAD_S * (one.code in _HARD), one.rank

    return sorted(failures, key=order)


def signature_of(failure: WorkerFailure) -> str:
    """Return a text that is equal for two failures with one reason, on whichever rank."""
    place = [line.strip() for line in failure.traceback.splitlines() if "  File " in line]
    if not failure.type:
        return failure.message
    return "\n".join([failure.type, failure.message, *place[-1:]])


def own_frames(found: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of the runner around the user's code."""
    inner = found
    while inner is not None:
        file = inner.tb_frame.f_code.co_filename
        if file not in _RUNNERS and not file.startswith("<frozen"):
            return inner
        inner = inner.tb_next
    return found
