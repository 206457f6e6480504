"""Copies that a bucket is asked to make of its own objects."""

from __future__ import annotations

import itertools

import pytest

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.cloud import CloudStore
from milepost.testing import fault_proxy, write_key
from milepost.testing.proxy import Answer, Forward, Request, error_answer, first, lose_answer, stall

from ..servers import AZURE_ACCOUNT, Server

pytestmark = pytest.mark.cloud
_numbers = itertools.count()


def is_copy(request: Request) -> bool:
    return any(name.lower().endswith("-copy-source") for name in request.headers)


def do_and_refuse(request: Request, forward: Forward) -> Answer:
    """Copy, and say that it was not."""
    forward(request)
    return error_answer(400, "Whatever")


@pytest.mark.parametrize("fault", [stall, lose_answer, do_and_refuse])
def test_a_copy_that_fails_is_given_up_soon_and_leaves_nothing(moto: Server, fault) -> None:
    """A save waits for it; then the bytes are written, under the very same key."""
    with fault_proxy(moto.endpoint) as proxy:
        config = {**moto.config, "endpoint": proxy.endpoint}
        url = f"{moto.url}/copies/{next(_numbers)}"
        store = CloudStore(url, config=config, max_retries=0, silent_timeout_s=0.3)
        write_key(store, "old", b"1" * 1000)
        proxy.rule = first(1, fault, only=is_copy)
        with pytest.raises(mp.StorageError, match="copy"):
            store.link("old", "new")
        assert [one for one in proxy.seen if is_copy(one)]
        write_key(store, "new", b"1" * 1000)
        assert store.get("new") == b"1" * 1000


def test_a_copy_has_the_time_of_a_service_and_not_of_a_line() -> None:
    """Its bytes pass no line: hours are for what is sent on the slowest one."""
    store = CloudStore("s3://nowhere/at/all", config={"region": "us-east-1"})
    largest_bytes = 5 * 1024**3
    assert store._clients.request_s(0, kind="copy") == 60
    assert store._clients.request_s(largest_bytes, kind="copy") == pytest.approx(167, abs=1)
    assert store._clients.request_s(largest_bytes) > 3600


def test_azure_is_not_asked_to_copy(azurite: Server) -> None:
    """It says yes before it has, and may do it later or never."""
    with fault_proxy(azurite.endpoint) as proxy:
        config = {**azurite.config, "endpoint": f"{proxy.endpoint}/{AZURE_ACCOUNT}"}
        store = CloudStore(f"{azurite.url}/copies/{next(_numbers)}", config=config)
        assert not store.traits.copies_itself
        for key, size_bytes in (("small", 1000), ("large", 2 * BLOCK_BYTES + 5)):
            data = bytes(range(250)) * (size_bytes // 250 + 1)
            write_key(store, key, data[:size_bytes])
            store.link(key, f"copy/{key}")
            assert store.get(f"copy/{key}") == data[:size_bytes]
        assert proxy.seen
        assert not [one for one in proxy.seen if is_copy(one)]
