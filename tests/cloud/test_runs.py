"""Runs in a bucket: saved, resumed, listed, verified and downloaded.

That killed trainings go on from a bucket is shown in ``tests/faults/test_kill_training.py``.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.cli.app import app
from milepost.stores import open_store
from milepost.stores.cloud import CloudStore
from milepost.testing import write_key

from .conftest import KEY, SECRET
from .test_contract import open_s3

pytestmark = pytest.mark.cloud


@pytest.fixture
def place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a run of its own; credentials are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://runs/{tmp_path.name}"


def test_the_command_line_takes_addresses(place: str) -> None:
    """The same verbs, and the same records of what there is."""
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(place, model=model) as run:
        run.save("a", wait=True)
        run.save("b", wait=True)

    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == code, result.output
        return result.stdout

    listed = json.loads(call("ls", place, "--json"))
    assert [one["name"] for one in listed] == ["a", "b"]
    assert json.loads(call("show", f"{place}/a", "--json"))["name"] == "a"
    assert "good" in call("verify", place)
    assert "good" in call("verify", f"{place}/latest")
    call("pin", f"{place}/a")
    call("prune", place, "--keep-last", "1", "--yes")
    assert [one.name for one in mp.open_run(place).checkpoints()] == ["a", "b"]
    call("unpin", f"{place}/a")
    call("prune", place, "--keep-last", "1", "--yes")
    assert [one.name for one in mp.open_run(place).checkpoints()] == ["b"]
    call("show", f"{place}/nope", code=3)
    call("show", f"{place}x/nope", code=3)


def test_weights_and_folders_come_out_of_a_bucket(place: str, tmp_path: Path) -> None:
    """By ranges into live tensors, and as files for other tools."""
    model = torch.nn.Linear(3000, 1000)
    with mp.Checkpointer(place, model=model) as run:
        run.save("a", wait=True)
    other = torch.nn.Linear(3000, 1000)
    mp.open_run(place).get("a").load_weights(other)
    assert other.weight.equal(model.weight)
    folder = open_checkpoint(f"{place}/a").to_directory(tmp_path / "copy")
    assert open_checkpoint(folder).verify().is_good


def test_single_files_live_in_a_bucket_too(place: str) -> None:
    """With the records hidden beside them, resumed, and opened by their visible names."""
    model = torch.nn.Linear(2000, 1500)
    for resumed in (None, "ba1"):
        with mp.Checkpointer(place, keep=mp.KeepLast(1), save_format="torch", model=model) as run:
            assert run.resumed_from == resumed
            run.step()
            run.save(wait=True)
    keys = [entry.key for entry in open_store(place).list()]
    assert [key for key in keys if not key.startswith(".")] == ["ba2.pt"]
    weights = open_checkpoint(f"{place}/ba2.pt").load()["state"]["model"]
    assert weights["weight"].equal(model.weight)


def test_two_writers_of_one_run_do_not_both_win(place: str) -> None:
    """The older session is fenced, as on a local disk."""
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(place, model=model) as first:
        first.save("a", wait=True)
        with mp.Checkpointer(place, model=model) as second:
            second.save("b", wait=True)
            with pytest.raises(mp.FencedError):
                first.save("c", wait=True)
    assert [one.name for one in mp.open_run(place).checkpoints()] == ["a", "b"]


def test_a_bucket_that_is_not_there_is_no_empty_run(place: str) -> None:
    """Whoever mistyped it must be told before the training begins."""
    wrong = place.replace("s3://runs", "s3://other")
    with pytest.raises(mp.StorageError, match="NoSuchBucket") as caught:
        mp.Checkpointer(wrong, model=torch.nn.Linear(1, 1)).open()
    assert "no such bucket" in caught.value.hint


def test_no_secret_is_told(
    place: str,
    s3_endpoint: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In no error, no text of an object, no log and no record in the bucket."""
    caplog.set_level(logging.DEBUG)
    seen = []
    with mp.Checkpointer(place, model=torch.nn.Linear(1, 1)) as run:
        seen += [repr(run), repr(run.save("a", wait=True))]
    store = open_store(place)
    seen += [repr(store), store.url, repr(vars(store))]
    seen += [store.get(entry.key).decode("latin-1") for entry in store.list()]
    for wrong in (
        lambda: store.get("nope"),
        lambda: open_s3(s3_endpoint, "x", bucket="other").get("a"),
        lambda: CloudStore("s3://", config={"secret_access_key": SECRET, "nonsense": SECRET}),
        lambda: pickle.dumps(store),
        lambda: open_s3("http://127.0.0.1:1", "x").get("a"),
    ):
        with pytest.raises(mp.CheckpointError) as caught:
            wrong()
        error = caught.value
        seen += [str(error), repr(error), repr(error.facts), repr(error.__cause__)]
        seen += [repr(error.__context__) if not error.__suppress_context__ else ""]
    seen += [caplog.text]
    assert not [text for text in seen if SECRET in text]
    assert all(text for text in seen[:3])


def test_a_forked_child_is_refused(s3_endpoint: str) -> None:
    """The client has threads that are not there any more: it would hang."""
    store = open_s3(s3_endpoint, "forked")
    write_key(store, "a", b"1")
    pid = os.fork()
    if pid == 0:
        try:
            store.get("a")
        except mp.UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
