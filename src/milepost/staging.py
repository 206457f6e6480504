"""The words by which one chooses when the state is copied for a save, and how it is watched."""

from __future__ import annotations

from typing import Literal

__all__ = ["CopyCheck", "Staging"]

Staging = Literal["auto", "overlap", "eager"]
"""``eager``: all of it before a save returns. ``overlap``: what optimizers own while training goes
on. ``auto``: so where nothing but a step of theirs can come next."""

CopyCheck = Literal["sample", "full", "none"]
"""How what is copied while training goes on is watched, beside version counters: by some bytes of
each tensor, by all, or not at all."""
