"""The JSON files of a checkpoint that one process writes, and where things are in its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..format.layout import INDEX
from ..format.manifest import FORMAT_VERSION
from .stage import StagedPart
from .together import tensor_map

__all__ = ["documents", "layout_state", "places"]


def layout_state(items: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange items as readers get them: ``{"state": {...}, "rng": [...]}``."""
    state = {name: value for name, value in items.items() if name != "rng"}
    return {"state": state, "rng": items.get("rng", [])}


def places(staged: Sequence[StagedPart]) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Return where each tensor lies, by item and name in the part: file, first byte, the end."""
    return {
        (part.plan.item, entry.key): (part.plan.file, entry.start, entry.stop)
        for part in staged
        for entry in part.plan.tensors
    }


def documents(trees: Mapping[str, Any], staged: Sequence[StagedPart]) -> dict[str, bytes]:
    """Return the JSON files of a checkpoint by path.

    Args:
        trees: The tree of each item.
        staged: The parts.
    """
    files: dict[str, list[str]] = {name: [] for name in trees}
    weights: dict[str, dict[str, str]] = {name: {} for name in trees}
    for part in staged:
        files[part.plan.item].append(part.plan.file)
        weights[part.plan.item].update((entry.key, part.plan.file) for entry in part.plan.tensors)
    index = {
        "format": FORMAT_VERSION,
        "items": {name: {"tree": tree, "files": files[name]} for name, tree in trees.items()},
    }
    documents = {INDEX: _json(index)}
    for name, parts in files.items():
        if len(parts) > 1:
            # Several parts of whole tensors: the index that other tools look for.
            total = sum(p.plan.size_bytes for p in staged if p.plan.item == name)
            documents.update(tensor_map(name, weights[name], total))
    return documents


def _json(value: Any) -> bytes:
    """Encode without sorting: the order of a dict is part of the state."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
