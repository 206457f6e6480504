"""Figures of several rounds, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["COLUMNS", "Figures", "Verdict", "ratios", "table"]

COLUMNS = ["variant", "median s", "spread s", "ratio"]


@dataclass(slots=True)
class Figures:
    """Seconds or rates by variant, one entry a round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add the figure of one round."""
        self.rounds.setdefault(name, []).append(value)

    def add_round(self, row: dict[str, float]) -> None:
        """Add the figures of one round."""
        for name, value in row.items():
            self.add(name, value)

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.rounds[name])

    def spread(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest figure."""
        return min(self.rounds[name]), max(self.rounds[name])


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table at the end: a claim, what was measured, and what it should be.

    Attributes:
        claim: What is claimed, with its unit.
        ours: The figure of Milepost.
        target: What it should be at most, or at least.
        is_ceiling: Whether the target is the most.
        peers: The figures of others, by name.
    """

    claim: str
    ours: float
    target: float
    is_ceiling: bool
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Return whether the figure is as it should be."""
        return self.ours <= self.target if self.is_ceiling else self.ours >= self.target

    def row(self) -> list[str]:
        """Return the line."""
        sign = "at most" if self.is_ceiling else "at least"
        others = ", ".join(f"{name} {figure:.2f}" for name, figure in self.peers.items())
        met = "yes" if self.is_met else "NO"
        return [self.claim, f"{self.ours:.3f}", f"{sign} {self.target:g}", met, others]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(("  " + "  ".join(cells)).rstrip())


def ratios(figures: Figures, limit: str, names: Sequence[str], *, is_rate: bool) -> list[list[str]]:
    """Return a row a variant: median seconds, spread, ratio to the limit."""
    rows = []
    base = figures.median(limit)
    for name in [limit, *names]:
        median, (low, high) = figures.median(name), figures.spread(name)
        ratio = base / median if is_rate else median / base
        rows.append([name, f"{median:.3f}", f"{low:.3f}-{high:.3f}", f"{ratio:.2f}"])
    return rows
