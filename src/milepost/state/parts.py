"""What every kind of tracked object must be able to do.

A restore has two halves. ``check`` compares a stored item with the live object and writes what does
not fit into the report; nothing is changed. Only when all items passed does ``apply`` change the
objects, so that a checkpoint that does not fit leaves them as they were.

Some values are *spread* over the ranks: a stage of a pipeline has names that other ranks have not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from .report import LoadReport
from .source import StateSource

__all__ = ["Alike", "Part", "Place"]

Place = tuple[str, ...]
"""The first keys on the way to something in a value."""


class Part(Protocol):
    """One tracked object, seen as something that is saved and restored."""

    def capture(self) -> Any:
        """Return the value to store: containers, numbers, tensors. Tensors are not copied."""

    def frozen(self) -> Collection[str]:
        """Return the keys of tensors that the run does not train."""

    def leaders(self) -> Collection[str]:
        """Return the keys of tensors of which one rank's are saved, whatever the others have."""

    def spread(self) -> Collection[Place] | None:
        """Return the places of what this rank has; ``None`` if every rank has all of it."""

    def learn(self, places: Collection[Place]) -> None:
        """Take note of what the ranks have together, of a value that is spread."""

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Write into the report what does not fit."""

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Restore the live object."""


class Alike:
    """What parts have in common whose value is the same on every rank, or a rank's own."""

    def frozen(self) -> Collection[str]:
        """Return nothing."""
        return ()

    def leaders(self) -> Collection[str]:
        """Return nothing."""
        return ()

    def spread(self) -> Collection[Place] | None:
        """Return ``None``."""
        return None

    def learn(self, places: Collection[Place]) -> None:
        """Do nothing."""
