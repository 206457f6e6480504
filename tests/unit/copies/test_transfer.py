"""Copying in blocks, by several threads."""

from __future__ import annotations

import threading

import pytest

from milepost.copies.transfer import FileCopy, copy_files
from milepost.errors import StorageError
from milepost.stores import MemoryStore
from milepost.testing import write_key

BLOCK = 8 * 1024 * 1024
NUM_BLOCKS = 14


class Held:
    """A store whose reader of the first block waits until it is let go."""

    def __init__(self, below: MemoryStore, error: StorageError | None = None):
        self.below, self.url, self.traits = below, below.url, below.traits
        self.error = error
        self.begun: list[int] = []
        self.changed = threading.Condition()
        self.ahead = 0

    def open_reader(self, key):
        reader = self.below.open_reader(key)
        held = self

        class Reader:
            size_bytes = reader.size_bytes

            def read_into(self, offset, buffer):
                with held.changed:
                    held.begun.append(offset // BLOCK)
                    held.changed.notify_all()
                    if offset == 0:
                        held.changed.wait_for(lambda: len(held.begun) > NUM_BLOCKS, 0.5)
                        held.ahead = max(held.begun)
                        if held.error:
                            raise held.error
                reader.read_into(offset, buffer)

            def close(self):
                reader.close()

        return Reader()


@pytest.fixture(scope="module")
def source():
    store = MemoryStore("source")
    write_key(store, "a", b"0123456789abcdef" * (NUM_BLOCKS * BLOCK // 16))
    return store


def test_no_thread_runs_far_ahead_of_a_block_that_takes_long(source):
    """What comes early is held by who writes from one end to the other."""
    target, held = MemoryStore("target"), Held(source)
    seen = []
    file = FileCopy("a", "b", NUM_BLOCKS * BLOCK)
    copy_files(held, target, [file], num_threads=3, progress=seen.append)
    assert held.ahead == 7
    assert target.get("b") == source.get("a")
    assert seen == [BLOCK] * NUM_BLOCKS


def test_threads_that_wait_for_a_block_end_when_it_fails(source):
    """With the error of that block, at once."""
    target, held = MemoryStore("target"), Held(source, StorageError("gone"))
    with pytest.raises(StorageError, match="gone"):
        copy_files(held, target, [FileCopy("a", "b", NUM_BLOCKS * BLOCK)], num_threads=3)
    assert not list(target.list())
