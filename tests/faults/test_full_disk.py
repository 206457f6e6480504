"""Real file systems that are full, or may not be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from milepost.errors import AccessError, NoSpaceError
from milepost.runs import (
    KeepLast,
    Level,
    decide,
    ensure_run,
    open_session,
    prune,
    record_origin,
    scan,
    verify,
)
from milepost.stores import LocalStore
from milepost.testing import save_files

MIB = 1024 * 1024
ROOM = 8 * MIB


@contextmanager
def mounted(*options: str, at: Path) -> Iterator[None]:
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", at=tmp_path / "disk"):
        yield tmp_path / "disk"


def begin(store: LocalStore):
    return record_origin(store, open_session(store, ensure_run(store)), None)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_a_full_disk_costs_the_save_and_nothing_else(small_disk):
    """The error names the place, the older checkpoint stays, no half file keeps the disk full."""
    store = LocalStore(small_disk / "run")
    session = begin(store)
    save_files(store, session, name="ba1", attempt=1, files={"part": os.urandom(5 * MIB)})
    free_before = free_bytes(small_disk)
    with pytest.raises(NoSpaceError) as caught:
        save_files(store, session, name="ba2", attempt=2, files={"part": os.urandom(5 * MIB)})
    assert str(small_disk / "run" / "ba2" / "part") in str(caught.value)
    assert free_bytes(small_disk) == free_before
    assert [found.name for found in scan(store).found] == ["ba1"]
    assert verify(store, "ba1", Level.FULL).is_good
    save_files(store, session, name="ba3", attempt=3, files={"part": os.urandom(2 * MIB)})
    prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert [found.name for found in scan(store).found] == ["ba3"]
    assert {path.name for path in store_files(small_disk)} >= {"ba3", "latest", "run.json"}
    assert not list(small_disk.rglob(".tmp-*"))


def test_a_disk_without_room_for_a_record_costs_the_save_only(small_disk):
    """The manifest itself may be what does not fit any more."""
    store = LocalStore(small_disk / "run")
    session = begin(store)
    save_files(store, session, name="ba1", attempt=1, files={"part": b"1"})
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free_bytes(small_disk) - 8192))

    def save_until_full() -> None:
        for attempt in range(2, 40):
            files = {f"part{n}": b"1" for n in range(3)}
            save_files(store, session, name=f"ba{attempt}", attempt=attempt, files=files)

    with pytest.raises(NoSpaceError):
        save_until_full()
    latest = scan(store).latest()
    assert verify(store, latest.name, Level.FULL).is_good
    filler.unlink()
    save_files(store, session, name="after", attempt=50, files={"part": b"1"})
    assert scan(store).latest().name == "after"


def test_a_read_only_place_refuses_access_and_can_be_read(tmp_path):
    """Refused is not missing: the run is listed, and no new one is begun in its place."""
    source = tmp_path / "source"
    store = LocalStore(source / "run")
    session = begin(store)
    save_files(store, session, name="ba1", attempt=1, files={"part": b"1"})
    with mounted("--bind", "-o", "ro", str(source), at=tmp_path / "seen"):
        if os.access(tmp_path / "seen", os.W_OK):
            pytest.skip("this system ignores ro on a bind mount")
        seen = LocalStore(tmp_path / "seen" / "run")
        assert [found.name for found in scan(seen).lineage()] == ["ba1"]
        assert verify(seen, "ba1", Level.FULL).is_good
        with pytest.raises(AccessError):
            open_session(seen, ensure_run(seen))
        with pytest.raises(AccessError):
            seen.put("latest", b"1")
        with pytest.raises(AccessError):
            seen.create_writer("ba2/part", 1)
        with pytest.raises(AccessError):
            seen.delete("ba1/part")
        with pytest.raises(AccessError):
            seen.rename("ba1/part", "ba1/other")
        empty = LocalStore(tmp_path / "seen" / "other")
        with pytest.raises(AccessError):
            ensure_run(empty)


def store_files(folder: Path) -> list[Path]:
    return list((folder / "run").iterdir())
