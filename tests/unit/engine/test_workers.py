"""After an error nobody touches anything: no memory that is read into, no file that is written."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from milepost.checkpoint import Checkpoint
from milepost.engine import workers as workers_module
from milepost.engine.workers import Workers
from milepost.engine.write import file_job, write_files
from milepost.errors import DamagedError
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import MemoryStore
from milepost.stores.pages import page_memory

WAIT_S = 20.0


def is_caller() -> bool:
    return threading.current_thread() is threading.main_thread()


def end_of(name: str) -> None:
    """Wait for the threads of a name."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_an_interrupted_caller_leaves_nobody_behind_who_touches_anything():
    """It does not wait for who waits elsewhere; and that one finds the door closed."""
    crew = Workers[int]("test-crew", num_threads=2)
    waits, answer, done = threading.Event(), threading.Event(), []

    def work(pieces: Any) -> None:
        for piece in pieces:
            if is_caller():
                assert waits.wait(WAIT_S)
                raise KeyboardInterrupt
            waits.set()
            assert answer.wait(WAIT_S)
            with crew.touching():
                done.append(piece)

    for piece in range(4):
        crew.put(piece)
    with pytest.raises(KeyboardInterrupt):
        crew.run(work)
    assert crew.is_still
    assert not answer.is_set()
    answer.set()
    end_of("test-crew")
    assert done == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_who_is_at_it_is_waited_for(error):
    """Half a block later the memory belongs to somebody else."""
    crew = Workers[int]("test-crew", num_threads=2)
    inside, go, done = threading.Event(), threading.Event(), []

    def work(pieces: Any) -> None:
        for piece in pieces:
            if is_caller():
                assert inside.wait(WAIT_S)
                threading.Timer(0.05, go.set).start()
                raise error
            with crew.touching():
                inside.set()
                assert go.wait(WAIT_S)
                done.append(piece)

    for piece in range(4):
        crew.put(piece)
    with pytest.raises(error):
        crew.run(work)
    assert len(done) == 1
    end_of("test-crew")
    assert len(done) == 1


def test_who_hangs_is_not_waited_for_without_end(monkeypatch, caplog):
    """And is told of: what it has in hand must not be used."""
    monkeypatch.setattr(workers_module, "_STILL_S", 0.01)
    crew = Workers[int]("test-crew", num_threads=2)
    inside, go = threading.Event(), threading.Event()

    def work(pieces: Any) -> None:
        for _ in pieces:
            if is_caller():
                assert inside.wait(WAIT_S)
                raise KeyboardInterrupt
            with crew.touching():
                inside.set()
                assert go.wait(WAIT_S)

    for piece in range(2):
        crew.put(piece)
    with pytest.raises(KeyboardInterrupt):
        crew.run(work)
    assert not crew.is_still
    assert "still at a block" in caplog.text
    go.set()
    end_of("test-crew")


class HeldWriter:
    """A writer whose writes wait, and that notes what is done with it."""

    def __init__(self, calls: list[str], begun: threading.Event, go: threading.Event) -> None:
        self._calls, self._begun, self._go = calls, begun, go

    def write_at(self, offset: int, data: memoryview) -> None:
        self._begun.set()
        assert self._go.wait(WAIT_S)
        self._calls.append("written")

    def close(self) -> None:
        self._calls.append("closed")

    def abort(self) -> None:
        self._calls.append("aborted")


def test_a_thread_that_does_not_start_drops_no_file_under_the_hands_of_another(monkeypatch):
    """What is written to would be closed, and its number may be that of another file at once."""
    calls: list[str] = []
    begun, go = threading.Event(), threading.Event()
    store: Any = MemoryStore()
    store.create_writer = lambda key, size_bytes: HeldWriter(calls, begun, go)
    start = threading.Thread.start

    def start_one(self: threading.Thread) -> None:
        if self.name == "milepost-write-2":
            assert begun.wait(WAIT_S)
            start(threading.Timer(0.05, go.set))
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    data = memoryview(page_memory(4 * BLOCK_BYTES))
    with pytest.raises(RuntimeError, match="start new thread"):
        write_files(store, [file_job("k", "k", data)], num_threads=3)
    end_of("milepost-write")
    assert calls == ["written", "aborted"]


class HeldReader:
    """A reader whose first read by another thread than the caller waits for an answer."""

    def __init__(self, reader: Any, held: threading.Event, answer: threading.Event) -> None:
        self._reader, self._held, self._answer = reader, held, answer
        self.size_bytes = reader.size_bytes
        self.num_closed = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if not is_caller() and offset:
            self._held.set()
            assert self._answer.wait(WAIT_S)
            assert not self.num_closed
        self._reader.read_into(offset, buffer)

    def close(self) -> None:
        self.num_closed += 1


def test_after_an_interrupted_load_late_answers_change_nothing(new_lab):
    """The tensors may be those of another checkpoint by then; and the file is open until then."""
    lab = new_lab()
    count = 10 * BLOCK_BYTES // 4  # more blocks than threads: one is left for the caller
    lab.save("a", {"model": {"w": torch.ones(count)}})
    held, answer, readers = threading.Event(), threading.Event(), []

    class Store:
        url, traits = lab.store.url, lab.store.traits

        def __getattr__(self, name: str) -> Any:
            return getattr(lab.store, name)

        def open_reader(self, key: str) -> Any:
            readers.append(HeldReader(lab.store.open_reader(key), held, answer))
            return readers[-1]

    def interrupt(num_bytes: int) -> None:
        if is_caller():
            assert held.wait(WAIT_S)
            raise KeyboardInterrupt

    source = Checkpoint(Store(), "a").source(progress=interrupt)  # type: ignore[arg-type]
    source.tensors("model")
    live = torch.zeros(count)
    with pytest.raises(KeyboardInterrupt):
        source.read([("model", "w", live)])
    assert not readers[-1].num_closed
    live.fill_(7.0)
    answer.set()
    end_of("milepost-read")
    assert bool((live == 7).all())
    assert readers[-1].num_closed == 1


def test_a_load_that_fails_says_what_it_leaves_behind(new_lab):
    """Some of it is there, which must not be trained on."""
    lab = new_lab()
    lab.save("a", {"model": {"w": torch.ones(2 * BLOCK_BYTES // 4)}})
    key = "a/model.safetensors"
    data = bytearray(lab.store.get(key, max_bytes=1 << 30))
    data[-1] ^= 1
    lab.store.put(key, bytes(data))
    with pytest.raises(DamagedError, match="neither old nor new"):
        Checkpoint(lab.store, "a").source().read(
            [("model", "w", torch.zeros(2 * BLOCK_BYTES // 4))]
        )
