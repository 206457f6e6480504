"""A state that is larger than its memory: the same bytes, through a few blocks, by any threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from milepost.checkpoint import Checkpoint
from milepost.engine import streaming
from milepost.engine.arena import Arena
from milepost.engine.plan import make_plan
from milepost.engine.stage import Stager
from milepost.engine.streaming import Stream, Streamer, copy_elements
from milepost.engine.write import file_job, write_files
from milepost.errors import StorageError, UsageError
from milepost.opening import WriterOptions
from milepost.runs import scan
from milepost.stores import LocalStore, MemoryStore
from milepost.stores.uploading import FeedWriter
from milepost.tensors.pack import pack_item

BLOCK = 8 * 1024 * 1024
BUDGET = 4 * BLOCK


def odd_state() -> dict[str, torch.Tensor]:
    """More than the budget: one tensor larger than it, thousands of tiny ones, and every kind."""
    torch.manual_seed(0)
    tiny = {f"t{i}": torch.full((i % 50,), float(i)) for i in range(2000)}
    return {
        **tiny,
        "huge": torch.randint(0, 255, (BUDGET + 70_001,), dtype=torch.uint8),
        "turned": torch.randn(1500, 1801).t(),
        "cube": torch.randn(60, 70, 300).permute(2, 0, 1),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "no": torch.rand(100_001) < 0.5,
        "half": torch.randn(70_001).to(torch.bfloat16),
        "complex": torch.randn(50_000, dtype=torch.complex64).conj(),
        "empty": torch.ones(0, 3),
        "frozen": torch.randn(BLOCK // 4 + 100),
        "frozen too": torch.randn(3),
    }


FROZEN = {"model": {"frozen", "frozen too"}}


def files_of(store: Any, name: str) -> dict[str, bytes]:
    """Return the parts and the index of a checkpoint: all that the state decides alone."""
    found = (key.key.partition("/")[2] for key in store.list(name))
    kept = [path for path in found if path.endswith((".safetensors", "index.json"))]
    return {path: store.get(f"{name}/{path}") for path in kept}


class View:
    """Passes everything on to another store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.url, self.traits = store.url, store.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_what_is_streamed_has_the_bytes_of_what_is_not(new_lab, tmp_path):
    """On a disk too; within the budget; and the tenth save allocates nothing."""
    state = odd_state()
    plain = new_lab()
    plain.save("a", {"model": state, "rest": [1, 2]}, frozen=FROZEN)
    expected = files_of(plain.store, "a")
    for store, budget in ((MemoryStore(), BUDGET), (LocalStore(tmp_path), BUDGET + BLOCK + 77)):
        lab = new_lab(store, budget_bytes=budget)
        saved = lab.save("a", {"model": state, "rest": [1, 2]}, frozen=FROZEN)
        assert saved.verify().is_good
        assert files_of(store, "a") == expected
        arena, blocks = lab.saver._stager.arena, lab.saver._streamer._blocks
        before = (arena.generation, arena.tensor(0, 1).data_ptr(), [id(b) for b in blocks.values()])
        for name in "bc":
            lab.save(name, {"model": state, "rest": [1, 2]}, frozen=FROZEN)
            assert arena.capacity_bytes <= budget
            assert 1 < lab.saver._copy.most_slots <= budget // BLOCK
        after = (arena.generation, arena.tensor(0, 1).data_ptr(), [id(b) for b in blocks.values()])
        assert after == before
        assert files_of(store, "c") == expected


