"""Loads of torch.distributed.checkpoint (DCP) from a checkpoint of any kind.

DCP's metadata is made from the tables and trees of the checkpoint, under the names that DCP gives
the entries of a nested state. Every byte is checked before it is used. Values that are no tensors
are built from their trees, and handed to the planner in the form that it expects, which is made
here and never came from the disk.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...checkpoint import Checkpoint, open_checkpoint, open_source
from ...convert.dcp_trees import Path, entries_of, name_of
from ...errors import FormatError, MismatchError, MissingError, UsageError
from ...state.source import StateSource, TensorInfo, new_tensor
from ...tensors.boxes import Box, covers_once
from ...tensors.dtypes import dtype_of_code, named_dtype
from ...tensors.unpack import leaf_tag, unpack_item

__all__ = ["StorageReader"]

Folder = str | os.PathLike[str]
_SHOWN = 8


@runtime_checkable
class _BoxSource(StateSource, Protocol):
    """A source of which boxes of tensors can be read."""

    def boxes(self, item: str) -> Mapping[str, list[Box]]:
        """Return in which pieces each tensor is stored."""

    def stood_at(self, item: str) -> list[str]:
        """Return where an item stood in the state that it was saved from."""

    def read_boxes(self, wanted: Iterable[tuple[str, str, Box, Tensor]]) -> None:
        """Read boxes of tensors into memory of their shape and of the stored dtype."""


class _Wholes:
    """A source that is in memory, such as one read from a single file, as one of boxes."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self.name = source.name
        self.trees = source.trees
        self.tensors = source.tensors
        self.read = source.read

    def boxes(self, item: str) -> Mapping[str, list[Box]]:
        return {key: [Box.whole(one.shape)] for key, one in self.tensors(item).items()}

    def stood_at(self, item: str) -> list[str]:
        return [item]

    def read_boxes(self, wanted: Iterable[tuple[str, str, Box, Tensor]]) -> None:
        for item, key, box, memory in wanted:
            whole = new_tensor(self.tensors(item)[key])
            self.read([(item, key, whole)])
            memory.copy_(whole[box.slices(within=Box.whole(whole.shape))])


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the state.

    Attributes:
        item: The item that it belongs to.
        tree: Its JSON.
        info: What it is, if it is a tensor.
        boxes: Its pieces then.
        dtype: Its dtype then.
    """

    item: str
    tree: Any
    info: TensorInfo | None = None
    boxes: Sequence[Box] = ()
    dtype: torch.dtype | None = None

    @property
    def is_raw(self) -> bool:
        """Return whether it is stored as bytes, with one dimension more."""
        assert self.info is not None
        return dtype_of_code(self.info.code) is not self.dtype

    def shape(self) -> tuple[int, ...]:
        """Return the shape that its owner sees."""
        assert self.info is not None
        return self.info.shape[:-1] if self.is_raw else self.info.shape

    def metadata(self) -> TensorStorageMetadata:
        """Return what DCP wants to know of it."""
        assert self.dtype is not None
        count = len(self.shape())
        chunks = [
            ChunkStorageMetadata(torch.Size(b.offsets[:count]), torch.Size(b.sizes[:count]))
            for b in self.boxes
        ]
        properties = TensorProperties(dtype=self.dtype)
        return TensorStorageMetadata(properties, torch.Size(self.shape()), chunks)


class StorageReader(storage.StorageReader):
    """Reads a checkpoint for ``torch.distributed.checkpoint.load``.

    The entries are called as DCP calls those of a nested state: ``model.0.weight``,
    ``optimizer.state.0.weight.exp_avg``. What DCP has saved has the names it had.

    Args:
        place: A checkpoint: the folder of one, a run (its newest), a run and a name, a ``.pt``
            file, or a folder that DCP itself wrote. May be left out if ``checkpoint_id`` is a path.
        item: Show only this item, as if it were the whole state: with ``model``, the weights are
            called as in ``model.state_dict()``.
        cast: Whether tensors may be read into ones of another dtype. DCP by itself does so in
            silence.

    Raises:
        MissingError: There is no checkpoint.
        FormatError: It is damaged, or not what it claims to be.
    """

    def __init__(
        self,
        place: Folder | Checkpoint | None = None,
        *,
        item: str | None = None,
        cast: bool = False,
    ) -> None:
        self._place = place
        self._item = item
        self._cast = cast
        self._source: _BoxSource | None = None
        self._identity = ""
        self._entries: dict[str, _Entry] = {}
        self._paths: dict[str, Path] = {}
        if place is not None:
            self._open(place)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """Open the checkpoint of a name in the run, or at a path. Called by DCP."""
        if checkpoint_id is None:
            return
        text = os.fspath(checkpoint_id)
        if "/" in text:
            self._open(text)
            return
        if self._place is None or isinstance(self._place, Checkpoint):
            raise UsageError(
                f"It is not known to which run the checkpoint {text!r} belongs.",
                hint='Use StorageReader("runs/a"), or a path as checkpoint_id.',
            )
        self._open(os.path.join(os.fspath(self._place), text))  # noqa: PTH118 - may be an address

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        """Return whether this can be the name of a checkpoint, or the path of one."""
        return bool(os.fspath(checkpoint_id).strip("/"))

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return what is in the checkpoint. Called by DCP, on every rank."""
        del args, options
        if self._source is None:
            raise UsageError(
                "There is no checkpoint to read.",
                hint='Use StorageReader("runs/a/ep3"), or pass a checkpoint_id.',
            )
        stored: dict[str, Any] = {
            name: BytesStorageMetadata() if entry.info is None else entry.metadata()
            for name, entry in self._entries.items()
        }
        return Metadata(state_dict_metadata=stored, planner_data=dict(self._paths))

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's
        *args: Any,
        **options: Any,
    ) -> None:
        """Do nothing. Called by DCP."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which checkpoint this rank reads. Called by DCP."""
        return dataclasses.replace(plan, storage_data=self._identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all ranks read the same checkpoint. Called by DCP, on rank 0."""
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1:
            raise MismatchError(
                f"The ranks read different checkpoints: {', '.join(sorted(map(str, seen)))}.",
                safe="Nothing was changed.",
                hint="Name the checkpoint: the newest one may be another a moment later.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants. Called by DCP.

        Raises:
            MismatchError: A tensor of another dtype, and ``cast`` is false. Nothing was changed.
            DamagedError: Bytes that do not match their checksum.
        """
        assert self._source is not None
        tensors = [req for req in plan.items if req.type is not LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(req).detach() for req in tensors]
        self._check(tensors, targets)
        wanted: list[tuple[str, str, Box, Tensor]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for req, target in zip(tensors, targets, strict=True):
            entry = self._entries[req.storage_index.fqn]
            assert entry.info is not None
            box = _box_of(req)
            memory = target
            if entry.is_raw:
                assert entry.dtype is not None
                size = entry.dtype.itemsize
                box = Box((*box.offsets, 0), (*box.sizes, size))
                memory = torch.empty(box.sizes, dtype=torch.uint8, device="cpu")
                copies.append((target, memory.view(entry.dtype).squeeze(-1)))
            elif target.dtype != entry.dtype:
                memory = torch.empty(box.sizes, dtype=entry.dtype, device="cpu")
                copies.append((target, memory))
            wanted.append((entry.item, leaf_tag(entry.tree), box, memory))
        self._source.read_boxes(wanted)
        for target, read in copies:
            target.copy_(read)
        for req, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(req, target)
        for req in plan.items:
            if req.type is LoadItemType.BYTE_IO:
                planner.load_bytes(req, self._value(req.storage_index.fqn))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self, place: Folder | Checkpoint) -> None:
        """Open a checkpoint and read its tables.

        At once: an error that comes out of ``read_metadata`` is but a text in one of DCP's own.
        """
        self._source, self._identity = _open_source(place)
        self._entries, self._paths = _entries(self._source, self._item)

    def _check(self, requests: Sequence[ReadItem], targets: Sequence[Tensor]) -> None:
        """Refuse targets of another dtype, and tensors that are not whole."""
        problems: list[str] = []
        for name, target in {
            req.storage_index.fqn: target for req, target in zip(requests, targets, strict=True)
        }.items():
            entry = self._entries[name]
            assert entry.info is not None
            if not covers_once(entry.boxes, Box.whole(entry.info.shape)):
                raise FormatError(f"The stored pieces of {name} do not cover it exactly once.")
            if target.dtype != entry.dtype and not self._cast:
                problems.append(f"{name} is {entry.dtype} and was to become {target.dtype}")
        if problems:
            more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise MismatchError(
                f"Tensors have other dtypes in the checkpoint: {'; '.join(problems[:_SHOWN])}"
                f"{more}.",
                safe="Nothing was changed.",
                hint="Load into tensors of the stored dtype, or use StorageReader(..., cast=True).",
            )

    def _value(self, name: str) -> io.BytesIO:
        """Return a value that is no tensor as the planner takes it."""
        entry, source = self._entries[name], self._source
        assert source is not None

        def get(key: str) -> Tensor:
            infos = source.tensors(entry.item)
            if key not in infos:
                raise MissingError(f"{source.name}: item {entry.item!r} lacks the tensor {key!r}.")
            made = new_tensor(infos[key])
            source.read([(entry.item, key, made)])
            return made

        data = io.BytesIO()
        torch.save(unpack_item(entry.tree, get), data)
        data.seek(0)
        return data


def _open_source(place: Folder | Checkpoint) -> tuple[_BoxSource, str]:
    """Return the state at a place, and what tells the checkpoint from others."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    found: StateSource
    try:
        checkpoint = place if isinstance(place, Checkpoint) else open_checkpoint(place)
        found = checkpoint.source(rank=rank)
        identity = f"{checkpoint.name} ({checkpoint.manifest.write_id})"
    except MissingError:
        if isinstance(place, Checkpoint):
            raise
        found = open_source(place)
        identity = found.name
    return (found if isinstance(found, _BoxSource) else _Wholes(found)), identity


def _entries(source: _BoxSource, item: str | None) -> tuple[dict[str, _Entry], dict[str, Path]]:
    """Return the entries of a state by name, and the path of each."""
    trees = source.trees
    if item is not None and item not in trees:
        raise MissingError(
            f"{source.name} holds no item {item!r}.", hint=f"It holds {sorted(trees)}."
        )
    entries: dict[str, _Entry] = {}
    paths: dict[str, Path] = {}
    for one in trees if item is None else [item]:
        at = tuple(source.stood_at(one)) if item is None else ()
        infos, boxes = source.tensors(one), source.boxes(one)
        for path, _, value in entries_of(one, trees[one], at=at):
            name = name_of(path)
            if name in entries:
                raise FormatError(
                    f"Two entries of {source.name} are called {name!r}.",
                    hint="Read one of them with StorageReader(..., item=...).",
                )
            entries[name] = _entry(one, value, infos, boxes)
            paths[name] = path
    return entries, paths


def _entry(
    item: str, value: Any, infos: Mapping[str, TensorInfo], boxes: Mapping[str, list[Box]]
) -> _Entry:
    if not isinstance(value, dict) or value.get("$") != "tensor":
        return _Entry(item, value)
    key = leaf_tag(value)
    if key not in infos:
        raise MissingError(f"The item {item!r} lacks the tensor {key!r}.")
    named = value.get("dtype")
    dtype = dtype_of_code(infos[key].code) if named is None else named_dtype(str(named))
    if dtype is None:
        raise FormatError(f"This version of torch has no dtype for {item}/{key}.")
    return _Entry(item, value, infos[key], boxes[key], dtype)


def _box_of(req: ReadItem) -> Box:
    """Return which box of the whole tensor is wanted."""
    offset = req.storage_index.offset
    begin = offset if offset is not None else torch.Size([0] * len(req.lengths))
    offsets = tuple(a + b for a, b in zip(begin, req.storage_offsets, strict=True))
    return Box(offsets, tuple(req.lengths))
