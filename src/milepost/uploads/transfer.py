"""One file into a store, in the place of what is there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from ..errors import CheckpointError, DamagedError, StorageError, storage_error
from ..format.digest import BLOCK_BYTES
from ..stores.base import Store

__all__ = ["error_from_record", "error_record", "send_file"]

Progress = Callable[[int], None]


def send_file(store: Store, key: str, path: str, *, progress: Progress = lambda _: None) -> None:
    """Upload a file; an object of that name is replaced.

    Args:
        store: Where to.
        key: Name of the object.
        path: The file. It must not change meanwhile.
        progress: Called with the bytes of each piece, before it is handed over. What it raises ends
            the upload.

    Raises:
        StorageError: It could not be uploaded, or not be read.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0)
    except OSError as error:
        raise storage_error(error, operation="open", path=path) from error
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        upload: Callable[..., None] | None = getattr(store, "upload", None)
        if size_bytes <= BLOCK_BYTES:
            progress(size_bytes)
            store.put(key, b"".join(_pieces(file, path, size_bytes)))
        elif upload is not None:
            upload(key, _told(_pieces(file, path, size_bytes), progress), size_bytes)
        else:
            _write(store, key, _told(_pieces(file, path, size_bytes), progress), size_bytes)


def error_record(error: Exception) -> dict[str, Any]:
    """Return an error as what JSON can hold, without what it may give away."""
    if not isinstance(error, CheckpointError):
        what = f"The upload ended with a {type(error).__name__}."
        return {"kind": StorageError.kind, "what": what, "safe": "", "hint": "", "facts": {}}
    facts = {k: v for k, v in error.facts.items() if isinstance(v, str | int | float)}
    return {
        "kind": error.kind,
        "what": error.what,
        "safe": error.safe,
        "hint": error.hint,
        "facts": facts,
    }


def error_from_record(record: dict[str, Any]) -> CheckpointError:
    """Return the error that :func:`error_record` wrote down."""
    kinds = {one.kind: one for one in _tree(CheckpointError)}
    return kinds[record["kind"]](
        record["what"], safe=record["safe"], hint=record["hint"], **record["facts"]
    )


def _tree(top: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield top
    for below in top.__subclasses__():
        yield from _tree(below)


def _write(store: Store, key: str, pieces: Iterator[bytes], size_bytes: int) -> None:
    """Write by blocks into a store that creates only. What is there goes first."""
    store.delete(key)
    writer = store.create_writer(key, size_bytes)
    try:
        # Blocks are page aligned in memory, which a file that is written directly needs.
        with mmap.mmap(-1, BLOCK_BYTES) as block, memoryview(block) as view:
            offset = 0
            for piece in pieces:
                view[: len(piece)] = piece
                writer.write_at(offset, view[: len(piece)])
                offset += len(piece)
    except BaseException:
        writer.abort()
        raise
    writer.close()
    store.sync_folder(key.rpartition("/")[0])


def _told(pieces: Iterator[bytes], progress: Progress) -> Iterator[bytes]:
    for piece in pieces:
        progress(len(piece))
        yield piece


def _pieces(file: BinaryIO | Any, path: str, size_bytes: int) -> Iterator[bytes]:
    left_bytes = size_bytes
    while left_bytes:
        block = bytearray()
        while len(block) < min(BLOCK_BYTES, left_bytes):
            try:
                piece = file.read(min(BLOCK_BYTES, left_bytes) - len(block))
            except OSError as error:
                raise storage_error(error, operation="read", path=path) from error
            if not piece:
                raise DamagedError(f"{path} became shorter while it was uploaded.", path=path)
            block += piece
        left_bytes -= len(block)
        yield bytes(block)
