"""What every kind of tracked object must be able to do.

A restore has two halves. ``check`` compares a stored item with the live object and writes what does
not fit into the report; nothing is changed. Only when all items passed does ``apply`` change the
objects, so that a checkpoint that does not fit leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from .report import LoadReport
from .source import StateSource

__all__ = ["Part"]


class Part(Protocol):
    """One tracked object, seen as something that is saved and restored."""

    def capture(self) -> Any:
        """Return the value to store: containers, numbers, tensors. Tensors are not copied."""

    def frozen(self) -> Collection[str]:
        """Return the keys of tensors that the run does not train."""

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Write into the report what does not fit."""

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Restore the live object."""
