"""What cannot be fetched is not damaged: only a disk of this machine is taken at its word."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.errors import StorageError
from milepost.runs import Level, State, newest_good, scan, verify
from milepost.stores import LocalStore, MemoryStore, Store
from milepost.testing import FaultStore

DOWN = StorageError("The place is unwell.", operation="get", status=503)


def failing(store: Store, start: str) -> FaultStore:
    """Return the store with lasting trouble at some of its reads."""

    def fail(_: int, operation: str) -> None:
        if operation.startswith(start):
            raise DOWN

    return FaultStore(store, before=fail)


@pytest.fixture(params=["bucket", "disk"])
def run(request, tmp_path: Path, begin, save) -> Store:
    store: Store = MemoryStore("run") if request.param == "bucket" else LocalStore(tmp_path)
    session = begin(store)
    save(store, session, "ep1", 1)
    save(store, session, "ep2", 2)
    return store


@pytest.mark.parametrize("start", ["get ep2/manifest.json", "head ep2/part", "open_reader ep2/"])
def test_only_a_disk_that_fails_has_lost_the_newest_checkpoint(run, start):
    """A training must not go on from an earlier one because a bucket was down for a while."""
    store = failing(run, start)
    if run.traits.is_local:
        found, reports = newest_good(store, scan(store), level=Level.FULL)
        assert found is not None
        assert found.name == "ep1"
        assert [report.name for report in reports] == ["ep2"]
    else:
        with pytest.raises(StorageError) as caught:
            newest_good(store, scan(store), level=Level.FULL)
        assert caught.value is DOWN


@pytest.mark.parametrize("level", list(Level))
def test_a_bucket_that_is_down_is_not_reported_as_damage(run, level):
    """Whoever sees damage deletes, or trains again."""
    store = failing(run, "get ep2/manifest.json")
    if run.traits.is_local:
        assert not verify(store, "ep2", level).is_good
    else:
        with pytest.raises(StorageError):
            verify(store, "ep2", level)


@pytest.mark.parametrize("record", ["sessions/00000001.json", "sessions/00000001.from.json"])
def test_records_that_cannot_be_fetched_are_not_made_up(run, record):
    """Which checkpoints count would be guessed from the rest."""
    keys = [entry.key for entry in run.list("sessions")]
    assert record in keys
    store = failing(run, f"get {record}")
    if run.traits.is_local:
        view = scan(store) if record.endswith("1.json") else None
        assert view is None or view.sessions[0].problem
    else:
        with pytest.raises(StorageError) as caught:
            scan(store)
        assert caught.value is DOWN


def test_damage_in_a_bucket_is_still_passed_over(begin, save):
    """Bytes that came, and are wrong, are what falling back is for."""
    store = MemoryStore("run")
    session = begin(store)
    save(store, session, "ep1", 1)
    save(store, session, "ep2", 2)
    store.put("ep2/manifest.json", store.get("ep2/manifest.json")[:-9])
    view = scan(store)
    assert view.get("ep2").state is State.DAMAGED
    found, _ = newest_good(store, view)
    assert found is not None
    assert found.name == "ep1"
