"""Say so when a policy ranks by a metric that no checkpoint has: it keeps every one of them then.

That is safe, and it fills the disk. A mistyped name shows nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches

from .keep import KeepBest, KeepPolicy
from .scan import RunView

__all__ = ["Unranked"]

_log = logging.getLogger("milepost")

_PATIENCE = 5
"""Checkpoints without the metric that are no sign yet: it may come with the next evaluation."""


class Unranked:
    """Tells of each such metric once.

    Args:
        policies: Retention of the run.
    """

    def __init__(self, policies: Sequence[KeepPolicy]) -> None:
        ranked = [policy.metric for policy in policies if isinstance(policy, KeepBest)]
        self._untold = dict.fromkeys(ranked)

    def look(self, view: RunView) -> None:
        """Look at the checkpoints that are there after a save."""
        if not self._untold:
            return
        found = view.lineage()
        if len(found) < _PATIENCE or any(one.is_pending_validation for one in found):
            return
        known = list(dict.fromkeys(name for one in found for name in one.metrics))
        for metric in [name for name in self._untold if name not in known]:
            del self._untold[metric]
            meant = get_close_matches(metric, known, n=1)
            _log.warning(
                "KeepBest ranks by %r, and none of the %d checkpoints has a metric of that name: "
                "as long as that is so, every one is kept. %sThere %s.",
                metric,
                len(found),
                f"Was {meant[0]!r} meant? " if meant else "",
                f"is: {', '.join(known)}" if known else "are no metrics",
            )
