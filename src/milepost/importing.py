"""Import: a checkpoint of another tool becomes a checkpoint of a new run.

Nothing is loaded: folders of torch.distributed.checkpoint are copied piece by piece, in order,
through a few megabytes of memory, and the checksum that they carry of each piece is compared on the
way. What was cut into rows, as by FSDP, comes out as whole tensors; what was cut otherwise stays in
its pieces, which any layout can load. The new checkpoint is committed last, so that a stop leaves
nothing to see.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .checkpoint import Checkpoint
from .convert.dcp_trees import DCP_METADATA
from .engine.live import LiveBytes
from .engine.loose import LooseBox, write_boxes, write_index
from .engine.stream import Fill
from .errors import DamagedError, MissingError, UsageError
from .format.layout import check_name, part_file, safe_name
from .publisher import Publisher
from .state.source import StateSource, TensorInfo, new_tensor
from .stores.base import Store
from .stores.posix import expanded
from .stores.url import open_store
from .tensors.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from .convert.dcp import DcpFiles, DcpSource
    from .convert.dcp_metadata import DcpEntry, DcpPiece
    from .convert.torch_archive import Archived

__all__ = ["import_checkpoint"]

Place = str | os.PathLike[str]


def import_checkpoint(
    source: Place,
    run: Place | Store,
    *,
    name: str | None = None,
    items: Sequence[str] | None = None,
    trust: bool = False,
) -> Checkpoint:
    """Make a checkpoint of a new run out of one of another tool.

    Args:
        source: A folder that ``torch.distributed.checkpoint`` wrote, or a ``.pt`` file.
        run: The new run: a folder that is empty or not there.
        name: Name of the checkpoint; by default that of the source.
        items: Only these items, such as ``["model"]``; ``None`` for all.
        trust: Whether values that are no tensors, or the ``.pt`` file, may run code when they are
            read. Only for what you made yourself.

    Returns:
        The checkpoint, committed.

    Raises:
        MissingError: There is no source, or no such item in it.
        ExistsError: The run holds checkpoints already.
        UnsupportedStateError: The source holds code, and ``trust`` is false.
        DamagedError: Bytes that do not match the checksum of the source.
        FormatError: It is damaged otherwise, or none of the known formats.
    """
    from .convert.dcp import DcpSource

    path = expanded(source)
    wanted = check_name(name) if name is not None else safe_name(path.absolute().stem)
    with ExitStack() as stack:
        found: StateSource
        store = run if isinstance(run, Store) else open_store(run)
        if store.url == open_store(path).url:
            raise UsageError(
                f"{path} cannot be the new run: it is what is imported.",
                safe="Nothing was written.",
                hint="Give another folder.",
            )
        if (path / DCP_METADATA).is_file():
            folder = found = DcpSource(path, items=items, trust=trust)
            stack.enter_context(folder.files.held())
            boxes = {item: _boxes_of_folder(folder, item) for item in found.trees}
            paths = {item: folder.stood_at(item) for item in found.trees}
        elif path.is_file():
            from .convert.torch_file import torch_file_source

            found, paths = torch_file_source(path, trust=trust), {}
            names = list(found.trees) if items is None else list(items)
            if missing := [item for item in names if item not in found.trees]:
                raise MissingError(
                    f"{path} holds no item {missing[0]!r}.", hint=f"It holds {sorted(found.trees)}."
                )
            boxes = {item: _boxes_in_memory(found, item, found.tensors(item)) for item in names}
        else:
            raise MissingError(
                f"{path} is neither a folder of torch.distributed.checkpoint nor a file.",
                hint=f"Such a folder has a {DCP_METADATA} in it.",
                path=str(path),
            )
        trees = {item: found.trees[item] for item in boxes}
        return _publish(store, wanted, trees=trees, boxes=boxes, paths=paths)


def _publish(
    store: Store,
    name: str,
    *,
    trees: dict[str, object],
    boxes: dict[str, list[LooseBox]],
    paths: dict[str, list[str]],
) -> Checkpoint:
    is_pieced = any(not box.is_whole for found in boxes.values() for box in found)
    rank = 0 if is_pieced else None
    publisher = Publisher(store, resume="never")
    held = publisher.claim(name)
    try:
        # One thread, so that what is read comes in order and can be summed up.
        entries = write_boxes(store, held.folder, boxes, rank=rank, num_threads=1)
        files = {item: [part_file(item)] if found else [] for item, found in boxes.items()}
        index = write_index(
            store,
            held.folder,
            trees,
            files={} if is_pieced else files,
            paths=paths,
            ranks=1 if is_pieced else None,
        )
        return publisher.commit(items=list(trees), files=[*entries, index], world_size=1)
    except BaseException:
        publisher.give_up()
        raise


def _boxes_in_memory(
    source: StateSource, item: str, infos: Mapping[str, TensorInfo]
) -> list[LooseBox]:
    """Return what a source holds in memory, whole."""

    def box(key: str, info: TensorInfo) -> LooseBox:
        empty = new_tensor(TensorInfo(info.code, ()))
        num_bytes = math.prod(info.shape) * empty.itemsize

        def get() -> Tensor:
            made = new_tensor(info)
            source.read([(item, key, made)])
            return made

        live = LiveBytes(get, num_bytes)
        return LooseBox(key, info.code, info.shape, Box.whole(info.shape), num_bytes, live)

    return [box(key, info) for key, info in infos.items()]


def _boxes_of_folder(source: DcpSource, item: str) -> list[LooseBox]:
    """Return the tensors of a folder of DCP's: whole if their pieces are rows, else in pieces."""
    infos = source.tensors(item)
    found: list[LooseBox] = []
    if item in source.values:
        found += _boxes_in_memory(source, item, source.values[item].tensors(item))
    for name, entry in source.entries.items():
        place = source.places[name]
        if place.item != item or entry.dtype is None:
            continue
        info = infos[place.key]
        pieces = [piece for piece in entry.pieces if piece.box and not piece.box.is_empty]
        fills = [_fill_of(source.files, entry, piece) for piece in pieces]
        whole = Box.whole(info.shape)
        if all(piece.box and piece.box.sizes[1:] == entry.shape[1:] for piece in pieces):
            num_bytes = math.prod(entry.shape) * entry.dtype.itemsize
            fill = _joined(pieces, fills, entry)
            found.append(LooseBox(place.key, info.code, info.shape, whole, num_bytes, fill))
            continue
        for piece, fill in zip(pieces, fills, strict=True):
            assert piece.box is not None
            num_bytes = math.prod(piece.box.sizes) * entry.dtype.itemsize
            # Raw bytes have one dimension more in the container.
            more = info.shape[len(entry.shape) :]
            box = Box((*piece.box.offsets, *(0 for _ in more)), (*piece.box.sizes, *more))
            found.append(LooseBox(place.key, info.code, info.shape, box, num_bytes, fill))
    return found


