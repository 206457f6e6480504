"""Copies of checkpoints in an object store: they save downloads, and decide nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.copies.cached import CachedStore
from milepost.copies.kept import KeptCopies
from milepost.errors import NoSpaceError
from milepost.stores import MemoryStore
from milepost.stores import blocks as local_blocks
from milepost.stores.base import LendingReader, StreamingReader
from milepost.stores.ranges import StreamReader
from milepost.testing import Crash, Fault, FaultStore, StoreConformance

BLOCK = 8 * 1024 * 1024
WEIGHTS = 3 * BLOCK // 4 + 1000  # a part of several blocks, the last one odd


class Far:
    """A store far away that counts the bytes of the files that are read."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.url, self.traits = store.url, store.traits
        self.read_bytes = 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def open_reader(self, key: str):
        reader, far = self._store.open_reader(key), self

        class Counted:
            size_bytes = reader.size_bytes

            def read_into(self, offset: int, buffer: memoryview) -> None:
                reader.read_into(offset, buffer)
                far.read_bytes += len(buffer)

            def close(self) -> None:
                reader.close()

        return Counted()


class TestCachedStore(StoreConformance):
    """Whoever is given one need not know."""

    @pytest.fixture(autouse=True)
    def _take_folder(self, tmp_path: Path) -> Iterator[None]:
        self.copies = KeptCopies(tmp_path)
        yield
        self.copies.close()

    def make_store(self) -> CachedStore:
        return CachedStore(MemoryStore(), self.copies)


