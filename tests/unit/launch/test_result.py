"""What a launch says if the place of its run does not answer at the end."""

from __future__ import annotations

import json

import milepost as mp
from milepost.launch import result as launch_results
from milepost.launch.result import launch_result
from milepost.stores import MemoryStore


class Silent(MemoryStore):
    """A place that was there, and is not now."""

    def list(self, folder):
        """Fail."""
        raise mp.StorageError("It does not answer.", operation="list", path=folder)

    def folders(self, folder):
        """Fail."""
        raise mp.StorageError("It does not answer.", operation="list", path=folder)


def test_a_run_that_cannot_be_read_is_no_run_without_checkpoints(monkeypatch, tmp_path, capsys):
    """Whoever finds no checkpoint in the result would train anew; the other facts stay."""
    run = mp.RunConfig(storage_path=tmp_path)
    monkeypatch.setattr(launch_results, "open_store", lambda place: Silent())
    found = launch_result(run, return_value=3, last_commit="report-1")
    assert isinstance(found.unread_error, mp.StorageError)
    assert (found.return_value, found.error, found.path) == (3, None, run.place)
    record = json.loads(json.dumps(found.to_json(), default=str))
    assert "It does not answer" in record["unread_error"]
    assert "It does not answer" in capsys.readouterr().err
    monkeypatch.undo()
    assert launch_result(run).unread_error is None
