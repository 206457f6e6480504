"""``milepost show``: one checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...checkpoint import Checkpoint
from ...runs.costs import cost_text
from ..contents import Contents, read_contents
from ..escaped import escaped
from ..places import Located, locate
from ..render import (
    Column,
    age_text,
    count_text,
    iso_text,
    plain,
    print_json,
    print_table,
    size_text,
)
from ..trees import tree_lines
from .ls import validation_record

__all__ = ["show"]

_TENSOR_COLUMNS = (
    Column("item"),
    Column("name"),
    Column("dtype", is_whole=True),
    Column("shape", is_whole=True),
    Column("bytes", is_number=True),
    Column("file"),
)
_PLAIN_COLUMN = Column("plain bytes", is_number=True)
_FILE_COLUMNS = (
    Column("file"),
    Column("bytes", is_number=True),
    Column("crc32c", is_whole=True),
    Column("shared with"),
)


def show(
    checkpoint: Annotated[
        str, typer.Argument(help="RUN/NAME, a run (its newest), or a checkpoint's own folder.")
    ],
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show the structure of the state.")] = False,
    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Show what a checkpoint is and what it holds. No tensor is read."""
    located = locate(checkpoint)
    facts = _facts(located)
    contents = read_contents(located.checkpoint) if tensors or tree else None
    if as_json:
        if contents is not None and tensors:
            facts["tensors"] = _tensor_records(contents)
        if contents is not None and tree:
            facts["tree"] = dict(contents.trees)
        if files:
            facts["files"] = _file_records(located.checkpoint)
        print_json(facts)
        return
    if contents is None and not files:
        _print_facts(facts)
    if contents is not None and tensors:
        _print_tensors(contents)
    if contents is not None and tree:
        _print_tree(contents)
    if files:
        _print_files(located.checkpoint)


def _facts(located: Located) -> dict[str, Any]:
    checkpoint, made, found = located.checkpoint, located.checkpoint.manifest, located.found
    return {
        "name": checkpoint.name,
        "url": checkpoint.url,
        "state": found.state.value if found else "committed",
        "is_pinned": bool(found and found.is_pinned),
        "is_final": made.is_final,
        "reason": made.reason,
        "created": iso_text(made.created_s),
        "created_s": made.created_s,
        "time": dict(made.time),
        "metrics": dict(found.metrics if found else made.metrics),
        "validation": validation_record(found),
        "bytes": made.size_bytes,
        "plain_bytes": made.plain_bytes,
        "num_files": len(made.files),
        "items": list(made.items),
        "layout": made.layout,
        "world_size": made.world_size,
        "run_id": made.run_id,
        "session": made.session,
        "attempt": made.attempt,
        "parent": made.parent,
        "software": dict(made.software),
        "stats": dict(made.stats),
        "interval": dict(made.interval),
        "notes": list(made.notes),
        "metadata": checkpoint.get_metadata(),
    }


def _print_facts(facts: dict[str, Any]) -> None:
    marks = [word for word in ("final", "pinned") if facts[f"is_{word}"]]
    counters = {name: plain(value) for name, value in facts["time"].items()}
    lines = {
        "name": facts["name"],
        "place": facts["url"].removeprefix("file://"),
        "state": ", ".join([facts["state"], *marks]),
        "made": f"{facts['created']} ({age_text(facts['created_s'])}), reason: {facts['reason']}",
        "progress": _pairs(counters),
        "metrics": _pairs(facts["metrics"]),
        "validation": _validation_text(facts["validation"]),
        "size": _size_text(facts),
        "items": ", ".join(facts["items"]),
        "layout": f"{facts['layout']}, written by {count_text(facts['world_size'], 'rank')}",
        "lineage": f"session {facts['session']}, attempt {facts['attempt']}, "
        + (f"after {facts['parent']}" if facts["parent"] else "the first"),
        "software": _pairs(facts["software"]),
        "save": cost_text(facts["stats"]),
        "copied": _copied_text(facts["stats"]),
        "interval": str(facts["interval"].get("why", "")),
        "metadata": _pairs(facts["metadata"]),
    }
    width = max(len(title) for title in lines)
    for title, text in lines.items():
        if text:
            print(f"{title:<{width}}  {escaped(text)}")
    for note in facts["notes"]:
        print(f"{'inexact':<{width}}  {escaped(note)}")


def _size_text(facts: dict[str, Any]) -> str:
    text = f"{size_text(facts['bytes'])} in {count_text(facts['num_files'], 'file')}"
    if facts["plain_bytes"] != facts["bytes"]:
        text += f", compressed from {size_text(facts['plain_bytes'])}"
    return text


def _validation_text(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    lines = str(record["error"] or "").strip().splitlines()
    words = [record["status"], _pairs(record["metrics"]), lines[0] if lines else ""]
    return ", ".join(word for word in words if word)


def _copied_text(stats: dict[str, Any]) -> str:
    """Return what of the state was copied while the training went on, and why not more."""
    late, reason = stats.get("late_bytes"), stats.get("eager_reason")
    late = late if isinstance(late, int | float) else None
    texts = [f"{size_text(late)} while training went on"] if late else []
    if reason:
        texts.append(f"{'the rest' if late else 'all'} before the save returned: {reason}")
    return ", ".join(texts)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {plain(value)}"
        for name, value in values.items()
    )


def _tensor_records(contents: Contents) -> list[dict[str, Any]]:
    return [
        {
            "item": row.item,
            "name": row.key,
            "dtype": row.dtype,
            "shape": list(row.shape),
            "bytes": row.num_bytes,
            "file": row.file,
        }
        for row in contents.tensors.values()
    ]


def _print_tensors(contents: Contents) -> None:
    rows = [
        [row.item, row.key, row.dtype, _shape_text(row.shape), f"{row.num_bytes:,}", row.file]
        for row in contents.tensors.values()
    ]
    print_table(_TENSOR_COLUMNS, rows)
    total = sum(row.num_bytes for row in contents.tensors.values())
    print(f"{count_text(len(rows), 'tensor')}, {size_text(total)}")


def _print_tree(contents: Contents) -> None:
    for item, tree in contents.trees.items():
        texts = {
            key: f"{row.dtype} {_shape_text(row.shape)}"
            for (owner, key), row in contents.tensors.items()
            if owner == item
        }
        for line in tree_lines(item, tree, texts):
            print(escaped(line))


def _file_records(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    return [
        {
            "path": entry.path,
            "bytes": entry.size_bytes,
            "plain_bytes": entry.plain.size_bytes,
            "crc32c": f"{entry.crc:08x}",
            "linked_from": entry.linked_from,
        }
        for entry in checkpoint.manifest.files
    ]


def _print_files(checkpoint: Checkpoint) -> None:
    rows = [
        [entry.path, f"{entry.size_bytes:,}", f"{entry.crc:08x}", entry.linked_from or ""]
        for entry in checkpoint.manifest.files
    ]
    columns = list(_FILE_COLUMNS)
    if checkpoint.manifest.is_compressed:
        columns.insert(2, _PLAIN_COLUMN)
        for row, entry in zip(rows, checkpoint.manifest.files, strict=True):
            row.insert(2, f"{entry.plain.size_bytes:,}")
    print_table(columns, rows)


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