def box(value: float, columns: int = WEIGHTS // 1000) -> torch.nn.Module:
    model = torch.nn.Linear(columns, 1000, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def life(
    store, cache: Path | None, *names: str, value: float = 1.0, **size: int
) -> tuple[str | None, float]:
    """Open the run, save some checkpoints, and return what it went on from."""
    model = box(value, **size)
    with mp.Checkpointer(store, local_cache=cache, model=model, handle_signals=False) as run:
        found = run.resumed_from, float(model.weight.detach()[0, 0])
        for number, name in enumerate(names, start=1):
            torch.nn.init.constant_(model.weight, value + number)
            run.save(name, wait=True)
    return found


def kept(cache: Path) -> list[Path]:
    """Return the copies, oldest first."""
    (root,) = cache.iterdir()
    return sorted(one for run in root.iterdir() if run.is_dir() for one in run.iterdir())


def test_a_resume_reads_the_tensors_from_the_disk(tmp_path: Path) -> None:
    """The records of the run are asked for; of the parts no more than the headers."""
    store = Far(MemoryStore())
    life(store, tmp_path, "a", "b")
    store.read_bytes = 0
    assert life(store, tmp_path) == ("b", 3.0)
    assert store.read_bytes < BLOCK // 100
    assert life(store, None) == ("b", 3.0)
    assert store.read_bytes > WEIGHTS


def test_the_newest_two_are_kept_and_never_more_beside_the_one_being_written(
    tmp_path: Path,
) -> None:
    """Or the disk fills up; a session that goes on makes room before its first save too."""
    seen = []

    def look(_number: int, operation: str) -> None:
        if operation.startswith("close") and "model" in operation:
            seen.append(len(kept(tmp_path)))

    store = FaultStore(MemoryStore(), before=look)
    life(store, tmp_path, "a", "b", "c")
    life(store, tmp_path, "d")
    assert max(seen) == 2  # one is kept, one is being written: a folder each
    names = [one.name[:17] for one in kept(tmp_path)]
    assert names == ["00000001-00000003", "00000002-00000001"]


@pytest.mark.parametrize("where", [100, BLOCK + 5, -1])
def test_a_damaged_block_of_a_copy_comes_from_the_store(
    tmp_path: Path, where: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And so does all after it; the copy is not tried again."""
    store = Far(MemoryStore())
    life(store, tmp_path, "a")
    (part,) = kept(tmp_path)[-1].glob("model.safetensors")
    data = bytearray(part.read_bytes())
    data[where] ^= 1
    part.write_bytes(data)
    store.read_bytes = 0
    with caplog.at_level(logging.WARNING, logger="milepost"):
        assert life(store, tmp_path) == ("a", 2.0)
    assert store.read_bytes > 1000
    assert caplog.text.count("is damaged and is not used") == 1
    assert not part.exists()


@pytest.mark.parametrize("how", ["cut", "empty", "gone", "folder", "link"])
def test_what_is_no_whole_file_is_no_copy(tmp_path: Path, how: str) -> None:
    """A power cut or a person may leave anything."""
    store = MemoryStore()
    life(store, tmp_path, "a")
    (part,) = kept(tmp_path)[-1].glob("model.safetensors")
    data = part.read_bytes()
    part.unlink()
    if how in ("cut", "empty"):
        part.write_bytes(data[: 0 if how == "empty" else -1])
    elif how == "folder":
        part.mkdir()
    elif how == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        part.symlink_to(tmp_path / "elsewhere")
    assert life(store, tmp_path) == ("a", 2.0)


def test_the_copy_of_another_attempt_of_that_name_is_not_used(tmp_path: Path) -> None:
    """Another machine went on from an older checkpoint and used the name again."""
    store = MemoryStore()
    life(store, tmp_path / "here", "a", "b")
    mp.runs.delete_checkpoint(store, "b")
    assert life(store, tmp_path / "there", "b", value=7.0) == ("a", 2.0)
    assert life(store, tmp_path / "here") == ("b", 8.0)


def test_what_was_not_committed_is_never_gone_on_from(tmp_path: Path) -> None:
    """At every stop in a save a resume with copies finds what one without finds, bit for bit."""
    program, small = FaultStore(MemoryStore()), {"columns": 1}
    life(program, None, "a", "b", **small)
    total = len(program.operations)
    for at in range(1, total + 1):
        below, cache = MemoryStore(), tmp_path / str(at)
        with suppress(Crash):
            life(FaultStore(below, [Fault(at)]), cache, "a", "b", **small)
        twin = MemoryStore()
        twin._data = dict(below._data)
        assert life(below, cache, **small) == life(twin, None, **small), program.operations[at - 1]


def test_a_full_disk_costs_the_copy_and_not_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, until copies can be kept again."""
    store = MemoryStore()
    with caplog.at_level(logging.WARNING, logger="milepost"):
        with monkeypatch.context() as full:
            full.setattr(local_blocks.LocalWriter, "_reserve", _no_space)
            life(store, tmp_path, "a", "b")
        assert caplog.text.count("not all of them are kept") == 1
        assert kept(tmp_path) == []
        with monkeypatch.context() as full:
            full.setattr(local_blocks.LocalWriter, "_write", _no_space)
            life(store, tmp_path, "c")
    assert caplog.text.count("not all of them are kept") == 2
    assert life(store, tmp_path, "d") == ("c", 2.0)
    assert len(kept(tmp_path)) == 1
    assert life(store, tmp_path) == ("d", 2.0)


def _no_space(*_: object) -> None:
    raise NoSpaceError("The disk is full.")


def test_what_a_killed_process_was_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    """And what a living one is writing stays."""
    script = (
        "import os, sys\n"
        "from milepost.copies.kept import KeptCopies\n"
        "copies = KeptCopies(sys.argv[1])\n"
        "copies.create_writer('a/model', 4096)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        (root,) = tmp_path.iterdir()
        (part,) = root.iterdir()
        KeptCopies(tmp_path)
        assert part.exists()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    KeptCopies(tmp_path)
    assert not part.exists()


def test_a_run_without_a_save_for_a_week_is_left_behind(tmp_path: Path) -> None:
    """Every new run would leave its last copies for ever; a person's files stay."""
    life(MemoryStore("one"), tmp_path, "a")
    (root,) = tmp_path.iterdir()
    (root / "mine").write_text("1")
    (old,) = (one for one in root.iterdir() if one.is_dir())
    day_s = 24 * 3600
    os.utime(old, times=(old.stat().st_atime, old.stat().st_mtime - 6 * day_s))
    KeptCopies(tmp_path)
    assert old.exists()
    os.utime(old, times=(old.stat().st_atime, old.stat().st_mtime - 2 * day_s))
    KeptCopies(tmp_path)
    assert [one.name for one in root.iterdir()] == ["mine"]


def test_diagnostic_checkpoints_are_not_kept(tmp_path: Path) -> None:
    """They would take the place of one to go on from."""
    store = MemoryStore()
    with mp.Checkpointer(store, local_cache=tmp_path, model=box(1.0)) as run:
        run.save("a", wait=True)
        for number in range(3):
            run.save_diagnostic("nan", f"ba{number}", extra={})
    assert len(kept(tmp_path)) == 1
    assert life(store, tmp_path) == ("a", 1.0)


def test_what_a_store_can_do_besides_is_not_lost(tmp_path: Path) -> None:
    """Where there is no copy, reading and writing are as quick as without."""
    store = CachedStore(MemoryStore(), KeptCopies(tmp_path))
    data = bytes(range(256)) * 100
    writer = store.create_writer("a/b", len(data))
    writer.write_at(0, memoryview(data))
    writer.close()
    reader = store.open_reader("a/b")
    assert isinstance(reader, LendingReader)
    assert bytes(reader.lend(512, 300)) == data[512:812]
    assert (store.local_bytes, store.remote_bytes) == (0, 300)
    store.close()


def test_what_a_store_streams_is_streamed_and_counted(tmp_path: Path) -> None:
    """Or a long range would be held whole; what nobody took is not counted."""

    class Streams:
        def __init__(self) -> None:
            self._store = MemoryStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def open_reader(self, key: str) -> Any:
            return StreamReader(self, key, self.head(key).size_bytes)

        def read_range(self, key: str, start: int, length: int) -> memoryview:
            return memoryview(self.get(key))[start : start + length]

        def stream_range(self, key: str, start: int, length: int) -> Iterator[memoryview]:
            for at in range(start, start + length, 100):
                yield self.read_range(key, at, min(100, start + length - at))

    below: Any = Streams()
    store = CachedStore(below, KeptCopies(tmp_path))
    data = bytes(range(256)) * 100
    store.put("a/b", data)
    reader = store.open_reader("a/b")
    assert isinstance(reader, StreamingReader)
    assert b"".join(reader.stream(512, 350)) == data[512:862]
    assert (store.local_bytes, store.remote_bytes) == (0, 350)
    pieces = reader.stream(0, 1000)
    assert bytes(next(pieces)) == data[:100]
    pieces.close()
    assert store.remote_bytes == 450
    store.close()


def test_restore_in_a_loop_reads_copies(tmp_path: Path) -> None:
    """Rolling back is the other time when a checkpoint is read."""
    store = Far(MemoryStore())
    model = box(1.0)
    with mp.Checkpointer(store, local_cache=tmp_path, model=model) as run:
        run.save("a", wait=True)
        torch.nn.init.constant_(model.weight, 5.0)
        store.read_bytes = 0
        run.restore()
        assert float(model.weight.detach().min()) == float(model.weight.detach().max()) == 1.0
        assert store.read_bytes == 0


def test_frozen_weights_that_are_shared_far_away_are_shared_here(tmp_path: Path) -> None:
    """Or a copy would lack what did not change."""
    store = Far(MemoryStore())
    model = box(3.0).requires_grad_(False)
    with mp.Checkpointer(store, local_cache=tmp_path, model=model) as run:
        run.save("a", wait=True)
        run.save("b", wait=True)
    assert any(entry.linked_from for entry in mp.open_run(store).get("b").manifest.files)
    store.read_bytes = 0
    other = box(0.0).requires_grad_(False)
    with mp.Checkpointer(store, local_cache=tmp_path, model=other) as run:
        assert run.resumed_from == "b"
    assert other.weight.equal(model.weight)
    assert store.read_bytes < BLOCK // 100


def test_it_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    """For a run on a disk, and for folders that others could change."""
    with pytest.raises(mp.UsageError, match="is on a disk"):
        mp.Checkpointer(tmp_path / "run", local_cache=tmp_path, model=box(1.0))
    assert not (tmp_path / "run").exists()
    open_to_all = tmp_path / f"milepost-cache-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(mp.UsageError, match="not this user's alone"):
        mp.Checkpointer(MemoryStore(), local_cache=tmp_path, model=box(1.0))
