"""The words by which one chooses when the state is copied for a save, and how it is watched."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "BY_HAND",
    "EAGER_ASKED",
    "FORBIDDEN",
    "LAST_SAVE",
    "NOTHING_LARGE",
    "OVER_BUDGET",
    "SEVERAL_RANKS",
    "WRITTEN_TO",
    "CopyCheck",
    "Staging",
]

Staging = Literal["auto", "overlap", "eager"]
"""``eager``: all of it before a save returns. ``overlap``: what optimizers own while training goes
on. ``auto``: so where nothing but a step of theirs can come next."""

CopyCheck = Literal["sample", "full", "none"]
"""How what is copied while training goes on is watched, beside version counters: by some bytes of
each tensor, by all, or not at all."""

# Why a save has copied everything before it returned: ``stats["eager_reason"]``, where it is not
# for what the optimizers have; see ``Owned.reason``.

EAGER_ASKED = 'staging="eager"'
LAST_SAVE = "no other save follows: the training ends, or failed and is kept for a look"
BY_HAND = "a save by hand, after which something else than an optimizer may write"
SEVERAL_RANKS = 'several ranks, which copy late only with staging="overlap"'
WRITTEN_TO = "something wrote to the state while an earlier save was copied"
OVER_BUDGET = "a state that is larger than staging_budget_bytes"
FORBIDDEN = "the system forbids process_vm_writev"
NOTHING_LARGE = "no optimizer has a tensor of 64 KiB or more"
