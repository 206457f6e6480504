"""Consolidate: a checkpoint in pieces becomes one of whole tensors, in bounded memory.

No process group is needed, and no tensor is ever held whole: each block of the new files is made
from the pieces that lie in it, and of the files that those come from a few blocks are kept, each
compared with its checksum. What is each rank's own, such as its random numbers, stays that: the new
checkpoint goes on exactly on as many ranks as the old one, and on any other number like it.

It is the first checkpoint of a new run. Files are written first and the commit last, as in every
save: a stop leaves an attempt that nobody sees, and that the next try removes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch

from .checkpoint import Checkpoint, open_checkpoint, run_store
from .convert.export import tied_names, write_whole_file
from .convert.torch_stream import Placeholder, write_torch
from .engine.checked import CheckedFiles
from .engine.pieces import StoredWhole
from .engine.read import CheckpointSource
from .engine.single import check_plain
from .engine.wholes import CachedBlocks, JoinedPart, plan_joined, whole_fill
from .engine.write import FileJob, file_job, write_files
from .errors import ExistsError, FormatError, MissingError, UsageError
from .format import tree
from .format.digest import BLOCK_BYTES
from .format.layout import INDEX, check_name, part_file, rank_index, safe_name
from .format.manifest import FORMAT_VERSION, FileEntry
from .publisher import Publisher
from .state.source import TensorInfo, new_tensor
from .stores import posix
from .stores.base import Store
from .stores.pages import page_memory
from .stores.posix import expanded
from .stores.url import is_address, open_store
from .tensors.dtypes import dtype_of_code, named_dtype
from .tensors.unpack import leaf_tag, unpack_item

__all__ = ["consolidate"]

Place = str | os.PathLike[str]
Progress = Callable[[int], None]
Format = Literal["milepost", "safetensors", "torch"]

MEMORY_BYTES = 1024**3
"""How much memory it takes unless told otherwise."""

_MIN_MEMORY_BYTES = 64 * 1024 * 1024
_BESIDE_BLOCKS = 4
"""Blocks that are in use beside those that are kept: two threads make and write one each."""

_GROUP = 64
"""Files that are written at a time, each of which is open meanwhile."""


@overload
def consolidate(
    checkpoint: Checkpoint | Place,
    to: Place | Store,
    *,
    format: Literal["milepost"] = "milepost",
    name: str | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> Checkpoint: ...


@overload
def consolidate(
    checkpoint: Checkpoint | Place,
    to: Place | Store,
    *,
    format: Literal["safetensors", "torch"],
    name: str | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> Path: ...


def consolidate(
    checkpoint: Checkpoint | Place,
    to: Place | Store,
    *,
    format: Format = "milepost",  # noqa: A002 - the word that users look for
    name: str | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
) -> Checkpoint | Path:
    """Join the pieces that several ranks wrote into whole tensors.

    Args:
        checkpoint: A checkpoint, its folder, or a run, of which its newest one is taken.
        to: With ``milepost`` a new run: a folder that is empty or not there. Otherwise a file that
            is not there, or a folder: then it is called after the checkpoint.
        format: ``milepost``: a checkpoint like the old one. ``safetensors``: the weights of the
            item ``model``. ``torch``: the whole state in one ``.pt``.
        name: Name of the new checkpoint; by default that of the old one.
        memory_bytes: The most memory to take for the bytes of tensors. With less than 16 MiB for
            each rank that wrote, and 32 MiB, some bytes are read several times.
        progress: Called with the bytes of each block that was read.

    Returns:
        The checkpoint, committed; or the path of the file.

    Raises:
        MissingError: There is no such checkpoint.
        ExistsError: The run holds checkpoints already, or the file is there.
        DamagedError: Bytes that do not match their checksum. Nothing new is to be seen.
        UnsupportedStateError: A value that the format cannot hold.
        UsageError: The checkpoint is one file already, or an option makes no sense.
    """
    found = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if found.manifest.layout != "milepost":
        raise UsageError(
            f"{found.url} is not in pieces: it has the layout {found.manifest.layout}.",
            hint="Use it as it is, or milepost export.",
        )
    if memory_bytes < _MIN_MEMORY_BYTES:
        raise UsageError(f"memory_bytes must be at least {_MIN_MEMORY_BYTES:,}.")
    if format not in ("milepost", "safetensors", "torch"):
        raise UsageError(f"format={format!r} is not known.", hint="milepost, safetensors or torch?")
    plain = found.name.rpartition("/")[2]
    wanted = safe_name(plain) if name is None else check_name(name)
    with found.held():
        pieces = _Pieces(found, memory_bytes=memory_bytes, progress=progress)
        if format == "milepost":
            return _new_run(pieces, to if isinstance(to, Store) else open_store(to), wanted)
        if isinstance(to, Store) or is_address(os.fspath(to)):
            raise UsageError(f"A file for other programs needs a path, not {to!r}.")
        return _file(pieces, expanded(to).absolute(), wanted, format)


class _Pieces:
    """A checkpoint in pieces, and a bounded number of blocks of its files."""

    def __init__(
        self, checkpoint: Checkpoint, *, memory_bytes: int, progress: Progress | None
    ) -> None:
        self.manifest = checkpoint.manifest
        self._where = (checkpoint.store, checkpoint.folder)
        self.source = self.of_rank(0)
        files = CheckedFiles(*self._where, self.manifest, progress=progress)
        self.blocks = CachedBlocks(
            files.load,
            block_bytes=BLOCK_BYTES,
            max_blocks=memory_bytes // BLOCK_BYTES - _BESIDE_BLOCKS,
        )

    def of_rank(self, rank: int) -> CheckpointSource:
        """Return the state as a rank sees it."""
        return CheckpointSource(*self._where, self.manifest, rank=rank)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the new checkpoint, and where its tensors come from."""

    plan: JoinedPart
    table: Mapping[str, StoredWhole]


