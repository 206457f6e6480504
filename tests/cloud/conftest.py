"""Object stores on this machine; see ``tests/servers.py``."""

from __future__ import annotations

import pytest

from milepost.testing.proxy import Request

from ..servers import KEY, SECRET, Server

__all__ = ["KEY", "SECRET", "is_put"]


def is_put(request: Request) -> bool:
    return request.method == "PUT"


@pytest.fixture(scope="session")
def s3_endpoint(moto: Server) -> str:
    """A server that speaks S3, conditional creation included."""
    return moto.endpoint


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as ever, in a tenth of the time; how long they are is tested by a clock."""
    monkeypatch.setattr("milepost.stores.tries._FIRST_PAUSE_S", 0.01)
