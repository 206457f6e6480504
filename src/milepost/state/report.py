"""What a load did: loaded, missing, unexpected, mis-shaped, mis-typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import CheckpointError, MismatchError

__all__ = ["LoadReport", "restoring"]

_SHOWN = 8


@dataclass(slots=True)
class LoadReport:
    """The outcome of loading a checkpoint into live objects.

    Names are written ``item: tensor``, as in ``model: 0.weight``.

    Attributes:
        source: The checkpoint that was read.
        loaded: What was restored.
        missing: What the live objects have and the checkpoint lacks.
        unexpected: What the checkpoint has and the live objects lack.
        mis_shaped: Tensors whose shapes differ, with both shapes.
        mis_typed: Tensors whose dtypes differ, with both dtypes.
        cast: Tensors that were converted to the dtype of the live one; only in a lenient load.
        problems: Anything else that does not fit, in plain words.
        notes: What cannot be reproduced exactly, and checkpoints that were passed over.
        is_position_alien: Whether a position in an epoch does not fit, which a lenient load refuses
            as well.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[str] = field(default_factory=list)
    mis_typed: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_position_alien: bool = False

    @property
    def is_exact(self) -> bool:
        """Return whether everything fitted everything."""
        return not (
            self.missing
            or self.unexpected
            or self.mis_shaped
            or self.mis_typed
            or self.cast
            or self.problems
        )

    def summary(self) -> str:
        """Return the report in a few lines."""
        restored = f"{len(self.loaded)} of {self.num_wanted} restored from {self.source}"
        return "\n".join([restored, *self._details()])

    __str__ = summary

    def _details(self) -> list[str]:
        lines = []
        for title, names in self._groups():
            if names:
                lines.append(f"  {len(names)} {title}: {_some(names)}")
        lines.extend(f"  {problem}" for problem in self.problems)
        lines.extend(f"  note: {note}" for note in self.notes)
        return lines

    @property
    def num_wanted(self) -> int:
        """Return how many things the live objects asked for."""
        return len(self.loaded) + len(self.missing) + len(self.mis_shaped) + len(self.mis_typed)

    def require_exact(self) -> None:
        """Raise if anything did not fit.

        Raises:
            MismatchError: With the whole report, before anything was changed.
        """
        if not self.is_exact:
            details = "\n".join(self._details())
            raise MismatchError(
                f"What {self.source} holds does not fit the objects it is loaded into:\n"
                f"{details}\n",
                safe="Nothing was changed.",
                hint="Build the objects as they were, or go on from the end of an epoch."
                if self.is_position_alien
                else "Build the objects as they were, or load with strict=False to take what fits.",
                report=self,
                is_lenient_enough=not self.is_position_alien,
            )

    def _groups(self) -> list[tuple[str, Sequence[str]]]:
        return [
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("of another shape", self.mis_shaped),
            ("of another dtype", self.mis_typed),
            ("converted to the live dtype", self.cast),
        ]


@contextmanager
def restoring(source: str, item: str) -> Iterator[None]:
    """Turn whatever goes wrong while stored state is taken over into a typed error.

    Stored state may be anything, and so may the objects that take it over.

    Args:
        source: The checkpoint.
        item: What is being restored.

    Raises:
        MismatchError: With the error as its cause. Typed errors pass.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise MismatchError(
            f"What {source} holds as {item!r} could not be taken over: {type(error).__name__}: "
            f"{error}.",
            hint="Build the object as it was when the checkpoint was made.",
            item=item,
        ) from error


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
