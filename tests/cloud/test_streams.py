"""Long ranges come as streams, which may break off in the middle."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import PrefixStore
from milepost.stores.base import StreamingReader
from milepost.stores.cloud import CloudStore
from milepost.testing import write_key
from milepost.testing.proxy import (
    Answer,
    FaultProxy,
    Forward,
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


def shorten(size_bytes: int) -> Rule:
    """Answer with so many bytes as if that were all: no error of the line shows it."""

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        return replace(answer, body=answer.body[:size_bytes])

    return rule


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


@pytest.mark.parametrize("size_bytes", [0, 5 * MIB])
def test_an_answer_that_ends_too_soon_is_not_the_end_of_the_object(
    proxy: FaultProxy, store: CloudStore, size_bytes: int
) -> None:
    """The rest is asked for, whether a block is read at once or many as they come."""
    proxy.rule = first(3, shorten(size_bytes), only=is_range)
    assert b"".join(stream(store)) == DATA
    assert asked(proxy) == [
        (low, len(DATA) - 1) for low in (0, size_bytes, 2 * size_bytes, 3 * size_bytes)
    ]
    proxy.seen.clear()
    proxy.rule = first(2, shorten(size_bytes), only=is_range)
    reader = store.open_reader("big")
    assert bytes(reader.lend(MIB, BLOCK_BYTES)) == DATA[MIB : MIB + BLOCK_BYTES]
    assert asked(proxy) == 3 * [(MIB, MIB + BLOCK_BYTES - 1)]


def test_a_service_that_answers_in_part_for_ever_is_unwell_and_nothing_is_damaged(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """For damage an older checkpoint would be taken, and a whole one given up."""
    proxy.rule = first(None, shorten(10), only=is_range)
    for read in (lambda: list(stream(store)), lambda: store.open_reader("big").lend(0, 100)):
        proxy.seen.clear()
        with pytest.raises(mp.StorageError) as caught:
            read()
        assert caught.value.facts["operation"] == "read"
        assert caught.value.facts["tries"] == len(asked(proxy)) < 10


def test_blocks_that_come_one_by_one_are_a_range(
    proxy: FaultProxy, store: CloudStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may never answer with more at once, and each answer goes on."""
    monkeypatch.setattr("milepost.stores.streams.BLOCK_BYTES", MIB)
    proxy.rule = first(None, shorten(MIB), only=is_range)
    assert b"".join(stream(store)) == DATA
    assert len(asked(proxy)) == 16


def test_one_short_answer_takes_no_checkpoint_from_a_resume(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """Nor do many: a bucket that is unwell is an error, and no reason for an older one."""
    model = torch.nn.Linear(1000, 1500)

    def is_part(request: Request) -> bool:
        return request.method == "GET" and request.path.endswith("model.safetensors")

    place = PrefixStore(store, "run")
    with mp.Checkpointer(place, model=model) as run:
        run.save("one", wait=True)
        run.save("two", wait=True)
    for count in (1, 2):
        proxy.rule = first(count, shorten(2 * MIB), only=is_part)
        found = torch.nn.Linear(1000, 1500)
        with mp.Checkpointer(place, model=found) as run:
            assert run.resumed_from == "two"
        assert torch.equal(found.weight, model.weight)
    proxy.rule = first(None, shorten(1000), only=is_part)
    with pytest.raises(mp.StorageError), mp.Checkpointer(place, model=model):
        pass


def test_a_range_past_the_end_is_damage(store: CloudStore) -> None:
    """An object that was cut short is not asked for more than it has."""
    with pytest.raises(mp.DamagedError):
        list(stream(store, offset=BLOCK_BYTES, length=BLOCK_BYTES))
    assert list(stream(store, offset=BLOCK_BYTES, length=0)) == []
