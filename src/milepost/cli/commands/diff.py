"""``milepost diff``: what differs between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..compare import Change, Comparison, compare, measure_changes, only_items
from ..contents import read_contents
from ..escaped import escaped
from ..exits import Exit
from ..places import locate
from ..render import Column, count_text, print_json, print_table, size_text, span_text

__all__ = ["diff"]

_MAX_TEXT = 40
_TENSOR_COLUMNS = (
    Column("tensor"),
    Column("change", is_whole=True),
    Column("before", is_whole=True),
    Column("after", is_whole=True),
    Column("bytes", is_number=True),
    Column("max abs", is_number=True),
    Column("rel l2", is_number=True),
)
_OTHER_COLUMNS = (
    Column("value"),
    Column("change", is_whole=True),
    Column("before"),
    Column("after"),
)


def diff(
    a: Annotated[str, typer.Argument(help="RUN/NAME, a run, or a checkpoint's own folder.")],
    b: Annotated[str, typer.Argument(help="What to compare it with.")],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Measure how far tensors are apart; needs torch.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ITEM", help="Only this item; may be repeated.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Print at most so many of each kind.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object, with everything.")
    ] = False,
) -> None:
    """Compare two checkpoints: tensors by their bytes, the rest by value.

    Equal checksums are taken for equal bytes. Ends with 1 if anything differs. That two runs took
    not equally long is told, and counts as no difference.
    """
    found, against = locate(a), locate(b)
    left, right = found.checkpoint, against.checkpoint
    one, other = read_contents(left), read_contents(right)
    if only:
        one, other = only_items(one, other, only)
    comparison = compare(one, other)
    if values:
        comparison = measure_changes(one, other, comparison)
    changes = sorted((change for change, _, _ in comparison.tensors), key=_weight)
    if as_json:
        print_json(_record(left.url, right.url, changes, comparison))
    else:
        _print(found.called(a), against.called(b), changes, comparison, top=top)
    if not comparison.is_equal:
        raise typer.Exit(Exit.DAMAGED)


def _weight(change: Change) -> tuple[float, float, str]:
    """Sort what differs most first: by measured distance, then by size."""
    distance = change.max_abs if change.max_abs is not None else 0.0
    return (-math.inf if math.isnan(distance) else -distance, -change.num_bytes, change.path)


def _print(a: str, b: str, changes: Sequence[Change], comparison: Comparison, *, top: int) -> None:
    print(
        f"{a} -> {b}: {count_text(comparison.num_equal, 'tensor')} equal, {_counts(changes)}; "
        f"{count_text(len(comparison.others), 'other difference')}"
    )
    rows = [
        [
            change.path,
            change.kind,
            change.before,
            change.after if change.after != change.before else "",
            size_text(change.num_bytes),
            _number(change.max_abs),
            _number(change.relative_l2),
        ]
        for change in changes[:top]
    ]
    print_table(_TENSOR_COLUMNS, rows)
    _print_more(len(changes) - top, "tensors")
    others = comparison.others
    rows = [[c.path, c.kind, _short(c.before), _short(c.after)] for c in others[:top]]
    print_table(_OTHER_COLUMNS, rows)
    _print_more(len(others) - top, "values")
    for clock in comparison.clocks:
        before, after = (span_text(float(text)) for text in (clock.before, clock.after))
        print(f"not counted: {escaped(clock.path)}, the time it took: {before} -> {after}")


def _print_more(count: int, what: str) -> None:
    if count > 0:
        print(f"... and {count} more {what}; --top shows more, --json all of them")


def _counts(changes: Sequence[Change]) -> str:
    kinds = ("changed", "added", "removed")
    counted = [(sum(change.kind == kind for change in changes), kind) for kind in kinds]
    return ", ".join(f"{count} {kind}" for count, kind in counted if count) or "none changed"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _record(a: str, b: str, changes: Sequence[Change], comparison: Comparison) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "is_equal": comparison.is_equal,
        "num_equal_tensors": comparison.num_equal,
        "tensors": [
            {
                "tensor": change.path,
                "change": change.kind,
                "before": change.before or None,
                "after": change.after or None,
                "bytes": change.num_bytes,
                "max_abs": change.max_abs,
                "relative_l2": change.relative_l2,
            }
            for change in changes
        ],
        "values": [
            {
                "path": change.path,
                "change": change.kind,
                "before": change.before or None,
                "after": change.after or None,
            }
            for change in comparison.others
        ],
        "not_counted": [
            {"path": clock.path, "before": clock.before, "after": clock.after}
            for clock in comparison.clocks
        ],
    }
