"""The contract of a store as tests: inherit, say how to make a store, and run pytest.

class TestMyStore(StoreConformance):
    def make_store(self):
        return MyStore(...)
"""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event

from ..errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    FormatError,
    MissingError,
)
from ..format.digest import BLOCK_BYTES
from ..stores.base import Store
from .saver import read_key, write_key

__all__ = ["StoreConformance"]

_SIZES = (0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1)
_WAIT_S = 60
_BAD_KEYS = ("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a\\b", "a b", "a\n", "a:b", "~/\0")


@contextmanager
def _refused(kind: type[CheckpointError]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _noise(size_bytes: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 - test data


class StoreConformance(ABC):
    """Tests of everything that :class:`milepost.stores.Store` promises."""

    @abstractmethod
    def make_store(self) -> Store:
        """Return an empty store."""

    def test_put_new_then_get_returns_the_bytes(self) -> None:
        """What was written is what is read, the empty record included."""
        store = self.make_store()
        for key, data in (("a.json", b"one"), ("b/c/d.json", b""), ("e", _noise(100_000))):
            store.put_new(key, data)
            assert store.get(key) == data
            assert store.head(key).size_bytes == len(data)

    def test_put_new_never_replaces(self) -> None:
        """A commit must not be overwritten by a second one."""
        store = self.make_store()
        store.put_new("a/b", b"first")
        with _refused(ExistsError):
            store.put_new("a/b", b"second")
        assert store.get("a/b") == b"first"
        assert [entry.key for entry in store.list()] == ["a/b"]

    def test_put_new_has_one_winner_among_threads(self) -> None:
        """Two writers that reach for one name must not both believe they have it."""
        store = self.make_store()
        barrier = Barrier(8)

        def reach(worker: int) -> bytes | None:
            data = b"%d" % worker * 5_000
            barrier.wait(_WAIT_S)
            try:
                store.put_new("race/record", data)
            except ExistsError:
                return None
            return data

        with ThreadPoolExecutor(8) as pool:
            won = [data for data in pool.map(reach, range(8)) if data is not None]
        assert len(won) == 1
        assert store.get("race/record") == won[0]
        assert [entry.key for entry in store.list()] == ["race/record"]

    def test_put_replaces_in_one_step(self) -> None:
        """A reader sees the old bytes or the new ones, never a mixture."""
        store = self.make_store()
        values = [b"%d" % number * 40_000 for number in range(3)]
        store.put("hint", values[0])
        done = Event()

        def watch() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(store.get("hint"))
            return seen

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                for turn in range(60):
                    store.put("hint", values[turn % 3])
            finally:
                done.set()
            assert watching.result(_WAIT_S) <= set(values)

    def test_missing_keys_are_missing(self) -> None:
        """Absence has one error, whatever is asked and however deep the key lies."""
        store = self.make_store()
        store.put_new("a/b", b"1")
        for key in ("x", "a", "a/x", "a/b/c"):
            with _refused(MissingError):
                store.get(key)
            with _refused(MissingError):
                store.head(key)
            with _refused(MissingError):
                store.open_reader(key)
        with _refused(MissingError):
            store.rename("x", "y")
        with _refused(MissingError):
            store.link("x", "y")

    def test_get_refuses_more_than_asked_for(self) -> None:
        """A record that a stranger made large must not fill the memory."""
        store = self.make_store()
        store.put_new("a", b"12345")
        assert store.get("a", max_bytes=5) == b"12345"
        with _refused(FormatError):
            store.get("a", max_bytes=4)

    def test_keys_that_lead_out_are_refused(self) -> None:
        """A manifest names keys, and a stranger may have written it."""
        store = self.make_store()
        for key in _BAD_KEYS:
            with _refused(FormatError):
                store.put_new(key, b"")
            with _refused(FormatError):
                store.get(key)
            with _refused(FormatError):
                store.delete(key)
            with _refused(FormatError):
                store.create_writer(key, 0)
        assert list(store.list()) == []

    def test_list_leaves_out_neighbours(self) -> None:
        """``ckpt-1`` is a folder and not the beginning of a name."""
        store = self.make_store()
        keys = ["run/ckpt-1-best/a", "run/ckpt-1.tmp/a", "run/ckpt-1/a", "run/ckpt-10/a"]
        for key in [*keys, "run/ckpt-1/b/c"]:
            store.put_new(key, b"1")
        assert [entry.key for entry in store.list("run/ckpt-1")] == [
            "run/ckpt-1/a",
            "run/ckpt-1/b/c",
        ]
        assert [entry.key for entry in store.list("run/ckpt")] == []
        names = ["ckpt-1", "ckpt-1-best", "ckpt-1.tmp", "ckpt-10"]
        assert store.folders("run") == names
        for entry in list(store.list("run/ckpt-1")):
            store.delete(entry.key)
        assert [entry.key for entry in store.list()] == [
            key for key in keys if "ckpt-1/" not in key
        ]

    def test_list_is_in_the_order_of_the_keys(self) -> None:
        """Whole keys are compared, so that a folder stands where its keys do."""
        store = self.make_store()
        keys = ["a-b/x", "a.txt", "a/b", "a/b.c/d", "a/b.d", "a0", "B", "z/y/x"]
        for key in keys:
            store.put_new(key, key.encode())
        assert [entry.key for entry in store.list()] == sorted(keys)
        assert [entry.size_bytes for entry in store.list()] == [len(key) for key in sorted(keys)]
        assert store.folders() == ["a", "a-b", "z"]
        assert store.folders("a") == ["b.c"]
        assert store.folders("nothing") == []
        assert list(store.list("nothing")) == []

    def test_delete_removes_empty_folders_only(self) -> None:
        """Nothing of a deleted checkpoint stays, and nothing else goes with it."""
        store = self.make_store()
        for key in ("run/ep1/a", "run/ep1/b/c", "run/ep2/a"):
            store.put_new(key, b"1")
        store.delete("run/ep1/a")
        store.delete("run/ep1/a")
        assert store.folders("run") == ["ep1", "ep2"]
        store.delete("run/ep1/b/c")
        assert store.folders("run") == ["ep2"]
        path = store.local_path("run/ep1")
        assert path is None or not Path(path).exists()
        assert store.get("run/ep2/a") == b"1"

    def test_rename_moves_and_never_replaces(self) -> None:
        """Unpublishing must neither lose the manifest nor hit another one."""
        store = self.make_store()
        store.put_new("a/manifest", b"1")
        store.rename("a/manifest", "a/deleted")
        assert [entry.key for entry in store.list()] == ["a/deleted"]
        store.put_new("a/manifest", b"2")
        with _refused(ExistsError):
            store.rename("a/manifest", "a/deleted")
        assert store.get("a/deleted") == b"1"
        assert store.get("a/manifest") == b"2"
        store.rename("a/manifest", "b/manifest")
        assert store.get("b/manifest") == b"2"

    def test_linked_bytes_survive_the_first_name(self) -> None:
        """Deleting one checkpoint must not hurt another that shares a file with it."""
        store = self.make_store()
        data = _noise(10_000)
        write_key(store, "ep1/part", data)
        store.link("ep1/part", "ep2/part")
        with _refused(ExistsError):
            store.link("ep1/part", "ep2/part")
        store.delete("ep1/part")
        assert store.get("ep2/part") == data

    def test_point_can_be_moved(self) -> None:
        """The hint for people names another checkpoint after every save."""
        store = self.make_store()
        store.put_new("ep1/a", b"1")
        store.put_new("ep2/a", b"1")
        store.point("latest", "ep1")
        store.point("latest", "ep2")
        path = store.local_path("latest")
        if path is not None and Path(path).is_symlink():
            assert str(Path(path).readlink()) == "ep2"
        else:
            assert store.get("latest") == b"ep2\n"
        store.delete("latest")
        assert store.folders() == ["ep1", "ep2"]

    def test_blocks_of_odd_sizes_come_back(self) -> None:
        """Direct I/O is easy to get wrong where a file does not end on a page."""
        store = self.make_store()
        for size_bytes in _SIZES:
            data = _noise(size_bytes, seed=size_bytes)
            key = f"parts/{size_bytes}"
            write_key(store, key, data)
            store.sync_folder("parts")
            assert store.head(key).size_bytes == size_bytes
            assert read_key(store, key) == data
            assert store.get(key) == data

    def test_blocks_may_come_in_any_order_from_threads(self) -> None:
        """Several threads write one file; the blocks must land where they belong."""
        store = self.make_store()
        data = _noise(3 * BLOCK_BYTES + 5)
        pages = bytearray(data)
        writer = store.create_writer("a", len(data))
        starts = list(range(0, len(data), BLOCK_BYTES))[::-1]
        with ThreadPoolExecutor(4) as pool, memoryview(pages) as view:
            list(pool.map(lambda s: writer.write_at(s, view[s : s + BLOCK_BYTES]), starts))
        writer.close()
        assert store.get("a") == data

    def test_a_file_may_come_to_fewer_bytes_than_were_expected(self) -> None:
        """How small compressed bytes become is known only once they were written."""
        store = self.make_store()
        for size_bytes in (1, 5_000, BLOCK_BYTES, 2 * BLOCK_BYTES + 5):
            data, key = _noise(size_bytes, seed=size_bytes), f"parts/{size_bytes}"
            for most_bytes in (size_bytes + 3, 3 * BLOCK_BYTES):
                writer = store.create_writer(key, most_bytes)
                with memoryview(bytearray(data)) as view:
                    for start in range(0, size_bytes, BLOCK_BYTES):
                        writer.write_at(start, view[start : start + BLOCK_BYTES])
                writer.close(size_bytes)
                assert store.head(key).size_bytes == size_bytes
                assert store.get(key) == data
                store.delete(key)

    def test_ranges_may_begin_on_any_page(self) -> None:
        """Compressed blocks are of any size; each begins on a page."""
        store = self.make_store()
        data = _noise(BLOCK_BYTES + 9_000)
        write_key(store, "a", data)
        reader = store.open_reader("a")
        try:
            for start, length in ((4096, 1), (8192, 12_345), (BLOCK_BYTES - 4096, 9_001)):
                pages = memoryview(mmap.mmap(-1, length))[:length]
                reader.read_into(start, pages)
                assert bytes(pages) == data[start : start + length]
        finally:
            reader.close()

    def test_a_writer_needs_a_new_key(self) -> None:
        """Parts of an earlier attempt must not be written into."""
        store = self.make_store()
        write_key(store, "a", b"1")
        with _refused(ExistsError):
            store.create_writer("a", 1)
        assert store.get("a") == b"1"

    def test_abort_leaves_nothing_and_frees_the_key(self) -> None:
        """A failed save gives its room back, and its name."""
        store = self.make_store()
        writer = store.create_writer("a/b", 4096)
        writer.write_at(0, memoryview(bytearray(4096)))
        writer.abort()
        writer.abort()
        assert list(store.list()) == []
        write_key(store, "a/b", b"again")
        assert store.get("a/b") == b"again"

    def test_abort_after_close_keeps_the_key(self) -> None:
        """Clean-up code runs on every path, after a success as well."""
        store = self.make_store()
        writer = store.create_writer("a", 1)
        writer.write_at(0, memoryview(bytearray(b"1")))
        writer.close()
        writer.abort()
        assert store.get("a") == b"1"

    def test_reading_past_the_end_is_damage(self) -> None:
        """A part that is shorter than the manifest says must not be padded with anything."""
        store = self.make_store()
        write_key(store, "a", _noise(5_000))
        reader = store.open_reader("a")
        try:
            with _refused(DamagedError):
                reader.read_into(0, memoryview(bytearray(5_001)))
        finally:
            reader.close()