def _new_run(pieces: _Pieces, store: Store, name: str) -> Checkpoint:
    if next(iter(store.list()), None) is not None and run_store(store) is None:
        raise ExistsError(
            f"There are files at {store.url} that belong to no run.",
            safe="They were not touched.",
            hint="Name a folder that is empty or not there.",
            path=store.url,
        )
    publisher = Publisher(store, resume="never")
    held = publisher.claim(name)
    try:
        jobs = _jobs(pieces, held.folder)
        entries: list[FileEntry] = []
        for start in range(0, len(jobs), _GROUP):
            entries += write_files(store, jobs[start : start + _GROUP])
        return publisher.commit(
            items=pieces.manifest.items,
            files=entries,
            world_size=pieces.manifest.world_size,
            like=pieces.manifest,
        )
    except BaseException:
        publisher.give_up()
        raise


def _jobs(pieces: _Pieces, folder: str) -> list[FileJob]:
    """Return what to write: whole tensors first, then what is each rank's own, then the JSON."""
    source = pieces.source
    has_tables, num_ranks = source.has_tables, pieces.manifest.world_size
    own_items = [item for item in source.trees if source.is_per_rank(item)]
    parts: list[_Part] = []
    rows: list[dict[str, Any]] = [
        {item: {"pieces": []} for item in source.trees} for _ in range(num_ranks)
    ]
    items = {item: dict(entry) for item, entry in source.index["items"].items()}
    for item in [item for item in source.trees if item not in own_items]:
        table = source.wholes(item)
        plan = plan_joined(part_file(item), table)
        if plan.tensors:
            parts.append(_Part(plan, table))
        rows[0][item]["pieces"] = plan.rows()
        items[item]["files"] = [plan.file] if plan.tensors and not has_tables else []
        if has_tables:
            items[item]["tensors"] = [
                [one.key, one.dtype, list(one.shape), {"rank": 0}] for one in plan.tensors
            ]
    for rank in range(num_ranks) if own_items else ():
        own = pieces.of_rank(rank)
        for item in own_items:
            table = own.wholes(item)
            plan = plan_joined(part_file(item, rank=rank), table)
            if plan.tensors:
                parts.append(_Part(plan, table))
            rows[rank][item] = {"pieces": plan.rows(), "tree": own.trees[item]}
    documents: dict[str, Any] = {}
    if has_tables:
        for rank, found in enumerate(rows):
            table_of_rank = {"format": FORMAT_VERSION, "rank": rank, "items": found}
            documents[rank_index(rank)] = table_of_rank
    grids: dict[str, Any] = {"grids": []} if "grids" in source.index else {}
    documents[INDEX] = {**source.index, **grids, "items": items}
    jobs: list[FileJob] = [
        one.plan.job(f"{folder}/{one.plan.file}", one.table, pieces.blocks) for one in parts
    ]
    return [*jobs, *(_document(folder, file, value) for file, value in documents.items())]


