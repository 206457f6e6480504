"""What one rank writes of a state that it was handed in boxes: its parts, and the table of them.

Elsewhere a rank finds out by itself what it writes, from live objects. Here others have decided:
the planner of another library, or the file that is imported. The files are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..format.header import ITEM_SIZES, encode_header
from ..format.layout import INDEX, part_file, rank_index
from ..format.manifest import FORMAT_VERSION, FileEntry
from ..stores.base import Store
from ..stores.pages import page_memory
from ..tensors.boxes import Box
from .pieces import piece_rows
from .plan import part_order
from .stream import Fill, part_job
from .write import NUM_THREADS, FileJob, file_job, write_files

__all__ = ["LooseBox", "write_boxes", "write_index"]


@dataclass(frozen=True, slots=True)
class LooseBox:
    """A box of a tensor that is to be written.

    Attributes:
        key: Name of the tensor in its item.
        code: Dtype code in the container.
        whole_shape: Shape of the whole tensor in the container.
        box: Which piece of it this is, in the dimensions of the container.
        num_bytes: Its bytes.
        fill: Makes them, row by row.
    """

    key: str
    code: str
    whole_shape: tuple[int, ...]
    box: Box
    num_bytes: int
    fill: Fill

    @property
    def is_whole(self) -> bool:
        """Return whether it is the whole tensor."""
        return self.box.sizes == self.whole_shape

    @property
    def part_key(self) -> str:
        """Return its name in the part: that of a piece says where it begins."""
        if self.is_whole:
            return self.key
        return f"{self.key}@{'x'.join(map(str, self.box.offsets))}"


def write_boxes(
    store: Store,
    folder: str,
    items: Mapping[str, Sequence[LooseBox]],
    *,
    rank: int | None,
    num_threads: int = NUM_THREADS,
) -> list[FileEntry]:
    """Write what a rank has of each item, durably.

    Args:
        store: The run's store.
        folder: The folder that was claimed.
        items: The boxes of every item of the state, none for items that it has nothing of.
        rank: This rank; ``None`` where one process writes whole tensors, of which there is no
            table.
        num_threads: How many threads write. One asks for the bytes in the order of the files.

    Returns:
        The files.
    """
    jobs: list[FileJob] = []
    table: dict[str, Any] = {}
    for item, boxes in items.items():
        file = part_file(item, rank=rank)
        ordered = sorted(boxes, key=lambda o: part_order(ITEM_SIZES[o.code], o.num_bytes))
        header, entries = encode_header(
            [(one.part_key, one.code, one.box.sizes, one.num_bytes) for one in ordered],
            metadata={"format": "pt"},
        )
        places = {entry.key: (file, entry.start, entry.stop) for entry in entries}
        table[item] = {"pieces": piece_rows(ordered, places)}
        if ordered:
            fills = [one.fill for one in ordered]
            key = f"{folder}/{file}"
            jobs.append(part_job(key, file, header=header, tensors=entries, fills=fills))
    if rank is not None:
        document = {"format": FORMAT_VERSION, "rank": rank, "items": table}
        jobs.append(_document(folder, rank_index(rank), document))
    return write_files(store, jobs, num_threads=num_threads)


def write_index(
    store: Store,
    folder: str,
    trees: Mapping[str, Any],
    *,
    files: Mapping[str, Sequence[str]],
    paths: Mapping[str, Sequence[str]],
    ranks: int | None,
) -> FileEntry:
    """Write the index of a checkpoint.

    Args:
        store: The run's store.
        folder: The folder that was claimed.
        trees: The tree of every item.
        files: The parts of each item, where there are no tables of ranks.
        paths: Where items stood in the state that they come from.
        ranks: How many ranks have written tables; ``None`` if there are none.
    """
    items: dict[str, Any] = {}
    for item, tree in trees.items():
        items[item] = {"tree": tree, "files": list(files.get(item, ()))}
        if ranks is not None:
            items[item]["home"] = "all"
        if list(paths.get(item, [item])) != [item]:
            items[item]["path"] = list(paths[item])
    index: dict[str, Any] = {"format": FORMAT_VERSION, "items": items}
    if ranks is not None:
        index["ranks"] = ranks
    (entry,) = write_files(store, [_document(folder, INDEX, index)])
    return entry


def _document(folder: str, path: str, value: Any) -> FileJob:
    """Return the job of writing JSON, unsorted: the order of a dict is part of the state."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    memory = page_memory(len(data))
    memory[: len(data)] = data
    return file_job(f"{folder}/{path}", path, memoryview(memory)[: len(data)])
