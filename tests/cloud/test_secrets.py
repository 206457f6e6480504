"""No secret is told: by what succeeds, by what fails, in memory, on a disk or in the bucket.

Every secret here is one text that occurs nowhere else. What is looked through is everything that a
person or another process gets to see: logs down to DEBUG, what is printed of objects, errors with
all that hangs on them, what is pickled, files, objects, and what starts processes of our own.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.stores import ObjectStoreProviderHparams
from milepost.stores.cloud import CloudStore
from milepost.testing import FaultProxy, fault_proxy
from milepost.testing.proxy import Request, answer_with, first, hang_up
from milepost.uploads.destination import Destination
from milepost.uploads.process import UploadProcess

from ..servers import BUCKET, Server, s3_client

pytestmark = pytest.mark.cloud
_numbers = itertools.count()

KEY_ID, SECRET, TOKEN = "AKIA7QX3NEVERTELL", "sEcReT-nEvEr-tElL-77", "token-never-tell-88"
SIGNATURE, ACCOUNT_KEY = "c2lnbmF0dXJlTmV2ZXJUZWxs", "YWNjb3VudEtleU5ldmVyVGVsbA=="
SECRETS = (KEY_ID, SECRET, TOKEN, SIGNATURE, ACCOUNT_KEY)


def told(text: str | bytes) -> list[str]:
    """Return the secrets that a text holds."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return [one for one in SECRETS if one.encode() in data]


