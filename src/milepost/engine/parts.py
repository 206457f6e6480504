"""Where the tensors of an item lie whose parts hold whole ones, as one process writes them.

There may be very many. So what is kept are the tables in the headers of its parts, column by
column, and where a tensor lies in terms of boxes is said when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from ..format.header import StoredTable, StoredTensor
from ..format.stored import Kind
from ..state.source import TensorInfo
from ..tensors.boxes import Box
from .pieces import Piece, StoredWhole

__all__ = ["PartTable", "Places"]

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Places:
    """Where some tensors lie, in their order.

    Attributes:
        files: The number of the part of each.
        starts: The first byte of each in its part.
        stops: One past the last byte of each.
        kinds: The number of the kind of each.
    """

    files: Numbers
    starts: Numbers
    stops: Numbers
    kinds: Numbers


class PartTable(Mapping[str, StoredWhole]):
    """The tensors of an item by name.

    Args:
        headers: By part: its tensors by name.
        name: The item, for messages.

    Attributes:
        files: The parts.
        kinds: The kinds of tensors that there are.

    Raises:
        FormatError: Two parts hold a tensor of one name.
    """

    def __init__(self, headers: Mapping[str, StoredTable], *, name: str) -> None:
        self.files = list(headers)
        self._tables = tables = list(headers.values())
        if len(tables) == 1:
            self._rows = tables[0].rows
        else:
            self._rows = dict(zip(chain.from_iterable(tables), count(), strict=False))
            if len(self._rows) != sum(map(len, tables)):
                raise FormatError(f"Two parts of {name} hold {_first_twice(tables)!r}.")
        self._firsts = np.array([0, *accumulate(map(len, tables))], dtype=np.int64)
        numbers: dict[Kind, int] = {}
        self._kinds_of = [
            _numbers([numbers.setdefault(kind, len(numbers)) for kind in table.kinds])
            for table in tables
        ]
        self.kinds: list[Kind] = list(numbers)
        self._columns: Places | None = None

    def __getitem__(self, key: str) -> StoredWhole:
        file, entry = self.place(key)
        piece = Piece(file, Box.whole(entry.shape), entry.start, entry.stop)
        return StoredWhole(entry.dtype, entry.shape, [piece])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, key: str) -> tuple[str, StoredTensor]:
        """Return the part of a tensor, and where it lies in it."""
        row, file = self._rows[key], 0
        if len(self.files) > 1:
            file = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self.files[file], self._tables[file].entry(row - int(self._firsts[file]))

    def places(self, keys: Sequence[str]) -> Places:
        """Return where tensors lie, all together."""
        if self._columns is None:
            self._columns = self._put_together()
        columns = self._columns
        rows = np.fromiter(map(self._rows.__getitem__, keys), dtype=np.int64, count=len(keys))
        return Places(
            columns.files[rows], columns.starts[rows], columns.stops[rows], columns.kinds[rows]
        )

    def infos(self) -> dict[str, TensorInfo]:
        """Return what each tensor is."""
        made = [TensorInfo(*kind) for kind in self.kinds]
        numbers = (self._columns or self._put_together()).kinds.tolist()
        return dict(zip(self._rows, map(made.__getitem__, numbers), strict=True))

    def _put_together(self) -> Places:
        tables = self._tables
        kinds = [
            known[_numbers(table.kind_of)]
            for known, table in zip(self._kinds_of, tables, strict=True)
        ]
        return Places(
            np.repeat(np.arange(len(tables)), np.diff(self._firsts)),
            _joined([_numbers(one.starts) for one in tables]),
            _joined([_numbers(one.stops) for one in tables]),
            _joined(kinds),
        )


def _numbers(found: Sequence[int]) -> Numbers:
    return np.array(found, dtype=np.int64)


def _joined(columns: Sequence[Numbers]) -> Numbers:
    return np.concatenate([_numbers([]), *columns])


def _first_twice(tables: Sequence[StoredTable]) -> str:
    """Return the first name in the alphabet of those that stand in two tables."""
    seen: set[str] = set()
    twice: set[str] = set()
    for table in tables:
        twice |= seen.intersection(table)
        seen.update(table)
    return min(twice)
