"""What ranks are told of a report that some rank did not make: who, and how far each has come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..errors import DeadlineError, RankFailedError
from ..ranks.outcome import Outcome, raise_failures

__all__ = ["ended_early", "listed", "not_known", "summary", "too_late"]

_SHOWN_RANKS = 64
_SAFE = "Nothing was committed by it; earlier checkpoints are intact."
_HINT = "Every rank must report equally often, with a checkpoint or without."


def summary(number: int, errors: Sequence[Outcome], *, world_size: int) -> Exception:
    """Return one error for all ranks from what some of them said."""
    if world_size == 1:
        return errors[0].exception()
    failed = {one.rank: one for one in errors}
    outcomes = [failed.get(rank, Outcome(rank)) for rank in range(world_size)]
    try:
        raise_failures(f"make report {number}", outcomes)
    except Exception as error:  # noqa: BLE001 - made here, to be told to every rank
        return error
    raise AssertionError("an error was said, and none was found")


def ended_early(number: int, gone: Collection[int], counts: Mapping[int, int]) -> RankFailedError:
    """Return the error about ranks that left before a report."""
    return RankFailedError(
        f"Rank {listed(gone)} ended before report {number} was made by every rank. "
        f"{_counted(counts)}",
        safe=_SAFE,
        hint=_HINT,
        ranks=sorted(gone),
    )


def too_late(
    number: int,
    missing: Collection[int],
    counts: Mapping[int, int],
    *,
    what: str,
    timeout_s: float,
) -> DeadlineError:
    """Return the error about ranks that did not come, or did not write, in time."""
    return DeadlineError(
        f"Rank {listed(missing)} did not {what} report {number} within {timeout_s:g} s. "
        f"{_counted(counts)}",
        safe=_SAFE,
        hint=_HINT,
        ranks=sorted(missing),
    )


def not_known(
    number: int, late: Collection[int], counts: Mapping[int, int], *, timeout_s: float
) -> DeadlineError:
    """Return the error for a rank that asked what came of its reports."""
    who = f"rank {listed(late)} to make it" if late else "its upload"
    return DeadlineError(
        f"It was not known within {timeout_s:g} s what came of report {number}: it waits for "
        f"{who}. {_counted(counts)}",
        safe="It goes on in the background.",
        hint="Every rank must report equally often. Or wait longer.",
        ranks=sorted(late),
    )


def listed(ranks: Collection[int]) -> str:
    """Return ranks as text."""
    return ", ".join(map(str, sorted(ranks)))


def _counted(counts: Mapping[int, int]) -> str:
    shown = sorted(counts.items())[:_SHOWN_RANKS]
    return "Reports so far: " + ", ".join(f"rank {r} {n}" for r, n in shown) + "."
