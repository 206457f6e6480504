"""What is reported to in this process: the innermost run that is in use."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Stack"]

T = TypeVar("T")


class Stack(Generic[T]):
    """The runs in use, the innermost last."""

    def __init__(self) -> None:
        self.items: list[T] = []

    def push(self, item: T) -> None:
        """Use this one from now on."""
        self.items.append(item)

    def pop(self, item: T) -> None:
        """Use it no more."""
        if item in self.items:
            self.items.remove(item)
