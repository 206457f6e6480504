"""Object stores: neighbours, places, refusals, and how they are reached."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.runs import delete_checkpoint, ensure_run, open_session, record_origin
from milepost.stores import LocalStore, MemoryStore, Store, open_store
from milepost.stores.cloud import CloudStore
from milepost.testing import FaultProxy, fault_proxy, save_files
from milepost.testing.proxy import Answer, Forward, Request, answer_with, error_answer

from ..servers import BUCKET, KEY, SECRET, Server, s3_client

pytestmark = pytest.mark.cloud
_numbers = itertools.count()

NAMES = ("ckpt-1", "ckpt-10", "ckpt-1-best")


@pytest.fixture
def prefix() -> str:
    return f"cases{next(_numbers)}"


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as one:
        yield one


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def open_s3(endpoint: str, prefix: str, **options: Any) -> CloudStore:
    config = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    return CloudStore(f"s3://{BUCKET}/{prefix}", config={"endpoint": endpoint, **config, **options})


def keys(server: Server, prefix: str = "") -> list[str]:
    """Return what another client sees."""
    found = s3_client(server).list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [one["Key"] for one in found.get("Contents", ())]


@pytest.fixture(params=["bucket", "memory", "folder"])
def place(request: pytest.FixtureRequest, moto: Server, prefix: str, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore("run")
    return LocalStore(tmp_path / "run") if request.param == "folder" else moto.open(prefix)


def test_h29_a_checkpoint_is_not_its_neighbours(place: Store, tmp_path: Path) -> None:
    """Listed, fetched and deleted by the name, and not by what begins with it."""
    session = record_origin(place, open_session(place, ensure_run(place)), None)
    for number, name in enumerate(NAMES, start=1):
        files = {"a": name.encode(), "sub/a": b"below"}
        save_files(place, session, name=name, attempt=number, files=files)
    place.put("ckpt-1.tmp/a", b"theirs")
    listed = {entry.key.partition("/")[0] for entry in place.list("ckpt-1")}
    assert listed == {"ckpt-1"}
    with pytest.raises(mp.CheckpointError):
        list(place.list("ckpt-1/"))
    copy = mp.open_run(place).get("ckpt-1").to_directory(tmp_path / "copy")
    found = {p.relative_to(copy).as_posix() for p in Path(copy).rglob("*") if p.is_file()}
    assert {"a", "sub/a"} <= found
    assert not [name for name in found if "best" in name or "10" in name or "tmp" in name]
    assert (Path(copy) / "a").read_bytes() == b"ckpt-1"
    assert (Path(copy) / "sub" / "a").read_bytes() == b"below"
    others = {e.key for e in place.list() if not e.key.startswith(("ckpt-1/", "latest", "pins/"))}
    delete_checkpoint(place, "ckpt-1", force=True)
    left = {entry.key for entry in place.list()}
    assert others <= left
    assert not [key for key in left if key.startswith("ckpt-1/")]
    assert [one.name for one in mp.open_run(place).checkpoints()] == list(NAMES[1:])


def test_h31_a_store_that_says_slow_down_for_a_while_is_waited_for(
    proxy: FaultProxy, moto: Server, prefix: str
) -> None:
    """Each object is refused twice; all are stored, once, with the right bytes."""
    store = open_s3(proxy.endpoint, prefix)
    store.put_new("warm", b"")
    refused: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    lock = threading.Lock()

    def busy(request: Request, forward: Forward) -> Answer:
        if request.method == "PUT":
            with lock:
                refused[request.path] += 1
                if refused[request.path] <= 2:
                    return error_answer(503, "SlowDown")
                stored[request.path] += 1
        return forward(request)

    proxy.rule = busy
    data = {f"file-{number}": str(number).encode() * 100 for number in range(20)}
    groups = [list(data)[n::4] for n in range(4)]
    threads = [
        threading.Thread(target=lambda names=names: [store.put_new(n, data[n]) for n in names])
        for names in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    client = s3_client(moto)
    for name, right in data.items():
        found = client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read()
        assert found == right
    assert set(stored.values()) == {1}
    assert len(stored) == 20


@pytest.mark.parametrize(
    ("status", "code", "num_tries"),
    [(503, "SlowDown", 4), (403, "AccessDenied", 1), (404, "NoSuchBucket", 1)],
)
def test_h31_what_lasts_is_said_and_what_is_hopeless_at_once(
    proxy: FaultProxy, prefix: str, status: int, code: str, num_tries: int
) -> None:
    """With the object and the number of tries."""
    config = {"endpoint": proxy.endpoint, "access_key_id": KEY, "secret_access_key": SECRET}
    store = CloudStore(f"s3://{BUCKET}/{prefix}", config=config, max_retries=3)
    store.put_new("warm", b"")
    proxy.seen.clear()
    proxy.rule = answer_with(status, code)
    with pytest.raises(mp.CheckpointError) as caught:
        store.put("file-7", b"1")
    assert f"{prefix}/file-7" in str(caught.value)
    assert caught.value.facts["tries"] == len(proxy.seen) == num_tries


@pytest.mark.usefixtures("_credentials")
@pytest.mark.parametrize("how", ["option", "environment"])
def test_h38_every_request_goes_to_the_endpoint_that_was_given(
    proxy: FaultProxy, moto: Server, prefix: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Saving, listing, resuming and deleting; the bucket is not in the keys."""
    address = f"s3://{BUCKET}/{prefix}/team/run"
    other = "http://127.0.0.1:1"  # where nobody listens
    if how == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        place: Any = address
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", other)
        place = CloudStore(address, config={"endpoint": proxy.endpoint}, max_retries=0)
    weight = torch.nn.Parameter(torch.arange(4.0))
    model = torch.nn.Module()
    model.weight = weight
    for resumed in (None, "ba1"):
        with mp.Checkpointer(place, keep=mp.KeepLast(1), model=model) as run:
            assert run.resumed_from == resumed
            run.step()
            run.save(wait=True)
    assert [one.name for one in mp.open_run(place).checkpoints()] == ["ba2"]
    found = keys(moto, prefix)
    assert found
    assert all(key.startswith(f"{prefix}/team/run/") for key in found)
    assert not [key for key in found if "//" in key or key.count("team/run") != 1]
    assert not [key for key in found if BUCKET in key.removeprefix(f"{prefix}/team/run/")[:4]]
    assert {one.path.split("/")[1].partition("?")[0] for one in proxy.seen} == {BUCKET}


