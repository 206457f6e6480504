"""Rounds of uploads: what a reader of the copy sees at any moment, and what counts as a change."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.stores import MemoryStore
from milepost.testing import Crash, Fault, FaultStore, read_key
from milepost.uploads.changes import Changes
from milepost.uploads.destination import Destination
from milepost.uploads.lanes import Lanes
from milepost.uploads.mirror import SMALL_BYTES, Mirror


@pytest.fixture
def lanes_of() -> Iterator[Callable[[object], Lanes]]:
    made = []

    def make(store) -> Lanes:
        made.append(Lanes(Destination(store), num_lanes=1, use_procs=False))
        return made[-1]

    yield make
    for one in made:
        one.close()


def mirror(root: Path, store, prefix: str = "") -> Mirror:
    return Mirror(
        str(root),
        Destination(store),
        prefix=prefix,
        changes=Changes(None, small_bytes=SMALL_BYTES),
        is_wanted=lambda _: True,
    )


def save(folder: Path, names: list[str], *, value: float, keep=()) -> None:
    model = torch.nn.Linear(700, 700)
    torch.nn.init.constant_(model.weight, value)
    with mp.Checkpointer(folder, keep=keep, model=model) as run:
        for name in names:
            run.save(name, wait=True)


def files_of(root: Path) -> dict[str, bytes]:
    """What a copy has to hold: every file under its own name, and no link twice."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def held(store) -> dict[str, bytes]:
    return {entry.key: read_key(store, entry.key) for entry in store.list()}


def check_whole(store, folder: str = "") -> list[str]:
    """Every checkpoint that the copy shows must be whole."""
    try:
        run = mp.open_run(store)
    except mp.MissingError:
        return []
    names = []
    for one in run.checkpoints():
        assert one.verify().is_good
        names.append(one.name)
    return names


@pytest.fixture
def two_lives(tmp_path: Path) -> tuple[Path, MemoryStore]:
    """A run whose copy is older than it: one checkpoint is new, one replaced, one gone."""
    run = tmp_path / "run"
    save(run, ["a", "b"], value=1)
    store = MemoryStore()
    lanes = Lanes(Destination(store), num_lanes=1, use_procs=False)
    assert mirror(run, store).run(lanes) == []
    lanes.close()
    shutil.rmtree(run / "a")
    shutil.rmtree(run / "b")
    save(run, ["b", "c"], value=2)
    (run / "notes.txt").write_text("kept")
    return run, store


def test_a_stop_anywhere_leaves_whole_checkpoints_and_the_next_life_finishes(
    two_lives: tuple[Path, MemoryStore], lanes_of
) -> None:
    """Also where a checkpoint takes the name of one that was deleted."""
    run, before = two_lives

    def fresh() -> MemoryStore:
        store = MemoryStore()
        for key, data in held(before).items():
            store.put(key, data)
        return store

    dry = FaultStore(fresh())
    assert mirror(run, dry).run(lanes_of(dry)) == []
    assert len(dry.operations) > 20
    for number in range(1, len(dry.operations) + 1):
        below = fresh()
        faulty = FaultStore(below, [Fault(number)])
        with pytest.raises(Crash):
            mirror(run, faulty).run(lanes_of(faulty))
        check_whole(below)
        assert mirror(run, below).run(lanes_of(below)) == []
        assert check_whole(below) == ["b", "c"]  # the first life's are off the lineage
        got, wanted = held(below), files_of(run)
        assert {key: got[key] for key in wanted} == wanted
        assert got["latest"] == b"c\n"
        assert {key for key in got if key not in wanted} == {"latest"} | {
            key for key in held(before) if key.startswith(("a/", "sessions/")) and key not in wanted
        }


