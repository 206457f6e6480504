"""A stage of a model: saved as a piece of the whole, restored from the whole."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import UnsupportedStateError
from .model import ModelPart
from .parts import Place
from .report import LoadReport
from .source import StateSource
from .stages import Stage

__all__ = ["StagePart"]


class StagePart:
    """The modules of a :class:`Stage` under the names of the whole model.

    Args:
        stage: The stage.
        strict: See :class:`ModelPart`. What other ranks hold is neither missing nor unexpected.
    """

    def __init__(self, stage: Stage, *, strict: bool = True) -> None:
        self._parts = [ModelPart(module, strict=strict) for module in stage.modules]
        self._known: set[str] = set()

    def capture(self) -> dict[str, Any]:
        """Return the state of all modules by clean name.

        Raises:
            UnsupportedStateError: Two modules of this rank have one name for two things.
        """
        state: dict[str, Any] = {}
        for part in self._parts:
            for name, value in part.capture().items():
                if name in state and not _is_same(state[name], value):
                    raise UnsupportedStateError(
                        f"Two stages of this rank both have {name!r}, and it is not one tensor.",
                        hint="Names must be those of the whole model; tie the two to each other.",
                        path=name,
                    )
                state[name] = value
        return state

    def leaders(self) -> Collection[str]:
        """Return the names of buffers."""
        return {name for part in self._parts for name in part.leaders()}

    def frozen(self) -> Collection[str]:
        """Return the names of parameters that do not require gradients."""
        return {name for part in self._parts for name in part.frozen()}

    def spread(self) -> Collection[Place]:
        """Return the names that this rank has."""
        return {(name,) for part in self._parts for name in part.capture()}

    def learn(self, places: Collection[Place]) -> None:
        """Take note of the names of the whole model."""
        self._known = {name for (name,) in places}

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Compare the names of this rank with those that are stored."""
        elsewhere = {f"{item}: {name}" for name in self._known}
        unexpected: list[str] | None = None
        for part in self._parts:
            found = LoadReport(report.source)
            part.check(source, item, found)
            if unexpected is None:
                unexpected = [name for name in found.unexpected if name not in elsewhere]
            unexpected = [name for name in unexpected if name in found.unexpected]
            for kind in ("missing", "mis_shaped", "mis_typed", "cast", "problems"):
                getattr(report, kind).extend(getattr(found, kind))
        report.unexpected += unexpected or []

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Read the stored tensors into those of this rank."""
        for part in self._parts:
            if part.capture():
                part.apply(source, item, report)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two values are one tensor."""
    return first is second or (
        hasattr(first, "data_ptr")
        and hasattr(second, "data_ptr")
        and first.numel() > 0
        and (first.data_ptr(), first.shape, first.dtype, first.stride())
        == (second.data_ptr(), second.shape, second.dtype, second.stride())
    )
