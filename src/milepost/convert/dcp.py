"""Read folders that torch.distributed.checkpoint (DCP) wrote: ``.metadata`` and ``.distcp`` files.

A source like any other: a load asks for boxes of tensors, and gets the bytes of just those, in
whatever way the tensors were cut. No pickle is run. The files carry a checksum of each piece, which
can be compared only where a piece is read whole: an import does, a load of some boxes cannot.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, MissingError, UnsupportedStateError, storage_error
from ..state.source import MemorySource, TensorInfo
from ..stores import posix
from ..stores.posix import expanded
from ..tensors.boxes import Box, overlap
from ..tensors.dtypes import CODES, dtype_name, named_dtype
from ..tensors.flat import Run, pieces_of
from ..tensors.pack import PackedItem, pack_item
from .dcp_metadata import DcpEntry, DcpPiece, read_dcp_metadata
from .dcp_trees import DCP_METADATA, Path, Place, Tree, build_tree, place_all
from .torch_archive import Archived, find_tensor
from .torch_file import load_torch_file

__all__ = ["DcpFiles", "DcpSource", "checked_piece", "read_piece"]

_MAX_METADATA_BYTES = 256 * 1024 * 1024
_MAX_VALUE_BYTES = 256 * 1024 * 1024
_SPAN_BYTES = 32 * 1024 * 1024
"""How many bytes are read at once where those that are wanted do not lie together."""

_RUN_BYTES = 64 * 1024
"""Bytes that lie together and are worth a read of their own."""

_MAX_OPEN = 32
"""How many files stay open. A folder has one for each rank or more, which may be thousands."""


class DcpFiles:
    """The files of a folder, open for reading. Links below the folder are not followed.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = expanded(folder)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._sizes: dict[str, int | None] = {}
        self._found: dict[tuple[str, int], Archived] = {}

    def size_of(self, file: str) -> int | None:
        """Return the size of a file, or ``None`` if there is none."""
        if file not in self._sizes:
            try:
                place, *names = [self.folder, *file.split("/")]
                for name in names[:-1]:
                    place /= name
                    if not stat.S_ISDIR(place.lstat().st_mode):
                        return None
                found = (self.folder / file).lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise self._error(error, file) from error
            self._sizes[file] = found.st_size if stat.S_ISREG(found.st_mode) else None
        return self._sizes[file]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the last few files open that were read from."""
        try:
            yield
        finally:
            with self._lock:
                while self._open:
                    os.close(self._open.popitem()[1])

    def read_at(self, file: str, start: int, count: int) -> bytes:
        """Return bytes of a file, fewer at its end. Within ``held`` only."""
        memory = bytearray(count)
        filled = self._fill(file, start, memoryview(memory))
        return bytes(memory[:filled])

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill a view from a file. Within ``held`` only.

        Raises:
            FormatError: The file ends too early.
        """
        if self._fill(file, start, view) != len(view):
            raise FormatError(f"{self.folder / file} ends too early.", path=str(file))

    def find(self, piece: DcpPiece, *, name: str) -> Archived:
        """Find the values of a piece of a tensor. Within ``held`` only."""
        key = (piece.file, piece.start)
        if key not in self._found:
            where = f"{name} in {self.folder / piece.file}"

            def read(start: int, count: int) -> bytes:
                return self.read_at(piece.file, start, count)

            self._found[key] = find_tensor(read, piece.start, piece.length, where=where)
        return self._found[key]

    def _fill(self, file: str, start: int, view: memoryview) -> int:
        try:
            with self._lock:
                descriptor = self._open.pop(file, None)
            # Nobody else has it while it is read from: nobody can close it.
            if descriptor is None:
                descriptor = self._open_file(file)
            try:
                done = 0
                while done < len(view):
                    count = os.preadv(descriptor, [view[done:]], start + done)
                    if count == 0:
                        break
                    done += count
                return done
            finally:
                self._keep(file, descriptor)
        except OSError as error:
            raise self._error(error, file) from error

    def _open_file(self, file: str) -> int:
        """Open a file folder by folder, so that none on the way is a link."""
        *above, name = file.split("/")
        at = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in above:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(folder, flags, dir_fd=at)
                os.close(at)
                at = inner
            return posix.open_file(name, folder=at)
        finally:
            os.close(at)

    def _keep(self, file: str, descriptor: int) -> None:
        """Keep a file open, in place of that which was not used for the longest time."""
        with self._lock:
            # Another thread may have opened it meanwhile.
            closed = [self._open.pop(file)] if file in self._open else []
            self._open[file] = descriptor
            while len(self._open) > _MAX_OPEN:
                closed.append(self._open.popitem(last=False)[1])
        for one in closed:
            os.close(one)

    def _error(self, error: OSError, file: str) -> Exception:
        return storage_error(error, operation="read", path=str(self.folder / file))


