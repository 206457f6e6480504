"""Single-file checkpoints for ``torch.load``: one ``ep1.pt`` in the layout of the guide.

The file holds ``{"state": {...}, "rng": [...]}`` and only kinds of values that
``torch.load(weights_only=True)`` takes, so that opening it runs no code.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import IO, Any, cast

import torch
from torch import Tensor

from ..errors import UnsupportedStateError
from ..format import tree
from ..format.digest import BLOCK_BYTES
from ..stores.pages import page_memory

__all__ = ["check_plain", "encode_single"]

_COMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": lambda out: gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0),
    "bzip2": lambda out: bz2.BZ2File(out, mode="wb"),
    "lzma": lambda out: lzma.LZMAFile(out, mode="wb", preset=1),  # noqa: SIM115 - used in a with
}


def encode_single(value: Any, *, compression: str) -> list[memoryview]:
    """Serialize a state for ``torch.load``.

    Args:
        value: What the file shall hold.
        compression: A key of ``visible.SUFFIXES``.

    Returns:
        The bytes in page-aligned blocks of ``digest.BLOCK_BYTES``, the last one shorter.
    """
    out = _Blocks()
    file = cast("IO[bytes]", out)
    if compression:
        with _COMPRESSORS[compression](file) as compressor:
            torch.save(value, compressor)
    else:
        torch.save(value, file)
    return out.blocks()


def check_plain(value: Any, path: tuple[Any, ...]) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse.

    Raises:
        UnsupportedStateError: Naming the path to the value.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        raise UnsupportedStateError(
            f"{tree.path_text(path)} is an int of {value.bit_length():,} bits, which torch.load "
            "refuses to read without running code.",
            hint='Store it as text or bytes, or use save_format="milepost".',
            path=tree.path_text(path),
        )
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, (*path, key))
            check_plain(item, (*path, key))
    elif kind in (list, tuple, set):
        for index, item in enumerate(value):
            check_plain(item, (*path, index))
    elif kind not in _PLAIN and not isinstance(value, Tensor):
        if kind.__module__ == "numpy":
            return  # our own reader allows numpy's arrays and scalars by name
        raise UnsupportedStateError(
            f"{tree.path_text(path)} is a {kind.__qualname__}, which torch.load refuses to read "
            "without running code.",
            hint='Store it as numbers, text or tensors, or use save_format="milepost".',
            path=tree.path_text(path),
        )


_MAX_INT_BITS = 255 * 8 - 1
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray}
    | {torch.dtype, torch.Size, torch.device}
)


class _Blocks(io.RawIOBase):
    """A write-only file that collects its bytes in page-aligned blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._full: list[memoryview] = []
        self._last: mmap.mmap | None = None
        self._used = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return len(self._full) * BLOCK_BYTES + self._used

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self._last is None:
                self._last, self._used = page_memory(BLOCK_BYTES), 0
            count = min(len(view) - done, BLOCK_BYTES - self._used)
            self._last[self._used : self._used + count] = view[done : done + count]
            self._used += count
            done += count
            if self._used == BLOCK_BYTES:
                self._full.append(memoryview(self._last))
                self._last, self._used = None, 0
        return done

    def blocks(self) -> list[memoryview]:
        tail: Sequence[memoryview] = ()
        if self._last is not None:
            tail = (memoryview(self._last)[: self._used],)
        return [*self._full, *tail]
