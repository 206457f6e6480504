"""Long ranges come as streams, which may break off in the middle."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.base import StreamingReader
from milepost.stores.cloud import CloudStore
from milepost.testing import write_key
from milepost.testing.proxy import (
    FaultProxy,
    Request,
    Rule,
    answer_with,
    cut_answer,
    fault_proxy,
    first,
    stall_answer,
)

from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud

MIB = 1024 * 1024
DATA = random.Random(7).randbytes(2 * BLOCK_BYTES - 5)


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as one:
        yield one


@pytest.fixture
def store(proxy: FaultProxy) -> CloudStore:
    config = {"endpoint": proxy.endpoint, "access_key_id": KEY, "secret_access_key": SECRET}
    store = CloudStore(
        f"s3://runs/streams/{time.time_ns()}", config=config, max_retries=2, silent_timeout_s=1
    )
    write_key(store, "big", DATA)
    proxy.seen.clear()
    return store


def is_range(request: Request) -> bool:
    return request.method == "GET" and "big" in request.path


def stream(store: CloudStore, *, offset: int = 0, length: int = len(DATA)) -> Iterator[bytes]:
    reader = store.open_reader("big")
    assert isinstance(reader, StreamingReader)
    return (bytes(piece) for piece in reader.stream(offset, length))


def asked(proxy: FaultProxy) -> list[tuple[int, int]]:
    """Return the first and the last byte of each range that was asked for."""
    found = []
    for one in proxy.seen:
        if is_range(one):
            header = {key.lower(): value for key, value in one.headers.items()}["range"]
            low, high = re.fullmatch(r"bytes=(\d+)-(\d+)", header).groups()  # type: ignore[union-attr]
            found.append((int(low), int(high)))
    return found


def test_a_range_is_one_request_and_comes_in_pieces(proxy: FaultProxy, store: CloudStore) -> None:
    """However many blocks it has; and never more of it is held than a piece."""
    pieces = list(stream(store, offset=MIB, length=len(DATA) - MIB))
    assert b"".join(pieces) == DATA[MIB:]
    assert asked(proxy) == [(MIB, len(DATA) - 1)]
    assert max(map(len, pieces)) < 3 * MIB


@pytest.mark.parametrize("trouble", [cut_answer, stall_answer], ids=["cut", "stalled"])
def test_what_breaks_off_goes_on_where_it_was(
    proxy: FaultProxy, store: CloudStore, trouble
) -> None:
    """Bytes that came are not asked for again, except for those of the piece that broke off."""
    proxy.rule = first(2, trouble(5 * MIB), only=is_range)
    assert b"".join(stream(store)) == DATA
    ranges = asked(proxy)
    assert len(ranges) == 3
    starts = [low for low, _ in ranges]
    assert starts[0] == 0
    assert all(2 * MIB < after - low <= 5 * MIB for low, after in itertools.pairwise(starts))
    assert {high for _, high in ranges} == {len(DATA) - 1}


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (answer_with(503, "SlowDown"), mp.StorageError),
        (answer_with(403, "AccessDenied"), mp.AccessError),
    ],
    ids=["503", "403"],
)
def test_what_cannot_go_on_is_said(
    proxy: FaultProxy, store: CloudStore, trouble: Rule, kind: type[mp.CheckpointError]
) -> None:
    """What came before was right, and what follows never comes."""
    proxy.rule = first(1, cut_answer(5 * MIB), only=is_range)
    pieces = stream(store)
    came = next(pieces)
    proxy.rule = first(None, trouble, only=is_range)
    with pytest.raises(kind) as caught:
        for piece in pieces:
            came += piece
    assert caught.value.facts["operation"] == "read"
    assert DATA.startswith(came)


def test_a_range_past_the_end_is_damage(store: CloudStore) -> None:
    """An object that was cut short is not asked for more than it has."""
    with pytest.raises(mp.DamagedError):
        list(stream(store, offset=BLOCK_BYTES, length=BLOCK_BYTES))
    assert list(stream(store, offset=BLOCK_BYTES, length=0)) == []
