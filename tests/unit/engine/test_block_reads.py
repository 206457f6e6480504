"""How blocks come: from where, by how many requests, and what is done with one that is damaged."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.checkpoint import Checkpoint
from milepost.engine import blocks
from milepost.engine.checks import require_block
from milepost.errors import DamagedError
from milepost.fetching import Fetching
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import LocalStore, MemoryStore
from milepost.stores.blocks import LocalReader
from milepost.tensors.boxes import Box

FILE = "a/model.safetensors"
NUM_BLOCKS = 6


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Six blocks: two large tensors with a hundred small ones between, and more at the end."""
    generator = torch.Generator().manual_seed(0)
    large = {n: torch.randn(5_500_000, generator=generator) for n in ("w0", "w1")}
    small = {f"s{n}": torch.randn(1000, generator=generator) for n in range(100)}
    odd = {"h": torch.randn(2_500_001, generator=generator).half()}
    return {**large, **small, **odd}


class Spy:
    """A reader that notes what it is asked for."""

    def __init__(self, reader: Any, calls: list[tuple[str, int, int]], lies: dict[int, int]):
        self._reader, self._calls, self._lies = reader, calls, lies
        self.size_bytes = reader.size_bytes
        self.close = reader.close

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._calls.append(("read_into", offset, len(buffer)))
        self._reader.read_into(offset, buffer)
        self._alter(offset, buffer)

    def _alter(self, offset: int, buffer: memoryview) -> None:
        for place in [place for place in self._lies if offset <= place < offset + len(buffer)]:
            if self._lies[place]:
                self._lies[place] -= 1
                buffer[place - offset] ^= 1


class LocalSpy(Spy):
    """One of a local file."""

    def is_cached(self, offset: int, length: int) -> bool:
        return bool(self._reader.is_cached(offset, length))

    def copy_into(self, offset: int, buffer: memoryview) -> None:
        self._calls.append(("copy_into", offset, len(buffer)))
        self._reader.copy_into(offset, buffer)
        self._alter(offset, buffer)


class LendingSpy(Spy):
    """One of a service."""

    def lend(self, offset: int, length: int) -> memoryview:
        self._calls.append(("lend", offset, length))
        data = memoryview(bytearray(self._reader.lend(offset, length)))
        self._alter(offset, data)
        return data.toreadonly()


class StreamingSpy(Spy):
    """One of a service whose answers come in pieces, of odd sizes."""

    def stream(self, offset: int, length: int) -> Generator[memoryview, None, None]:
        self._calls.append(("stream", offset, length))
        data = memoryview(bytearray(self._reader.lend(offset, length)))
        self._alter(offset, data)
        for start in range(0, length, 1_000_003):
            yield data[start : start + 1_000_003].toreadonly()


class SpyStore:
    """A store whose readers are looked at, and whose bytes can come altered a few times."""

    def __init__(
        self, store: Any, lies: dict[int, int] | None = None, *, streams: bool = False
    ) -> None:
        self._store = store
        self.url, self.traits = store.url, replace(store.traits, streams=streams)
        self.calls: list[tuple[str, int, int]] = []
        self.lies = lies or {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_reader(self, key: str) -> Any:
        reader = self._store.open_reader(key)
        if key != FILE:
            return reader
        kind: type[Spy] = LocalSpy if isinstance(reader, LocalReader) else LendingSpy
        return (StreamingSpy if self.traits.streams else kind)(reader, self.calls, self.lies)


def empty(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 7.0) for key, value in state.items()}


def read(store: Any, into: dict[str, torch.Tensor], **options: Any) -> list[tuple[str, int, int]]:
    """Read tensors; return what was asked for beside the header."""
    source = Checkpoint(store, "a").source(**options)
    source.tensors("model")
    del store.calls[:]
    source.read([("model", key, live) for key, live in into.items()])
    return list(store.calls)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[key], right[key]) for key in left)


def warm(path: Any) -> None:
    path.read_bytes()


def cold(path: Any) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_what_is_cached_is_copied_straight_into_place(new_lab, tmp_path, state):
    """In portions that stay in the cache of a core until they are checked, and without the disk."""
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    warm(tmp_path / FILE)
    store, into = SpyStore(LocalStore(tmp_path)), empty(state)
    calls = read(store, into)
    assert same(into, state)
    assert {name for name, _, _ in calls} == {"copy_into"}
    size = (tmp_path / FILE).stat().st_size
    assert sum(length for _, _, length in calls) == size - BLOCK_BYTES  # one came with the header
    assert max(length for _, _, length in calls) <= 2 * 1024 * 1024
    assert len({offset for _, offset, _ in calls}) == len(calls)


