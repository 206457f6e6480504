"""What people read: one paragraph for each attempt that did not finish, and one at the end."""

from __future__ import annotations

import sys

from ..liveness import Commit
from .attempt import AttemptResult
from .policy import Ending, Restart, Stop

__all__ = ["attempt_text", "end_text", "progress_text", "say"]

_MAX_FOLLOWERS = 4


def say(text: str) -> None:
    """Tell the person who launched."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - data goes to standard output


def attempt_text(
    attempt: AttemptResult, *, newest: Commit | None, decision: Restart | Stop | None
) -> str:
    """Say what ended an attempt, what is safe, and what happens now.

    Args:
        attempt: The attempt.
        newest: The newest checkpoint of all attempts.
        decision: What happens now; ``None``: the launcher was asked to end.
    """
    head = f"attempt {attempt.number} ({_workers(attempt.num_workers)}) {_ending(attempt)}"
    lines = [f"milepost: {head} after {attempt.duration_s:.1f} s"]
    cause = attempt.cause
    if cause is not None:
        lines.append(f"  cause:      rank {cause.rank}: {cause.text}")
        lines += [f"    | {line}" for line in cause.traceback.splitlines()]
    followers = attempt.failures[1:]
    for one in followers[:_MAX_FOLLOWERS]:
        lines.append(f"  then:       rank {one.rank}: {_first_line(one.text)}")
    if len(followers) > _MAX_FOLLOWERS:
        lines.append(f"  then:       {len(followers) - _MAX_FOLLOWERS} more")
    lines.append(f"  checkpoint: {progress_text(attempt, newest=newest)}")
    lines.append(f"  logs:       {attempt.folder}")
    if isinstance(decision, Restart):
        wait = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
        lines.append(f"  next:       attempt {attempt.number + 1} {wait} ({decision.reason})")
    return "\n".join(lines)


def progress_text(attempt: AttemptResult, *, newest: Commit | None) -> str:
    """Say which checkpoint is the newest, and how many batches came after it."""
    if newest is None:
        told = "" if attempt.num_batches is None else f"; {_batches(attempt.num_batches)} lost"
        return f"none was noted{told}"
    batch = "" if newest.batch is None else f" (batch {newest.batch})"
    lost = lost_batches(attempt, newest)
    told = "" if lost is None else f"; {_batches(lost)} lost"
    is_new = attempt.commit is not None
    return f"{newest.name}{batch}{'' if is_new else ', of an earlier attempt'}{told}"


def lost_batches(attempt: AttemptResult, newest: Commit | None) -> int | None:
    """Return how many batches were done after the newest checkpoint; ``None`` if not known."""
    if attempt.num_batches is None:
        return None
    if newest is None:
        return attempt.num_batches
    return None if newest.batch is None else max(0, attempt.num_batches - newest.batch)


def end_text(attempts: tuple[AttemptResult, ...]) -> str:
    """Say in one line how a launch that finished went."""
    num = len(attempts)
    total_s = sum(one.duration_s for one in attempts)
    num_failures = sum(one.ending in (Ending.FAILED, Ending.HUNG) for one in attempts)
    num_preempted = sum(one.ending is Ending.PREEMPTED for one in attempts)
    parts = [f"{num} attempts", f"{num_failures} failed"] if num > 1 else ["1 attempt"]
    parts += [f"{num_preempted} preempted"] if num_preempted else []
    return f"milepost: done after {total_s:.1f} s ({', '.join(parts)})"


def _ending(attempt: AttemptResult) -> str:
    if attempt.ending is Ending.ASKED_TO_END:
        return "was asked to end and ended"
    return {
        Ending.DONE: "finished",
        Ending.FAILED: "failed",
        Ending.HUNG: "hung and was stopped",
        Ending.PREEMPTED: "was preempted",
    }[attempt.ending]


def _workers(num: int) -> str:
    return "1 worker" if num == 1 else f"{num} workers"


def _batches(num: int) -> str:
    return "1 batch" if num == 1 else f"{num} batches"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else text
