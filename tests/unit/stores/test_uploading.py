"""Uploads that go from one end to the other, fed by several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from milepost.format.digest import BLOCK_BYTES
from milepost.stores.base import Entry
from milepost.stores.pages import page_memory
from milepost.stores.uploading import FeedWriter

WAIT_S = 30.0


class Uploads:
    """A place that uploads when it is told to, and keeps what came."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.objects: dict[str, bytes] = {}

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        came = []
        for piece in pieces:
            came.append(bytes(piece))
            assert self.may_go_on.wait(WAIT_S)
        self.objects[key] = b"".join(came)
        assert len(self.objects[key]) == size_bytes

    def put_new(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def head(self, key: str) -> Entry:
        return Entry(key, len(self.objects[key]), 0.0)


def block_of(value: int) -> memoryview:
    memory = memoryview(page_memory(BLOCK_BYTES))
    memory[:] = bytes([value]) * BLOCK_BYTES
    return memory


def test_a_block_that_was_left_early_is_not_missing_at_the_end() -> None:
    """A writer is closed when every block was brought, which is before the upload took the last."""
    place = Uploads()
    writer = FeedWriter(place, "a", 2 * BLOCK_BYTES, timeout_s=WAIT_S)
    writer.write_at(BLOCK_BYTES, block_of(2))  # nobody brings the first: a copy is left
    writer.write_at(0, block_of(1))  # taken, and not answered yet
    threading.Timer(0.2, place.may_go_on.set).start()
    writer.close()
    assert place.objects["a"] == bytes(block_of(1)) + bytes(block_of(2))