def test_what_is_not_cached_is_read_past_the_cache(new_lab, tmp_path, state):
    """Whole blocks into aligned memory; and asking does not begin to read them ahead."""
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    cold(tmp_path / FILE)
    store, into = SpyStore(LocalStore(tmp_path)), empty(state)
    reader = LocalStore(tmp_path).open_reader(FILE)
    last = NUM_BLOCKS - 1  # its last bytes, less than a page, always come through the cache
    is_cached = [reader.is_cached(n * BLOCK_BYTES, BLOCK_BYTES) for n in range(last)]
    if any(is_cached):
        pytest.skip("this file system does not let go of what it has cached")
    calls = read(store, into)
    assert same(into, state)
    found = {offset // BLOCK_BYTES for name, offset, _ in calls if name == "read_into"}
    assert found >= set(range(1, last))  # the first came with the header
    again = [reader.is_cached(n * BLOCK_BYTES, BLOCK_BYTES // 2) for n in range(last)]
    reader.close()
    assert not any(again)


def test_a_disk_has_requests_for_more_blocks_than_are_checked_at_a_time(
    new_lab, tmp_path, state, monkeypatch
):
    """It is not idle while blocks are checked; and cores do not take their caches from each other.

    Every thread is held in its first request until all of them have one.
    """
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    monkeypatch.setattr(LocalReader, "is_cached", lambda *_: False)
    monkeypatch.setattr(blocks, "num_cores", lambda: 1)
    together = threading.Barrier(NUM_BLOCKS - 1)  # one came with the header
    at_work: list[int] = []
    most: list[int] = []

    class Held(LocalSpy):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            together.wait(timeout=30)
            super().read_into(offset, buffer)

    def require(*args: Any, **named: Any) -> None:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.01)  # others would come in, if they could
        at_work.pop()
        require_block(*args, **named)

    store, into = SpyStore(LocalStore(tmp_path)), empty(state)
    source = Checkpoint(store, "a").source()
    source.tensors("model")
    monkeypatch.setattr(sys.modules[__name__], "LocalSpy", Held)
    monkeypatch.setattr(blocks, "require_block", require)
    source.read([("model", key, live) for key, live in into.items()])
    assert same(into, state)
    assert most == [1] * (NUM_BLOCKS - 1)


def test_what_is_cached_takes_fewer_threads(new_lab, tmp_path, state, monkeypatch):
    """Nobody waits for a disk there, and more threads would only wait for each other."""
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    monkeypatch.setattr(blocks, "NUM_THREADS_CACHED", 1)
    callers = set()
    fill = LocalReader.copy_into

    def copy_into(self: LocalReader, offset: int, buffer: memoryview) -> None:
        callers.add(threading.current_thread())
        fill(self, offset, buffer)

    monkeypatch.setattr(LocalReader, "copy_into", copy_into)
    warm(tmp_path / FILE)
    store, into = SpyStore(LocalStore(tmp_path)), empty(state)
    read(store, into)
    assert same(into, state)
    assert callers == {threading.current_thread()}


def test_parts_of_the_same_bytes_go_to_each_of_their_places(new_lab, tmp_path, state):
    """Whether they lie side by side or not, are large or small, and in any order."""
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    warm(tmp_path / FILE)
    source = Checkpoint(LocalStore(tmp_path), "a").source()
    whole, count = state["w0"], 5_500_000
    boxes = [(0, count), (1000, count - 1000), (0, 10), (200_000, 100_000), (count - 3, 3)]
    lives = [torch.zeros(size) for _, size in boxes]
    apart = torch.zeros(2 * count)[::2]
    source.read_boxes(
        [
            ("model", "w0", Box((at,), (n,)), live)
            for (at, n), live in zip(boxes, lives, strict=True)
        ]
        + [("model", "w0", Box((0,), (count,)), apart)]
        + [("model", key, Box((1000,), (0,)), torch.zeros(0)) for key in ("s1", "s2")]
    )
    for (at, size), live in zip(boxes, lives, strict=True):
        assert torch.equal(live, whole[at : at + size])
    assert torch.equal(apart, whole)


def test_a_service_is_asked_for_neighbouring_blocks_at_once(new_lab, state):
    """As many as the piece holds, and no byte twice: the first block came with the header."""
    lab = new_lab(MemoryStore())
    size = lab.save("a", {"model": state}).manifest.file("model.safetensors").size_bytes
    for chunk_bytes, expected in ((1, 5), (BLOCK_BYTES, 5), (3 * BLOCK_BYTES, 2), (1 << 40, 1)):
        store, into = SpyStore(lab.store), empty(state)
        calls = read(store, into, fetching=Fetching(chunk_bytes))
        assert same(into, state)
        assert (len(calls), {name for name, _, _ in calls}) == (expected, {"lend"})
        assert sum(length for _, _, length in calls) == size - BLOCK_BYTES
    store = SpyStore(lab.store)
    some = {key: live for key, live in empty(state).items() if key in ("w0", "h")}
    calls = read(store, some, fetching=Fetching(1 << 40))
    assert same(some, state)
    assert sum(length for _, _, length in calls) < size


def test_a_stream_is_for_as_many_blocks_as_leave_all_streams_some(new_lab, state, monkeypatch):
    """Few requests cost a service less than many, and the last must not come alone."""
    lab = new_lab(MemoryStore())
    size = lab.save("a", {"model": state}).manifest.file("model.safetensors").size_bytes
    for num_requests, chunk_bytes, expected in ((8, 0, 5), (1, 0, 2), (1, BLOCK_BYTES, 5)):
        monkeypatch.setattr("milepost.engine.blocks.NUM_REQUESTS", num_requests)
        store, into = SpyStore(lab.store, streams=True), empty(state)
        calls = read(store, into, fetching=Fetching(chunk_bytes))
        assert same(into, state)
        assert (len(calls), {name for name, _, _ in calls}) == (expected, {"stream"})
        assert sum(length for _, _, length in calls) == size - BLOCK_BYTES


def test_a_slice_asks_for_its_own_blocks_only(new_lab):
    """A tenth of a tensor costs a tenth of it and the blocks at its edges."""
    whole = torch.arange(25_000_000, dtype=torch.float32)  # 12 blocks
    lab = new_lab(MemoryStore())
    lab.save("a", {"model": {"w": whole}})
    store = SpyStore(lab.store)
    source = Checkpoint(store, "a").source()
    source.tensors("model")
    del store.calls[:]
    live = torch.zeros(2_500_000)
    source.read_boxes([("model", "w", Box((5_000_000,), (2_500_000,)), live)])
    assert torch.equal(live, whole[5_000_000:7_500_000])
    assert sum(length for _, _, length in store.calls) <= 4 * 2_500_000 + 2 * BLOCK_BYTES


@pytest.mark.parametrize("kind", ["cached", "cold", "service", "stream"])
def test_a_block_that_came_damaged_is_read_once_more(new_lab, tmp_path, state, caplog, kind):
    """Bytes may be altered on the way, and what is stored be whole."""
    is_local = kind in ("cached", "cold")
    lab = new_lab(LocalStore(tmp_path) if is_local else MemoryStore())
    lab.save("a", {"model": state})
    place = 2 * BLOCK_BYTES + 12_345
    for times, is_whole in ((1, True), (2, False)):
        if is_local:
            (warm if kind == "cached" else cold)(tmp_path / FILE)
        store = SpyStore(lab.store, {place: times}, streams=kind == "stream")
        into, caught = empty(state), None
        caplog.clear()
        with caplog.at_level(logging.WARNING, "milepost"):
            try:
                calls = read(store, into)
            except DamagedError as error:
                caught = error
        if is_whole:
            assert caught is None
            assert same(into, state)
            assert "Block 2 of a/model.safetensors came damaged" in caplog.text
            assert calls.count(("read_into", 2 * BLOCK_BYTES, BLOCK_BYTES)) == (
                2 if kind == "cold" else 1
            )
        else:
            assert caught is not None
            assert caught.facts["block"] == 2


def test_memory_that_is_read_into_is_known_to_autograd_and_not_to_inference(new_lab, state):
    """Versions are counted where there are any."""
    saved = new_lab().save("a", {"model": {"s1": state["s1"]}})
    with torch.inference_mode():
        frozen = torch.zeros(1000)
        saved.source().read([("model", "s1", frozen)])
    live = torch.zeros(1000)
    version = live._version
    saved.source().read([("model", "s1", live)])
    assert torch.equal(live, state["s1"])
    assert torch.equal(frozen.clone(), state["s1"])
    assert live._version > version


def test_large_new_tensors_lie_on_huge_pages(new_lab):
    """Clearing and mapping fresh memory in small pages takes longer than reading into it."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages to ask for")
    saved = new_lab().save("a", {"model": {"w": torch.ones(12 * 1024 * 1024)}})
    loaded = saved.load()["state"]["model"]["w"]
    inside = loaded.data_ptr() + loaded.nbytes // 2
    flags, is_there = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0]
        if "-" in span and ":" not in span:
            low, high = (int(end, 16) for end in span.split("-"))
            is_there = low <= inside < high
        elif is_there and line.startswith("VmFlags:"):
            flags = line
    assert " hg " in flags + " "
    assert bool((loaded == 1).all())


def test_a_header_that_is_cached_costs_no_request_to_the_disk(new_lab, tmp_path, state, caplog):
    """The block it is in is checked and read again past the cache only if it must be; used once."""
    new_lab(LocalStore(tmp_path)).save("a", {"model": state})
    for lies, expected in (({}, 0), ({12_345: 1}, 1)):
        warm(tmp_path / FILE)
        store, into = SpyStore(LocalStore(tmp_path), dict(lies)), empty(state)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "milepost"):
            source = Checkpoint(store, "a").source()
            source.read([("model", key, live) for key, live in into.items()])
        assert same(into, state)
        assert ("came damaged" in caplog.text) == bool(lies)
        firsts = [name for name, offset, _ in store.calls if offset < BLOCK_BYTES]
        assert firsts == ["copy_into"] + ["read_into"] * expected
