"""What is special about files: names, links, temporary files, direct I/O, and their errors."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.errors import (
    AccessError,
    CheckpointError,
    ExistsError,
    MissingError,
    NoSpaceError,
    StorageError,
)
from milepost.stores import LocalStore, blocks, posix
from milepost.testing import read_key, write_key


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def refuse(code: int):
    def call(*_args, **_options):
        raise OSError(code, os.strerror(code))

    return call


def record_calls(monkeypatch, module, name: str) -> list:
    calls, real = [], getattr(module, name)

    def call(*args, **options):
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(module, name, call)
    return calls


def test_the_url_is_absolute(tmp_path, monkeypatch):
    """A run that was opened by a relative path is the same after a change of directory."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore("runs/a")
    assert store.url == f"file://{tmp_path}/runs/a"
    store.put_new("x", b"1")
    monkeypatch.chdir("/")
    assert store.get("x") == b"1"


def test_a_new_record_is_synced_before_and_after_it_has_its_name(store, monkeypatch):
    """File, name, folder, and the folders above that are new: in this order."""
    order: list[str] = []
    real_fsync, real_link, real_folder = os.fsync, os.link, posix.sync_folder
    monkeypatch.setattr(posix.os, "fsync", lambda fd: (order.append("fsync"), real_fsync(fd)))
    monkeypatch.setattr(
        posix.os, "link", lambda *a, **k: (order.append("link"), real_link(*a, **k))
    )

    def sync_folder(path: str) -> None:
        order.append(f"folder {Path(path).name}")
        real_folder(path)

    monkeypatch.setattr(posix, "sync_folder", sync_folder)
    store.put_new("ep1/manifest.json", b"1")
    parent = Path(store.local_path("run.json")).parent.parent.name
    assert [step for step in order if step != "fsync"] == [
        "link",
        "folder ep1",
        "folder run",
        f"folder {parent}",
    ]
    assert order.index("fsync") < order.index("link")
    order.clear()
    store.put_new("ep1/other.json", b"1")
    assert [step for step in order if step != "fsync"] == ["link", "folder ep1"]


def test_a_folder_that_is_made_again_is_synced_again(store, monkeypatch):
    """It has a new name in the folder above, which a power cut would drop."""
    synced = []
    real = posix.sync_folder
    monkeypatch.setattr(posix, "sync_folder", lambda p: (synced.append(Path(p).name), real(p)))
    for _ in range(2):
        synced.clear()
        store.put_new("ep1/a", b"1")
        assert synced[:2] == ["ep1", "run"]
        store.delete("ep1/a")


def test_a_record_that_cannot_take_its_place_leaves_nothing(store):
    """A folder bears the name already."""
    store.put_new("hint/a", b"1")
    with pytest.raises(StorageError):
        store.put("hint", b"1")
    assert not list(Path(store.local_path("hint")).parent.glob(".tmp-*"))


