"""Copies into a folder of the caller's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.checkpoint import Checkpoint, open_checkpoint
from milepost.errors import DamagedError, ExistsError, MissingError, StorageError
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Fault, FaultStore


def contents(folder) -> dict[str, bytes]:
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("given", [True, False], ids=["named", "private"])
def test_a_copy_holds_every_byte_and_opens(far, make_remote, files, tmp_path, where, given):
    """From a disk or from afar, into a folder that is named or a new one."""
    store = LocalStore(far) if where == "local" else make_remote()
    checkpoint = Checkpoint(store, "ep1")
    checkpoint.set_metadata({"note": "mine"})
    target = checkpoint.to_directory(tmp_path / "copy" if given else None)
    found = contents(target)
    assert {path: found[path] for path in files} == files
    assert found["manifest.json"] == (far / "ep1" / "manifest.json").read_bytes()
    copy = open_checkpoint(target)
    assert copy.verify().is_good
    assert copy.get_metadata() == {"note": "mine"}
    if not given:
        assert Path(target).stat().st_mode & 0o077 == 0


def test_a_copy_never_mixes_with_what_is_there(far, tmp_path):
    """Files of another checkpoint would look like those of this one."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").write_text("x")
    with pytest.raises(ExistsError):
        Checkpoint(LocalStore(far), "ep1").to_directory(tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"mine": b"x"}


@pytest.mark.parametrize("path", ["a.bin", "big.bin", "sub/c.txt"])
def test_a_damaged_byte_leaves_no_copy(far, tmp_path, path):
    """The error names the file; nobody takes half a copy for a whole one."""
    file = far / "ep1" / path
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=path):
        Checkpoint(LocalStore(far), "ep1").to_directory(tmp_path / "copy")
    assert contents(tmp_path / "copy") == {}


def test_a_file_of_another_size_or_none_leaves_no_copy(far, tmp_path):
    """Neither is copied as far as it goes."""
    (far / "ep1" / "big.bin").write_bytes(b"short")
    with pytest.raises(DamagedError, match=r"big\.bin"):
        Checkpoint(LocalStore(far), "ep1").to_directory(tmp_path / "copy")
    (far / "ep1" / "big.bin").unlink()
    with pytest.raises(MissingError, match=r"big\.bin"):
        Checkpoint(LocalStore(far), "ep1").to_directory(tmp_path / "copy")
    assert contents(tmp_path / "copy") == {}


def test_a_failed_copy_leaves_no_private_folder(far, make_remote, tmp_path, monkeypatch):
    """Whoever tries again and again must not fill the disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def fail(key):
        raise StorageError("The line is down.")

    with pytest.raises(StorageError, match="line is down"):
        Checkpoint(make_remote(before_read=fail), "ep1").to_directory()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_commit_comes_last_and_every_failure_leaves_none(in_memory):
    """An error at each operation of the source: there is no copy that opens."""
    store = in_memory
    counting = FaultStore(store)
    Checkpoint(counting, "ep1").to_directory()
    for at in range(1, len(counting.operations) + 1):
        failing = FaultStore(store, [Fault(at, error=StorageError("down"))])
        with pytest.raises(StorageError, match="down"):
            Checkpoint(failing, "ep1").to_directory()


@pytest.fixture
def in_memory(far, tmp_path, monkeypatch):
    """The same run in memory, and a folder for private copies that must end empty."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    local, memory = LocalStore(far), MemoryStore("run")
    for entry in local.list():
        memory.put_new(entry.key, local.get(entry.key))
    before = set(tmp_path.iterdir())
    yield memory
    left = set(tmp_path.iterdir()) - before
    assert len(left) == 1  # of the run without a fault


def test_a_folder_of_the_users_own_is_copied_as_it_is(tmp_path):
    """It has no commit, and needs none."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("a")
    checkpoint = Checkpoint.from_directory(tmp_path / "mine")
    with checkpoint.as_directory() as folder:
        assert folder == str(tmp_path / "mine")
    assert contents(checkpoint.to_directory(tmp_path / "copy")) == {"a.txt": b"a"}


def test_what_is_not_committed_is_no_checkpoint(far, make_remote):
    """Neither from a disk nor from afar."""
    (far / "ep1" / "manifest.json").unlink()
    for store in (LocalStore(far), make_remote()):
        with pytest.raises(MissingError):
            Checkpoint(store, "ep1").to_directory()
        with pytest.raises(MissingError), Checkpoint(store, "ep1").as_directory():
            pass
