"""The engine for one machine: workers are processes of the launcher."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from .engine import Events, Plan
from .environment import environment_of, free_port
from .keeping import Keeper
from .workers import Workers

__all__ = ["LocalEngine"]


class LocalEngine:
    """Runs workers on this machine."""

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._ports: list[int] = []

    def __enter__(self) -> LocalEngine:  # noqa: PYI034 - Self is younger than 3.10
        self._keeper = Keeper()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._keeper is not None
        self._keeper.close()

    def reserve(self, fewest: int, most: int) -> int:
        """Return how many workers can be started: as many as are wanted."""
        del fewest
        return most

    def group(self, plan: Plan, events: Events) -> Workers:
        """Return the workers of an attempt."""
        assert self._keeper is not None
        port = free_port(self._ports)
        self._ports.append(port)
        return Workers(
            [sys.executable, "-u", "-m", "milepost.launch.worker", *plan.arguments],
            [
                environment_of(
                    rank,
                    num_workers=plan.num_workers,
                    attempt=plan.number,
                    max_failures=plan.max_failures,
                    port=port,
                    launch_folder=plan.folder,
                    base={**os.environ, **plan.variables},
                )
                for rank in range(plan.num_workers)
            ],
            folder=plan.attempt_folder,
            events=events,
            keeper=self._keeper,
        )