class DcpSource:
    """A folder of DCP's as a source of state.

    Args:
        folder: The folder.
        items: Read only these items; ``None`` for all.
        trust: Whether values that are no tensors may run code when they are read.

    Attributes:
        name: The folder, for messages.
        entries: Every entry by its name.
        places: Where each stands in the items.
        files: The files.
        values: Tensors in values that are no tensors, by item.

    Raises:
        MissingError: There is no such folder, or no ``.metadata`` in it.
        UnsupportedStateError: It holds code, and ``trust`` is false.
        FormatError: It is damaged, or says what cannot be.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        items: Sequence[str] | None = None,
        trust: bool = False,
    ) -> None:
        self.files = DcpFiles(folder)
        self.name = str(self.files.folder)
        found = read_dcp_metadata(
            self._metadata(), self.files.size_of, where=f"{self.name}/{DCP_METADATA}"
        )
        tensors = frozenset(name for name, one in found.items() if one.dtype is not None)
        places, stood = place_all({n: e.path for n, e in found.items()}, tensors=tensors)
        if items is not None:
            _check_items(items, stood, self.name)
            found = {n: e for n, e in found.items() if places[n].item in items}
        self.entries: dict[str, DcpEntry] = found
        self.places: dict[str, Place] = {name: places[name] for name in found}
        names = dict.fromkeys(place.item for place in self.places.values())
        self._stood = {item: stood[item] for item in names}
        self.values: dict[str, MemorySource] = {}
        self.trees: dict[str, Any] = self._trees(trust=trust)
        self._tensors: dict[str, dict[str, DcpEntry]] = {item: {} for item in names}
        for name, entry in found.items():
            if entry.dtype is not None:
                place = self.places[name]
                self._tensors[place.item][place.key] = entry

    def tensors(self, item: str) -> Mapping[str, TensorInfo]:
        """Return what each dense tensor of an item is."""
        infos = {}
        for key, entry in self._tensors[item].items():
            assert entry.dtype is not None
            code = CODES.get(entry.dtype)
            shape = entry.shape if code else (*entry.shape, entry.dtype.itemsize)
            infos[key] = TensorInfo(code or "U8", shape)
        inner = self.values[item].tensors(item) if item in self.values else {}
        return {**infos, **inner}

    def boxes(self, item: str) -> Mapping[str, list[Box]]:
        """Return in which pieces each dense tensor of an item is stored."""
        found: dict[str, list[Box]] = {}
        for key, info in self.tensors(item).items():
            entry = self._tensors[item].get(key)
            pieces = [Box.whole(info.shape)] if entry is None else _boxes_of(entry)
            found[key] = pieces
        return found

    def stood_at(self, item: str) -> list[str]:
        """Return where an item stood in the state that it was saved from."""
        return self._stood[item]

    def read(self, wanted: Sequence[tuple[str, str, Tensor | Run]]) -> None:
        """Read tensors into existing ones. See ``StateSource.read``."""
        self.read_boxes(
            (item, key, box, memory) for item, key, one in wanted for box, memory in pieces_of(one)
        )

    def read_boxes(self, wanted: Iterable[tuple[str, str, Box, Tensor]]) -> None:
        """Read boxes of tensors into memory of their shape and of the stored dtype."""
        with self.files.held(), torch.no_grad():
            for item, key, box, memory in wanted:
                entry = self._tensors[item].get(key)
                if entry is not None:
                    self._read_entry(entry, box, memory)
                    continue
                whole = self.values[item].tensors(item)[key]
                made = torch.empty_like(memory, memory_format=torch.contiguous_format)
                if box != Box.whole(whole.shape):
                    raise UnsupportedStateError(f"{key} of {item} is not to be had in pieces.")
                self.values[item].read([(item, key, made)])
                memory.copy_(made)

    def _read_entry(self, entry: DcpEntry, box: Box, memory: Tensor) -> None:
        assert entry.dtype is not None
        if entry.dtype not in CODES:
            # The caller sees bytes, with one dimension more.
            box = Box(box.offsets[:-1], box.sizes[:-1])
            plain = torch.empty(box.sizes, dtype=entry.dtype, device="cpu")
            self._read_entry_as_is(entry, box, plain)
            memory.copy_(plain.unsqueeze(-1).view(torch.uint8))
            return
        self._read_entry_as_is(entry, box, memory)

    def _read_entry_as_is(self, entry: DcpEntry, box: Box, memory: Tensor) -> None:
        for piece in entry.pieces:
            assert piece.box is not None
            shared = overlap(piece.box, box)
            if shared is None:
                continue
            found = checked_piece(self.files, entry, piece)
            offsets = [a - b for a, b in zip(shared.offsets, piece.box.offsets, strict=True)]
            target = memory[shared.slices(within=box)] if shared != box else memory
            _read_strided(self.files, piece.file, found, offsets, target)

    def _metadata(self) -> bytes:
        size = self.files.size_of(DCP_METADATA)
        if size is None:
            raise MissingError(
                f"There is no {DCP_METADATA} in {self.name}.",
                hint="Give the folder of one checkpoint of torch.distributed.checkpoint.",
                path=self.name,
            )
        if size > _MAX_METADATA_BYTES:
            raise FormatError(
                f"{self.name}/{DCP_METADATA} has {size:,} bytes; at most "
                f"{_MAX_METADATA_BYTES:,} are read.",
                path=self.name,
            )
        with self.files.held():
            return self.files.read_at(DCP_METADATA, 0, size)

    def _trees(self, *, trust: bool) -> dict[str, Any]:
        leaves: dict[str, dict[Path, Tree]] = {item: {} for item in self._stood}
        packed: dict[str, list[PackedItem]] = {}
        with self.files.held():
            for name, entry in self.entries.items():
                place = self.places[name]
                if entry.dtype is not None:
                    leaves[place.item][place.path] = Tree(_tag(entry, place))
                    continue
                one = pack_item(place.item, self._value(entry, trust=trust), at=place.path)
                leaves[place.item][place.path] = Tree(one.tree)
                if one.leaves:
                    packed.setdefault(place.item, []).append(one)
        for item, several in packed.items():
            together = PackedItem(
                item,
                None,
                [leaf for one in several for leaf in one.leaves],
                [tensor for one in several for tensor in one.tensors],
            )
            self.values[item] = MemorySource.from_packed(self.name, [together])
        return {item: build_tree(found) for item, found in leaves.items()}

    def _value(self, entry: DcpEntry, *, trust: bool) -> Any:
        """Read a value that is no tensor."""
        (piece,) = entry.pieces
        if piece.length > _MAX_VALUE_BYTES:
            raise FormatError(f"{entry.name} has {piece.length:,} bytes, which are not read.")
        data = io.BytesIO(self.files.read_at(piece.file, piece.start, piece.length))
        try:
            return load_torch_file(data, trust=trust)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(
                f"{entry.name} in {self.name}: {error.what}",
                safe=error.safe,
                hint="Leave it out by naming the items you want, or trust the folder only if you "
                "made it yourself.",
                path=entry.name,
                **{key: value for key, value in error.facts.items() if key == "refused"},
            ) from error
        except FormatError as error:
            raise FormatError(f"{entry.name} in {self.name}: {error.what}") from error


def _boxes_of(entry: DcpEntry) -> list[Box]:
    """Return the pieces of a tensor, in the dimensions of the container."""
    boxes = [piece.box for piece in entry.pieces if piece.box is not None]
    if entry.dtype is None or entry.dtype in CODES:
        return boxes
    size = entry.dtype.itemsize
    return [Box((*box.offsets, 0), (*box.sizes, size)) for box in boxes]


def checked_piece(files: DcpFiles, entry: DcpEntry, piece: DcpPiece) -> Archived:
    """Find the values of a piece, and make sure that they are what the entry says.

    Raises:
        FormatError: They are not.
    """
    found = files.find(piece, name=entry.name)
    assert piece.box is not None
    if (found.dtype, found.shape) != (entry.dtype, piece.box.sizes):
        raise FormatError(
            f"{files.folder / piece.file} holds {list(found.shape)} of {found.dtype} where a piece "
            f"of {entry.name} with {list(piece.box.sizes)} of {entry.dtype} belongs.",
            path=piece.file,
        )
    return found


def read_piece(files: DcpFiles, piece: DcpPiece, found: Archived) -> Tensor:
    """Read a piece of a tensor whole. Within ``held`` only."""
    value = torch.empty(found.shape, dtype=found.dtype, device="cpu")
    _read_strided(files, piece.file, found, [0] * value.dim(), value)
    return value


def _check_items(items: Sequence[str], stood: Mapping[str, Any], name: str) -> None:
    for item in items:
        if item not in stood:
            raise MissingError(f"{name} holds no item {item!r}.", hint=f"It holds {sorted(stood)}.")


def _tag(entry: DcpEntry, place: Place) -> dict[str, Any]:
    tag: dict[str, Any] = {"$": "tensor", "key": place.key}
    assert entry.dtype is not None
    if entry.dtype not in CODES:
        tag["dtype"] = dtype_name(entry.dtype)
        if named_dtype(tag["dtype"]) is None:
            raise UnsupportedStateError(f"{entry.name} has the dtype {entry.dtype}.")
    return tag


def _read_strided(
    files: DcpFiles, file: str, found: Archived, offsets: Sequence[int], target: Tensor
) -> None:
    """Read a box of an archived tensor into memory of its shape, in bounded portions."""
    sizes, strides, item = tuple(target.shape), found.strides, found.dtype.itemsize
    if 0 in sizes:
        return
    first = found.first + sum(o * s for o, s in zip(offsets, strides, strict=True))
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    count = target.numel()
    start = found.start + first * item
    if span == count and _is_row_major(sizes, strides):
        if target.device.type == "cpu" and target.is_contiguous():
            files.read_into(file, start, _bytes_of(target))
            return
        if span * item <= _SPAN_BYTES:
            plain = torch.empty(sizes, dtype=found.dtype, device="cpu")
            files.read_into(file, start, _bytes_of(plain))
            target.copy_(plain)
            return
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d], default=0)
    run = count // sizes[dim] * item if sizes else item
    is_wasteful = span > count + count // 4 and run >= _RUN_BYTES
    if span * item <= _SPAN_BYTES and not is_wasteful:
        flat = torch.empty(span, dtype=found.dtype, device="cpu")
        files.read_into(file, start, _bytes_of(flat))
        target.copy_(flat.as_strided(sizes, strides))
        return
    half = max(sizes[dim] // 2, 1)
    for low, length in ((0, half), (half, sizes[dim] - half)):
        if length:
            moved = list(offsets)
            moved[dim] += low
            _read_strided(files, file, found, moved, target.narrow(dim, low, length))


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for length, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _bytes_of(value: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = value.reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # arrays are buffers
