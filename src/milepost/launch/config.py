"""What is asked of a launch: how many workers, where, and what is done about failures."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..options import check_seconds, longest_wait_s
from ..reporting.config import CheckpointConfig
from ..stores.url import folder_of, is_address, settled, trimmed
from .policy import FailureConfig

__all__ = ["RunConfig", "ScalingConfig"]

_LOCAL_PATH = "runs"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,~-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How many workers there are.

    Attributes:
        num_workers: The number, or the fewest and the most. Each attempt starts as many as there
            is room for, at most the latter. 0 calls the function in this very process: under
            ``torchrun`` in each of its processes.
    """

    num_workers: int | tuple[int, int] = 1

    def __post_init__(self) -> None:
        fewest, most = self.bounds
        if self.num_workers != 0 and not 1 <= fewest <= most:
            raise UsageError(
                f"ScalingConfig(num_workers={self.num_workers!r}) makes no sense.",
                hint="Give a number from 1 on, or the fewest and the most: num_workers=(2, 4).",
                num_workers=self.num_workers,
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the fewest and the most workers."""
        if isinstance(self.num_workers, int):
            return self.num_workers, self.num_workers
        fewest, most = self.num_workers
        return fewest, most


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where a launch keeps its records, and what is done about failures.

    Attributes:
        storage_path: Where runs are kept: a folder, or an address such as ``s3://bucket/runs``.
        name: Name of the run, a folder below ``storage_path``. It is what the function reports to.
        local_path: Folder on this machine where the launch keeps its own records, such as the logs
            of workers, below ``name``. ``None``: ``storage_path``, or ``runs`` if that is an
            address.
        local_cache: For an address: a folder on each machine where copies of the files of the
            newest two reported checkpoints are kept, so that a start there need not download them.
        failure_config: What is done about workers that fail.
        checkpoint_config: Which of the reported checkpoints are kept.
        if_finished: What is done if all that the run was to do has been reported to it: ``return``
            its result and start nothing, ``continue`` from its newest checkpoint, or ``error``.
        grace_s: Seconds that workers get to save and end when the launcher is asked to end.
    """

    storage_path: str | os.PathLike[str] = "runs"
    name: str = "launched"
    local_path: str | os.PathLike[str] | None = None
    local_cache: str | os.PathLike[str] | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    if_finished: str = "return"
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for place in (self.storage_path, self.local_path, self.local_cache):
            if place is not None:
                settled(os.fspath(place))  # raises if it is none
        if self.local_path is not None and is_address(os.fspath(self.local_path)):
            raise UsageError(
                f"{os.fspath(self.local_path)} is not a folder on this machine.",
                hint="Logs are written to a local folder; storage_path may be elsewhere.",
            )
        if self.local_cache is not None and not is_address(os.fspath(self.storage_path)):
            raise UsageError(
                "local_cache= keeps copies of a run in an object store, and storage_path= is a "
                "folder.",
                hint="Leave out local_cache.",
            )
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot name a run.",
                hint="Use letters, digits and '._+=@,~-', not beginning with '.' or '-'.",
                name=self.name,
            )
        if self.if_finished not in ("return", "continue", "error"):
            raise UsageError(
                f"if_finished={self.if_finished!r} is not known.",
                hint="Use 'return', 'continue' or 'error'.",
            )
        check_seconds("grace_s", self.grace_s, is_zero_fine=True)
        object.__setattr__(self, "grace_s", longest_wait_s(self.grace_s))

    @property
    def root(self) -> str:
        """Return where runs are kept: an absolute folder, or an address."""
        place = os.fspath(self.storage_path)
        return trimmed(place) if is_address(place) else folder_of(place)

    @property
    def place(self) -> str:
        """Return where the run is: an absolute folder, or an address."""
        return f"{self.root}/{self.name}"

    @property
    def folder(self) -> Path:
        """Return the folder on this machine for what the launch itself writes down."""
        place = os.fspath(self.storage_path)
        given = self.local_path or (_LOCAL_PATH if is_address(place) else place)
        return Path(folder_of(os.fspath(given))) / self.name
