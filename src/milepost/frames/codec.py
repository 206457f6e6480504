"""The codec: a block of bytes to a frame and back. The only file that loads blosc2.

A frame is one Blosc2 chunk after the other, each of 1 MiB of the block: what is compressed at a
time fits into the caches, and what the library allocates for it is small. The bytes of elements are
shuffled first, so that those that say the same of each number, sign and exponent, stand together:
the rest of a trained weight is noise.

A chunk says by itself how it is to be decompressed, and Blosc2 knows more ways than are used here:
chunks that lie elsewhere, codecs that are looked for on the machine. So everything that a header
says is compared with what a writer would have said before the library gets to see it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from functools import lru_cache
from typing import Any, Literal

from ..errors import FormatError, UsageError
from ..format.digest import crc32c

__all__ = [
    "CHUNK_BYTES",
    "METHODS",
    "Method",
    "compress",
    "decompress",
    "has_codec",
    "is_loadable",
    "load_codec",
]

CHUNK_BYTES = 1024 * 1024

Method = Literal["zstd", "lz4"]
"""``zstd``: bytes shuffled; smaller. ``lz4``: bits shuffled; faster."""

METHODS: tuple[Method, ...] = ("zstd", "lz4")

_log = logging.getLogger("milepost")
_local = threading.local()

_HEADER_BYTES = 32
_BLOCK_BYTES = 512 * 1024
_MAX_ITEM_BYTES = 16
_TRIED_CHUNKS, _WORTH = 2, 0.99
"""If so many chunks of a block do not become smaller than that, it is noise."""

_COPIED = 0x02
_ZEROS = 0x10
_FLAGS = {  # codec in the flags; shuffled both ways, which stands for the long header; not split
    1: frozenset(1 << 5 | rest for rest in (0x05, 0x07, 0x15, 0x17)),
    5: frozenset(4 << 5 | rest for rest in (0x05, 0x07, 0x15, 0x17)),
}
_TOO_SMALL = 0x07  # copied before a codec was looked at


def has_codec() -> bool:
    """Return whether the library is installed, without loading it."""
    return importlib.util.find_spec("blosc2") is not None


def is_loadable() -> bool:
    """Return whether the library can be used, which may have to be loaded for that."""
    try:
        load_codec("Whoever asks")
    except UsageError:
        return False
    return True


def load_codec(what: str) -> Any:
    """Return the library.

    Args:
        what: What it is needed for, for messages.

    Raises:
        UsageError: It is not installed, or does not load.
    """
    try:
        return _library()
    except Exception as error:  # a library that does not fit the machine raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == "blosc2":
            raise UsageError(
                f"{what} needs blosc2, which is not installed.",
                hint="Install it with: pip install 'milepost[compression]'",
            ) from error
        raise UsageError(
            f"{what} needs blosc2, which is installed but does not load: {error}.",
            hint="Install it anew: pip install --force-reinstall 'milepost[compression]'",
        ) from error


@lru_cache(maxsize=1)
def _library() -> Any:
    import blosc2
    from blosc2 import blosc2_ext

    # By default it holds the interpreter lock, and the training would stand still meanwhile.
    blosc2.set_releasegil(True)
    return blosc2_ext


def compress(data: memoryview, *, method: Method, item_bytes: int) -> list[bytes] | None:
    """Return the chunks of a frame, which may be longer than the block.

    What comes out is decompressed and compared at once: a codec that errs would show it only when
    the bytes are needed, and in every checkpoint. ``None``: it erred or refused, or
    the first quarter does not become smaller; store the block as it is.

    Args:
        data: The block.
        method: How to compress it.
        item_bytes: Bytes of an element of most of it.
    """
    library, blosc2 = load_codec("Compressing a part"), importlib.import_module("blosc2")
    codec, shuffle = (
        (blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE)
        if method == "zstd"
        else (blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE)
    )
    chunks = []
    for start in range(0, len(data), CHUNK_BYTES):
        plain = data[start : start + CHUNK_BYTES]
        try:
            chunk = library.compress2(
                plain,
                codec=codec,
                clevel=1,
                typesize=item_bytes,
                filters=[shuffle],
                filters_meta=[0],
                splitmode=blosc2.SplitMode.NEVER_SPLIT,  # as small, and faster
                # Whole elements: of others Blosc2 4.14 makes what it cannot read. 0: its choice.
                blocksize=min(_BLOCK_BYTES, len(plain) // _MAX_ITEM_BYTES * _MAX_ITEM_BYTES),
                nthreads=1,
            )
        except (ValueError, RuntimeError) as error:
            _log.error("Blosc2 cannot compress a block, which is stored as it is: %s", error)
            return None
        if not _comes_back(chunk, plain):
            _log.error("Blosc2 cannot read what it wrote; a block is stored as it is.")
            return None
        chunks.append(chunk)
        tried_bytes = start + len(plain)
        if len(chunks) == _TRIED_CHUNKS and sum(map(len, chunks)) > _WORTH * tried_bytes:
            return None
    return chunks


def _comes_back(chunk: bytes, plain: memoryview) -> bool:
    memory: bytearray | None = getattr(_local, "memory", None)
    if memory is None:
        memory = _local.memory = bytearray(CHUNK_BYTES)
    found = memoryview(memory)[: len(plain)]
    try:
        decompress(memoryview(chunk), found, where="what was compressed")
    except FormatError:
        return False
    return crc32c(found) == crc32c(plain)


def decompress(frame: memoryview, into: memoryview, *, where: str) -> None:
    """Fill memory with the plain bytes of a frame.

    Args:
        frame: The frame, whose checksum was compared.
        into: Memory of exactly the size of the block.
        where: The frame, for messages.

    Raises:
        FormatError: It is not a frame of a block of that size.
        UsageError: The library is not installed, or does not load.
    """
    library = load_codec(f"Reading {where}")
    at = 0
    for start in range(0, len(into), CHUNK_BYTES):
        plain = into[start : start + CHUNK_BYTES]
        length = _check_header(frame[at : at + _HEADER_BYTES], len(frame) - at, len(plain), where)
        try:
            library.decompress2(frame[at : at + length], plain, nthreads=1)
        except (ValueError, RuntimeError) as error:
            raise FormatError(f"{where} cannot be decompressed: {error}", path=where) from error
        at += length
    if at != len(frame):
        raise FormatError(f"{where} holds more than its block.", path=where)


def _check_header(header: memoryview, left_bytes: int, plain_bytes: int, where: str) -> int:
    """Return the length of a chunk, if it is one that a writer makes."""
    if len(header) < _HEADER_BYTES:
        raise FormatError(f"{where} ends too early.", path=where)
    version, _, flags, item_bytes = header[:4]
    length = int.from_bytes(header[12:16], "little")
    filters, others = bytes(header[16:22]), bytes(header[23:31])
    is_copied, is_zeros = bool(flags & _COPIED), header[31] == _ZEROS
    is_known = (
        version == 5
        and header[22] in _FLAGS
        and (flags in _FLAGS[header[22]] or flags == _TOO_SMALL)
        and 1 <= item_bytes <= _MAX_ITEM_BYTES
        and int.from_bytes(header[4:8], "little") == plain_bytes
        and 0 < int.from_bytes(header[8:12], "little") <= plain_bytes
        and filters in (b"\1\0\0\0\0\0", b"\2\0\0\0\0\0")
        and not any(others)
        and header[31] in (0, _ZEROS)
        and _HEADER_BYTES <= length <= left_bytes
        and (not is_copied or length == _HEADER_BYTES + plain_bytes)
        and (not is_zeros or length == _HEADER_BYTES)
    )
    if not is_known:
        raise FormatError(f"{where} holds what no writer of frames makes.", path=where)
    return length
