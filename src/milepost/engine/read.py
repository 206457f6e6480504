"""Reading: blocks come from the store in several threads and are checked on the way.

A read that returns has verified the checksum of every byte. One that raises leaves what it was
reading into neither old nor new: bytes that were at hand may be in place before they are checked,
and other blocks were right. Whoever restores something else instead must see to it that it
overwrites all of that; see ``opening.py``. Only the blocks that hold wanted
bytes are read, and each is read once. Of a sharded tensor a rank reads the bytes of its own piece,
however the tensor was cut when it was saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..collecting import no_collecting
from ..errors import FormatError, MissingError
from ..fetching import Fetching
from ..format import canonical
from ..format.digest import BLOCK_BYTES
from ..format.header import StoredTable, parse_header, parse_header_length
from ..format.layout import INDEX, rank_index
from ..format.manifest import FileEntry, Manifest, check_version
from ..frames.reader import open_plain
from ..state.source import TensorInfo
from ..stores.base import CachedReader, Reader, Store
from ..stores.pages import page_memory
from ..tensors.boxes import Box
from ..tensors.flat import Run, pieces_of
from .blocks import BlockReads, Progress
from .checks import check_size, read_block, require_block
from .parts import PartTable
from .pieces import Cut, StoredWhole, cuts, read_rows
from .ranges import Batch, Range, ranges_of
from .small import small_wholes
from .tables import RankTables

__all__ = ["CheckpointSource", "read_file"]

_MAX_FIRSTS = 8

_Wanted = tuple[str, str, Tensor | Run]


class CheckpointSource:
    """A committed checkpoint as a source of state.

    Args:
        store: The run's store.
        folder: The checkpoint's folder in it; ``""`` if the store begins there.
        manifest: Its manifest.
        progress: Called with the number of bytes of each block that was read.
        fetching: How blocks come from a service.
        rank: Whose part to show of what every rank has for itself. A rank that did not write it
            sees the leader's.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        *,
        progress: Progress | None = None,
        fetching: Fetching | None = None,
        rank: int = 0,
    ) -> None:
        self.name = manifest.name
        self.rank = rank if rank < manifest.world_size else 0
        self.manifest = manifest
        self._store = store
        self._folder = folder
        self._progress = progress
        self._fetching = fetching or Fetching()
        self._firsts: dict[str, memoryview] = {}
        self._index: Mapping[str, Any] | None = None
        self._rank_tables: RankTables | None = None
        self._tables: dict[str, Mapping[str, StoredWhole]] = {}
        self._infos: dict[str, Mapping[str, TensorInfo]] = {}

    @property
    def trees(self) -> Mapping[str, Any]:
        """Return the tree of every item."""
        return {item: self._tree(item, entry) for item, entry in self._items().items()}

    def is_per_rank(self, item: str) -> bool:
        """Return whether every rank has saved an item of its own."""
        return bool(self._items()[item].get("home") == "each")

    def files(self, item: str) -> list[str]:
        """Return the parts of an item."""
        entry = self._items().get(item)
        if entry is None:
            raise MissingError(f"{self.name} holds no item {item!r}.")
        return list(entry["files"])

    def tensors(self, item: str) -> Mapping[str, TensorInfo]:
        """Return what each dense tensor of an item is."""
        if item not in self._infos:
            with no_collecting():
                self._infos[item] = self._find_infos(item)
        return self._infos[item]

    def _find_infos(self, item: str) -> Mapping[str, TensorInfo]:
        if self._is_shared(item):
            return self._of_ranks().infos(item)
        table = self._table(item)
        if isinstance(table, PartTable):
            return table.infos()
        return {k: TensorInfo(one.code, one.shape) for k, one in table.items()}

    def boxes(self, item: str) -> Mapping[str, list[Box]]:
        """Return in which pieces each dense tensor of an item is stored."""
        if self._is_shared(item):
            self._of_ranks().read_all()
        return {k: [piece.box for piece in one.pieces] for k, one in self._table(item).items()}

    @property
    def index(self) -> Mapping[str, Any]:
        """Return the index, as it is stored."""
        self._items()
        assert self._index is not None
        return self._index

    @property
    def has_tables(self) -> bool:
        """Return whether each rank has a table of what it wrote."""
        return self._has_tables()

    def wholes(self, item: str) -> Mapping[str, StoredWhole]:
        """Return where each tensor of an item is stored, and all pieces of it."""
        if self._is_shared(item):
            self._of_ranks().read_all()
        return self._table(item)

    def stood_at(self, item: str) -> list[str]:
        """Return where an item stood in the state that it was saved from."""
        path = self._items()[item].get("path", [item])
        if not isinstance(path, list) or not all(isinstance(key, str) for key in path):
            raise FormatError(f"The index of {self.name} holds a malformed path.")
        return path

    def read(self, wanted: Sequence[_Wanted]) -> None:
        """Read tensors into existing ones. See ``StateSource.read``."""
        with no_collecting():
            ranges, left = self._small_wholes(wanted)
            boxes = [(item, key, box, one) for item, key, v in left for box, one in pieces_of(v)]
            self._add_ranges(boxes, ranges)
        self._run(ranges)

    def read_boxes(self, wanted: Sequence[tuple[str, str, Box, Tensor]]) -> None:
        """Read boxes of tensors into memory of their shape and of the stored dtype.

        Args:
            wanted: ``(item, key, box, memory)``.

        Raises:
            DamagedError: Bytes that do not match their checksum.
            FormatError: The stored pieces do not cover a box exactly once.
        """
        ranges: dict[str, list[Range | Batch]] = defaultdict(list)
        self._add_ranges(wanted, ranges)
        self._run(ranges)

    def _small_wholes(
        self, wanted: Sequence[_Wanted]
    ) -> tuple[dict[str, list[Range | Batch]], list[_Wanted]]:
        """Return what to read for small tensors that are wanted and stored whole; and the rest."""
        ranges: dict[str, list[Range | Batch]] = defaultdict(list)
        left: list[_Wanted] = []
        for item, some in _by_item(wanted):
            table = self._table_of_wholes(item)
            if table is None:
                left += some
                continue
            _, keys, ones = zip(*some, strict=True)
            batches, rest = small_wholes(table, keys, ones)
            for file, found in batches.items():
                ranges[file] += found
            left += [some[row] for row in rest]
        return ranges, left

    def _table_of_wholes(self, item: str) -> PartTable | None:
        table = None if self._is_shared(item) else self._table(item)
        return table if isinstance(table, PartTable) else None

    def _add_ranges(
        self,
        wanted: Sequence[tuple[str, str, Box, Tensor]],
        ranges: dict[str, list[Range | Batch]],
    ) -> None:
        asked = [
            (item, key, box)
            for item, key, box, _ in wanted
            if not box.is_empty and self._is_shared(item)
        ]
        if asked:
            self._of_ranks().locate(asked)
        with torch.no_grad():
            for item, key, box, live in wanted:
                if not box.is_empty:
                    for cut in self._cuts(item, key, box):
                        ranges[cut.file].extend(ranges_of(cut, box, live, tensor=key))

    def _run(self, ranges: Mapping[str, Sequence[Range | Batch]]) -> None:
        reads = BlockReads(
            self._store,
            self._key,
            self.manifest,
            self._progress,
            fetching=self._fetching,
            firsts=self._firsts,
        )
        with torch.no_grad():
            reads.run(ranges)

    def _cuts(self, item: str, key: str, box: Box) -> list[Cut]:
        name = f"{self.name}: {item}/{key}"
        try:
            return cuts(self._table(item)[key], box, name=name)
        except FormatError:
            # Not where the index says: the tables of the ranks decide.
            if not self._is_shared(item) or not self._of_ranks().read_all():
                raise
            return cuts(self._table(item)[key], box, name=name)

    def _key(self, path: str) -> str:
        return f"{self._folder}/{path}" if self._folder else path

    def _items(self) -> Mapping[str, Any]:
        if self._index is None:
            where = self._key(INDEX)
            data = read_file(self._store, where, self.manifest.file(INDEX))
            self._index = _check_index(canonical.load(data, where=where), where)
        items: Mapping[str, Any] = self._index["items"]
        return items

    def _tree(self, item: str, entry: Mapping[str, Any]) -> Any:
        if not self.rank or not self.is_per_rank(item):
            return entry["tree"]
        return self._of_rank(self.rank)[item]["tree"]

    def _of_rank(self, rank: int) -> Mapping[str, Any]:
        """Read what one of several ranks wrote, by item."""
        file = rank_index(rank)
        where = self._key(file)
        data = read_file(self._store, where, self.manifest.file(file))
        index = canonical.load(data, where=where)
        found = _check_rank_index(index, rank, self._items(), where)
        items: Mapping[str, Any] = found["items"]
        return items

    def _of_ranks(self) -> RankTables:
        if self._rank_tables is None:
            self._items()
            assert self._index is not None
            self._rank_tables = RankTables(
                self.name, self._index, self.manifest.world_size, self._of_rank
            )
        return self._rank_tables

    def _is_shared(self, item: str) -> bool:
        """Return whether several ranks have written an item together."""
        if item not in self._items():
            raise MissingError(f"{self.name} holds no item {item!r}.")
        return self._has_tables() and not self.is_per_rank(item)

    def _has_tables(self) -> bool:
        """Return whether there are tables of ranks: one rank has one if it wrote pieces."""
        self._items()
        assert self._index is not None
        return self.manifest.world_size > 1 or "ranks" in self._index

    def _table(self, item: str) -> Mapping[str, StoredWhole]:
        """Return where the tensors of an item are; shared ones as far as was looked for."""
        if self._is_shared(item):
            return self._of_ranks().table(item)
        table = self._tables.get(item)
        if table is None:
            is_own = self._has_tables()
            table = self._table_of_own(item) if is_own else self._table_of_parts(item)
            self._tables[item] = table
        return table

    def _table_of_own(self, item: str) -> dict[str, StoredWhole]:
        table: dict[str, StoredWhole] = {}
        where = f"{self.name}: {rank_index(self.rank)}, {item}"
        read_rows(table, self._of_rank(self.rank)[item]["pieces"], where=where)
        return table

    def _table_of_parts(self, item: str) -> PartTable:
        headers: dict[str, StoredTable] = {}
        for file in self.files(item):
            header = self._header(file)
            if file in headers:
                raise FormatError(f"{self.name}: {item} has a part twice.")
            headers[file] = header
        return PartTable(headers, name=f"{self.name}: {item}")

    def _header(self, file: str) -> StoredTable:
        stored = self.manifest.file(file)
        entry, where = stored.plain, self._key(file)
        reader = open_plain(self._store, where, stored)
        try:
            check_size(reader, entry, where)
            first = _read_checked(reader, entry, 0, where)
            length = parse_header_length(bytes(first[:8]), size_bytes=entry.size_bytes, where=where)
            header = bytearray(first[8 : 8 + length])
            block = 1
            while len(header) < length:
                header += _read_checked(reader, entry, block, where)[: length - len(header)]
                block += 1
        finally:
            reader.close()
        if len(self._firsts) < _MAX_FIRSTS:
            self._firsts[file] = first  # with the header come tensors: they are not fetched twice
        return parse_header(bytes(header), size_bytes=entry.size_bytes, where=where)