def test_after_a_failed_sync_the_file_is_gone_and_not_synced_again(store, monkeypatch):
    """The kernel may drop the dirty pages and report success the second time."""
    store.put_new("ep1/a", b"1")
    calls = []

    def fsync(fd):
        calls.append(fd)
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(blocks.os, "fsync", fsync)
    with pytest.raises(StorageError):
        store.put_new("ep1/record", b"1")
    assert len(calls) == 1
    writer = store.create_writer("ep1/part", 1)
    writer.write_at(0, memoryview(bytearray(1)))
    with pytest.raises(StorageError) as caught:
        writer.close()
    assert caught.value.facts["operation"] == "fsync"
    writer.close()
    assert len(calls) == 2
    assert [entry.key for entry in store.list()] == ["ep1/a"]
    assert not list(Path(store.local_path("ep1")).glob(".tmp-*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_for_a_part_shows_before_the_first_byte(store, monkeypatch, code):
    """The room is reserved at once, and given back."""
    monkeypatch.setattr(blocks.os, "posix_fallocate", refuse(code))
    with pytest.raises(NoSpaceError) as caught:
        store.create_writer("ep1/part", 1 << 40)
    assert caught.value.errno == code
    assert list(store.list()) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_place_that_cannot_reserve_is_written_all_the_same(store, monkeypatch, code):
    """Reserving is a help and no condition."""
    monkeypatch.setattr(blocks.os, "posix_fallocate", refuse(code))
    write_key(store, "a", b"12345")
    assert store.get("a") == b"12345"


def test_short_writes_are_gone_on_from(store, monkeypatch):
    """The system may write less than it was given, and often does near a limit."""
    real_write, real_pwrite, real_preadv = os.write, os.pwrite, os.preadv
    monkeypatch.setattr(posix.os, "write", lambda fd, data: real_write(fd, data[:7]))
    monkeypatch.setattr(
        blocks.os, "pwrite", lambda fd, data, at: real_pwrite(fd, data[: min(len(data), 5_000)], at)
    )
    monkeypatch.setattr(
        blocks.os, "preadv", lambda fd, to, at: real_preadv(fd, [to[0][:3_000]], at)
    )
    data = os.urandom(60_001)
    store.put_new("record", data[:100])
    write_key(store, "part", data)
    assert store.get("record") == data[:100]
    assert read_key(store, "part") == data


def test_a_place_that_refuses_direct_writes_is_asked_once(tmp_path, monkeypatch):
    """The first refusal is remembered; the bytes are the same."""
    store = LocalStore(tmp_path)
    real_pwrite, refused = os.pwrite, []

    def pwrite(fd, data, at):
        if fcntl_is_direct(fd):
            refused.append(at)
            raise OSError(errno.EINVAL, "unaligned")
        return real_pwrite(fd, data, at)

    monkeypatch.setattr(blocks.os, "pwrite", pwrite)
    data = os.urandom(10_000)
    for key in ("a", "b"):
        write_key(store, key, data)
        assert store.get(key) == data
    assert refused == [0]


def fcntl_is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_blocks_go_past_the_page_cache(tmp_path):
    """On a file system that can: otherwise a save evicts what the training reads."""
    writer = LocalStore(tmp_path).create_writer("a", 8192)
    assert fcntl_is_direct(writer._fd)
    writer.abort()
    writer = LocalStore(tmp_path, direct=False).create_writer("a", 8192)
    assert not fcntl_is_direct(writer._fd)
    writer.abort()


def test_unaligned_memory_is_written_all_the_same(store):
    """The engine aligns its buffers; a caller that does not gets the slow way and not an error."""
    data = os.urandom(9_000)
    writer = store.create_writer("a", 9_000)
    writer.write_at(0, memoryview(b"x" + data)[1:])
    writer.close()
    assert store.get("a") == data
    buffer = bytearray(9_001)
    reader = store.open_reader("a")
    reader.read_into(0, memoryview(buffer)[1:])
    reader.close()
    assert bytes(buffer[1:]) == data


def test_an_error_with_a_partial_page_in_hand_is_that_error(store, monkeypatch):
    """The page of our own must not turn it into one about buffers."""
    monkeypatch.setattr(blocks.os, "pwrite", refuse(errno.EIO))
    writer = store.create_writer("a", 100)
    with pytest.raises(StorageError, match="EIO"):
        writer.write_at(0, memoryview(mmap.mmap(-1, 4096))[:100])
    writer.abort()
    assert writer.abort_errors == []
    with pytest.raises(StorageError, match="EBADF"):
        writer.write_at(0, memoryview(b"1"))


def test_a_late_abort_leaves_the_file_of_another_writer_alone(tmp_path):
    """A hung writer whose attempt was swept must not remove what was written in its place."""
    store = LocalStore(tmp_path)
    late = store.create_writer("part", 4)
    store.delete("part")
    write_key(store, "part", b"anew")
    late.abort()
    assert late.abort_errors == []
    assert store.get("part") == b"anew"


def test_what_goes_wrong_while_dropping_a_file_is_recorded(store, monkeypatch):
    """``abort`` runs in error handlers and must not hide the error that led there."""
    writer = store.create_writer("a", 10)
    monkeypatch.setattr(blocks.os, "unlink", refuse(errno.EACCES))
    writer.abort()
    assert [error.errno for error in writer.abort_errors] == [errno.EACCES]


def test_symlinks_are_neither_followed_nor_listed(store, tmp_path):
    """A link in a copied folder may lead anywhere."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"keep out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"1")
    store.put_new("ep1/a", b"1")
    folder = Path(store.local_path("ep1"))
    (folder / "link").symlink_to(secret)
    (folder.parent / "ep2").symlink_to(tmp_path / "elsewhere")
    assert [entry.key for entry in store.list()] == ["ep1/a"]
    assert store.folders() == ["ep1"]
    for look in (store.get, store.head, store.open_reader):
        with pytest.raises(CheckpointError):
            look("ep1/link")
    store.put("ep1/link", b"replaced")
    assert secret.read_bytes() == b"keep out"
    assert store.get("ep1/link") == b"replaced"


@pytest.mark.parametrize("call", ["scandir", "lstat", "open"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_refusals_are_refusals_for_every_call(store, monkeypatch, call, code):
    """403 is not 404: a run that cannot be read must not look like no run."""
    store.put_new("ep1/a", b"1")
    monkeypatch.setattr(posix.os, call, refuse(code))
    look = {
        "scandir": lambda: list(store.list()),
        "lstat": lambda: store.head("ep1/a"),
        "open": lambda: store.get("ep1/a"),
    }[call]
    with pytest.raises(AccessError):
        look()


def test_other_files_are_left_alone(store):
    """Names that cannot be keys are not ours: not listed, and not in the way."""
    store.put_new("ep1/a", b"1")
    folder = Path(store.local_path("ep1"))
    (folder / "my notes.txt").write_bytes(b"1")
    (folder / "sub folder").mkdir()
    os.mkfifo(folder / "pipe")
    deep = folder.parent / "deep" / "/".join(["d" * 100] * 12)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"1")
    assert [entry.key for entry in store.list()] == ["ep1/a"]
    with pytest.raises(MissingError):
        store.get("ep1/pipe")
    store.delete("ep1/a")
    assert (folder / "my notes.txt").exists()


def test_a_file_in_the_way_of_a_folder_is_something_that_exists(store):
    """``ep3`` may be a file of the user's."""
    store.put_new("ep3", b"1")
    with pytest.raises(ExistsError):
        store.put_new("ep3/manifest.json", b"1")
    with pytest.raises(ExistsError):
        store.create_writer("ep3/x/part", 1)
    assert store.get("ep3") == b"1"


def test_the_answer_to_a_link_may_get_lost(store, monkeypatch):
    """On a network mount a repeated request is refused because the first one worked."""
    real_link = os.link

    def link(*args, **options):
        real_link(*args, **options)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(posix.os, "link", link)
    store.put_new("a", b"mine")
    assert store.get("a") == b"mine"
    with pytest.raises(ExistsError):
        store.put_new("a", b"other")
    assert store.get("a") == b"mine"
    assert not list(Path(store.local_path("a")).parent.glob(".tmp-*"))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_what_cannot_be_linked_is_copied(store, monkeypatch, code):
    """Unchanged weights on another device, or with too many names, are still saved."""
    data = os.urandom(100_000)
    write_key(store, "ep1/part", data)
    monkeypatch.setattr(posix.os, "link", refuse(code))
    store.link("ep1/part", "ep2/part")
    assert store.get("ep2/part") == data
    first, second = (Path(store.local_path(f"{n}/part")).stat() for n in ("ep1", "ep2"))
    assert first.st_ino != second.st_ino


def test_a_link_shares_the_bytes(store):
    """That is what it is for."""
    write_key(store, "ep1/part", b"1")
    store.link("ep1/part", "ep2/part")
    first, second = (Path(store.local_path(f"{n}/part")).stat() for n in ("ep1", "ep2"))
    assert first.st_ino == second.st_ino


def test_where_symlinks_are_refused_the_hint_is_a_text(store, monkeypatch):
    """Network drives refuse them, and no save may fail because of that."""
    monkeypatch.setattr(posix.os, "symlink", refuse(errno.EOPNOTSUPP))
    store.point("latest", "ep1")
    store.point("latest", "ep2")
    assert store.get("latest") == b"ep2\n"


def test_the_hint_leads_there_from_anywhere(store, tmp_path, monkeypatch):
    """It is relative to its own folder, so that a run can be moved."""
    store.put_new("ep1/a", b"1")
    store.point("latest", "ep1")
    Path(store.local_path("latest")).parent.rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    assert (tmp_path / "moved" / "latest" / "a").read_bytes() == b"1"


def test_a_folder_in_the_way_of_the_hint_is_an_error_of_the_tree(store):
    """The caller logs it and goes on."""
    store.put_new("latest/a", b"1")
    with pytest.raises(CheckpointError):
        store.point("latest", "ep1")
    assert [entry.key for entry in store.list()] == ["latest/a"]
    assert not list(Path(store.local_path("x")).parent.glob(".tmp-*"))


def test_a_temporary_file_that_stays_is_recorded(store, monkeypatch):
    """The record was created: that it left something behind is no error, but no secret either."""
    monkeypatch.setattr(posix.os, "unlink", refuse(errno.EIO))
    store.put_new("a", b"1")
    assert store.get("a") == b"1"
    assert [error.errno for _, error in store.leftovers] == [errno.EIO]


def test_a_folder_that_vanishes_is_made_again(store, monkeypatch):
    """Another process may remove an empty folder just when a file is to go into it."""
    real_open, vanished = posix.create_file, []

    def create_file(path):
        if not vanished:
            vanished.append(path)
            Path(path).parent.rmdir()
        return real_open(path)

    monkeypatch.setattr(posix, "create_file", create_file)
    store.put_new("ep1/a", b"1")
    assert store.get("ep1/a") == b"1"
    vanished.clear()
    write_key(store, "ep2/a", b"2")
    assert store.get("ep2/a") == b"2"


def test_files_obey_the_umask(store):
    """Others of the group may be meant to read the run."""
    before = os.umask(0o027)
    try:
        store.put_new("a", b"1")
        write_key(store, "b", b"1")
    finally:
        os.umask(before)
    for key in ("a", "b"):
        assert Path(store.local_path(key)).stat().st_mode & 0o777 == 0o640


def test_the_file_half_loads_neither_torch_nor_numpy():
    """Listing a run must not take seconds."""
    code = (
        "import sys, milepost.stores, milepost.runs, milepost.testing;"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
