"""The tensors of a part: what each is and where it lies, kept column by column.

There may be very many. An object for each would take longer to make than to read what it says, and
would be looked at by Python's search for garbage again and again. So there is one list for each
thing that is known of all of them, and the entry of one tensor is made when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

__all__ = ["ITEM_SIZES", "Kind", "StoredTable", "StoredTensor"]

ITEM_SIZES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by the dtype codes of the container."""

Kind = tuple[str, tuple[int, ...]]
"""Dtype code and shape: tensors have few kinds, however many they are."""


class StoredTensor(NamedTuple):
    """One tensor in a part. There are many: a tuple is made faster than anything else.

    Attributes:
        key: Its name in the container.
        dtype: A code of ``ITEM_SIZES``.
        shape: Its dimensions, row-major.
        start: First byte, counted from the beginning of the file.
        stop: One past its last byte.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return self.stop - self.start


class StoredTable(Mapping[str, StoredTensor]):
    """The tensors of a part by name, in the order of its header.

    Args:
        keys: Their names, no two alike.
        kinds: The kinds that there are, no two alike.
        kind_of: The number of the kind of each tensor.
        starts: The first byte of each.
        stops: One past the last byte of each.

    Attributes:
        names: As ``keys``.
        kinds: As given.
        kind_of: As given.
        starts: As given.
        stops: As given.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        kinds: Sequence[Kind],
        kind_of: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> None:
        self.names = keys
        self.kinds = kinds
        self.kind_of = kind_of
        self.starts = starts
        self.stops = stops
        self._rows: dict[str, int] | None = None

    @classmethod
    def side_by_side(
        cls, keys: Sequence[str], kinds: Sequence[Kind], kind_of: Sequence[int], edges: list[int]
    ) -> StoredTable:
        """Return a table of tensors that lie one behind the other.

        Args:
            keys: See above.
            kinds: See above.
            kind_of: See above.
            edges: Where each begins, and where the last one ends.
        """
        return cls(keys, kinds=kinds, kind_of=kind_of, starts=edges[:-1], stops=edges[1:])

    @classmethod
    def of(cls, entries: Iterable[StoredTensor]) -> StoredTable:
        """Return a table of entries that were made already."""
        numbers: dict[Kind, int] = {}
        found = list(entries)
        kind_of = [numbers.setdefault((one.dtype, one.shape), len(numbers)) for one in found]
        return cls(
            [one.key for one in found],
            kinds=list(numbers),
            kind_of=kind_of,
            starts=[one.start for one in found],
            stops=[one.stop for one in found],
        )

    @property
    def rows(self) -> Mapping[str, int]:
        """Return the number of each tensor in the lists, by name."""
        if self._rows is None:
            self._rows = dict(zip(self.names, count(), strict=False))
        return self._rows

    def __getitem__(self, key: str) -> StoredTensor:
        return self.entry(self.rows[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def entry(self, row: int) -> StoredTensor:
        """Return a tensor by its number."""
        dtype, shape = self.kinds[self.kind_of[row]]
        return StoredTensor(self.names[row], dtype, shape, self.starts[row], self.stops[row])
