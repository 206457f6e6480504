"""Which unfinished files of a stopped writer are removed, and that nothing else is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milepost.errors import AccessError
from milepost.stores import LocalStore, MemoryStore, posix
from milepost.stores.prefix import PrefixStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


OURS = ".tmp-12-0123456789abcdef"


def age(path: Path, by_s: float = 7_200) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1")
    os.utime(path, (path.stat().st_mtime - by_s,) * 2)
    return path


def test_the_name_of_a_temporary_file_is_known_as_one():
    """Or nothing would ever be swept."""
    assert all(posix.is_temporary(posix.temporary_name()) for _ in range(20))


def test_sweeping_removes_what_is_old_and_temporary(store):
    """Young temporary files may be another writer's, and everything else is nobody's business."""
    store.put_new("ep1/attempt.json", b"1")
    folder = Path(store.local_path("ep1"))
    young = age(folder.parent / OURS, 0)
    age(folder / OURS)
    hidden = age(folder / ".hidden")
    os.utime(folder / "attempt.json", (0, 0))
    assert store.sweep_temporary(3_600) == [f"ep1/{OURS}"]
    assert young.exists()
    assert hidden.exists()
    assert store.get("ep1/attempt.json") == b"1"
    assert store.sweep_temporary(0) == [OURS]


@pytest.mark.parametrize("record", ["attempt.json", "manifest.json", "deleted.json"])
@pytest.mark.parametrize("folder", ["ep1", "nan/ba3", "failed/ep2"])
def test_sweeping_looks_where_records_are_written(store, folder, record):
    """In every folder of a checkpoint, in every state, and beside the sessions and pins."""
    store.put_new(f"{folder}/{record}", b"1")
    store.put_new("sessions/00000001.json", b"1")
    root = Path(store.local_path("x")).parent
    for where in (folder, "sessions", "pins"):
        age(root / where / OURS)
    assert sorted(store.sweep_temporary(3_600)) == sorted(
        f"{where}/{OURS}" for where in (folder, "sessions", "pins")
    )
    assert {path.name for path in root.iterdir()} == {folder.partition("/")[0], "sessions"}


def test_sweeping_leaves_the_files_and_folders_of_others(store):
    """People keep their own things in the folder of a run, under any name."""
    store.put_new("ep1/attempt.json", b"1")
    root = Path(store.local_path("x")).parent
    (root / "mine" / "empty").mkdir(parents=True)
    theirs = [
        age(root / "mine" / "data.bin"),
        age(root / "mine" / OURS),
        age(root / "mine" / ".tmp-important"),
        age(root / "deep" / "er" / OURS),
        age(root / "ep1" / "sub" / OURS),
        age(root / "nan" / OURS),
        *(
            age(root / "ep1" / name)
            for name in (".tmp-important", f"{OURS}0", OURS[:-1], f"x{OURS}", OURS.upper())
        ),
    ]
    (root / "ep1" / OURS).mkdir()
    assert store.sweep_temporary(0) == []
    assert all(path.exists() for path in theirs)
    assert (root / "mine" / "empty").exists()
    assert (root / "ep1" / OURS).exists()


def test_sweeping_does_not_follow_links(store, tmp_path):
    """What a link leads to is somewhere else, and someone else's."""
    store.put_new("run.json", b"1")
    root, outside = Path(store.local_path("x")).parent, tmp_path / "outside"
    age(outside / OURS)
    (root / "sessions").symlink_to(outside)
    (root / "ep1").symlink_to(outside)
    assert store.sweep_temporary(0) == []
    assert (outside / OURS).exists()


def test_sweeping_below_a_prefix_stays_there(store):
    """A run that is kept in a folder of the store is not the whole store."""
    store.put_new("a/ep1/attempt.json", b"1")
    root = Path(store.local_path("x")).parent
    other = age(root / OURS)
    age(root / "a" / OURS)
    age(root / "a" / "ep1" / OURS)
    below = PrefixStore(store, "a")
    assert sorted(below.sweep_temporary(0)) == [OURS, f"ep1/{OURS}"]
    assert other.exists()
    assert PrefixStore(MemoryStore(), "a").sweep_temporary(0) == []


def test_sweeping_removes_the_folder_that_a_temporary_file_kept(store):
    """The checkpoint in it was deleted, but not what its writer had left."""
    store.put_new("ep1/a", b"1")
    folder = Path(store.local_path("ep1"))
    (folder / OURS).write_bytes(b"1")
    store.delete("ep1/a")
    assert folder.exists()
    store.sweep_temporary(0)
    assert not folder.exists()


def test_a_folder_that_must_not_be_read_hinders_nobody(store, monkeypatch):
    """The place of a run is often the root of a disk, with a folder of the system's in it."""
    store.put_new("ep1/attempt.json", b"1")
    store.put_new("lost+found/x", b"1")
    age(Path(store.local_path("ep1")) / OURS)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr("milepost.stores.folders.os.scandir", scandir)
    assert store.folders() == ["ep1", "lost+found"]
    assert store.sweep_temporary(0) == [f"ep1/{OURS}"]
    with pytest.raises(AccessError):
        list(store.list("lost+found"))
