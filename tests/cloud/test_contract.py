"""Object stores keep the whole contract too."""

from __future__ import annotations

import itertools

import pytest

from milepost.stores import Store
from milepost.stores.cloud import CloudStore
from milepost.testing import StoreConformance

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
