"""What differs between two checkpoints.

How long a training took says nothing of its state, and no two runs take equally long, not even one
that was resumed bit for bit. It is told beside and counts as no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import MissingError
from .contents import Contents, TensorRow, same_bytes
from .trees import flatten

__all__ = ["Change", "Comparison", "compare", "measure_changes", "only_items"]

_CLOCKS = ("timer['wall_s']",)
"""Where seconds of this machine are counted; see ``progress/timer.py``."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs.

    Attributes:
        path: Where: ``model/0.weight``, or ``timer['batch']`` for what is not a tensor.
        kind: ``added``, ``removed`` or ``changed``, seen from the first checkpoint.
        before: What the first one holds.
        after: What the second one holds.
        num_bytes: Bytes of the tensor, 0 for what is not one.
        max_abs: Largest absolute difference, if values were measured.
        relative_l2: Norm of the difference over that of the first, if values were measured.
    """

    path: str
    kind: str
    before: str = ""
    after: str = ""
    num_bytes: int = 0
    max_abs: float | None = None
    relative_l2: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome.

    Attributes:
        tensors: Tensors that differ, each with its rows in the two checkpoints.
        others: What differs besides.
        clocks: Seconds that were counted, where they differ; no difference.
        num_equal: How many tensors are equal, byte for byte.
    """

    tensors: list[tuple[Change, TensorRow | None, TensorRow | None]]
    others: list[Change]
    clocks: list[Change]
    num_equal: int

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs that counts."""
        return not self.tensors and not self.others


def compare(a: Contents, b: Contents) -> Comparison:
    """Compare two checkpoints, tensors by their bytes and the rest by value.

    Raises:
        DamagedError: Bytes that do not match their checksum.
    """
    changes, num_equal = [], 0
    keys = dict.fromkeys([*a.tensors, *b.tensors])
    for key in keys:
        left, right = a.tensors.get(key), b.tensors.get(key)
        change = _compare_tensor(a, left, b, right)
        if change is None:
            num_equal += 1
        else:
            changes.append((change, left, right))
    rest = _compare_rest(a.trees, b.trees)
    others = [change for change in rest if not _is_clock(change)]
    clocks = [change for change in rest if _is_clock(change)]
    return Comparison(changes, others, clocks, num_equal)


def only_items(a: Contents, b: Contents, items: Collection[str]) -> tuple[Contents, Contents]:
    """Return the two with nothing but these items.

    Raises:
        MissingError: None of the two has one of them.
    """
    known = list(dict.fromkeys([*a.trees, *b.trees]))
    for item in items:
        if item not in known:
            raise MissingError(
                f"None of the two holds an item {item!r}.",
                hint=f"There are: {', '.join(known)}.",
                item=item,
            )
    one, other = (
        replace(
            contents,
            trees={item: tree for item, tree in contents.trees.items() if item in items},
            tensors={key: row for key, row in contents.tensors.items() if key[0] in items},
        )
        for contents in (a, b)
    )
    return one, other


def measure_changes(a: Contents, b: Contents, comparison: Comparison) -> Comparison:
    """Measure how far changed tensors are apart. Imports torch; one pair is in memory at a time."""
    from .values import measure, read_tensor

    one = a.source or a.checkpoint.source()
    other = b.source or b.checkpoint.source()
    measured = []
    for change, left, right in comparison.tensors:
        if left is not None and right is not None and change.before == change.after:
            distance = measure(
                read_tensor(one, left.item, left.key), read_tensor(other, right.item, right.key)
            )
            if distance is not None:
                change = replace(  # noqa: PLW2901 - the same change, with its measure
                    change, max_abs=distance.max_abs, relative_l2=distance.relative_l2
                )
        measured.append((change, left, right))
    return replace(comparison, tensors=measured)


def _is_clock(change: Change) -> bool:
    return change.kind == "changed" and change.path in _CLOCKS


def _compare_tensor(
    a: Contents, left: TensorRow | None, b: Contents, right: TensorRow | None
) -> Change | None:
    if left is None or right is None:
        row = left or right
        assert row is not None
        path = f"{row.item}/{row.key}"
        if left is None:
            return Change(path, "added", "", _describe(row), row.num_bytes)
        return Change(path, "removed", _describe(row), "", row.num_bytes)
    before, after = _describe(left), _describe(right)
    if before == after and same_bytes(a, left, b, right):
        return None
    return Change(f"{left.item}/{left.key}", "changed", before, after, left.num_bytes)


def _describe(row: TensorRow) -> str:
    return f"{row.dtype} [{', '.join(map(str, row.shape))}]"


def _compare_rest(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Change]:
    left = {path: text for item, tree in one.items() for path, text in flatten(tree, item)}
    right = {path: text for item, tree in other.items() for path, text in flatten(tree, item)}
    changes = []
    for path in dict.fromkeys([*left, *right]):
        if path not in right:
            changes.append(Change(path, "removed", left[path], ""))
        elif path not in left:
            changes.append(Change(path, "added", "", right[path]))
        elif left[path] != right[path]:
            changes.append(Change(path, "changed", left[path], right[path]))
    return changes
