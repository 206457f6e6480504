"""Write what ``torch.save`` writes, with tensors that are made block by block and never held.

Such a file is a zip archive: a small pickle says what the value is, and each storage is a member of
its own, uncompressed. So the pickle is made of a value in which a tensor may be a placeholder, and
the bytes of that are written when its turn comes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

import torch
from torch import Tensor

__all__ = ["Placeholder", "write_torch"]

_ALIGNMENT = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_BYTES = 20
_PADDING = b"FB"

Blocks = Callable[[], Iterator[memoryview]]


class Placeholder:
    """A dense tensor, row by row, whose bytes are made when they are written.

    Args:
        dtype: Its dtype.
        shape: Its shape.
        blocks: Returns its bytes in pieces.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], blocks: Blocks) -> None:
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        """Stands for it in a value: has its dtype and shape, and takes no memory."""
        self.blocks = blocks


def write_torch(value: Any, descriptor: int, *, placeholders: Sequence[Placeholder]) -> None:
    """Write a value for ``torch.load``.

    Args:
        value: Containers, plain values and tensors on the CPU.
        descriptor: An empty file to write to.
        placeholders: Those whose tensors are in the value.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, {id(one.tensor): one for one in placeholders})
    pickler.dump(value)
    with (
        os.fdopen(descriptor, "wb", closefd=False) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        _add(archive, file, "data.pkl", [memoryview(stream.getvalue())])
        _add(archive, file, "byteorder", [memoryview(b"little")])
        for number, blocks in enumerate(pickler.storages):
            _add(archive, file, f"data/{number}", blocks())
        _add(archive, file, "version", [memoryview(b"3\n")])


def _add(archive: zipfile.ZipFile, file: IO[bytes], name: str, blocks: Any) -> None:
    member = zipfile.ZipInfo(f"archive/{name}")
    start = file.tell() + _LOCAL_HEADER_BYTES + len(member.filename) + _ZIP64_BYTES + 4
    padding = -start % _ALIGNMENT
    member.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(member, "w", force_zip64=True) as target:
        for block in blocks:
            target.write(block)


class _Storage:
    """Stands for a storage in the pickle."""

    def __init__(self, kind: type, number: int, numel: int) -> None:
        self.kind = kind
        self.number = number
        self.numel = numel


class _Pickler(pickle.Pickler):
    """Writes tensors as torch does, and notes where the bytes of their storages come from."""

    def __init__(self, stream: IO[bytes], placeholders: dict[int, Placeholder]) -> None:
        super().__init__(stream, protocol=2)
        self.storages: list[Blocks] = []
        self._placeholders = placeholders
        self._known: dict[int, int] = {}
        self._held: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for a storage."""
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, str(obj.number), "cpu", obj.numel)
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001 - as torch.save
            return self._of_memory(typed._untyped_storage, kind, typed._size())  # noqa: SLF001 - as torch.save
        if isinstance(obj, torch.UntypedStorage):
            return self._of_memory(obj, torch.UntypedStorage, obj.nbytes())
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Return how a placeholder is made; anything else is pickled as usual."""
        if not isinstance(obj, Tensor) or id(obj) not in self._placeholders:
            return NotImplemented
        found = self._placeholders[id(obj)]
        number = len(self.storages)
        self.storages.append(found.blocks)
        shape, numel = tuple(obj.shape), math.prod(obj.shape)
        stride = tuple(obj.stride())
        kind = _storage_type(obj.dtype)
        if kind is not None:
            storage = _Storage(kind, number, numel)
            arguments: tuple[Any, ...] = (storage, 0, shape, stride, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments  # noqa: SLF001 - as torch.save
        storage = _Storage(torch.UntypedStorage, number, numel * obj.itemsize)
        arguments = (storage, 0, shape, stride, False, OrderedDict(), obj.dtype)
        return torch._utils._rebuild_tensor_v3, arguments  # noqa: SLF001 - as torch.save

    def _of_memory(self, storage: torch.UntypedStorage, kind: type, numel: int) -> Any:
        address = storage._cdata  # noqa: SLF001 - as torch.save
        if address not in self._known:
            self._known[address] = len(self.storages)
            self._held.append(storage)
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(cast("Any", storage))
            self.storages.append(lambda: iter([memoryview(raw.numpy())]))  # type: ignore[arg-type]
        return ("storage", kind, str(self._known[address]), "cpu", numel)


def _storage_type(dtype: torch.dtype) -> type | None:
    """Return the class that torch names in a file for storages of a dtype; some have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)  # noqa: SLF001 - as torch.save
    return None if name is None else getattr(torch, name)
