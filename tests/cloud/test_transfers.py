"""Checkpoints and runs between folders and buckets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.cli.app import app
from milepost.errors import StorageError
from milepost.format.layout import is_key
from milepost.runs import ensure_run, open_session, record_origin
from milepost.stores import open_store

from ..servers import Server, s3_client
from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud


@pytest.fixture
def place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address of its own; credentials are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://runs/{tmp_path.name}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, of which most is frozen, of more than a block."""
    frozen = torch.nn.Linear(1500, 1500)
    frozen.requires_grad_(False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(1500, 100))
    with mp.Checkpointer(tmp_path / "run", model=model) as made:
        for name in ("a", "b", "c"):
            torch.nn.init.normal_(model[1].weight)
            made.save(name, wait=True)
    return tmp_path / "run"


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def names(place: str | Path) -> list[str]:
    return [one.name for one in mp.open_run(place).checkpoints()]


def test_odd_names_in_a_bucket_stop_nothing_and_are_told(
    run: Path, place: str, tmp_path: Path, moto: Server
) -> None:
    """Other tools allow any name, and make an empty object for each folder that they show."""
    mp.sync_run(run, f"{place}/up")
    bucket, prefix = place.removeprefix("s3://").split("/", 1)
    client = s3_client(moto)
    for name in ("my notes.txt", "a/sn\u00f6/w.txt", "x#y/1", "x#y/2", "b/my own (1).md"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/up/{name}", Body=b"x")
    for name in ("", "a/", "sessions/", "fresh/", "c/deep/"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/up/{name}", Body=b"")
    client.put_object(Bucket=bucket, Key=f"{prefix}/up/empty", Body=b"")
    store = open_store(f"{place}/up")
    keys = [entry.key for entry in store.list()]
    assert not {"", "a", "sessions"} & set(keys)
    assert "empty" in keys
    assert all(is_key(key) for key in keys)
    assert not [entry for entry in store.list("a") if not entry.key.startswith("a/")]
    assert store.folders() == ["a", "b", "c", "fresh", "sessions"]
    expected = ["a/sn\u00f6/", "b/my own (1).md", "my notes.txt", "x#y/"]
    assert store.strangers() == expected
    down = mp.sync_run(f"{place}/up", tmp_path / "down")
    assert (sorted(down.skipped), down.errors) == (expected, {})
    assert names(tmp_path / "down") == ["a", "b", "c"]
    copied = mp.copy_checkpoint(f"{place}/up/b", tmp_path / "alone", verify=True)
    assert list(copied.skipped) == ["my own (1).md"]
    assert mp.sync_run(tmp_path / "down", f"{place}/up").errors == {}
    client.put_object(Bucket=bucket, Key=f"{prefix}/up/x//y", Body=b"x")  # our client cannot
    try:
        with pytest.raises(StorageError, match="an object there has a name with an empty part"):
            mp.sync_run(f"{place}/up", tmp_path / "down")
    finally:
        # No folder above it can be listed while it is there, and other tests use the bucket too.
        client.delete_object(Bucket=bucket, Key=f"{prefix}/up/x//y")


def test_a_run_goes_up_across_and_down_again(run: Path, place: str, tmp_path: Path) -> None:
    """Shared files are sent once; in one bucket nothing is; the last copy equals the first."""
    up = mp.sync_run(run, f"{place}/up", verify=True)
    assert not up.errors
    size_bytes = sum(one.manifest.size_bytes for one in mp.open_run(run).checkpoints())
    assert up.verified_bytes == size_bytes
    assert all(one.shared_bytes > 8_000_000 for one in up.copied[1:])
    across = mp.sync_run(f"{place}/up", f"{place}/across")
    assert [one.name for one in across.copied] == ["c", "b", "a"]
    assert sum(one.sent_bytes for one in across.copied) == 0
    down = mp.sync_run(f"{place}/across", tmp_path / "down", verify=True)
    assert not down.errors
    for name in ("a", "b", "c"):
        for path in sorted((run / name).iterdir()):
            if path.name != "attempt.json":
                assert (tmp_path / "down" / name / path.name).read_bytes() == path.read_bytes()
    frozen = [tmp_path / "down" / name / "model-frozen.safetensors" for name in ("a", "b", "c")]
    assert len({path.stat().st_ino for path in frozen}) == 1
    assert mp.sync_run(run, f"{place}/across").present == ("c", "b", "a")


def test_a_checkpoint_goes_up_across_and_down_again(run: Path, place: str, tmp_path: Path) -> None:
    """By the command line, with its exit codes."""
    call("cp", run / "b", f"{place}/one", "--verify")
    across = json.loads(call("cp", f"{place}/one", f"{place}/two", "--json"))
    assert across["shared_bytes"]
    assert not across["sent_bytes"]
    assert "already" in call("cp", run / "b", f"{place}/two")
    call("cp", run / "a", f"{place}/two", code=2)
    call("cp", f"{place}/two", tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").verify().is_good
    assert "good" in call("verify", f"{place}/two")
    open_store(f"{place}/two").put("model.safetensors", b"?")
    call("cp", f"{place}/two", tmp_path / "other", code=1)
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_a_mirror_follows_a_run_that_prunes_itself(run: Path, place: str) -> None:
    """By the command line, as a timer would call it."""
    call("sync", run, place)
    call("pin", f"{place}/a")
    call("prune", run, "--keep-last", "1", "--yes")
    call("sync", run, place)
    assert names(place) == ["a", "b", "c"]
    call("sync", run, place, "--delete")
    assert names(place) == ["a", "c"]
    call("unpin", f"{place}/a")
    call("sync", run, place, "--delete")
    assert names(place) == ["c"]
    store = open_store(place)
    record_origin(store, open_session(store, ensure_run(store)), None)  # a training begins there
    call("sync", run, place, code=6)


def test_doctor_looks_at_a_bucket_and_at_the_run_there(run: Path, place: str) -> None:
    """Nothing is left, and what cannot be reached ends with a code."""
    call("sync", run, place)
    before = [entry.key for entry in open_store(place).list()]
    found = json.loads(call("doctor", place, "--json"))
    statuses = {one["check"]: one["status"] for one in found["checks"]}
    assert (
        statuses.items()
        >= {
            "writable": "ok",
            "exclusive create": "ok",
            "ranged read": "ok",
            "newest": "ok",
        }.items()
    )
    assert [entry.key for entry in open_store(place).list()] == before
    assert "there is no run" in call("doctor", f"{place}-new")
    assert "fail" in call("doctor", "s3://no-such-bucket/run", code=4)


def test_what_is_made_of_a_checkpoint_in_a_bucket(run: Path, place: str, tmp_path: Path) -> None:
    """A new run there, or files here; a file for other programs is never made there."""
    call("sync", run, place)
    call("consolidate", f"{place}/a", "--to", f"{place}-whole")
    assert names(f"{place}-whole") == ["a"]
    call("export", f"{place}/a", tmp_path / "a.pt", "--to", "torch")
    call("export", f"{place}/a", tmp_path / "a.safetensors", "--to", "safetensors")
    for verb in (
        ("export", f"{place}/a", f"{place}/a.pt", "--to", "torch"),
        ("consolidate", f"{place}/a", "--to", f"{place}/a.pt", "--format", "torch"),
    ):
        call(*verb, code=2)
    with pytest.raises(mp.UsageError):
        mp.consolidate(f"{place}/a", f"{place}/a.pt", format="torch")
    call("import", tmp_path / "a.pt", f"{place}-back", "--trust")
    assert names(f"{place}-back") == ["a"]
    assert json.loads(call("diff", f"{place}/a", f"{run}/a", "--json"))["is_equal"]
    assert not json.loads(call("diff", f"{place}/a", f"{place}/b", "--json", code=1))["is_equal"]
    shown = json.loads(call("show", f"{place}/a", "--tensors", "--tree", "--files", "--json"))
    assert shown["num_files"] == len(shown["files"])
    call("export", f"{place}/nope", tmp_path / "b.pt", "--to", "torch", code=3)


def test_bench_measures_a_bucket_and_leaves_nothing(place: str) -> None:
    """Uploads and downloads in the place of writes and reads."""
    found = json.loads(
        call("bench", place, "--probe", "16MiB", "--seconds", "1", "--size", "1G", "--json")
    )
    assert found["limits"]["put_s"] > 0
    assert found["limits"]["sync_s"] is None
    assert found["costs"]["size_bytes"] == 1024**3
    assert not list(open_store(place).list())
