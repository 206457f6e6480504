"""Uploads of killed processes are ended, and those of live ones never.

A process is killed between two parts of an upload; what the server keeps of it is seen by another
client than the one that is tested. The rules themselves: ``tests/unit/runs/test_cut_off.py``.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import app
from milepost.runs import ensure_run, find_cut_off, open_session, record_origin, scan, sweep
from milepost.stores import PrefixStore
from milepost.stores.cloud import CloudStore
from milepost.testing import fault_proxy
from milepost.testing.proxy import Answer, Forward, Request

from ..places import Place
from ..servers import BUCKET, KEY, SECRET, Server, s3_client
from .test_strays import WRITE

pytestmark = pytest.mark.cloud
PART = "ep1/model.safetensors"


def uploads(place: Place) -> list[str]:
    """What the server keeps of uploads to a place, by another client."""
    assert place.server is not None
    prefix = place.root.removeprefix(f"{place.server.url}/")
    listed = s3_client(place.server).list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    keys = sorted(one["Key"] for one in listed)
    return [key[len(prefix) + 1 :] for key in keys if key.startswith(f"{prefix}/")]


@contextmanager
def uploading(place: Place, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have another process between two parts of an upload; it ends with the block."""
    assert place.server is not None
    arguments = [place.server.endpoint, place.run(run), KEY, SECRET]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"under way\n"
        deadline_s = time.monotonic() + 20
        while f"{run}/{PART}" not in uploads(place):
            assert time.monotonic() < deadline_s, "no upload was begun"
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(place: Place, key: str) -> str:
    """Begin an upload by another client, and leave it."""
    assert place.server is not None
    prefix = place.root.removeprefix(f"{place.server.url}/")
    s3_client(place.server).create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    return key


def checked(place: str) -> dict[str, tuple[str, str]]:
    answer = CliRunner().invoke(app, ["doctor", place, "--json"])
    return {
        one["check"]: (one["status"], one["text"]) for one in json.loads(answer.stdout)["checks"]
    }


@pytest.mark.parametrize("place", ["moto", "juicefs"], indirect=True)
def test_the_next_start_ends_what_a_killed_process_left_and_nothing_of_a_live_one(
    place: Place,
) -> None:
    """Nothing either of a run below it and beside it."""
    others = [begin(place, f"{run}/{PART}") for run in ("run/run3", "run2")]
    with uploading(place, "run") as killed:
        # A newer session while the old one lives: it may be on its way.
        store = CloudStore(place.run("run"))
        session = record_origin(store, open_session(store, ensure_run(store)), None)
        assert sweep(store, session) == []
        assert uploads(place) == sorted([f"run/{PART}", *others])
        killed.kill()
        killed.wait(20)
        with mp.Checkpointer(place.run("run"), model=torch.nn.Linear(2, 2)) as run:
            run.save("ep1", wait=True)
        assert uploads(place) == others
    assert mp.open_run(place.run("run")).latest().verify("full").is_good
    left = find_cut_off(store, scan(store))
    assert (left.dead, [one.key for one in left.others]) == ((), [f"run3/{PART}"])