def _by_item(wanted: Sequence[_Wanted]) -> Iterator[tuple[str, Sequence[_Wanted]]]:
    """Yield what is wanted of each item."""
    items = list(dict.fromkeys(map(itemgetter(0), wanted)))
    for item in items:
        yield item, wanted if len(items) == 1 else [one for one in wanted if one[0] == item]


def read_file(store: Store, key: str, entry: FileEntry) -> bytes:
    """Read a whole file, plain if it is compressed, and check it.

    Raises:
        MissingError: It is not there.
        DamagedError: Its size or a checksum does not match.
    """
    reader, entry = open_plain(store, key, entry), entry.plain
    try:
        check_size(reader, entry, key)
        return b"".join(_read_checked(reader, entry, n, key) for n in range(len(entry.crcs)))
    finally:
        reader.close()


def _check_index(index: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(index, dict) or not isinstance(index.get("items"), dict):
        raise FormatError(f"{where} is not an index.", path=where)
    check_version(index.get("format"), where=where)
    for entry in index["items"].values():
        files = entry.get("files") if isinstance(entry, dict) else None
        if not isinstance(files, list) or "tree" not in entry:
            raise FormatError(f"{where} is not an index.", path=where)
    return index


def _check_rank_index(
    index: Any, rank: int, items: Mapping[str, Any], where: str
) -> Mapping[str, Any]:
    if not isinstance(index, dict) or not isinstance(index.get("items"), dict):
        raise FormatError(f"{where} is not the index of a rank.", path=where)
    check_version(index.get("format"), where=where)
    found = index["items"]
    is_right = index.get("rank") == rank and set(found) == set(items)
    for name, entry in found.items():
        is_each = is_right and items[name].get("home") == "each"
        is_whole = isinstance(entry, dict) and "pieces" in entry
        is_right = is_right and is_whole and (not is_each or "tree" in entry)
    if not is_right:
        raise FormatError(f"{where} is not the index of rank {rank}.", path=where)
    return index


def _read_checked(reader: Reader, entry: FileEntry, block: int, where: str) -> memoryview:
    start = block * BLOCK_BYTES
    length = min(BLOCK_BYTES, entry.size_bytes - start)
    if length <= 0:
        raise FormatError(f"The header of {where} goes past the end of the file.", path=where)
    data = memoryview(page_memory(length))[:length]
    if isinstance(reader, CachedReader) and reader.is_cached(start, length):
        reader.copy_into(start, data)
        require_block(reader, entry, block, data, where=where)
    else:
        read_block(reader, entry, block, data, where=where)
    return data
