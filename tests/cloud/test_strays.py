"""What an upload that ends badly leaves in the bucket, by the eyes of another client."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.runs import Identity, ensure_run, open_session, record_origin, sweep
from milepost.stores.cloud import CloudStore
from milepost.stores.pages import page_memory
from milepost.testing import FaultProxy, fault_proxy, save_files
from milepost.testing.proxy import Answer, Forward, HangUp, Request, answer_with, first, stall

from ..servers import BUCKET, KEY, SECRET, Server, s3_client
from .test_contract import open_s3

pytestmark = pytest.mark.cloud
_numbers = itertools.count()

WRITE = """
import sys
from milepost.format.digest import BLOCK_BYTES
from milepost.runs import claim, ensure_run, open_session, record_origin
from milepost.stores.cloud import CloudStore
from milepost.stores.pages import page_memory

endpoint, url, key, secret = sys.argv[1:]
store = CloudStore(url, config={
    "endpoint": endpoint, "access_key_id": key, "secret_access_key": secret, "region": "us-east-1",
})
session = record_origin(store, open_session(store, ensure_run(store)), None)
claimed = claim(store, session, "ep1", 1)
writer = store.create_writer("ep1/model.safetensors", 4 * BLOCK_BYTES)
block = memoryview(page_memory(BLOCK_BYTES))
for number in range(3):
    writer.write_at(number * BLOCK_BYTES, block)
print("under way", flush=True)
sys.stdin.read()
"""


@dataclass
class Bucket:
    """A folder of the bucket, and another client that looks at it."""

    proxy: FaultProxy
    store: CloudStore
    prefix: str
    client: Any

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        return [one["Key"] for one in found if one["Key"].startswith(self.prefix)]

    def objects(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self.prefix}/")
        return [one["Key"] for one in found.get("Contents", ())]


@pytest.fixture
def bucket(moto: Server) -> Iterator[Bucket]:
    prefix = f"strays/{next(_numbers)}"
    with fault_proxy(moto.endpoint) as proxy:
        yield Bucket(proxy, open_s3(proxy.endpoint, prefix), prefix, s3_client(moto))


def is_part(request: Request) -> bool:
    return "partNumber=" in request.path


def test_an_upload_that_is_dropped_leaves_nothing(bucket: Bucket) -> None:
    """Neither with blocks on their way nor with some missing."""
    block = memoryview(page_memory(BLOCK_BYTES))
    for end in ("abort", "close"):
        writer = bucket.store.create_writer("big", 3 * BLOCK_BYTES)
        writer.write_at(0, block)
        if end == "abort":
            writer.abort()
            writer.abort()
        else:
            with pytest.raises(mp.DamagedError, match="missing"):
                writer.close()
        assert any(is_part(one) or "uploads" in one.path for one in bucket.proxy.seen)
        assert (bucket.uploads(), bucket.objects()) == ([], [])
        bucket.proxy.seen.clear()


def test_an_upload_that_fails_leaves_nothing(bucket: Bucket) -> None:
    """Whichever of its requests was refused; and the writer gets the reason."""
    block = memoryview(page_memory(BLOCK_BYTES))

    def is_complete(request: Request) -> bool:
        return request.method == "POST" and "uploadId=" in request.path

    for only in (is_part, is_complete):
        bucket.proxy.rule = first(None, answer_with(403, "AccessDenied"), only=only)
        writer = bucket.store.create_writer("big", 3 * BLOCK_BYTES)
        with pytest.raises(mp.AccessError) as caught:
            for number in range(3):
                writer.write_at(number * BLOCK_BYTES, block)
            writer.close()
        writer.abort()
        assert caught.value.facts["path"] == "big"
        assert (bucket.uploads(), bucket.objects()) == ([], [])


def test_a_save_that_fails_leaves_nothing_and_the_next_one_succeeds(bucket: Bucket) -> None:
    """Of a whole checkpoint: its attempt is given up, in the bucket too."""
    store = bucket.store
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    records = bucket.objects()
    files = {"part": bytes(2 * BLOCK_BYTES)}
    bucket.proxy.rule = first(None, answer_with(400, "ExpiredToken"), only=is_part)
    with pytest.raises(mp.AccessError):
        save_files(store, session, name="ep1", attempt=1, files=files)
    bucket.proxy.rule = first(0, stall)
    assert bucket.uploads() == []
    left = [key for key in bucket.objects() if key not in records]
    save_files(store, session, name="ep1", attempt=2, files=files)
    assert all("part" not in key for key in left)
    assert mp.open_run(store).latest().verify().is_good


def test_a_part_whose_answer_is_lost_is_sent_again_from_memory(bucket: Bucket) -> None:
    """Though the memory it came from was filled anew meanwhile."""
    sent: dict[str, set[bytes]] = {}

    def lose_each_once(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if is_part(request):
            tries = sent.setdefault(request.path.partition("?")[2], set())
            is_first = not tries
            tries.add(request.body)
            if is_first:
                raise HangUp
        return answer

    bucket.proxy.rule = lose_each_once
    memory = memoryview(page_memory(BLOCK_BYTES))
    writer = bucket.store.create_writer("big", 4 * BLOCK_BYTES)
    for number in range(4):
        memory[:] = bytes([number + 1]) * BLOCK_BYTES
        writer.write_at(number * BLOCK_BYTES, memory)
    memory[:] = bytes(BLOCK_BYTES)
    writer.close()
    assert len(sent) == 4
    assert all(len(bodies) == 1 for bodies in sent.values())
    stored = bucket.client.get_object(Bucket=BUCKET, Key=f"{bucket.prefix}/big")["Body"].read()
    assert stored == b"".join(bytes([number + 1]) * BLOCK_BYTES for number in range(4))


def test_without_another_client_what_a_killed_process_leaves_hurts_nobody(
    bucket: Bucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not seen in the run; the next session goes on, and says how to get rid of it."""
    monkeypatch.setattr("milepost.stores.unended.importlib.util.find_spec", lambda _: None)
    arguments = [bucket.proxy.endpoint, f"s3://{BUCKET}/{bucket.prefix}", KEY, SECRET]
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"under way\n"
        process.kill()
    deadline_s = time.monotonic() + 20
    while not bucket.uploads():
        assert time.monotonic() < deadline_s, "no upload was begun"
    assert bucket.uploads() == [f"{bucket.prefix}/ep1/model.safetensors"]
    store = bucket.store
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    with caplog.at_level(logging.INFO, logger="milepost"):
        assert sweep(store, session) == ["ep1"]
    assert "milepost[s3]" in caplog.text
    assert "a rule of the bucket" in caplog.text
    save_files(store, session, name="ep1", attempt=1, files={"part": bytes(2 * BLOCK_BYTES)})
    assert mp.open_run(store).latest().verify(level="full").is_good
    assert bucket.uploads() == [f"{bucket.prefix}/ep1/model.safetensors"]


def test_sweeping_says_nothing_of_uploads_that_cannot_be(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a dead attempt there is nothing to look for."""
    store = bucket.store
    me = Identity("host", 1, "boot", "1@ns", "machine")
    session = record_origin(store, open_session(store, ensure_run(store), identity=me), None)
    with caplog.at_level(logging.INFO, logger="milepost"):
        assert sweep(store, session) == []
    assert "upload" not in caplog.text
