"""Where the tensors of an item lie whose parts hold whole ones, as one process writes them.

There may be very many. So what is kept of each is the entry in the header of its part, and where it
lies in terms of boxes is said when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import FormatError
from ..format.header import StoredTensor
from ..state.source import TensorInfo
from ..tensors.boxes import Box
from .pieces import Piece, StoredWhole

__all__ = ["PartTable"]


class PartTable(Mapping[str, StoredWhole]):
    """The tensors of an item by name.

    Args:
        headers: By part: its tensors by name.
        name: The item, for messages.

    Raises:
        FormatError: Two parts hold a tensor of one name.
    """

    def __init__(self, headers: Mapping[str, Mapping[str, StoredTensor]], *, name: str) -> None:
        self._file_of: dict[str, str] = {}
        self._entries: Mapping[str, StoredTensor] = {}
        if len(headers) == 1:
            ((self._file, self._entries),) = headers.items()
            return
        self._file = ""
        joined: dict[str, StoredTensor] = {}
        for file, entries in headers.items():
            twice = joined.keys() & entries.keys()
            if twice:
                raise FormatError(f"Two parts of {name} hold {min(twice)!r}.")
            joined.update(entries)
            self._file_of.update(dict.fromkeys(entries, file))
        self._entries = joined

    def __getitem__(self, key: str) -> StoredWhole:
        file, entry = self.place(key)
        piece = Piece(file, Box.whole(entry.shape), entry.start, entry.stop)
        return StoredWhole(entry.dtype, entry.shape, [piece])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def place(self, key: str) -> tuple[str, StoredTensor]:
        """Return the part of a tensor, and where it lies in it."""
        return self._file or self._file_of[key], self._entries[key]

    def infos(self) -> dict[str, TensorInfo]:
        """Return what each tensor is."""
        made: dict[tuple[str, tuple[int, ...]], TensorInfo] = {}
        found = {}
        for key, entry in self._entries.items():
            kind = (entry.dtype, entry.shape)
            info = made.get(kind)
            if info is None:
                info = made[kind] = TensorInfo(*kind)
            found[key] = info
        return found
