"""How values look: tables for people, JSON for programs.

On a terminal a table is drawn with rich; elsewhere it is plain text in columns, never cut short.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..progress.time import Time
from ..runs.costs import size_text
from .escaped import escaped

__all__ = [
    "Column",
    "age_text",
    "count_text",
    "fitted",
    "iso_text",
    "metrics_text",
    "plain",
    "print_json",
    "print_table",
    "size_text",
    "span_text",
    "time_text",
]

_SHOWN_METRICS = 3
_GAP = 2
_NARROWEST = 12
_WORD = re.compile(r"[^\s/]*(?:/+|\s+|$)")
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_STYLES = {
    "damaged": "red",
    "fail": "red",
    "removed": "red",
    "remove": "red",
    "incomplete": "yellow",
    "deleting": "yellow",
    "orphaned": "yellow",
    "warn": "yellow",
    "changed": "yellow",
    "added": "green",
    "ok": "green",
    "good": "green",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        is_number: Whether it is aligned to the right.
        is_whole: Whether its cells are never broken over lines, as those of numbers never are.
    """

    title: str
    is_number: bool = False
    is_whole: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings; columns that are empty everywhere are left out."""
    used = [n for n, _ in enumerate(columns) if any(row[n] for row in rows)]
    columns, rows = [columns[n] for n in used], [[escaped(row[n]) for n in used] for row in rows]
    if not rows:
        return
    if sys.stdout.isatty():
        _print_rich(columns, rows)
        return
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_rich(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    titles = [column.title for column in columns]
    lines = fitted([titles, *rows], columns, console.width)
    titles, rows = lines[0], lines[1:]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, column in zip(titles, columns, strict=True):
        table.add_column(
            title,
            justify="right" if column.is_number else "left",
            no_wrap=column.is_number or column.is_whole,
            overflow="fold",
        )
    for row in rows:
        # Text, not markup: names and metrics may hold square brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def fitted(rows: Sequence[Sequence[str]], columns: Sequence[Column], width: int) -> list[list[str]]:
    """Return rows whose long cells are broken into lines, where words end, to fit into a width.

    Args:
        rows: The cells, headings included.
        columns: What they belong to.
        width: Characters of a line.
    """
    widths = [max(len(row[n]) for row in rows) for n in range(len(columns))]
    free = [n for n, column in enumerate(columns) if not (column.is_number or column.is_whole)]
    excess = sum(widths) + _GAP * (len(columns) - 1) - width
    words = [max(len(word.rstrip()) for row in rows for word in _words(row[n])) for n in free]
    for floors in (words, [min(_NARROWEST, most) for most in words]):
        for _ in range(max(excess, 0) if free else 0):
            widest = max(zip(free, floors, strict=True), key=lambda one: widths[one[0]] - one[1])
            if widths[widest[0]] <= widest[1]:
                break
            widths[widest[0]] -= 1
            excess -= 1
    return [
        [_broken(cell, widths[n]) if n in free else cell for n, cell in enumerate(row)]
        for row in rows
    ]


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _broken(text: str, width: int) -> str:
    """Break a text after spaces and slashes, and anywhere only where there are none."""
    lines = [""]
    for word in _words(text):
        if len(lines[-1]) + len(word.rstrip()) > width and lines[-1]:
            lines.append("")
        rest = word
        while len(rest.rstrip()) > width:
            lines[-1], rest = rest[:width], rest[width:]
            lines.append("")
        lines[-1] += rest
    return "\n".join(line.rstrip() for line in lines)


def print_json(value: Any) -> None:
    """Print a value as JSON. Numbers that JSON has no form for become text: ``"NaN"``."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value made of what JSON has."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Time):
        return value.value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(member) for member in value]
    return str(value)


def count_text(count: int, noun: str) -> str:
    """Return a number of things: ``1 tensor``, ``2 tensors``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def age_text(then_s: float, *, now_s: float | None = None) -> str:
    """Return how long ago a moment was: ``5 min ago``.

    Args:
        then_s: Seconds since 1970.
        now_s: Seconds since 1970; the present by default.
    """
    age_s = (time.time() if now_s is None else now_s) - then_s
    if age_s < 1:
        return "now" if age_s > -60 else "in the future"
    span_s, unit = next((span_s, unit) for span_s, unit in _SPANS if age_s >= span_s)
    return f"{int(age_s // span_s)} {unit} ago"


def span_text(seconds: float) -> str:
    """Return a duration for people: ``1.5 ms``, ``12 s``, ``3 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def iso_text(then_s: float) -> str:
    """Return a moment in ISO 8601, in UTC."""
    moment = datetime.datetime.fromtimestamp(then_s, tz=datetime.timezone.utc)
    return moment.isoformat(timespec="seconds")


def time_text(counters: Mapping[str, Any], name: str) -> str:
    """Return a progress counter, or nothing if it was not counted."""
    value = plain(counters.get(name))
    return "" if value is None else str(value)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return a few metrics on a line; one that has a short name too, by that."""
    metrics = {name: value for name, value in metrics.items() if not _is_repeated(name, metrics)}
    shown = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={plain(value)}"
        for name, value in list(metrics.items())[:_SHOWN_METRICS]
    ]
    more = len(metrics) - len(shown)
    return " ".join(shown) + (f" +{more}" if more else "")


def _is_repeated(name: str, metrics: Mapping[str, Any]) -> bool:
    """Return whether a metric of an evaluator stands there by its own name too, alike."""
    _, slash, short = name.rpartition("/")
    if not slash or short not in metrics:
        return False
    one, other = plain(metrics[name]), plain(metrics[short])
    return bool(one == other)
