"""What a launch has to show: what its workers did, and what they reported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..reporting.result import Result
from ..stores.url import open_store
from .attempt import AttemptResult
from .config import RunConfig
from .failures import WorkerFailure
from .summary import say

__all__ = ["LaunchResult", "launch_result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult(Result):
    """How a launch went: what is kept of what was reported, see ``Result``, and this.

    Attributes:
        attempts: Every attempt, in order; none if the run was finished before.
        error: What ended the last attempt; ``None`` if it finished. Without workers, the exception.
        last_commit: Name of the newest acknowledged checkpoint that was noted, or ``None``.
        folder: Folder of the launch: ``attempt-1/rank-0.log`` and so on.
        unread_error: Why what was reported could not be read, if it could not. Then ``checkpoint``,
            ``best_checkpoints`` and ``metrics`` are missing here, not in the run:
            ``Result.from_path(result.path)`` reads them later.
    """

    attempts: tuple[AttemptResult, ...] = ()
    error: WorkerFailure | BaseException | None = None
    last_commit: str | None = None
    folder: Path = field(default_factory=Path)
    unread_error: CheckpointError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is written down of the launch."""
        error = self.error
        return {
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "return_value": self.return_value,
            "error": asdict(error) if isinstance(error, WorkerFailure) else error,
            "checkpoint": self.last_commit,
            "folder": self.folder,
            "unread_error": None if self.unread_error is None else str(self.unread_error),
        }


def launch_result(run: RunConfig, **facts: Any) -> LaunchResult:
    """Return the result of a launch, with what was reported.

    A run that cannot be read hides no other fact: the error is told, and stands in the result.

    Args:
        run: Where the run is.
        **facts: Fields of ``LaunchResult``.
    """
    try:
        return LaunchResult.from_store(open_store(run.place), config=run.checkpoint_config, **facts)
    except CheckpointError as error:
        say(f"milepost: what was reported cannot be read. {error}")
        return LaunchResult(path=run.place, unread_error=error, **facts)
