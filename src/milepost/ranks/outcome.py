"""What one rank tells the others of a piece of work: its result, or why there is none."""

from __future__ import annotations

import json
import traceback
from dataclasses import astuple, dataclass
from typing import Any

from .. import errors
from ..errors import CheckpointError, RankFailedError
from ..format import tree

__all__ = ["Outcome", "raise_failures"]

_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a piece of work on one rank.

    Attributes:
        rank: The rank.
        value: Its result.
        error: Name of the class of its error, or empty.
        what: What happened.
        safe: What is safe.
        hint: What to do.
        trace: The traceback, for errors that are not ours.
        task: What the rank was doing.
    """

    rank: int
    value: Any = None
    error: str = ""
    what: str = ""
    safe: str = ""
    hint: str = ""
    trace: str = ""
    task: str = ""

    @classmethod
    def of_error(cls, rank: int, task: str, error: BaseException) -> Outcome:
        """Describe an error."""
        kind = type(error).__name__
        if isinstance(error, CheckpointError):
            return cls(rank, None, kind, error.what, error.safe, error.hint, task=task)
        trace = "".join(traceback.format_exception(error))
        return cls(rank, None, kind, str(error), trace=trace, task=task)

    @property
    def is_failure(self) -> bool:
        """Return whether the work failed."""
        return bool(self.error)

    def to_bytes(self) -> bytes:
        """Encode for the way."""
        return json.dumps(tree.encode(list(astuple(self))), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Outcome:
        """Decode."""
        return cls(*tree.decode(json.loads(data)))

    def exception(self) -> Exception:
        """Return the error again: of its own class if that is one of ours."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, CheckpointError):
            typed: CheckpointError = kind(self.what, safe=self.safe, hint=self.hint)
            return typed
        return RankFailedError(
            f"Rank {self.rank} failed: {self.error}: {self.what}.\n{self.trace}",
            rank=self.rank,
        )


def raise_failures(task: str, outcomes: list[Outcome]) -> None:
    """Raise if any rank failed.

    Args:
        task: What was being done.
        outcomes: Of every rank.

    Raises:
        RankFailedError: Naming the ranks and their errors. If all ranks failed in one way, which is
            the fault of no rank, that error is raised by itself.
    """
    failed = [outcome for outcome in outcomes if outcome.is_failure]
    if not failed:
        return
    if len(failed) == len(outcomes) and len({one.error for one in failed}) == 1:
        raise outcomes[0].exception()
    lines = [f"  rank {one.rank}: {one.error}: {one.what}" for one in failed[:_SHOWN_RANKS]]
    if len(failed) > _SHOWN_RANKS:
        lines.append(f"  and {len(failed) - _SHOWN_RANKS} more")
    traces = "".join(f"\nRank {one.rank}:\n{one.trace}" for one in failed[:1] if one.trace)
    raise RankFailedError(
        f"{len(failed)} of {len(outcomes)} ranks failed to {task}:\n" + "\n".join(lines) + traces,
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint=failed[0].hint,
        ranks=[one.rank for one in failed],
        errors={one.rank: one.error for one in failed},
    )
