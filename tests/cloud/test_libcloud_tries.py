"""Requests of libcloud's drivers are tried again where that may help."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.base import LastingWriter
from milepost.stores.pages import page_memory
from milepost.testing import FaultProxy, fault_proxy
from milepost.testing.proxy import Rule, answer_with, first, hang_up, pass_on

from ..servers import BUCKET, KEY, SECRET, Server

libcloud = pytest.importorskip("libcloud")
from milepost.stores.libcloud import LibcloudStore, make_driver  # noqa: E402 - needs libcloud

pytestmark = [
    pytest.mark.cloud,
    # Its drivers leave connections that broke to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
_numbers = itertools.count()
SMALL = b"record" * 100


@pytest.fixture
def proxy(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setattr("milepost.stores.tries._FIRST_PAUSE_S", 0.01)
    with fault_proxy(moto.endpoint) as one:
        yield one


def store_at(proxy: FaultProxy, *, max_retries: int = 3) -> LibcloudStore:
    where = urlsplit(proxy.endpoint)
    options = {
        "key": KEY,
        "secret": SECRET,
        "host": where.hostname,
        "port": where.port,
        "secure": False,
        "region": "us-east-1",
    }
    store = LibcloudStore(
        "s3",
        BUCKET,
        prefix=f"libcloud/{next(_numbers)}",
        make=lambda: make_driver("s3", options),
        retry_timeout_s=20,
        max_retries=max_retries,
    )
    store.put("old", SMALL)
    proxy.seen.clear()
    return store


ASKED: dict[str, tuple[Callable[[LibcloudStore], Any], Any]] = {
    "put": (lambda store: store.put("new", SMALL), None),
    "put_new": (lambda store: store.put_new("new", SMALL), None),
    "get": (lambda store: store.get("old"), SMALL),
    "range": (lambda store: bytes(store.read_range("old", 2, 7)), SMALL[2:9]),
    "head": (lambda store: store.head("old").size_bytes, len(SMALL)),
    "list": (lambda store: [one.key for one in store.list()], ["old"]),
    "copy": (lambda store: store.link("old", "new"), None),
    "delete": (lambda store: store.delete("old"), None),
}


@pytest.mark.parametrize("rule", [answer_with(503, "SlowDown"), hang_up], ids=["503", "reset"])
def test_what_passes_is_not_noticed(proxy: FaultProxy, rule: Rule) -> None:
    """Every request of every operation fails once, and all of them succeed."""
    for name, (ask, result) in ASKED.items():
        store = store_at(proxy, max_retries=6)  # its driver sends all in three requests
        failed: Counter[str] = Counter()

        def once_each(request: Any, forward: Any, failed: Counter[str] = failed) -> Any:
            which = f"{request.method} {request.path.partition('uploadId')[0]}"
            failed[which] += 1
            return (rule if failed[which] == 1 else pass_on)(request, forward)

        proxy.rule = once_each
        assert ask(store) == result, name
        proxy.rule = pass_on
        assert failed
        found = {one.key: store.get(one.key) for one in store.list()}
        expected = {} if name == "delete" else {"old": SMALL}
        if name in ("put", "put_new", "copy"):
            expected["new"] = SMALL
        assert found == expected, name


def test_a_range_that_comes_in_part_is_asked_for_again(proxy: FaultProxy) -> None:
    """It says nothing of the object, which has those bytes: not even if it goes on like that."""

    def shorten(request: Any, forward: Any) -> Any:
        answer = forward(request)
        return replace(answer, body=answer.body[:3])

    def is_range(request: Any) -> bool:
        return request.method == "GET" and "range" in map(str.lower, request.headers)

    store = store_at(proxy)
    reader = store.open_reader("old")
    proxy.rule = first(2, shorten, only=is_range)
    buffer = bytearray(7)
    reader.read_into(2, memoryview(buffer))
    assert bytes(buffer) == SMALL[2:9]
    proxy.rule = first(None, shorten, only=is_range)
    with pytest.raises(mp.StorageError, match="3 of 7 bytes came") as caught:
        reader.read_into(2, memoryview(buffer))
    assert caught.value.facts["tries"] == 4


@pytest.mark.parametrize(
    ("rule", "kind", "num_tries"),
    [
        (answer_with(500, "InternalError"), mp.StorageError, 4),
        (hang_up, mp.StorageError, 4),
        (answer_with(403, "AccessDenied"), mp.AccessError, 1),
        (answer_with(400, "InvalidRequest"), mp.StorageError, 1),
    ],
    ids=["500", "reset", "403", "400"],
)
def test_what_lasts_is_said_and_what_is_hopeless_at_once(
    proxy: FaultProxy, rule: Rule, kind: type[Exception], num_tries: int
) -> None:
    """With the number of tries, and never with what the driver says."""
    store = store_at(proxy)
    proxy.rule = rule
    with pytest.raises(kind) as caught:
        store.put("new", SMALL)
    assert len(proxy.seen) == num_tries
    assert isinstance(caught.value, mp.CheckpointError)
    assert caught.value.facts["tries"] == num_tries
    assert SECRET not in str(caught.value)


def test_an_upload_begins_again_where_its_bytes_are_still_there(proxy: FaultProxy) -> None:
    """What has not begun, or stays in memory, is sent once more; a stream that is used up is not.

    The same feed as that of the other stores; see ``uploading.py``.
    """
    store, block = store_at(proxy), memoryview(page_memory(BLOCK_BYTES))

    def is_upload(request: Any) -> bool:
        return "/big" in request.path and request.method in ("PUT", "POST")

    def is_part(request: Any) -> bool:
        return "partNumber" in request.path

    proxy.rule = first(1, answer_with(503, "SlowDown"), only=is_upload)
    store.upload("big", [block], BLOCK_BYTES)
    proxy.rule = first(1, answer_with(503, "SlowDown"), only=is_part)
    writer = store.create_writer("big-kept", 2 * BLOCK_BYTES)
    assert isinstance(writer, LastingWriter)
    writer.refer_at(0, block)
    writer.refer_at(BLOCK_BYTES, block)
    writer.close()
    proxy.rule = first(1, answer_with(503, "SlowDown"), only=is_part)
    with pytest.raises(mp.StorageError):
        store.upload("big-once", iter([block, block]), 2 * BLOCK_BYTES)
    proxy.rule = pass_on
    sizes = {one.key: one.size_bytes for one in store.list()}
    assert sizes == {"old": len(SMALL), "big": BLOCK_BYTES, "big-kept": 2 * BLOCK_BYTES}
