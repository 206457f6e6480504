"""``milepost ls``: what is in a run."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ...runs.scan import Found, State
from ..places import locate_run
from ..render import (
    Column,
    age_text,
    iso_text,
    metrics_text,
    print_json,
    print_table,
    size_text,
    time_text,
)

__all__ = ["ls", "record_of", "validation_record"]

_COLUMNS = (
    Column("name", is_whole=True),
    Column("state", is_whole=True),
    Column("made", is_whole=True),
    Column("epoch", is_number=True),
    Column("batch", is_number=True),
    Column("size", is_number=True),
    Column("new", is_number=True),
    Column("metrics"),
    Column("marks"),
)


def ls(
    run: Annotated[str, typer.Argument(help="The folder of a run.")] = ".",
    *,
    everything: Annotated[
        bool,
        typer.Option("--all", "-a", help="Also what does not count: damaged, incomplete, ..."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """List the checkpoints of a run, the oldest first."""
    view = locate_run(run).view
    latest = view.latest()
    found = view.found if everything else view.lineage()
    if as_json:
        print_json([record_of(one, is_latest=one is latest) for one in found])
        return
    print_table(_COLUMNS, [_row(one, is_latest=one is latest) for one in found])
    hidden = len(view.found) - len(found)
    if not found:
        print("There are no checkpoints that count.", file=sys.stderr)
    if hidden:
        print(f"{hidden} more that do not count; --all shows them.", file=sys.stderr)


def record_of(found: Found, *, is_latest: bool) -> dict[str, Any]:
    """Return what is known of a checkpoint without opening its parts.

    Returns:
        ``name``, ``state``, ``created`` (ISO 8601, ``None`` without a commit), ``time``, ``bytes``,
        ``new_bytes`` (not shared with an earlier checkpoint), ``metrics`` (those that a validation
        has found included), ``validation`` (``None`` if none was asked for), ``reason``,
        ``is_final``, ``is_pinned``, ``is_latest``, ``session``, ``notes``, ``error``.
    """
    made = found.manifest
    return {
        "name": found.name,
        "state": found.state.value,
        "created": iso_text(made.created_s) if made else None,
        "time": dict(made.time) if made else {},
        "bytes": found.size_bytes,
        "new_bytes": _new_bytes(found),
        "metrics": dict(found.metrics),
        "validation": validation_record(found),
        "reason": made.reason if made else None,
        "is_final": bool(made and made.is_final),
        "is_pinned": found.is_pinned,
        "is_latest": is_latest,
        "session": found.session,
        "notes": list(made.notes) if made else [],
        "error": str(found.error) if found.error else None,
    }


def validation_record(found: Found | None) -> dict[str, Any] | None:
    """Return a validation: its ``status``, ``metrics``, ``error`` and ``num_attempts``."""
    validation = found.validation if found else None
    if validation is None:
        return None
    return {
        "status": validation.status.value,
        "metrics": dict(validation.metrics),
        "error": validation.error or None,
        "num_attempts": validation.num_attempts,
    }


def _new_bytes(found: Found) -> int:
    if found.manifest is None:
        return found.size_bytes
    return sum(e.size_bytes for e in found.manifest.files if e.linked_from is None)


def _row(found: Found, *, is_latest: bool) -> list[str]:
    made = found.manifest
    marks = {
        "latest": is_latest,
        "final": bool(made and made.is_final),
        "pinned": found.is_pinned,
        "inexact": bool(made and made.notes),
        str(found.validation.status if found.validation else ""): found.validation is not None,
    }
    new_bytes = _new_bytes(found)
    return [
        found.name,
        found.state.value if found.state is not State.COMMITTED else "",
        age_text(made.created_s if made else found.modified_s),
        time_text(made.time, "epoch") if made else "",
        time_text(made.time, "batch") if made else "",
        size_text(found.size_bytes),
        size_text(new_bytes) if new_bytes != found.size_bytes else "",
        metrics_text(found.metrics),
        " ".join(mark for mark, is_set in marks.items() if is_set),
    ]
