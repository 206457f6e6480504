"""Readers of a folder, and deletion: of two at one moment exactly one wins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from milepost.checkpoint import Checkpoint, open_run
from milepost.errors import InUseError, MissingError
from milepost.runs import KeepLast, decide, delete_checkpoint, prune, scan
from milepost.runs.readers import hold, shut_out
from milepost.stores import LocalStore, MemoryStore

READER = """
import sys
from milepost.checkpoint import open_run
with open_run(sys.argv[1]).get(sys.argv[2]).as_directory() as folder:
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def place(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def filled(place, begin, save):
    session = begin(place)
    for number in range(1, 5):
        save(place, session, f"ep{number}", number)
    return session


def names(store) -> list[str]:
    return [found.name for found in scan(store).lineage()]


def test_retention_spares_what_is_read_and_takes_it_afterwards(place, filled):
    """Two readers of one folder, threads or not: the first to leave must not hurt the second."""
    checkpoint = open_run(place).get("ep1")
    with checkpoint.as_directory() as folder:
        with Checkpoint(place, "ep1").as_directory() as again:
            assert again == folder == f"{place.url.removeprefix('file://')}/ep1"
        report = prune(place, decide(scan(place), [KeepLast(1)]), session=filled)
        assert report.deleted == ("ep2", "ep3")
        assert isinstance(report.errors["ep1"], InUseError)
        assert Path(folder, "part").read_bytes() == b"ep1"
        with pytest.raises(InUseError):
            delete_checkpoint(place, "ep1", force=True)
    assert names(place) == ["ep1", "ep4"]
    prune(place, decide(scan(place), [KeepLast(1)]), session=filled)
    assert names(place) == ["ep4"]


@pytest.mark.parametrize("how", ["leaves", "SIGKILL"])
def test_a_reader_in_another_process_counts_until_it_ends(place, filled, how):
    """However it ends: nothing is left that would keep the checkpoint for ever."""
    arguments = [sys.executable, "-c", READER, place.url, "ep1"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline().strip().endswith("/ep1")
        with pytest.raises(InUseError):
            delete_checkpoint(place, "ep1")
        if how == "leaves":
            reader.stdin.write("\n")
            reader.stdin.flush()
        else:
            reader.send_signal(signal.SIGKILL)
        reader.wait(30)
    delete_checkpoint(place, "ep1")
    assert "ep1" not in names(place)


def test_a_forked_child_does_not_outlast_the_block(place, filled):
    """The worker of a loader inherits the open file; the lock goes with the block all the same."""
    woken, wake = os.pipe()
    with open_run(place).get("ep1").as_directory():
        child = os.fork()
        if child == 0:
            os.close(wake)
            os.read(woken, 1)
            os._exit(0)
    try:
        delete_checkpoint(place, "ep1")
    finally:
        os.close(wake)
        os.waitpid(child, 0)
        os.close(woken)


def test_no_reader_gets_into_what_is_being_deleted(place, filled):
    """The deletion has locked first, or has renamed the manifest already."""
    with shut_out(place, "ep1"), pytest.raises(MissingError, match="being deleted"):
        with hold(place, "ep1"):
            pass
    delete_checkpoint(place, "ep1")
    with pytest.raises(MissingError), hold(place, "ep1"):
        pass


def test_a_manifest_renamed_between_opening_and_locking_is_seen(place, filled, monkeypatch):
    """Else the reader would hold a file that no longer stands for a checkpoint."""
    from milepost.runs import readers

    lock, done = readers._lock, []

    def lock_late(fd, kind, path):
        if not done:
            done.append(True)
            delete_checkpoint(place, "ep1")
        return lock(fd, kind, path)

    monkeypatch.setattr(readers, "_lock", lock_late)
    with pytest.raises(MissingError, match="being deleted"), hold(place, "ep1"):
        pass


def test_many_readers_and_a_deletion_never_overlap(place, filled):
    """Threads that enter and leave; whoever is inside finds every file."""
    errors, seen = [], 0
    stop = threading.Event()

    def read() -> None:
        nonlocal seen
        while not stop.is_set():
            try:
                with hold(place, "ep1"):
                    missing = {"manifest.json", "part"} - {one.name for one in path.iterdir()}
                    if missing:
                        errors.append(missing)
                    seen += 1
            except MissingError:
                return

    path = Path(place.local_path("ep1"))
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        try:
            delete_checkpoint(place, "ep1")
        except InUseError:
            continue
        break
    stop.set()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert seen


def test_reading_needs_no_right_to_write(place, filled):
    """A colleague's run, or an archive."""
    Path(place.local_path("ep1/manifest.json")).chmod(0o444)
    with hold(place, "ep1"), pytest.raises(InUseError):
        delete_checkpoint(place, "ep1")
    delete_checkpoint(place, "ep1")


def test_a_store_without_files_has_no_readers_to_wait_for(begin, save):
    """There the files are copied first, see ``copies``."""
    store = MemoryStore("run")
    session = begin(store)
    save(store, session, "ep1", 1)
    with hold(store, "ep1"):
        delete_checkpoint(store, "ep1")


def test_a_file_system_without_locks_is_told_of(place, filled, monkeypatch, caplog):
    """Reading goes on; but nobody shall believe that it is protected."""
    import errno
    import fcntl

    def refuse(fd, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold(place, "ep1"):
        assert "retention does not know" in caplog.text
    delete_checkpoint(place, "ep1")