def _fill_of(files: DcpFiles, entry: DcpEntry, piece: DcpPiece) -> Fill:
    """Return what makes the bytes of a piece, having looked at what it is."""
    from .convert.dcp import checked_piece, read_piece

    found = checked_piece(files, entry, piece)
    if found.is_dense:
        return _InOrder(files, entry, piece, found)
    num_bytes = math.prod(found.shape) * found.dtype.itemsize
    return LiveBytes(lambda: read_piece(files, piece, found), num_bytes)


def _joined(pieces: Sequence[DcpPiece], fills: Sequence[Fill], entry: DcpEntry) -> Fill:
    """Return what makes the bytes of a tensor out of those of its rows."""
    assert entry.dtype is not None
    row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    parts: list[tuple[int, int, Fill]] = []
    for piece, fill in zip(pieces, fills, strict=True):
        assert piece.box is not None
        start = piece.box.offsets[0] * row if piece.box.offsets else 0
        parts.append((start, start + math.prod(piece.box.sizes) * entry.dtype.itemsize, fill))
    parts.sort(key=lambda part: part[0])

    def join(start: int, view: memoryview) -> None:
        stop = start + len(view)
        for begin, end, fill in parts:
            low, high = max(start, begin), min(stop, end)
            if low < high:
                fill(low - begin, view[low - start : high - start])

    return join


class _InOrder:
    """Reads a piece from its first byte to its last, and compares its checksum at the end."""

    def __init__(self, files: DcpFiles, entry: DcpEntry, piece: DcpPiece, found: Archived) -> None:
        self._files = files
        self._entry = entry
        self._piece = piece
        self._found = found
        self._at = 0
        self._crc = 0

    def __call__(self, start: int, view: memoryview) -> None:
        found, file = self._found, self._piece.file
        assert start == self._at, "one thread reads it in order"
        self._files.read_into(file, found.start + start, view)
        self._at += len(view)
        self._crc = zlib.crc32(view, self._crc)
        # Without a checksum there is a zero in its place.
        if self._at == found.num_bytes and found.crc not in (0, self._crc):
            raise DamagedError(
                f"The piece of {self._entry.name} in {self._files.folder / file} is damaged.",
                safe="Nothing was imported.",
                path=str(self._files.folder / file),
                tensors=(self._entry.name,),
                expected=f"{found.crc:08x}",
                found=f"{self._crc:08x}",
            )
