"""Names of torch.distributed.checkpoint <-> items and trees.

DCP knows one flat state: each entry has a name, and a path of keys and positions that the name was
made of, ``model.0.weight`` of ``("model", "0.weight")``. A checkpoint has items, each with a tree.

- A key at the top that leads on, as ``model`` above, is the item of that name.
- A plain value at the top, as ``step`` of ``{"step": 5, ...}``, is an item of its own.
- Other entries at the top, as the weights of a bare state dict, form one item, ``model``.

The index of a checkpoint notes where an item stood if that is not its own name, so that the same
state is found again under the same names. All pure: no files here, and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError, UnsupportedStateError
from ..format import tree

__all__ = [
    "DCP_METADATA",
    "Path",
    "Place",
    "Tree",
    "build_tree",
    "entries_of",
    "name_of",
    "place_all",
]

Path = tuple[str | int, ...]

DCP_METADATA = ".metadata"
"""The file by which a folder of DCP's is known."""

_ITEM = re.compile(r"[A-Za-z0-9_]{1,64}")
_MAX_HOLES = 1_000_000
_TAKEN = frozenset({"rng"})
"""Items that have a form of their own: what each rank has saved of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry stands in a checkpoint.

    Attributes:
        item: The item.
        path: The way to it within the item.
    """

    item: str
    path: Path

    @property
    def key(self) -> str:
        """Return the key of a tensor that stands there."""
        return "/".join(map(str, self.path)) or "value"


@dataclass(frozen=True, slots=True)
class Tree:
    """JSON that is put into a tree as it is."""

    value: Any


def name_of(path: Path) -> str:
    """Return DCP's name of an entry."""
    return ".".join(map(str, path))


def place_all(
    paths: Mapping[str, Path], *, tensors: frozenset[str]
) -> tuple[dict[str, Place], dict[str, list[str]]]:
    """Find a place for every entry of a state.

    Args:
        paths: The path of each entry by its name.
        tensors: The names of those that are tensors.

    Returns:
        The place of each entry by its name; and by item where it stood in the state.

    Raises:
        UnsupportedStateError: Two entries would become one.
    """
    groups = {str(path[0]) for path in paths.values() if len(path) > 1}
    at_top = {name for name, path in paths.items() if len(path) == 1}
    alone = {n for n in at_top - tensors if _ITEM.fullmatch(n) and n not in groups}
    items: dict[str, str] = {}
    for top in (*sorted(groups), *sorted(alone)):
        items[top] = _free(top, set(items.values()))
    root = _free("model", set(items.values()))
    places: dict[str, Place] = {}
    for name, path in paths.items():
        top = str(path[0])
        is_at_root = len(path) == 1 and top not in alone
        places[name] = Place(root, path) if is_at_root else Place(items[top], path[1:])
    stood = {item: [top] for top, item in items.items()}
    if any(place.item == root for place in places.values()):
        stood[root] = []
    _check_apart(places)
    return places, stood


def build_tree(leaves: Mapping[Path, Tree]) -> Any:
    """Return the JSON of an item from that of its leaves.

    Raises:
        UnsupportedStateError: An entry stands where others must have one above them.
    """

    def sink(path: tree.Path, value: Any) -> Any:
        del path
        return value.value if isinstance(value, Tree) else None

    return tree.encode(_nest(leaves), sink=sink, path=("state",))


def entries_of(item: str, value: Any, *, at: Path) -> Iterator[tuple[Path, Path, Any]]:
    """Yield the entries that DCP would make of an item: path, path in the item, JSON.

    It goes on into dicts, and into lists that hold a tensor or a dict, at any depth.

    Args:
        item: Its name, for messages.
        value: Its tree.
        at: Where it stands in the state.
    """
    stack: list[tuple[Path, Any]] = [((), value)]
    while stack:
        path, one = stack.pop()
        if len(path) > tree.MAX_DEPTH:
            raise FormatError(f"The tree of {item} nests deeper than {tree.MAX_DEPTH} levels.")
        members = _members(one)
        if members is None:
            yield (*at, *path), path, one
        else:
            stack.extend(((*path, key), member) for key, member in reversed(members))


def _members(value: Any) -> list[tuple[str | int, Any]] | None:
    """Return the members of a dict or list that is no entry by itself."""
    if isinstance(value, list):
        return None if _is_entry(value) else list(enumerate(value))
    if not isinstance(value, dict):
        return None
    if "$" not in value:
        return list(value.items())
    if value["$"] in _MAPPINGS and isinstance(value.get("items"), list):
        return [(str(tree.decode(key)), member) for key, member in value["items"]]
    return None


def _is_entry(values: list[Any], depth: int = 0) -> bool:
    if depth > tree.MAX_DEPTH:
        return True
    for one in values:
        if isinstance(one, dict) and ("$" not in one or one["$"] in _MAPPINGS | _TENSORS):
            return False
        if isinstance(one, list) and not _is_entry(one, depth + 1):
            return False
    return True


_MAPPINGS = frozenset({"dict", "ordered_dict", "counter"})
_TENSORS = frozenset({"tensor", "sparse_coo", "sparse_compressed", "quantized"})


def _free(wanted: str, taken: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:48] or "_"
    name, count = (f"{plain}_" if plain in _TAKEN else plain), 1
    while name in taken:
        count += 1
        name = f"{plain}_{count}"
    return name


def _check_apart(places: Mapping[str, Place]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for name, place in places.items():
        other = seen.setdefault((place.item, place.key), name)
        if other != name:
            raise UnsupportedStateError(
                f"{name!r} and {other!r} would be stored under one name, {place.key!r}.",
                safe="Nothing was written.",
                hint="Rename a key that has a slash in it.",
                path=name,
            )


def _nest(leaves: Mapping[Path, Tree]) -> Any:
    last: dict[Path, int] = {}
    for path in leaves:
        for depth, key in enumerate(path):
            if type(key) is int:
                last[path[:depth]] = max(key, last.get(path[:depth], 0))
    if sum(last.values()) > _MAX_HOLES + len(leaves):
        raise FormatError("The state has lists of which hardly any member is there.")
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        here: Any = root
        for key, below in zip(("", *path), path, strict=False):
            made: Any = [] if type(below) is int else {}
            here = _member(here, key, made, path)
        # What stands for None is None, also to whoever encodes it.
        made = None if leaf.value is None else leaf
        _member(here, path[-1] if path else "", made, path)
    return root.get("", {})


def _member(container: Any, key: str | int, made: Any, path: Path) -> Any:
    """Return a member of a dict or list, putting it there if it is not."""
    if type(container) is list and type(key) is int:
        container.extend([None] * (key + 1 - len(container)))
        if container[key] is None:
            container[key] = made
        found = container[key]
    elif type(container) is dict and type(key) is str:
        found = container.setdefault(key, made)
    else:
        found = None
    if type(found) is not type(made) or (isinstance(made, Tree) and found is not made):
        raise UnsupportedStateError(
            f"{name_of(path)!r} stands both for a value and for others below it.",
            safe="Nothing was written.",
            path=name_of(path),
        )
    return found
