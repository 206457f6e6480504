"""The engine for one machine: workers are processes of the launcher."""

from __future__ import annotations

import os
from types import TracebackType

from ..processes.keeping import Keeper
from ..reporting.current import MEET
from .engine import Events, Plan
from .environment import LOOPBACK, HeldPort, Spot, environment_of
from .slots import SLOTS, num_processors, slots_of
from .workers import Workers

__all__ = ["LocalEngine"]


class LocalEngine:
    """Runs workers on this machine.

    Args:
        is_told: Whether somebody says before each attempt how many workers there may be, so that
            processors need not be counted.
    """

    def __init__(self, *, is_told: bool = False) -> None:
        self._is_told = is_told
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
        """Return how many workers can be started.

        As many as ``MILEPOST_SLOTS`` says. Where it says nothing and the number is left open, as
        many as there are processors, and not less than are needed.

        Raises:
            CheckpointError: ``MILEPOST_SLOTS`` holds no number and names no file that does.
        """
        slots = slots_of(os.environ.get(SLOTS, ""))
        if slots is not None:
            return min(most, slots)
        if self._is_told:
            return most
        return max(fewest, min(most, num_processors()))

    def group(self, plan: Plan, events: Events) -> Workers:
        """Return the workers of an attempt."""
        assert self._keeper is not None
        port = HeldPort(self._ports)
        self._ports.append(port.number)
        # Reports need no process group of the training's, so they have a port of their own.
        meeting = HeldPort(self._ports)
        self._ports.append(meeting.number)
        num = plan.num_workers
        spots = [
            Spot(
                rank=rank, local_rank=rank, node_rank=0, num_workers=num, num_local=num, num_nodes=1
            )
            for rank in range(num)
        ]

        def let_go() -> None:
            port.close()
            meeting.close()

        return Workers(
            plan,
            {
                spot.rank: environment_of(
                    spot,
                    plan=plan,
                    address=(LOOPBACK, port.number),
                    launch_folder=plan.folder,
                    base={**os.environ, MEET: f"{LOOPBACK}:{meeting.number}"},
                )
                for spot in spots
            },
            folder=plan.attempt_folder,
            events=events,
            keeper=self._keeper,
            on_close=let_go,
        )
