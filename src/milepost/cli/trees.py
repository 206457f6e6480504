"""The structure of an item as text, and as paths that can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flatten", "tensor_keys", "tree_lines"]

_INLINE = 8
_MAX_TEXT = 60
_SEQUENCES = ("tuple", "set", "frozenset", "deque")


def tree_lines(
    name: str, tree: Any, tensors: Mapping[str, str], *, depth: int = 0
) -> Iterator[str]:
    """Yield the lines of a tree, two spaces a level.

    Args:
        name: What stands before the tree.
        tree: The stored structure.
        tensors: Dtype and shape of each tensor by its key.
        depth: How far to indent.
    """
    indent = "  " * depth
    members, kind = _members(tree)
    if members is None:
        yield f"{indent}{name}: {_leaf_text(tree, tensors)}"
        return
    if _is_flat(members) and kind != "dict":
        values = [member for _, member in members]
        shown = json.dumps(values) if len(values) <= _INLINE else f"{len(values)} values"
        yield f"{indent}{name}: {kind} {_short(shown)}"
        return
    yield f"{indent}{name}: {kind} of {len(members)}"
    for key, member in members:
        yield from tree_lines(str(key), member, tensors, depth=depth + 1)


def tensor_keys(tree: Any) -> Iterator[str]:
    """Yield the key of every tensor in a tree, in its order, again for every reference."""
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, Mapping):
            if _is_tensor(value):
                yield str(value.get("key"))
            else:
                stack.extend(reversed(list(value.values())))


def flatten(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield a path and a text for everything in a tree that is not a tensor.

    A long row of plain values is one entry. Two trees differ where their entries do.
    """
    members, kind = _members(tree)
    if members is None:
        if not _is_tensor(tree):
            yield path, json.dumps(tree)
        return
    if kind != "dict" and _is_flat(members) and len(members) > _INLINE:
        yield path, json.dumps([member for _, member in members])
        return
    if not members:
        yield path, f"empty {kind}"
    for key, member in members:
        yield from flatten(member, f"{path}[{key!r}]")


def _members(tree: Any) -> tuple[list[tuple[Any, Any]] | None, str]:
    """Return the members of a container with its kind, or ``None`` for a leaf."""
    if isinstance(tree, list):
        return list(enumerate(tree)), "list"
    if not isinstance(tree, Mapping):
        return None, ""
    tag = tree.get("$")
    if tag is None:
        return list(tree.items()), "dict"
    if tag in ("dict", "ordered_dict", "counter"):
        return [(_key_text(key), member) for key, member in tree["items"]], "dict"
    if tag in _SEQUENCES:
        return list(enumerate(tree["v"])), str(tag)
    return None, ""


def _key_text(key: Any) -> Any:
    return key if isinstance(key, str | int | float) or key is None else json.dumps(key)


def _is_flat(members: list[tuple[Any, Any]]) -> bool:
    return all(not isinstance(member, list | Mapping) for _, member in members)


def _is_tensor(tree: Any) -> bool:
    return isinstance(tree, Mapping) and tree.get("$") == "tensor"


def _leaf_text(tree: Any, tensors: Mapping[str, str]) -> str:
    if not isinstance(tree, Mapping):
        return _short(json.dumps(tree))
    if _is_tensor(tree):
        key = str(tree.get("key"))
        if "dtype" in tree:
            return f"{tree['dtype']}, as the bytes of {key}"
        return tensors.get(key, f"tensor {key}, which is missing")
    if tree["$"] == "numpy":
        shape = tree.get("shape")
        return f"numpy {tree.get('dtype')}" + ("" if shape is None else f" {shape}")
    return _short(f"{tree['$']} {json.dumps({k: v for k, v in tree.items() if k != '$'})}")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
