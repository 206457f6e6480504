"""Save a checkpoint of plain bytes: every step of a commit, without tensors and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..format.digest import BLOCK_BYTES, block_crcs
from ..format.manifest import FileEntry, Manifest
from ..runs import Session, abandon, claim, point_latest, publish
from ..stores.base import Store
from ..stores.pages import page_memory

__all__ = ["read_key", "save_files", "write_key"]


def save_files(
    store: Store,
    session: Session,
    *,
    name: str,
    attempt: int,
    files: Mapping[str, bytes],
    metrics: Mapping[str, Any] | None = None,
    time: Mapping[str, Any] | None = None,
    created_s: float = 0.0,
) -> Manifest:
    """Save files as one checkpoint and return its manifest once it is acknowledged.

    An attempt that fails is abandoned before the error goes on.

    Args:
        store: The run's store.
        session: The settled session.
        name: Wanted name of the checkpoint.
        attempt: Number of the attempt; larger than those before in the session.
        files: Bytes by file name.
        metrics: Numbers by name.
        time: Progress counters by name.
        created_s: Seconds since 1970 that the manifest carries.
    """
    claimed = claim(store, session, name, attempt)
    manifest = Manifest(
        name=claimed.folder,
        run_id=session.run_id,
        session=session.number,
        attempt=attempt,
        write_id=claimed.write_id,
        parent=None,
        reason="manual",
        is_final=False,
        created_s=created_s,
        time=dict(time or {}),
        metrics=dict(metrics or {}),
        world_size=1,
        layout="files",
        items=(),
        files=tuple(
            FileEntry(file, len(data), tuple(block_crcs(data))) for file, data in files.items()
        ),
        software={},
    )
    is_written = False
    try:
        for file, data in files.items():
            write_key(store, f"{claimed.folder}/{file}", data)
        is_written = True
        publish(store, session, manifest)
    except CheckpointError:
        if not is_written:
            abandon(store, claimed)
        raise
    point_latest(store, claimed.folder)
    return manifest


def write_key(store: Store, key: str, data: bytes) -> None:
    """Write one key in blocks of page-aligned memory, as the engine does."""
    writer = store.create_writer(key, len(data))
    try:
        # Not closed by hand: the traceback of an error may still hold a slice of it.
        pages = page_memory(len(data))
        pages[: len(data)] = data
        view = memoryview(pages)[: len(data)]
        for start in range(0, len(data), BLOCK_BYTES):
            writer.write_at(start, view[start : start + BLOCK_BYTES])
        writer.close()
    except CheckpointError:
        writer.abort()
        raise


def read_key(store: Store, key: str) -> bytes:
    """Read one key in blocks into page-aligned memory, as the engine does."""
    reader = store.open_reader(key)
    size_bytes = reader.size_bytes
    try:
        pages = page_memory(size_bytes)
        view = memoryview(pages)[:size_bytes]
        for start in range(0, size_bytes, BLOCK_BYTES):
            reader.read_into(start, view[start : start + BLOCK_BYTES])
        return pages[:size_bytes]
    finally:
        reader.close()