def test_a_state_that_fits_is_copied_as_ever(new_lab):
    """The budget is a limit, and no way of its own; a state may grow beyond it and come back."""
    lab = new_lab(budget_bytes=BUDGET)
    small, large = {"w": torch.randn(1000)}, {"w": torch.randn(BUDGET // 4)}
    for name, state in (("a", small), ("b", large), ("c", small), ("d", large)):
        pending = lab.begin(name, {"model": state})
        pending.wait(30)
        assert ("streamed_bytes" in pending.stats) == (state is large)
        assert lab.saver._stager.arena.capacity_bytes <= BUDGET
        found = Checkpoint(lab.store, name).load()["state"]["model"]["w"]
        assert torch.equal(found, state["w"])


def test_frozen_parts_are_shared_only_if_nothing_says_that_they_changed(new_lab, tmp_path):
    """Neither a version counter nor a checksum; what was written around the counter is found."""
    frozen = torch.randn(BLOCK // 4 + 100)
    state = {"w": torch.zeros(BUDGET // 4), "frozen": frozen, "frozen too": torch.randn(3, 5).t()}
    lab = new_lab(LocalStore(tmp_path), budget_bytes=BUDGET)

    def linked_bytes(name: str) -> int:
        pending = lab.begin(name, {"model": state}, frozen=FROZEN)
        pending.wait(30)
        found = Checkpoint(lab.store, name).load()["state"]["model"]
        assert torch.equal(found["frozen"], state["frozen"])
        return pending.stats["linked_bytes"]

    assert linked_bytes("first") == 0
    assert linked_bytes("same") > BLOCK
    frozen.data[7] += 1  # moves no counter
    assert linked_bytes("around") == 0
    assert linked_bytes("again") > BLOCK
    frozen.add_(0)  # changes nothing
    assert linked_bytes("counted") == 0
    state["frozen"] = frozen.clone()  # the same bytes elsewhere
    assert linked_bytes("moved") == 0


def test_a_part_that_cannot_be_linked_is_streamed_after_all(new_lab, tmp_path, monkeypatch):
    """A place that refuses, and a folder that is only for a look, whose files are its own."""
    frozen = torch.randn(1000)
    state = {"w": torch.zeros(BUDGET // 4), "frozen": frozen}
    lab = new_lab(LocalStore(tmp_path), budget_bytes=BUDGET)
    lab.save("a", {"model": state}, frozen=FROZEN)

    def refused(key: str, new_key: str) -> None:
        raise StorageError("there are too many names of it")

    for name in ("failed/b", "c"):
        if name == "c":
            monkeypatch.setattr(lab.store, "link", refused)
        pending = lab.begin(name, {"model": state}, frozen=FROZEN)
        pending.wait(30)
        assert pending.stats["linked_bytes"] == 0
        assert pending.stats["unchanged_bytes"] > 0
        saved = Checkpoint(lab.store, name)
        assert saved.verify().is_good
        assert torch.equal(saved.load()["state"]["model"]["frozen"], frozen)


def streamed(num_slots: int) -> tuple[Stream, list[Any], list[bytes]]:
    """A stream of a few parts, their layouts, and the bytes that their files must have."""
    torch.manual_seed(1)
    items = [
        pack_item(f"m{i}", {"w": torch.randn(3 * BLOCK // 4 + 1000 * i), "b": torch.ones(5)})
        for i in range(3)
    ]
    plan = make_plan(items)
    stager, ring = Stager(Arena()), Streamer(Arena(), budget_bytes=num_slots * BLOCK)
    stager.stage(plan, items)
    stream, _ = ring.begin(plan, items, written=lambda path: None)
    parts = list(plan.parts)
    views = [stager.arena.view(part.arena_start, part.arena_stop) for part in parts]
    return stream, parts, [bytes(view) for view in views]


@pytest.mark.parametrize(("num_threads", "num_slots"), [(1, 4), (2, 4), (9, 4), (3, 1)])
def test_no_number_of_threads_and_slots_waits_for_ever(num_threads, num_slots):
    """However long each write takes; other files may lie between and behind."""
    stream, parts, expected = streamed(num_slots)
    draw = random.Random(num_threads)

    class Slow(View):
        def create_writer(self, key: str, size_bytes: int) -> Any:
            writer = self._store.create_writer(key, size_bytes)
            write_at, pause = writer.write_at, threading.Event()

            def slow(offset: int, data: memoryview) -> None:
                pause.wait(draw.random() / 50)
                write_at(offset, data)

            writer.write_at = slow
            return writer

    store = MemoryStore()
    jobs = [stream.job(part.file, part) for part in parts]
    stream.choose()
    jobs.insert(1, file_job("between", "between", memoryview(b"x" * 10)))
    written: list[Any] = []
    writing = threading.Thread(
        target=lambda: written.extend(write_files(Slow(store), jobs, num_threads=num_threads))
    )
    writing.start()
    stream.run(is_awaited=True)
    writing.join(60)
    assert len(written) == 4
    assert [store.get(part.file) for part in parts] == expected
    assert stream.most_slots <= num_slots
    assert not stream._used


@pytest.mark.parametrize("num_threads", [1, 2, 9])
def test_a_writer_that_fails_lets_everybody_out(num_threads):
    """Also where all other threads wait for a block, and all slots are full."""
    stream, parts, _ = streamed(4)
    count = iter(range(100))

    class Failing(View):
        def create_writer(self, key: str, size_bytes: int) -> Any:
            writer = self._store.create_writer(key, size_bytes)

            def write_at(offset: int, data: memoryview) -> None:
                if next(count) >= 3:
                    raise StorageError("the disk is full")

            writer.write_at = write_at
            return writer

    told: list[BaseException] = []

    def write() -> None:
        try:
            jobs = [stream.job(part.file, part) for part in parts]
            stream.choose()
            write_files(Failing(MemoryStore()), jobs, num_threads=num_threads)
        except StorageError as error:
            stream.stop(error)
            told.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    stream.run(is_awaited=True)
    writing.join(60)
    assert not writing.is_alive()
    assert [str(error) for error in told] == ["the disk is full"]
    assert stream.most_slots <= 4


@pytest.mark.parametrize("at", [1, 5, 6])
@pytest.mark.parametrize("where", ["copy", "store"])
def test_an_error_midway_commits_nothing_and_harms_no_later_save(new_lab, monkeypatch, where, at):
    """The caller gets it: at once where its own copy failed, else from the handle."""
    is_interrupt = where == "copy" and at == 5
    error = KeyboardInterrupt() if is_interrupt else StorageError(f"broken at {at}")
    original, count = streaming.assemble, iter(range(1, 100))
    below = MemoryStore()
    lab = new_lab(View(below), budget_bytes=BUDGET)
    state = {"w": torch.randn(6 * BLOCK // 4), "v": torch.randn(100)}

    def broken(*given: Any, **named: Any) -> None:
        if next(count) == at:
            raise error
        original(*given, **named)

    def create_writer(key: str, size_bytes: int) -> Any:
        writer = below.create_writer(key, size_bytes)
        write_at = writer.write_at

        def failing(offset: int, data: memoryview) -> None:
            if next(count) == at:
                raise error
            write_at(offset, data)

        writer.write_at = failing
        return writer

    if where == "copy":
        monkeypatch.setattr(streaming, "assemble", broken)
        with pytest.raises(type(error)) as caught:
            lab.begin("a", {"model": state})
        assert caught.value is error
        lab.saver.wait_until_free()
    else:
        lab.store.create_writer = create_writer
        assert lab.begin("a", {"model": state}).exception(30) is error
        del lab.store.create_writer
    monkeypatch.undo()
    assert not [one for one in scan(below).found if one.manifest is not None]
    saved = lab.save("b", {"model": state})
    assert saved.verify().is_good
    assert torch.equal(saved.load()["state"]["model"]["w"], state["w"])


def test_a_compressed_part_is_streamed_and_shared_too(new_lab, tmp_path):
    """Frames have checksums of their own; it is those of the plain blocks that are compared."""
    frozen = torch.arange(BLOCK // 4 + 100) % 7
    state = {"w": torch.zeros(BUDGET // 4), "frozen": frozen}
    lab = new_lab(LocalStore(tmp_path), budget_bytes=BUDGET, compression="zstd")
    for name in "ab":
        pending = lab.begin(name, {"model": state}, frozen=FROZEN)
        pending.wait(30)
        saved = Checkpoint(lab.store, name)
        assert saved.verify().is_good
        found = saved.load()["state"]["model"]
        assert all(torch.equal(found[key], value) for key, value in state.items())
        assert pending.stats["written_bytes"] + pending.stats["linked_bytes"] < BUDGET // 4
    assert pending.stats["linked_bytes"] > 0


def test_a_slow_bucket_gets_it_block_by_block(new_lab):
    """A place that takes an object from one end to the other, and holds what it was given."""
    below = MemoryStore()

    class Bucket(View):
        def create_writer(self, key: str, size_bytes: int) -> Any:
            return FeedWriter(self, key, size_bytes, timeout_s=30)

        def upload(self, key: str, pieces: Any, size_bytes: int) -> None:
            below.put(key, b"".join([bytes(piece) for piece in pieces]))

    lab = new_lab(Bucket(below), budget_bytes=BUDGET)
    state = {"w": torch.randn(6 * BLOCK // 4)}
    saved = lab.save("a", {"model": state})
    assert saved.verify().is_good
    assert lab.saver._copy.most_slots <= 4
    assert torch.equal(Checkpoint(below, "a").load()["state"]["model"]["w"], state["w"])


def test_elements_are_copied_from_tensors_of_any_stride():
    """Any range of them, in the order of rows, and nothing beside it."""
    draw = random.Random(3)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        tensor = torch.randn(shape).permute(draw.sample(range(len(shape)), len(shape)))
        flat = tensor.reshape(-1)
        start = draw.randint(0, len(flat))
        stop = draw.randint(start, len(flat))
        into = torch.full((len(flat) + 2,), -7.0)
        copy_elements(into[1 : 1 + stop - start], tensor, start, stop)
        assert torch.equal(into[1 : 1 + stop - start], flat[start:stop])
        assert into[0] == -7.0
        assert (into[1 + stop - start :] == -7.0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"staging_budget_bytes": BUDGET - 1},
        {"staging_budget_bytes": 0},
        {"staging_budget_bytes": BUDGET, "save_format": "torch"},
        {"staging_budget_bytes": BUDGET, "sharding": "consolidated"},
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(options):
    """At once, and not at the first save that would need more."""
    with pytest.raises(UsageError, match="staging_budget_bytes"):
        WriterOptions(**options)
