"""Options that the client of a bucket cannot take are refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from milepost.errors import UsageError
from milepost.stores import clients
from milepost.stores.cloud import CloudStore

PLACES = {
    "s3://bucket/run": {"region": "us-east-1", "skip_signature": "true"},
    "gs://bucket/run": {"skip_signature": "true"},
    "az://bucket/run": {"account_name": "somebody", "skip_signature": "true"},
}


@pytest.mark.parametrize("url", PLACES)
@pytest.mark.parametrize(
    "name", ["allow_http", "Allow_Http", "timeout", "proxy_url", "default_headers"]
)
def test_an_option_of_connections_is_refused_by_its_name(url, name):
    """The library panics, which no ``except Exception`` sees; and each may hold a secret."""
    prefix = {"s3": "aws", "gs": "google", "az": "azure"}[url[:2]]
    CloudStore(url, config=PLACES[url])
    for given in (name, f"{prefix}_{name}", f"{prefix}_{name}".upper()):
        with pytest.raises(UsageError, match=f"'{given}'") as caught:
            CloudStore(url, config={**PLACES[url], given: "secret"})
        assert "secret" not in str(caught.value)


class PanicException(BaseException):
    """As those of libraries in Rust are."""


@pytest.mark.parametrize("error", [PanicException, TypeError])
def test_a_client_that_cannot_be_made_is_a_matter_of_its_options(monkeypatch, error):
    """Whatever the library does about an option that it does not like."""

    def fail(*_: Any, **__: Any) -> None:
        raise error("secret")

    monkeypatch.setattr(clients, "from_url", fail)
    with pytest.raises(UsageError, match=f"No client can be made for .*{error.__name__}") as caught:
        CloudStore("s3://bucket/run", config={"region": "us-east-1"})
    assert "secret" not in str(caught.value)


def test_who_breaks_off_while_a_client_is_made_is_heard(monkeypatch):
    """A Ctrl-C is no matter of options."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clients, "from_url", fail)
    with pytest.raises(KeyboardInterrupt):
        CloudStore("s3://bucket/run", config={"region": "us-east-1"})