@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_prune_ends_them_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was asked what it would do; without boto3 it says what to do instead."""
    with mp.Checkpointer(place.run("run"), model=torch.nn.Linear(2, 2)) as run:
        run.save("ba1", wait=True)
    with uploading(place, "run"):
        pass

    def prune(*options: str) -> Any:
        words = ["prune", place.run("run"), "--keep-last", "5", *options]
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, answer.output
        return answer

    with monkeypatch.context() as patch:
        patch.setattr("milepost.stores.unended.importlib.util.find_spec", lambda _: None)
        assert "milepost[s3]" in prune().stderr
    status, text = checked(place.run("run"))["cut-off uploads"]
    assert (status, text) == ("warn", f"1 upload of processes that have ended, {PART}")
    # This process has opened the first session and lives; the killed one's claim tells them apart.
    assert f"To end: 1 upload of processes that have ended, {PART}." in prune("--dry-run").stdout
    assert uploads(place) == [f"run/{PART}"]
    assert json.loads(prune("--json").stdout)["ended_uploads"] == [PART]
    assert uploads(place) == []
    assert "Ended" not in prune().stdout


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_a_server_that_shows_uploads_by_their_very_keys_alone_is_asked_so(place: Place) -> None:
    """As MinIO does; the names come from the parts of earlier checkpoints, or are the usual."""
    assert place.server is not None

    def by_key_alone(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.method == "GET" and "?uploads" in request.path and "prefix=" in request.path:
            prefix = re.search(r"prefix=([^&]*)", request.path)
            assert prefix is not None
            if not prefix[1].replace("%2F", "/").endswith(".safetensors"):
                body = re.sub(rb"<Upload>.*</Upload>", b"", answer.body)
                headers = {**answer.headers, "Content-Length": str(len(body))}
                return Answer(answer.status, headers, body)
        return answer

    with uploading(place, "run"):
        pass
    with fault_proxy(place.server.endpoint) as proxy:
        proxy.rule = by_key_alone
        config = {**place.server.config, "endpoint": proxy.endpoint}
        store = CloudStore(place.run("run"), config=config)
        assert store.begun_uploads().found == ()
        session = record_origin(store, open_session(store, ensure_run(store)), None)
        assert [one.key for one in find_cut_off(store, scan(store)).dead] == [PART]
        assert sweep(store, session) == ["ep1"]
    assert uploads(place) == []


@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_a_start_asks_for_uploads_once_and_a_first_start_never(place: Place) -> None:
    """A refused right to see them is no reason not to start."""
    assert place.server is not None

    def refuse(request: Request, forward: Forward) -> Answer:
        if "?uploads" in request.path and request.method == "GET":
            return Answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        return forward(request)

    with fault_proxy(place.server.endpoint) as proxy:
        config = {**place.server.config, "endpoint": proxy.endpoint}
        for number in range(3):
            proxy.seen.clear()
            proxy.rule = refuse if number == 2 else lambda request, forward: forward(request)
            store = CloudStore(place.run("run"), config=config)
            with mp.Checkpointer(store, model=torch.nn.Linear(2, 2)) as run:
                assert run.resumed_from == (f"ba{number}" if number else None)
                run.step()
                run.save(wait=True)
            asked = [one for one in proxy.seen if one.method == "GET" and "?uploads" in one.path]
            assert len(asked) == min(number, 1)


@pytest.mark.parametrize("trouble", ["import", "client"])
@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_a_boto3_that_cannot_be_used_keeps_nobody_from_anything(
    place: Place, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is installed for housekeeping; a run must start without it, and say why it does."""
    with mp.Checkpointer(place.run("run"), model=torch.nn.Linear(2, 2)) as run:
        run.save("ba1", wait=True)

    def refuse(*_: object) -> None:
        raise ValueError(f"Invalid endpoint: {SECRET}")

    if trouble == "import":
        monkeypatch.delitem(sys.modules, "milepost.stores.unended_s3", raising=False)
        monkeypatch.setitem(sys.modules, "botocore.session", None)
    else:
        monkeypatch.setattr("milepost.stores.unended_s3._client", refuse)
    with mp.Checkpointer(place.run("run"), model=torch.nn.Linear(2, 2)) as run:
        assert run.resumed_from == "ba1"
    why = "boto3 is installed but cannot be used here"
    assert [one.levelname for one in caplog.records if why in one.message] == ["WARNING"]
    status, text = checked(place.run("run"))["cut-off uploads"]
    assert (status, why in text) == ("ok", True)
    answer = CliRunner().invoke(app, ["prune", place.run("run"), "--keep-last", "5"])
    assert (answer.exit_code, why in answer.stderr) == (0, True)
    assert SECRET not in caplog.text + text + answer.output


def test_a_host_that_boto3_does_not_take_is_a_reason_too() -> None:
    """The store's own client takes it, and so do the tools that give hosts such names."""
    config = {"endpoint": "http://minio_server:9000", "access_key_id": KEY}
    store = CloudStore("s3://runs/run", config={**config, "secret_access_key": SECRET})
    assert "cannot be used here (ValueError)" in store.why_uploads_are_unseen()
    with pytest.raises(mp.UsageError, match="cannot be used here"):
        store.begun_uploads()


@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_uploads_are_seen_and_ended_below_a_folder_too(place: Place, tmp_path: Path) -> None:
    """Of a run that keeps its records in a hidden folder; and nothing shows the secret."""
    with uploading(place, "run"):
        pass
    above = CloudStore(place.root)
    below = PrefixStore(above, "run")
    shown = below.begun_uploads()
    assert [one.key for one in shown.found] == [PART]
    assert below.begun_uploads("ep10").found == ()
    assert shown.now_s is not None
    assert abs(shown.now_s - time.time()) < 60
    assert abs(below.upload_written_s(shown.found[0]) - time.time()) < 60
    for _ in range(2):  # one that has ended is no error
        below.end_upload(shown.found[0])
    # Whoever looks at one that another has just ended goes on with the others.
    assert below.upload_written_s(shown.found[0]) == math.inf
    assert uploads(place) == []
    assert SECRET not in repr(above) + repr(vars(above)) + repr(vars(above._unended.uploads()))
    assert isinstance(place.server, Server)
