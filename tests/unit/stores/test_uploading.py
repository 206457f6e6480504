"""Uploads that go from one end to the other, fed by several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from milepost.engine.write import file_job, write_files
from milepost.errors import DeadlineError, UsageError
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.base import Entry
from milepost.stores.feed import BlockFeed
from milepost.stores.lent import LentBlocks
from milepost.stores.memory import MemoryStore
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


class FromOneEnd(MemoryStore):
    """A store whose objects go from one end to the other, and that keeps the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[memoryview] = []

    def upload(self, key: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        self.pieces = list(pieces)
        self.put_new(key, b"".join(self.pieces))

    def create_writer(self, key: str, size_bytes: int) -> FeedWriter:  # type: ignore[override]
        return FeedWriter(self, key, size_bytes, timeout_s=WAIT_S)


def test_staged_memory_is_sent_from_where_it_is() -> None:
    """A copy of what is staged would cost as much as staging it, and memory besides."""
    store, memory = FromOneEnd(), page_memory(2 * BLOCK_BYTES + 5)
    view = memoryview(memory)
    view[:] = bytes(range(256)) * (len(view) // 256) + bytes(range(len(view) % 256))
    write_files(store, [file_job("a", "a", view)])
    assert [piece.obj is memory for piece in store.pieces] == [True, True, True]
    assert store.get("a") == bytes(view)


def test_a_slow_upload_is_waited_for_and_not_stored_up() -> None:
    """What threads bring faster than it is sent must not gather in memory."""
    feed = BlockFeed("a", 6 * BLOCK_BYTES, timeout_s=WAIT_S)
    blocks = [block_of(value) for value in range(6)]
    held = []

    def upload() -> list[int]:
        came = []
        for piece in feed:
            time.sleep(0.3)  # longer than anybody waits for a block that nobody brings
            held.append(len(feed._brought))
            came.append(piece[0])
        return came

    with ThreadPoolExecutor(4) as pool:
        uploading = pool.submit(upload)
        bringing = [pool.submit(feed.put, n * BLOCK_BYTES, blocks[n]) for n in range(6)]
        assert [one.result(WAIT_S) for one in bringing] == [None] * 6
        assert uploading.result(WAIT_S) == [0, 1, 2, 3, 4, 5]
    assert max(held) == 1


def test_a_long_upload_may_take_longer_than_one_block_may() -> None:
    """The deadline is for an upload that does not go on, and not for its whole length."""
    place = Uploads()
    writer = FeedWriter(place, "a", 4 * BLOCK_BYTES, timeout_s=1.5)
    block, release = block_of(1), threading.Event()

    def let_go_on() -> None:
        while not release.wait(0.8):
            place.may_go_on.set()
            place.may_go_on.clear()

    pace = threading.Thread(target=let_go_on)
    pace.start()
    try:
        for number in range(4):
            writer.refer_at(number * BLOCK_BYTES, block)
        writer.close()
    finally:
        release.set()
        pace.join()
    assert len(place.objects["a"]) == 4 * BLOCK_BYTES


def test_an_upload_that_takes_nothing_is_given_up() -> None:
    """Blocks that last are brought at once, so that only the end can notice it."""
    place = Uploads()
    writer = FeedWriter(place, "a", 3 * BLOCK_BYTES, timeout_s=0.3)
    block = block_of(1)
    for number in range(3):
        writer.refer_at(number * BLOCK_BYTES, block)
    threading.Timer(1.0, place.may_go_on.set).start()
    with pytest.raises(DeadlineError):
        writer.close()
    assert place.objects == {}


def test_a_block_is_brought_once() -> None:
    """A second one in its place would be sent, or not, as it happens."""
    feed = BlockFeed("a", 2 * BLOCK_BYTES, timeout_s=WAIT_S)
    feed.put(BLOCK_BYTES, block_of(1), is_lasting=True)
    with pytest.raises(UsageError):
        feed.put(BLOCK_BYTES, block_of(2), is_lasting=True)
    with pytest.raises(UsageError):
        feed.put(2 * BLOCK_BYTES, block_of(2), is_lasting=True)


def test_lent_memory_is_used_again_only_when_nobody_has_it() -> None:
    """A client that still sends a block would send the one after it in its place."""
    lent = LentBlocks(4)
    first = lent.copy(memoryview(b"1111"))[1:]  # a part is as good as the whole
    second = lent.copy(memoryview(b"2222"))
    assert len(lent) == 2
    del second
    assert (lent.copy(memoryview(b"333")), bytes(first), len(lent)) == (b"333", b"111", 2)
    third = lent.copy(memoryview(b"4444"))
    assert (bytes(third), bytes(first), len(lent)) == (b"4444", b"111", 2)
    fourth = lent.copy(memoryview(b"5555"))
    assert (bytes(third), bytes(fourth), len(lent)) == (b"4444", b"5555", 3)


def test_an_upload_begins_again_only_with_every_block() -> None:
    """Of memory that was filled anew there is nothing to send."""
    first, second = bytes([1]) * BLOCK_BYTES, bytes([2]) * BLOCK_BYTES
    feed = BlockFeed("a", 2 * BLOCK_BYTES, timeout_s=WAIT_S)
    feed.put(0, memoryview(first), is_lasting=True)
    taken = iter(feed)
    assert next(taken) == first
    assert feed.begin_again()
    assert feed.missing_bytes == BLOCK_BYTES
    feed.put(BLOCK_BYTES, memoryview(second), is_lasting=True)
    assert list(feed) == [first, second]
    assert feed.begin_again()
    assert feed.missing_bytes == 0
    assert list(feed) == [first, second]
    with pytest.raises(UsageError):
        feed.put(0, memoryview(first), is_lasting=True)

    feed = BlockFeed("a", 2 * BLOCK_BYTES, timeout_s=WAIT_S)
    feed.put(0, memoryview(first), is_lasting=True)
    taken = iter(feed)
    next(taken)
    thread = threading.Thread(target=feed.put, args=(BLOCK_BYTES, memoryview(second)))
    thread.start()
    assert next(taken) == second
    thread.join(WAIT_S)
    assert not feed.begin_again()

    feed = BlockFeed("a", 2 * BLOCK_BYTES, timeout_s=WAIT_S)
    feed.stop()
    assert not feed.begin_again()