def _document(folder: str, file: str, value: Any) -> FileJob:
    # Not sorted: the order of a dict is part of the state.
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    memory = page_memory(len(data))
    memory[: len(data)] = data
    return file_job(f"{folder}/{file}", file, memoryview(memory)[: len(data)])


def _file(pieces: _Pieces, path: Path, name: str, to: Format) -> Path:
    if path.is_dir():
        path /= f"{name}.safetensors" if to == "safetensors" else f"{name}.pt"
    if os.path.lexists(path):
        raise ExistsError(f"{path} is already there.", safe="It was not touched.", path=str(path))
    writing = _weights(pieces) if to == "safetensors" else _state(pieces)
    write_whole_file(path, writing, overwrite=False)
    return path


def _weights(pieces: _Pieces) -> Callable[[int], None]:
    """Return what writes the item ``model`` as a safetensors file."""
    source = pieces.source
    if "model" not in source.trees:
        raise MissingError(
            f"{source.name} holds no item 'model'.", hint=f"It holds {sorted(source.trees)}."
        )
    metadata = tied_names("model", source.trees["model"])
    table = source.wholes("model")
    job = plan_joined("model", table, metadata=metadata).job("", table, pieces.blocks)

    def write(descriptor: int) -> None:
        for block in job.blocks:
            posix.write_all(descriptor, block)

    return write


def _state(pieces: _Pieces) -> Callable[[int], None]:
    """Return what writes the whole state as a file for ``torch.load``."""
    values = _Values(pieces)
    own: list[dict[str, Any]] = []
    for rank in range(1, pieces.manifest.world_size):
        source = pieces.of_rank(rank)
        names = [item for item in source.trees if source.is_per_rank(item)]
        own.append({item: values.of(source, item) for item in names})
    state = {item: values.of(pieces.source, item) for item in pieces.source.trees}
    rng = list(state.pop("rng", []))
    for one in own:
        rng += one.pop("rng", [])
    content: dict[str, Any] = {"state": state, "rng": rng}
    if any(own):
        content["ranks"] = [{}, *own]
    check_plain(content, ("checkpoint",))
    return lambda descriptor: write_torch(content, descriptor, placeholders=values.placeholders)


class _Values:
    """Values in which placeholders stand for tensors."""

    def __init__(self, pieces: _Pieces) -> None:
        self._blocks = pieces.blocks
        self.placeholders: list[Placeholder] = []

    def of(self, source: CheckpointSource, item: str) -> Any:
        """Return the value of an item.

        What a tensor is a part of, such as a sparse one, is read into memory.
        """
        table = source.wholes(item)
        made: dict[str, Any] = {}

        def resolve(tag: Mapping[str, Any]) -> Any:
            if tag["$"] != "tensor":
                return unpack_item(tag, lambda key: self._read(table[key], key))
            key = leaf_tag(tag)
            if key not in made:
                made[key] = self._stand_for(table[key], key, tag)
            return made[key]

        return tree.decode(source.trees[item], resolver=resolve)

    def _read(self, stored: StoredWhole, key: str) -> Any:
        tensor = new_tensor(TensorInfo(stored.code, stored.shape))
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            whole_fill(stored, self._blocks, name=key)(0, memoryview(raw))  # type: ignore[arg-type]
        return tensor

    def _stand_for(self, stored: StoredWhole, key: str, tag: Mapping[str, Any]) -> Any:
        dtype, shape = dtype_of_code(stored.code), stored.shape
        if "dtype" in tag:
            dtype, shape = named_dtype(tag["dtype"]), shape[:-1]
        if dtype is None:
            raise FormatError(f"This version of torch has no dtype for {key}.")
        fill = whole_fill(stored, self._blocks, name=key)
        num_bytes = math.prod(shape) * dtype.itemsize

        def blocks() -> Iterator[memoryview]:
            memory = memoryview(bytearray(min(num_bytes, BLOCK_BYTES)))
            for start in range(0, num_bytes, BLOCK_BYTES):
                view = memory[: min(BLOCK_BYTES, num_bytes - start)]
                fill(start, view)
                yield view

        found = Placeholder(dtype, shape, blocks)
        self.placeholders.append(found)
        return found.tensor
