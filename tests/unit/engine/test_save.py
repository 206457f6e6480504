"""The save: one arena, one plan, one copy, checksums of what is on disk, errors that surface."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import crc32c
import numpy as np
import pytest
import torch

from milepost.checkpoint import Checkpoint
from milepost.engine import commits
from milepost.errors import DeadlineError, FencedError, StorageError
from milepost.runs import ensure_run, open_session, record_origin, scan
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Fault, FaultStore

BLOCK = 8 * 1024 * 1024


def test_the_tenth_save_allocates_nothing(new_lab, tmp_path):
    """First touch of fresh memory costs several times the copy; the plan is made once."""
    lab = new_lab(LocalStore(tmp_path))
    state = {"w": torch.randn(300, 1000), "b": torch.randn(7), "n": 0}
    lab.save("a0", {"model": state})
    arena, plan = lab.saver._stager.arena, lab.saver._plan
    before = (arena.generation, arena.capacity_bytes, arena.tensor(0, 1).data_ptr())
    for number in range(1, 10):
        state["n"] = number
        state["w"].add_(1)
        lab.save(f"a{number}", {"model": state})
        assert lab.saver._plan is plan
    assert (arena.generation, arena.capacity_bytes, arena.tensor(0, 1).data_ptr()) == before


def test_what_is_written_is_the_arena_itself(new_lab, monkeypatch):
    """A second copy of the state would double the memory and halve the speed."""
    seen = []
    original = commits.write_files

    def write_files(store, jobs, **options):
        seen.extend(block for job in jobs if job.path.endswith("s") for block in job.blocks)
        return original(store, jobs, **options)

    monkeypatch.setattr(commits, "write_files", write_files)
    lab = new_lab()
    lab.save("a", {"model": {"w": torch.randn(3_000_000), "b": torch.randn(7)}})
    arena = lab.saver._stager.arena
    start = arena.tensor(0, 1).data_ptr()
    assert len(seen) == 2
    for block in seen:
        address = np.frombuffer(block, np.uint8).ctypes.data
        assert address % 4096 == 0
        assert start <= address
        assert address + len(block) <= start + arena.capacity_bytes


def test_a_bigger_state_gets_a_bigger_arena_and_a_smaller_one_keeps_it(new_lab):
    """And what was saved before the growth is not touched by it."""
    lab = new_lab()
    small = lab.save("small", {"model": {"w": torch.arange(10.0)}})
    big = lab.save("big", {"model": {"w": torch.arange(2_000_000.0)}})
    generation = lab.saver._stager.arena.generation
    again = lab.save("again", {"model": {"w": torch.arange(10.0)}})
    assert lab.saver._stager.arena.generation == generation
    for one, count in ((small, 10), (big, 2_000_000), (again, 10)):
        found = one.load()["state"]["model"]["w"]
        assert torch.equal(found, torch.arange(float(count)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fnuz), torch.float8_e5m2fnuz),
        (torch.tensor([1.5, -2.0], dtype=torch.complex128), torch.uint8),
    ],
    ids=["fp8 kinds", "complex and bytes"],
)
def test_a_plan_is_not_used_again_for_another_dtype(new_lab, first, second):
    """Dtypes without a code of their own look alike in the container: as bytes."""
    other = first.to(second) if second is not torch.uint8 else first.view(torch.uint8)
    other = other.reshape(*first.shape, -1) if second is torch.uint8 else other
    lab = new_lab()
    lab.save("a", {"x": {"v": first}})
    found = lab.save("b", {"x": {"v": other}}).load()["state"]["x"]["v"]
    assert found.dtype is other.dtype
    assert torch.equal(found.view(torch.uint8), other.view(torch.uint8))


def test_data_begins_on_a_page_and_every_tensor_on_its_own_size(new_lab, tmp_path):
    """Direct I/O and plain readers both need it; nothing lies between header and end."""
    state = {
        "bytes": torch.ones(3, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.float16),
        "double": torch.ones(3, dtype=torch.float64),
        "complex": torch.ones(3, dtype=torch.complex128),
        "float": torch.ones(5),
        "empty": torch.ones(0, 3),
    }
    lab = new_lab(LocalStore(tmp_path))
    lab.save("a", {"model": state})
    data = (tmp_path / "a/model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    header.pop("__metadata__")
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    assert 8 + length + spans[-1][1] == len(data)
    for name, value in state.items():
        assert header[name]["data_offsets"][0] % value.itemsize == 0


def test_checksums_are_those_of_the_files_on_disk(new_lab, tmp_path):
    """Block by block, the last and shorter one too, for parts and for the JSON beside them."""
    lab = new_lab(LocalStore(tmp_path))
    saved = lab.save(
        "a", {"model": {"w": torch.randn(5_000_001), "i": torch.arange(9)}, "other": [1, 2]}
    )
    files = {entry.path: entry for entry in saved.manifest.files}
    assert set(files) == {"index.json", "model.safetensors"}
    assert len(files["model.safetensors"].crcs) == 3
    for path, entry in files.items():
        data = (tmp_path / "a" / path).read_bytes()
        assert entry.size_bytes == len(data)
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        assert list(entry.crcs) == [crc32c.crc32c(block) for block in blocks]
        assert entry.crc == crc32c.crc32c(data)


def test_memory_file_systems_work(new_lab):
    """Not every file system takes direct I/O."""
    import tempfile

    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no memory file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        saved = new_lab(LocalStore(folder)).save("a", {"model": {"w": torch.arange(3_000_000)}})
        assert saved.verify().is_good
        found = saved.load()["state"]["model"]["w"]
    assert torch.equal(found, torch.arange(3_000_000))


def test_a_save_waits_for_the_one_before(new_lab):
    """There is one arena: staging into it while it is written would mix two states."""
    go = threading.Event()

    class Held(MemoryStoreView):
        def create_writer(self, key, size_bytes):
            assert go.wait(30)
            return self._store.create_writer(key, size_bytes)

    lab = new_lab(Held(MemoryStore()))
    value = torch.zeros(1000)
    first = lab.begin("a", {"x": {"v": value}})
    with pytest.raises(DeadlineError, match="a was not committed"):
        first.wait(0.05)
    assert lab.saver.in_flight is first
    value.fill_(1)
    second = []
    thread = threading.Thread(target=lambda: second.append(lab.begin("b", {"x": {"v": value}})))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    go.set()
    thread.join(30)
    second[0].wait(30)
    assert first.done()
    from milepost.checkpoint import Checkpoint

    values = [Checkpoint(lab.store, name).load()["state"]["x"]["v"] for name in "ab"]
    assert [value.unique().tolist() for value in values] == [[0.0], [1.0]]


class MemoryStoreView:
    """Passes everything on to another store."""

    def __init__(self, store):
        self._store = store
        self.url, self.traits = store.url, store.traits

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_an_error_at_any_write_leaves_no_checkpoint_and_no_rest(new_lab):
    """Whichever call fails: the handle says so, and the next save works."""
    items = {"model": {"w": torch.randn(10), "b": torch.ones(3)}, "rest": {"c": torch.ones(2)}}
    plain = FaultStore(MemoryStore())
    lab = new_lab(plain)
    begun = len(plain.operations)
    lab.save("a", items)
    count = len(plain.operations) - begun
    assert count > 8
    for at in range(1, count + 1):
        below = MemoryStore()
        store = FaultStore(below)
        lab = new_lab(store)
        store._faults[len(store.operations) + at] = Fault(0, error=StorageError("boom"))
        pending = lab.begin("a", items)
        error = pending.exception(30)
        names = [found.name for found in scan(below).lineage()]
        if error is None:  # the answer of a listing after the commit is not needed
            assert names == ["a"]
            continue
        assert "boom" in str(error)
        if not names:
            kinds = [found.state.value for found in scan(below).found]
            assert kinds in ([], ["incomplete"])
        saved = lab.save("b", items)
        assert saved.verify().is_good


def test_a_fenced_session_saves_nothing_more(new_lab):
    """Two writers must not both believe that they own the run."""
    store = MemoryStore()
    lab = new_lab(store)
    lab.save("a", {"x": 1})
    other = open_session(store, ensure_run(store))
    with pytest.raises(FencedError):
        lab.save("b", {"x": 1})
    record_origin(store, other, None)
    with pytest.raises(FencedError):
        lab.begin("c", {"x": 1})


def test_stats_tell_where_the_time_and_the_bytes_went(new_lab):
    """What a save costs is a promise of this library; each one carries its own bill."""
    lab = new_lab()
    pending = lab.begin("a", {"model": {"w": torch.randn(1000)}})
    manifest = pending.wait(30)
    stats = pending.stats
    assert stats["state_bytes"] == 4096 + 4000
    assert stats["written_bytes"] == sum(entry.size_bytes for entry in manifest.files)
    parts = ("capture_s", "wait_s", "plan_s", "mark_s", "stage_s")
    assert stats["blocking_s"] == pytest.approx(sum(stats[name] for name in parts))
    assert stats["durable_s"] >= stats["blocking_s"] + stats["write_s"] + stats["commit_s"]
    assert {"sync_s", "after_s"} <= set(stats)
    stored = Checkpoint(lab.store, "a").manifest.stats
    assert stored == {
        n: v for n, v in stats.items() if n not in ("commit_s", "durable_s", "after_s")
    }
    assert manifest.stats == {n: v for n, v in stats.items() if n != "after_s"}
    assert "committed" in repr(pending)


def test_stats_tell_apart_what_was_copied_written_and_shared(new_lab, tmp_path):
    """Frozen weights cost a comparison and a link; whoever pays by the byte wants to see it."""
    lab = new_lab(LocalStore(tmp_path))
    frozen = {"model": {"w"}}
    state = {"model": {"w": torch.randn(5000), "b": torch.randn(7)}}
    lab.begin("a", state, frozen=frozen).wait(30)
    pending = lab.begin("b", state, frozen=frozen)
    manifest = pending.wait(30)
    shared = 4096 + 4 * 5000
    assert pending.stats["unchanged_bytes"] == pending.stats["linked_bytes"] == shared
    assert pending.stats["written_bytes"] == manifest.size_bytes - shared


def test_nothing_to_store_but_a_tree_is_a_checkpoint_too(new_lab):
    """A state without any tensor has no parts."""
    saved = new_lab().save("a", {"x": {"n": 1}, "y": None, "z": {"e": torch.empty(0)}})
    assert saved.load()["state"]["x"] == {"n": 1}
    assert saved.load()["state"]["y"] is None
    assert saved.load()["state"]["z"]["e"].shape == (0,)
    assert saved.verify().is_good