def test_a_second_life_sends_only_what_is_missing(
    two_lives: tuple[Path, MemoryStore], lanes_of
) -> None:
    """A checkpoint that is there is not sent again, nor a file of one that was begun."""
    run, _ = two_lives
    dry = FaultStore(MemoryStore())
    assert mirror(run, dry).run(lanes_of(dry)) == []
    large = [one for one in dry.operations if one.startswith("put ") and "safetensors" in one]
    last = dry.operations.index(large[-1]) + 1
    below = MemoryStore()
    faulty = FaultStore(below, [Fault(last, is_after=True)])
    with pytest.raises(Crash):
        mirror(run, faulty).run(lanes_of(faulty))
    again = FaultStore(below)
    assert mirror(run, again).run(lanes_of(again)) == []
    assert not [one for one in again.operations if "safetensors" in one]
    assert check_whole(below) == ["b", "c"]


def test_every_change_is_seen_and_nothing_else_is_sent(tmp_path: Path, lanes_of) -> None:
    """Writes within one tick, of one size, with an older time, or by another file in its place."""
    root = tmp_path / "run"
    root.mkdir()
    small, large = root / "log.txt", root / "sub" / "large.bin"
    large.parent.mkdir()
    small.write_bytes(b"one")
    large.write_bytes(b"1" * (SMALL_BYTES + 1))
    (root / "link").symlink_to("log.txt")
    store = FaultStore(MemoryStore())
    one, lanes = mirror(root, store, "p/"), lanes_of(store)

    def sent() -> list[str]:
        before = len(store.operations)
        assert one.run(lanes) == []
        keys = {
            key
            for key in ("log.txt", "sub/large.bin")
            for op in store.operations[before:]
            if key in op
        }
        return sorted(keys)

    assert sent() == ["log.txt", "sub/large.bin"]
    assert sent() == []
    seen = small.stat()
    with small.open("r+b") as file:
        file.write(b"two")
    os.utime(small, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert sent() == ["log.txt"]
    with small.open("r+b") as file:
        file.write(b"six")
    os.utime(small, ns=(0, 0))
    assert sent() == ["log.txt"]
    os.utime(small)
    assert sent() == []  # another time, but the same bytes
    with large.open("r+b") as file:
        file.seek(SMALL_BYTES // 2)
        file.write(b"2")
    assert sent() == ["sub/large.bin"]
    other = root / "other"
    other.write_bytes(b"ten")
    other.replace(small)
    assert sent() == ["log.txt"]
    wanted = {f"p/{key}": data for key, data in files_of(root).items()}
    assert held(store) == wanted


def test_a_mark_is_trusted_once_it_is_old(tmp_path: Path, lanes_of, monkeypatch) -> None:
    """A second write within one tick of a coarse clock leaves the mark as it is."""
    root = tmp_path / "run"
    root.mkdir()
    path = root / "log.txt"
    path.write_bytes(b"one")
    frozen = (1, 1, 3, 10**18, 10**18)
    monkeypatch.setattr("milepost.uploads.changes.mark_of", lambda _: frozen)
    monkeypatch.setattr("milepost.uploads.scan.mark_of", lambda _: frozen)
    now_s = [1e9 + 0.5]
    monkeypatch.setattr("milepost.uploads.changes.clock_s", lambda _: now_s[0])
    store = MemoryStore()
    one, lanes = mirror(root, store), lanes_of(store)
    assert one.run(lanes) == []
    path.write_bytes(b"two")
    assert one.run(lanes) == []
    assert held(store) == {"log.txt": b"two"}
    now_s[0] += 100
    assert one.run(lanes) == []
    reads = []
    monkeypatch.setattr(
        "milepost.uploads.changes._read", lambda *args: reads.append(args) or iter([b"two"])
    )
    assert one.run(lanes) == []
    assert reads == []


def test_retention_waits_for_a_checkpoint_on_its_way(tmp_path: Path, lanes_of) -> None:
    """It is whole in the copy, although it was to be deleted while it was sent."""
    run = tmp_path / "run"
    save(run, ["a"], value=1)
    below = MemoryStore()
    is_saved = []

    def before(number: int, operation: str) -> None:
        if "a/model.safetensors" in operation and not is_saved:
            is_saved.append(True)
            save(run, ["b"], value=2, keep=mp.KeepLast(1))

    store = FaultStore(below, before=before)
    one, lanes = mirror(run, store), lanes_of(store)
    assert one.run(lanes) == []
    assert is_saved
    assert check_whole(below) == ["a"]
    assert one.run(lanes) == []
    assert check_whole(below) == ["a", "b"]


def test_unchanged_files_are_copied_by_the_store(tmp_path: Path, lanes_of) -> None:
    """What is one file here, by hard links, goes over the network once."""
    run = tmp_path / "run"
    model = torch.nn.Linear(700, 700)
    model.requires_grad_(False)
    head = torch.nn.Linear(2, 2)
    with mp.Checkpointer(run, model=torch.nn.ModuleList([model, head])) as open_run:
        for name in ("a", "b"):
            open_run.save(name, wait=True)
    links = {path.stat().st_ino for path in run.glob("*/model-frozen*.safetensors")}
    assert len(links) == 1
    store = FaultStore(MemoryStore())
    assert mirror(run, store).run(lanes_of(store)) == []
    frozen = [op for op in store.operations if "frozen" in op]
    assert len([op for op in frozen if op.startswith("put ")]) == 1
    assert len([op for op in frozen if op.startswith("link")]) == 1
    assert check_whole(store) == ["a", "b"]
    shutil.rmtree(run / "a")
    shutil.rmtree(run / "b")
    save(run, ["c"], value=1)
    one = mirror(run, store)
    assert one.run(lanes_of(store)) == []
    shutil.rmtree(run / "c")
    assert one.run(lanes_of(store)) == []
    assert (one._whole, one._keys) == ({}, {})  # no more is remembered than there is


def test_single_files_have_their_visible_names_there_too(tmp_path: Path, lanes_of) -> None:
    """And are sent once."""
    run = tmp_path / "run"
    model = torch.nn.Linear(700, 700)
    with mp.Checkpointer(run, save_format="torch", model=model) as open_run:
        open_run.save("a", wait=True)
    store = FaultStore(MemoryStore())
    assert mirror(run, store).run(lanes_of(store)) == []
    assert read_key(store, "a.pt") == (run / "a.pt").read_bytes()
    large = [op for op in store.operations if op.startswith("put ") and op.endswith(".pt")]
    assert len(large) == 1
    assert mp.open_run(store).latest().name == "a"


def test_two_runs_are_not_mixed(tmp_path: Path, lanes_of) -> None:
    """The same prefix for another run is refused before anything is replaced."""
    for name in ("one", "two"):
        save(tmp_path / name, ["a"], value=1)
    store = MemoryStore()
    assert mirror(tmp_path / "one", store).run(lanes_of(store)) == []
    before = held(store)
    with pytest.raises(mp.ExistsError, match="Another run is at"):
        mirror(tmp_path / "two", store).run(lanes_of(store))
    assert held(store) == before


def test_h29_a_replaced_checkpoint_leaves_its_neighbours_alone(
    two_lives: tuple[Path, MemoryStore], lanes_of
) -> None:
    """Keys that only begin with its name belong to others."""
    run, store = two_lives
    others = dict.fromkeys(("b-best/x", "b.tmp/x", "b0/x", "bb/manifest.json"), b"1")
    for key, data in others.items():
        store.put(key, data)
    assert mirror(run, store).run(lanes_of(store)) == []
    assert others.items() <= held(store).items()
    assert read_key(store, "b/manifest.json") == (run / "b" / "manifest.json").read_bytes()


def test_h30_uploading_again_lands_in_the_same_place(tmp_path: Path, lanes_of) -> None:
    """With and without a slash at the end of the folder."""
    root = tmp_path / "ck"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "y.pt").write_bytes(b"y")
    store = MemoryStore()
    for data, slash in ((b"1", ""), (b"2", "/"), (b"3", "")):
        (root / "x.pt").write_bytes(data)
        one = mirror(Path(f"{root}{slash}"), store, "run/ck0/")
        assert one.run(lanes_of(store)) == []
        assert held(store) == {"run/ck0/x.pt": data, "run/ck0/sub/y.pt": b"y"}


def test_copies_lie_in_the_staging_folder_only_while_they_are_sent(
    tmp_path: Path, lanes_of
) -> None:
    """One for each upload on its way; none of a checkpoint's files, which do not change."""
    run, staging = tmp_path / "run", tmp_path / "staging"
    save(run, ["a"], value=1)
    for name in ("one.bin", "two.bin"):
        (run / name).write_bytes(name.encode() * SMALL_BYTES)
    seen: dict[str, int] = {}

    def before(number: int, operation: str) -> None:
        held_here = len([path for path in staging.rglob("*") if path.is_file()])
        seen[operation.rpartition(" ")[2]] = held_here

    store = FaultStore(MemoryStore(), before=before)
    changes = Changes(str(staging), small_bytes=SMALL_BYTES)
    one = Mirror(str(run), Destination(store), prefix="", changes=changes, is_wanted=lambda _: True)
    assert one.run(lanes_of(store)) == []
    assert seen["one.bin"] == seen["two.bin"] == 1
    assert seen["a/model.safetensors"] == 0
    changes.close()
    assert list(staging.iterdir()) == []
    wanted = files_of(run)
    assert {key: data for key, data in held(store).items() if key != "latest"} == wanted


def test_an_error_is_told_before_the_round_ends(tmp_path: Path, lanes_of) -> None:
    """A training is not to go on for hours while one checkpoint after the other fails."""
    run = tmp_path / "run"
    save(run, ["a", "b"], value=1)
    told: list[tuple[str, int]] = []

    def before(number: int, operation: str) -> None:
        if operation == "put b/manifest.json":
            raise mp.StorageError("no")

    store = FaultStore(MemoryStore(), before=before)
    errors = mirror(run, store).run(
        lanes_of(store), tell=lambda error: told.append((str(error), len(store.operations)))
    )
    assert [str(error) for error in errors] == ["no"]
    assert [text for text, _ in told] == ["no"]
    assert told[0][1] < len(store.operations)
    assert check_whole(store) == ["a"]


def test_what_cannot_be_uploaded_is_told_once(
    tmp_path: Path, lanes_of, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is no key, and a checkpoint that is damaged: the rest goes up."""
    run = tmp_path / "run"
    save(run, ["a", "b"], value=1)
    (run / "my notes.txt").write_text("x")
    (run / "a" / "manifest.json").write_bytes(b"{}")
    store = MemoryStore()
    one, lanes = mirror(run, store), lanes_of(store)
    with caplog.at_level(logging.WARNING):
        assert one.run(lanes) == []
        assert one.run(lanes) == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "my notes.txt is not uploaded" in told[1]
    assert "checkpoint is not uploaded" in told[0]
    assert check_whole(store) == ["b"]
    assert not [key for key in held(store) if key.startswith("a/")]


def test_what_failed_is_sent_in_the_next_round(tmp_path: Path, lanes_of) -> None:
    """Each operation fails once; the checkpoint is never half there."""
    run = tmp_path / "run"
    save(run, ["a"], value=1)
    dry = FaultStore(MemoryStore())
    assert mirror(run, dry).run(lanes_of(dry)) == []
    num_operations, wanted = len(dry.operations), held(dry)
    for number in range(1, num_operations + 1):
        below = MemoryStore()
        store = FaultStore(below, [Fault(number, error=mp.StorageError("no"))])
        one, lanes = mirror(run, store), lanes_of(store)
        try:
            errors = one.run(lanes)
        except mp.StorageError as error:
            errors = [error]
        assert [str(error) for error in errors] == ["no"]
        check_whole(below)
        assert one.run(lanes) == []
        assert held(below) == wanted
