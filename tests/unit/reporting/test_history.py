"""The record of reported metrics: each line once, and its end is waited for with an end."""

from __future__ import annotations

import json
import threading

import pytest

import milepost as mp
from milepost.reporting import history
from milepost.reporting.history import History
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Fault, FaultStore

WAIT_S = 20.0


def lines_in(store) -> list[dict]:
    texts = [store.get(entry.key).decode() for entry in store.list("events")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_a_lost_answer_writes_no_line_twice(monkeypatch):
    """Else a curve drawn from the record of a bucket has points that were never reported."""
    monkeypatch.setattr(history, "_OBJECT_INTERVAL_S", 0.01)
    again = threading.Event()

    def before(number: int, operation: str) -> None:
        del operation
        if number == 2:
            again.set()

    below = MemoryStore()
    lost = Fault(1, is_after=True, error=mp.StorageError("Lost."))
    store = FaultStore(below, [lost], before=before)
    record = History(store, 1, {})
    assert again.wait(WAIT_S)
    record.add(1, {"loss": 0.5})
    record.close(WAIT_S)
    first, second = lines_in(below)
    assert first["session"] == 1
    assert second["n"] == 1


def test_a_folder_that_could_not_be_made_durable_writes_no_line_twice(tmp_path, monkeypatch):
    """The lines are in the file by then, and are tried again."""
    monkeypatch.setattr(history, "_INTERVAL_S", 0.01)
    again = threading.Event()
    below = LocalStore(tmp_path)

    def before(number: int, operation: str) -> None:
        del operation
        if number == 2:
            again.set()

    store = FaultStore(below, [Fault(1, error=mp.StorageError("Down."))], before=before)
    record = History(store, 1, {})
    assert again.wait(WAIT_S)
    record.close(WAIT_S)
    assert len(lines_in(below)) == 1


def test_closing_tells_of_a_write_that_does_not_end():
    """Else the last metrics would be missing without a word."""
    gate = threading.Event()
    store = FaultStore(MemoryStore(), before=lambda number, operation: gate.wait(WAIT_S))
    record = History(store, 1, {})
    try:
        with pytest.raises(mp.DeadlineError, match=r"not written within 0\.05 s"):
            record.close(0.05)
    finally:
        gate.set()
    record.close(WAIT_S)
