"""Whether a signal asked the training to end, as all of its ranks know it.

Between two batches the tally of the batch says so to every rank at once. In an evaluation ranks go
through their shares by themselves: a rank that was asked leaves a note, the others look for it now
and then, and at the end of the pass all of them say whether they cut it off. One is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..engine.signals import StopSignals
from .group import Group

__all__ = ["Stopping"]

_LOOK_EVERY_S = 0.2


class Stopping:
    """Knows about requests to end.

    Args:
        group: The ranks.
        signals: Those of this process; ``None``: nobody listens to signals.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self,
        group: Group,
        signals: StopSignals | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._signals = signals
        self._clock = clock
        self._looked_s = float("-inf")
        self._agreed: int | None = None
        self._count = 0

    @property
    def received(self) -> int | None:
        """Return the signal that this process got, if it did."""
        return None if self._signals is None else self._signals.received

    @property
    def number(self) -> int | None:
        """Return the signal to end for, the same on every rank; ``None``: train on."""
        return self.received if self._group.is_alone else self._agreed

    @property
    def grace_s(self) -> float:
        """Return the seconds between a signal and the moment the process has to be gone."""
        return 0.0 if self._signals is None else self._signals.grace_s

    @property
    def seconds_left(self) -> float:
        """Return what is left of them."""
        return 0.0 if self._signals is None else self._signals.seconds_left

    def begin(self) -> None:
        """Forget earlier requests, at the start of ``fit``."""
        self._agreed = None
        self._count += 1

    def learn(self, number: int | None) -> None:
        """Take over what the tally of a batch says."""
        self._agreed = self._agreed or number

    def should_cut_off(self) -> bool:
        """Return whether this rank should leave the evaluation that it is in."""
        notes = self._group.notes
        if notes is None:
            return self.received is not None
        if self._agreed is None and self.received is not None:
            notes.note(self._key, str(self.received))
            self._agreed = self.received
        if self._agreed is None and self._clock() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = self._clock()
            found = notes.notes([self._key])
            self._agreed = None if found is None else int(found[0])
        return self._agreed is not None

    def agree_on_cut(self, *, is_cut: bool) -> bool:
        """Return whether any rank left an evaluation early; every rank asks at its end."""
        if self._group.is_alone:
            return is_cut
        number = self._agreed if is_cut else None
        found = self._group.collect("end its part of the evaluation", lambda: number)
        self._agreed = next((one for one in found if one is not None), None)
        return self._agreed is not None

    @property
    def _key(self) -> str:
        return f"asked/{self._count}"
