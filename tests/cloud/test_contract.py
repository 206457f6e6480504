"""Object stores keep the whole contract too."""

from __future__ import annotations

import itertools

import pytest

from milepost.errors import ExistsError
from milepost.stores import Store
from milepost.stores.cloud import CloudStore
from milepost.testing import StoreConformance

from ..servers import Server
from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud
_numbers = itertools.count()


def open_s3(endpoint: str, prefix: str, **options: object) -> CloudStore:
    config = {
        "endpoint": endpoint,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        **options,
    }
    return CloudStore(f"s3://runs/{prefix}", config=config, retry_timeout_s=20, max_retries=3)


class TestS3(StoreConformance):
    @pytest.fixture(autouse=True)
    def _take_endpoint(self, s3_endpoint: str) -> None:
        self.endpoint = s3_endpoint

    def make_store(self) -> Store:
        return open_s3(self.endpoint, f"contract/{next(_numbers)}")


class TestJuiceFS(StoreConformance):
    """A real server, which does not take the condition: for one writer only."""

    @pytest.fixture(autouse=True)
    def _take_server(self, juicefs: Server) -> None:
        self.server = juicefs

    def make_store(self) -> Store:
        return self.server.open(f"contract/{next(_numbers)}")


class TestAzure(StoreConformance):
    """The emulator of the service's maker."""

    @pytest.fixture(autouse=True)
    def _take_server(self, azurite: Server) -> None:
        self.server = azurite

    def make_store(self) -> Store:
        return self.server.open(f"contract/{next(_numbers)}")


class TestGcs(StoreConformance):
    """The protocol, not the service."""

    @pytest.fixture(autouse=True)
    def _take_server(self, gcs: Server) -> None:
        self.server = gcs

    def make_store(self) -> Store:
        return self.server.open(f"contract/{next(_numbers)}")


def test_a_place_that_replaces_is_found_out_and_said(
    juicefs: Server, moto: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """On the server itself, by two objects of one name, and once only."""
    for server in (juicefs, moto):
        caplog.clear()
        store = server.open(f"probe/{next(_numbers)}")
        assert store.traits.exclusive_create
        for key in ("a", "b"):
            store.put_new(key, key.encode())
            with pytest.raises(ExistsError):
                store.put_new(key, b"again")
        warned = [one for one in caplog.records if "safe for one writer only" in one.message]
        assert store.traits.exclusive_create is server.is_exclusive
        assert len(warned) == (not server.is_exclusive)
        assert [entry.key for entry in store.list()] == ["a", "b"]


@pytest.mark.parametrize(
    ("endpoint", "said", "expected"),
    [
        ("https://example.test", {}, True),
        ("", {}, True),
        ("http://127.0.0.1:9", {}, False),
        ("https://example.test", {"aws_unsigned_payload": False}, False),
        ("http://127.0.0.1:9", {"unsigned_payload": True}, True),
    ],
)
def test_bodies_are_hashed_where_the_connection_does_not(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, said: dict[str, bool], expected: bool
) -> None:
    """TLS has a checksum; over plain HTTP only the signature says that bytes came as they went."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_UNSIGNED_PAYLOAD"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint": endpoint} if endpoint else {}
    store = CloudStore("s3://runs/a", config={"region": "us-east-1", **options, **said})
    options = store._clients.get("upload").config
    assert (options.get("unsigned_payload") in (True, "true")) is expected
    is_amazon = expected and not endpoint
    assert (options.get("checksum_algorithm") == "CRC64NVME") is is_amazon