@pytest.mark.parametrize(
    ("prefix", "plain"),
    [
        ("team/run/", True),
        ("/team/run/", False),
        ("team//run", False),
        ("team/../run", False),
        ("./team/run", False),
        ("team/run?version=1", False),
        ("team/run#1", False),
    ],
)
def test_h38_odd_spellings_of_a_prefix_are_refused(prefix: str, plain: bool) -> None:
    """Or two of them would be two places, or one that nobody meant."""
    if plain:
        assert open_s3("http://127.0.0.1:1", prefix).url == f"s3://{BUCKET}/team/run"
        return
    with pytest.raises(mp.UsageError) as caught:
        open_s3("http://127.0.0.1:1", prefix)
    assert f"s3://{BUCKET}/" in caught.value.hint


@pytest.mark.usefixtures("_credentials")
def test_h38_a_missing_bucket_is_said_at_the_start(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and where it was looked for, before the training begins."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    with pytest.raises(mp.StorageError, match="NoSuchBucket") as caught:
        mp.Checkpointer("s3://nowhere/team/run", model=torch.nn.Linear(1, 1)).open()
    assert "nowhere" in str(caught.value)
    assert moto.endpoint in str(caught.value)
    assert caught.value.facts["tries"] == 1
    with pytest.raises(mp.StorageError, match="NoSuchBucket"):
        open_store("s3://nowhere/team/run").head("run.json")


def test_h38_public_data_needs_no_credentials(
    proxy: FaultProxy, moto: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are not signed, and nobody looks for what to sign them with."""
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(moto.open(prefix), model=model) as run:
        run.save("a", wait=True)
    client = s3_client(moto)
    client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    for key in keys(moto, prefix):
        client.put_object_acl(Bucket=BUCKET, Key=key, ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.endpoint + "/metadata")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    other = torch.nn.Linear(3, 2)
    mp.open_run(f"s3://{BUCKET}/{prefix}").latest().load_weights(other)
    assert other.weight.equal(model.weight)
    assert proxy.seen
    assert not [one for one in proxy.seen if "authorization" in map(str.lower, one.headers)]
    assert not [one for one in proxy.seen if "metadata" in one.path]
