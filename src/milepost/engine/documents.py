"""The JSON files of a checkpoint that one process writes, and where things are in its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..format.layout import INDEX
from ..format.manifest import FORMAT_VERSION
from .stage import StagedPart
from .together import tensor_map

__all__ = ["TreeTexts", "documents", "layout_state", "places"]

_LARGE = 64
"""From how many members on the text of a container is worth being kept."""

_LEVELS = 3
"""How deep in a tree containers are looked at one by one."""


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


class TreeTexts:
    """Writes trees as JSON, and of them only anew what is not the very part of the time before.

    To encode a tree of 100,000 tensors takes a tenth of a second, in which no other thread runs.

    A tree that was written must not be changed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def texts(self, trees: Mapping[str, Any]) -> dict[str, str]:
        """Return the JSON of each of some trees. Texts of other trees are forgotten."""
        before, self._known = self._known, {}
        return {name: self._text(tree, before, _LEVELS) for name, tree in trees.items()}

    def _text(self, tree: Any, before: Mapping[int, tuple[Any, str]], levels: int) -> str:
        if not isinstance(tree, dict | list):
            return _json(tree)
        known = before.get(id(tree))
        members = tree.values() if isinstance(tree, dict) else tree
        if known is not None and known[0] is tree:
            text = known[1]
        elif not levels or not any(map(_is_large, members)):
            text = _json(tree)
        else:
            inner = [self._text(one, before, levels - 1) for one in members]
            if isinstance(tree, dict):
                keys = map(_json, tree)
                inner = [f"{key}:{one}" for key, one in zip(keys, inner, strict=True)]
            text = ",".join(inner).join("{}" if isinstance(tree, dict) else "[]")
        if _is_large(tree):
            # The tree is kept with it: no other has its number then.
            self._known[id(tree)] = (tree, text)
        return text


def _is_large(tree: Any) -> bool:
    return isinstance(tree, dict | list) and len(tree) >= _LARGE


def documents(
    trees: Mapping[str, Any], staged: Sequence[StagedPart], *, texts: TreeTexts | None = None
) -> dict[str, bytes]:
    """Return the JSON files of a checkpoint by path.

    Args:
        trees: The tree of each item.
        staged: The parts.
        texts: Keeps what was written for the checkpoint before.
    """
    files: dict[str, list[str]] = {name: [] for name in trees}
    for part in staged:
        files[part.plan.item].append(part.plan.file)
    written = (texts or TreeTexts()).texts(trees)
    items = ",".join(
        f'{_json(name)}:{{"tree":{text},"files":{_json(files[name])}}}'
        for name, text in written.items()
    )
    index = f'{{"format":{_json(FORMAT_VERSION)},"items":{{{items}}}}}'
    documents = {INDEX: index.encode("ascii")}
    for name, parts in files.items():
        if len(parts) > 1:
            # Several parts of whole tensors: the index that other tools look for.
            own = [part.plan for part in staged if part.plan.item == name]
            weights = {entry.key: plan.file for plan in own for entry in plan.tensors}
            documents.update(tensor_map(name, weights, sum(plan.size_bytes for plan in own)))
    return documents


def _json(value: Any) -> str:
    """Encode without sorting: the order of a dict is part of the state."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