def texts_of(error: BaseException) -> Iterator[str]:
    """Yield all that an error may tell, those behind it included, shown or not."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield from (str(one), repr(one), repr(getattr(one, "facts", None)), repr(vars(one)))
        yield "".join(traceback.format_exception(one))
        left += [one.__cause__, one.__context__]


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as one:
        yield one


def open_s3(endpoint: str, prefix: str, **options: Any) -> CloudStore:
    config = {
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
        "session_token": TOKEN,
        "region": "us-east-1",
        "endpoint": endpoint,
    }
    url = f"s3://{BUCKET}/{prefix}"
    return CloudStore(url, config={**config, **options}, max_retries=1)


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST") and "ep2/" in request.path


def test_a_run_that_fails_and_goes_on_tells_no_secret(
    proxy: FaultProxy,
    moto: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first record to the last error."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    prefix = f"secrets/{next(_numbers)}"
    store = open_s3(proxy.endpoint, prefix)
    seen: list[str] = []
    model = torch.nn.Linear(1500, 1500)
    with mp.Checkpointer(store, model=model) as run:
        seen += [repr(run), repr(run.save("ep1", wait=True)), repr(store), repr(vars(store))]
        seen += [repr(vars(value)) for value in vars(store).values() if hasattr(value, "__dict__")]
        for trouble in (
            answer_with(403, "AccessDenied"),
            answer_with(400, "ExpiredToken"),
            answer_with(500, "InternalError"),
            hang_up,
        ):
            proxy.rule = first(None, trouble, only=is_write)
            with pytest.raises(mp.CheckpointError) as caught:
                run.save("ep2", wait=True)
            seen += texts_of(caught.value)
            seen += [repr(pickle.dumps(caught.value))]
        proxy.rule = first(0, hang_up)
        run.save("ep3", wait=True)
    assert [one.name for one in mp.open_run(store).checkpoints()] == ["ep1", "ep3"]
    with pytest.raises(mp.UsageError) as refused:
        pickle.dumps(store)
    seen += texts_of(refused.value)
    mp.open_run(store).latest().to_directory(tmp_path / "copy")
    assert [one for one in seen if told(one)] == []
    assert told(caplog.text) == []
    assert [record for record in caplog.records if told(repr(vars(record)))] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if told(path.read_bytes())] == []
    client = s3_client(moto)
    objects = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    for one in objects:
        found = client.get_object(Bucket=BUCKET, Key=one["Key"])
        assert told(one["Key"]) == told(repr(found["Metadata"])) == told(found["Body"].read()) == []
    signed = [one for one in proxy.seen if KEY_ID in one.headers.get("authorization", "")]
    assert signed  # the secrets were in use all the time


@pytest.mark.parametrize("how", ["sas", "key"])
@pytest.mark.parametrize("trouble", [answer_with(403, "AuthenticationFailed"), hang_up, "nobody"])
def test_a_signed_address_is_not_told(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture, how: str, trouble: Any
) -> None:
    """The client puts it into its errors: it is enough to read and write what it names."""
    caplog.set_level(logging.DEBUG)
    secret = {
        "sas": {"sas_key": f"sv=2024-01-01&sig={SIGNATURE}"},
        "key": {"account_key": ACCOUNT_KEY},
    }[how]
    endpoint = "http://127.0.0.1:1" if trouble == "nobody" else f"{proxy.endpoint}/account"
    store = CloudStore(
        "az://runs/a",
        config={"account_name": "account", "endpoint": endpoint, **secret},
        max_retries=1,
    )
    if trouble != "nobody":
        proxy.rule = trouble
    for ask in (
        lambda: store.put_new("a", b"1"),
        lambda: store.get("a"),
        lambda: list(store.list()),
        lambda: store.head("a"),
        lambda: store.delete("a"),
        lambda: mp.open_run(store),
    ):
        with pytest.raises(mp.CheckpointError) as caught:
            ask()
        assert [one for one in texts_of(caught.value) if told(one)] == []
    assert told(caplog.text) == told(repr(vars(store))) == told(repr(store)) == []
    if how == "sas" and trouble != "nobody":
        assert any(SIGNATURE in one.path for one in proxy.seen)  # it was in use


def test_options_that_make_no_client_are_not_told() -> None:
    """Nor those beside the one that is wrong."""
    for options in ({"nonsense": TOKEN}, {"conditional_put": TOKEN}, {"region": 7}):
        with pytest.raises(mp.UsageError) as caught:
            open_s3("http://127.0.0.1:1", "x", **options)
        shown = "".join(traceback.format_exception(caught.value))
        assert told(shown) == told(repr(caught.value.facts)) == told(pickle.dumps(caught.value))


def test_a_password_in_an_endpoint_is_not_told(proxy: FaultProxy) -> None:
    """The hint says where a bucket was looked for."""
    endpoint = proxy.endpoint.replace("http://", f"http://user:{TOKEN}@")
    store = open_s3(endpoint, "x")
    proxy.rule = answer_with(404, "NoSuchBucket")
    with pytest.raises(mp.StorageError) as caught:
        store.get("a")
    assert proxy.endpoint in str(caught.value)
    assert [one for one in texts_of(caught.value) if told(one)] == []


def test_our_own_processes_are_told_nothing_by_their_command(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on the machine sees a command; secrets stay under the names the user gave them."""
    monkeypatch.setenv("STORE_KEY", KEY_ID)
    monkeypatch.setenv("STORE_SECRET", SECRET)
    host, port = proxy.endpoint.removeprefix("http://").split(":")
    destination = Destination(
        ObjectStoreProviderHparams(
            provider="s3",
            container=BUCKET,
            key_environ="STORE_KEY",
            secret_environ="STORE_SECRET",
            region="us-east-1",
            host=host,
            port=int(port),
            extra_init_kwargs={"secure": False},
        )
    )
    path = tmp_path / "file"
    path.write_bytes(b"data")
    uploader = UploadProcess(destination)
    try:
        pid = uploader._process.pid
        uploader.send(f"secrets-{time.time_ns()}", str(path), progress=lambda _: None)
        assert told(Path(f"/proc/{pid}/cmdline").read_bytes()) == []
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        holders = {one.partition(b"=")[0] for one in variables if told(one)}
        assert holders == {b"STORE_KEY", b"STORE_SECRET"}
    finally:
        uploader.close()
    assert told(repr(vars(uploader))) == told(repr(destination)) == []
    assert os.environ["STORE_SECRET"] == SECRET
