"""Bits that flip on the way: found by the service, by the store or by the checksum of a block."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

import milepost as mp
from milepost.engine.links import Links
from milepost.format.digest import BLOCK_BYTES, block_crcs
from milepost.runs import Level, ensure_run, open_session, record_origin, verify
from milepost.stores import PrefixStore
from milepost.stores.cloud import CloudStore
from milepost.stores.pages import page_memory
from milepost.testing import FaultProxy, fault_proxy, save_files, write_key
from milepost.testing.proxy import (
    Answer,
    Forward,
    Request,
    first,
    flip_received,
    flip_sent,
    pass_on,
)

from ..servers import BUCKET, KEY, SECRET, Server, s3_client
from .conftest import is_put
from .test_contract import open_s3

pytestmark = pytest.mark.cloud
_numbers = itertools.count()
BIG = random.Random(5).randbytes(2 * BLOCK_BYTES + 1000)


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    """Before a server that stores whatever comes."""
    with fault_proxy(s3_endpoint) as one:
        yield one


@pytest.fixture
def store(proxy: FaultProxy) -> CloudStore:
    store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}")
    store.put_new("warm", b"")
    return store


def is_part(request: Request) -> bool:
    return is_put(request) and "partNumber=" in request.path


def test_a_real_server_refuses_what_was_altered_and_gets_it_again(juicefs: Server) -> None:
    """It compares each body with the checksum in the signature; we try again from memory."""
    with fault_proxy(juicefs.endpoint) as proxy:
        store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}")
        store.put_new("warm", b"")
        for put in (store.put_new, store.put):
            proxy.rule = first(1, flip_sent(77), only=is_put)
            put("a", b"0123456789" * 100)
            assert store.get("a") == b"0123456789" * 100
            store.delete("a")
        proxy.rule = first(1, flip_sent(77), only=is_part)
        with pytest.raises(mp.StorageError):
            write_key(store, "big", BIG)
        proxy.rule = first(0, flip_sent())
        with pytest.raises(mp.MissingError):
            store.head("big")


@pytest.mark.parametrize("num_flips", [1, 99])
def test_a_part_that_is_refused_is_sent_again_from_staged_memory(
    juicefs: Server, num_flips: int
) -> None:
    """The engine keeps its memory until the save has ended; a flip need not end a save."""
    with fault_proxy(juicefs.endpoint) as proxy:
        store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}")
        proxy.rule = first(
            num_flips,
            flip_sent(77),
            only=lambda one: is_part(one) and "partNumber=2&" in one.path,
        )
        memory = memoryview(page_memory(len(BIG)))[: len(BIG)]
        memory[:] = BIG
        writer = store.create_writer("big", len(BIG))

        def write() -> None:
            for start in range(0, len(BIG), BLOCK_BYTES):
                writer.refer_at(start, memory[start : start + BLOCK_BYTES])
            writer.close()

        if num_flips == 1:
            write()
            assert not writer._feed._taken  # or the memory could not be given back
            assert (
                s3_client(juicefs)
                .get_object(Bucket=BUCKET, Key=f"{store.url.partition('runs/')[2]}/big")["Body"]
                .read()
                == BIG
            )
        else:
            with pytest.raises(mp.StorageError) as caught:
                write()
            assert caught.value.facts["tries"] == 2
            with pytest.raises(mp.MissingError):
                store.head("big")


def test_a_record_carries_its_checksum(proxy: FaultProxy, store: CloudStore) -> None:
    """What was altered before it was stored is found by whoever reads it, every time."""
    for put, key in ((store.put_new, "a"), (store.put, "b")):
        proxy.rule = first(1, flip_sent(), only=is_put)
        put(key, b"record")
        for _ in range(2):
            with pytest.raises(mp.DamagedError) as caught:
                store.get(key)
        assert caught.value.facts["path"] == key


def test_a_record_is_read_back_where_nobody_compares(proxy: FaultProxy) -> None:
    """A request without a signed body says nothing of it, so that no service can compare."""
    store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}", unsigned_payload=True)
    store.put_new("warm", b"")
    proxy.rule = first(1, flip_sent(), only=is_put)
    with pytest.raises(mp.DamagedError, match="on the way"):
        store.put_new("a", b"record")
    with pytest.raises(mp.MissingError):
        store.head("a")
    store.put_new("a", b"record")
    assert store.get("a") == b"record"
    proxy.rule = first(1, flip_sent(), only=is_put)
    store.put("a", b"newer record")
    assert store.get("a") == b"newer record"
    proxy.rule = first(None, flip_sent(), only=is_put)
    with pytest.raises(mp.DamagedError, match="on the way"):
        store.put("a", b"another one")
    assert store.head("a").size_bytes == 11


def test_what_another_has_put_meanwhile_is_left_alone(proxy: FaultProxy) -> None:
    """What is read back may be newer than what was sent: that is no harm, and not ours."""
    store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}", unsigned_payload=True)
    other = open_s3(proxy.endpoint, store.url.partition("runs/")[2])
    store.put_new("warm", b"")
    for put, key in ((store.put_new, "a"), (store.put, "a"), (store.put, "b")):
        other.delete(key)

        def replace_first(request: Request, forward: Forward, key: str = key) -> Answer:
            if request.method == "GET":
                proxy.rule = pass_on
                other.put(key, b"of another process")
            return forward(request)

        proxy.rule = replace_first
        put(key, b"mine")
        assert proxy.rule is pass_on
        assert store.get(key) == b"of another process"


def test_a_flip_on_the_way_back_is_asked_for_again(proxy: FaultProxy, store: CloudStore) -> None:
    """A record that came wrong once is not a damaged record."""
    store.put_new("a", b"record")
    for bit in range(0, 48, 7):
        proxy.rule = first(1, flip_received(bit))
        assert store.get("a") == b"record"


@pytest.fixture
def run(proxy: FaultProxy, store: CloudStore) -> PrefixStore:
    """A run with one checkpoint, of which a part was altered on its way into the bucket."""
    run = PrefixStore(store, "run")
    session = record_origin(run, open_session(run, ensure_run(run)), None)
    files = {"good": BIG, "bad": BIG[::-1]}
    proxy.rule = first(1, flip_sent(4321), only=lambda one: is_part(one) and "/bad?" in one.path)
    save_files(run, session, name="ep1", attempt=1, files=files)
    proxy.rule = first(0, flip_sent())
    return run


def test_a_part_that_was_altered_is_found_by_verifying(run: PrefixStore) -> None:
    """Where a service stores what it did not compare, the checksums of blocks tell."""
    report = verify(run, "ep1", Level.FULL)
    (problem,) = report.problems
    assert problem.path == "bad"
    found = block_crcs(run.get("ep1/bad"))
    right = block_crcs(BIG[::-1])
    assert [n for n in range(3) if found[n] != right[n]] == [problem.block]


def test_a_part_that_comes_wrong_once_is_not_damaged(
    run: PrefixStore, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for verifying nor for a download; it is told all the same."""

    def is_range(request: Request) -> bool:
        return "Range" in request.headers or "range" in request.headers

    proxy.rule = first(1, flip_received(99), only=lambda one: is_range(one) and "/good" in one.path)
    with caplog.at_level(logging.WARNING, logger="milepost"):
        report = verify(run, "ep1", Level.FULL)
    assert {problem.path for problem in report.problems} == {"bad"}
    assert "alters bytes" in caplog.text
    assert KEY not in caplog.text
    assert SECRET not in caplog.text


def test_what_came_wrong_is_not_copied_on(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that do not change are sent once and copied ever after: so is a bit that flipped."""
    store = open_s3(proxy.endpoint, f"integrity/{next(_numbers)}", unsigned_payload=True)
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    files = {"good": BIG, "bad": BIG[::-1]}
    proxy.rule = first(1, flip_sent(4321), only=lambda one: is_part(one) and "/bad?" in one.path)
    manifest = save_files(store, session, name="ep1", attempt=1, files=files)
    proxy.rule = pass_on
    links = Links(store, is_wanted=True)
    links.note(manifest)
    with caplog.at_level(logging.WARNING, logger="milepost"):
        assert links.try_link("ep2", "bad") is None
    assert "ep1 is damaged" in caplog.text
    with pytest.raises(mp.MissingError):
        store.head("ep2/bad")
    entry = links.try_link("ep2", "good")
    assert entry is not None
    assert entry.linked_from == "ep1"
    assert store.get("ep2/good") == BIG
    # Once: what was compared stays compared in its copies.
    proxy.seen.clear()
    links.note(replace(manifest, name="ep2", files=(entry,)))
    assert links.try_link("ep3", "good") is not None
    assert not [one for one in proxy.seen if one.method == "GET"]
