"""The ranks of one training: joining them at the start, agreeing on values, and leaving.

Alone in the world there is nothing to join, and everything here returns at once. Where the
environment names several workers and nobody has made a process group, one is made here, with a
deadline, and taken down at the end. A group that is there is used as it is, and left as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import DeadlineError, RankFailedError, UsageError
from ..options import check_seconds, longest_wait_s
from ..ranks.team import StoreTeam, Team, join_team

__all__ = ["Group"]

T = TypeVar("T")

_LEAVE_TIMEOUT_S = 10.0
_FAILED_TIMEOUT_S = 1.0
_log = logging.getLogger(__name__)


class Group:
    """The ranks of one training, this one included.

    Args:
        team: How they agree.
        timeout_s: How long one waits for another, in seconds.
        is_ours: Whether the process group was made here.

    Attributes:
        team: How the ranks agree.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, team: Team, *, timeout_s: float, is_ours: bool) -> None:
        self.team = team
        self.rank = team.rank
        self.world_size = team.world_size
        self.timeout_s = timeout_s
        self._is_ours = is_ours
        self._has_failed = False
        self._own: Team = team.for_thread("train")

    @classmethod
    def join(cls, device: torch.device, *, timeout_s: float) -> Group:
        """Join the other workers, if there are any.

        Args:
            device: Where the model will be: the group can send from there.
            timeout_s: How long ranks wait for each other, in seconds.

        Raises:
            DeadlineError: The others did not come in time.
            UsageError: The environment does not say where to meet.
        """
        check_seconds("group_timeout_s", timeout_s)
        timeout_s = longest_wait_s(timeout_s)
        is_ours = _make_process_group(device, timeout_s)
        return cls(join_team(), timeout_s=timeout_s, is_ours=is_ours)

    @property
    def is_alone(self) -> bool:
        """Return whether there is one rank only."""
        return self.world_size == 1

    @property
    def notes(self) -> StoreTeam | None:
        """Return where ranks leave notes for each other; ``None`` if there is one rank only."""
        return self._own if isinstance(self._own, StoreTeam) else None

    def lead(self, task: str, work: Callable[[], T]) -> T:
        """Have rank 0 decide; every rank gets its result, or its error."""
        return self._own.lead(task, work, timeout_s=self.timeout_s)

    def collect(self, task: str, work: Callable[[], T]) -> list[T]:
        """Have every rank say something; every rank gets all of it, or the same error."""
        return self._own.collect(task, work, timeout_s=self.timeout_s)

    def give_up(self, error: BaseException) -> None:
        """Say that this rank takes part in nothing any more; what others ask of it fails at once.

        Args:
            error: Why.
        """
        self._has_failed = True
        try:
            self._own.give_up(error)
        except RankFailedError as gone:
            _log.info("The other ranks cannot be told: %s", gone)

    def leave(self) -> None:
        """Leave the team, and take down the process group if it was made here."""
        # The leader's process holds the server that the others may still ask. After a failure they
        # may be waiting in turn for this very process to end.
        self.team.leave(timeout_s=_FAILED_TIMEOUT_S if self._has_failed else _LEAVE_TIMEOUT_S)
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()
        self._is_ours = False


def _make_process_group(device: torch.device, timeout_s: float) -> bool:
    """Make a process group if there must be one; return whether it was made."""
    expected = int(os.environ.get("WORLD_SIZE") or 1)
    if expected < 2 or not dist.is_available() or dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else None  # None: one for each kind of device
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except ValueError as error:
        raise UsageError(
            f"This is one of {expected} workers (WORLD_SIZE), and they cannot meet: {error}",
            safe="Nothing was touched.",
            hint="Start them with torchrun or milepost.launch, which say where, or call "
            "torch.distributed.init_process_group() yourself.",
        ) from error
    except dist.DistError as error:
        raise DeadlineError(
            f"The {expected} workers did not meet within {timeout_s:g} s: {error}",
            safe="Nothing was touched.",
            hint="Did all of them start? Look at the log of each.",
        ) from error
    return True
