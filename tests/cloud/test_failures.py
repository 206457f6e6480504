"""What networks and services do: each ends in success, or in an error that says what happened."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator

import pytest
import torch

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.cloud import CloudStore
from milepost.testing import read_key, write_key
from milepost.testing.proxy import (
    Answer,
    FaultProxy,
    Forward,
    HangUp,
    Request,
    Rule,
    answer_with,
    cut_answer,
    error_answer,
    fault_proxy,
    first,
    hang_up,
    lose_answer,
    stall_answer,
)

from .conftest import KEY, SECRET, is_put
from .test_contract import open_s3

pytestmark = pytest.mark.cloud


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as one:
        yield one


@pytest.fixture
def store(proxy: FaultProxy, request: pytest.FixtureRequest) -> CloudStore:
    return open_s3(proxy.endpoint, f"failures/{request.node.name}/{time.time_ns()}")


@pytest.mark.parametrize(
    "trouble",
    [
        answer_with(500, "InternalError"),
        answer_with(503, "SlowDown"),
        answer_with(429, "TooManyRequests"),
        hang_up,
    ],
    ids=["500", "503", "429", "reset"],
)
def test_passing_trouble_is_waited_out(proxy: FaultProxy, store: CloudStore, trouble) -> None:
    """Whatever is asked, and the bytes are right."""
    proxy.rule = first(2, trouble)
    store.put_new("a", b"1")
    proxy.rule = first(2, trouble)
    assert store.get("a") == b"1"
    data = random.Random(3).randbytes(2 * BLOCK_BYTES)
    proxy.rule = first(2, trouble, only=is_put)
    write_key(store, "big", data)
    proxy.rule = first(2, trouble)
    assert read_key(store, "big") == data


def test_lasting_trouble_is_an_error_with_operation_and_tries(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """Within the time that was given, and not as something missing."""
    store.put_new("warm", b"")
    proxy.seen.clear()
    proxy.rule = answer_with(503, "SlowDown")
    with pytest.raises(mp.StorageError) as caught:
        store.put_new("a", b"1")
    assert not isinstance(caught.value, mp.MissingError)
    facts = caught.value.facts
    assert (facts["operation"], facts["path"], facts["status"]) == ("create", "a", 503)
    assert (facts["code"], facts["tries"]) == ("SlowDown", 4)
    assert len([one for one in proxy.seen if is_put(one)]) == 4


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (400, "ExpiredToken"), (403, "SignatureDoesNotMatch"), (401, "x")],
)
def test_no_access_is_never_nothing_there(
    proxy: FaultProxy, store: CloudStore, status: int, code: str
) -> None:
    """A run that cannot be looked at must not be started afresh."""
    proxy.rule = answer_with(status, code)
    for ask in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.put_new("a", b"1"),
        lambda: store.delete("a"),
        lambda: store.create_writer("a", 1),
        lambda: mp.open_run(store),
    ):
        with pytest.raises(mp.CheckpointError) as caught:
            ask()
        assert not isinstance(caught.value, mp.MissingError)
    with pytest.raises(mp.AccessError):
        store.get("a")


def test_an_answer_that_got_lost_does_not_make_our_own_object_anothers(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """The second try finds what the first one made."""
    proxy.rule = first(1, lose_answer, only=is_put)
    store.put_new("a", b"ours")
    assert store.get("a") == b"ours"
    proxy.rule = first(1, lose_answer, only=is_put)
    with pytest.raises(mp.ExistsError):
        store.put_new("a", b"ours")  # equal bytes, and yet another's


def test_an_object_of_another_is_not_taken_for_ours(proxy: FaultProxy, store: CloudStore) -> None:
    """It came while our first try was lost before it arrived."""
    other = open_s3(proxy.endpoint, store.url.partition("//runs/")[2])
    store.put_new("warm", b"")

    def lose(request: Request, forward: Forward) -> Answer:
        proxy.rule = lambda request, forward: forward(request)
        other.put_new("a", b"theirs")
        raise HangUp

    proxy.rule = first(1, lose, only=is_put)
    with pytest.raises(mp.ExistsError):
        store.put_new("a", b"ours")
    assert store.get("a") == b"theirs"


def test_a_lost_answer_to_the_end_of_an_upload_is_no_loss(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """Either the object is whole, or the writer says that it is not."""
    data = random.Random(4).randbytes(2 * BLOCK_BYTES)
    proxy.rule = first(
        1, lose_answer, only=lambda one: one.method == "POST" and "uploadId" in one.path
    )
    try:
        write_key(store, "big", data)
    except mp.StorageError:
        return
    assert read_key(store, "big") == data


def test_a_body_that_breaks_off_is_not_believed(proxy: FaultProxy, store: CloudStore) -> None:
    """It is asked for again, or an error; never a short record."""
    store.put_new("a", b"0123456789" * 1000)

    proxy.rule = first(1, cut_answer(5000), only=lambda one: one.method == "GET")
    with contextlib.suppress(mp.StorageError):  # the other right answer
        assert store.get("a") == b"0123456789" * 1000
    proxy.rule = cut_answer(0)
    with pytest.raises(mp.StorageError):
        store.get("a")


def test_a_block_is_its_threads_again_as_soon_as_it_was_written(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """A slow upload must not take what has been written over it since."""

    def slow(request: Request, forward: Forward) -> Answer:
        if "partNumber" in request.path:
            time.sleep(0.15)
        return forward(request)

    store.put_new("warm", b"")
    proxy.rule = slow
    num_blocks, memory = 6, bytearray(BLOCK_BYTES)
    writer = store.create_writer("big", num_blocks * BLOCK_BYTES)
    for number in range(num_blocks):
        memory[:] = bytes([number + 1]) * BLOCK_BYTES
        writer.write_at(number * BLOCK_BYTES, memoryview(memory))
    memory[:] = bytes(BLOCK_BYTES)
    writer.close()
    stored = store.get("big")
    assert [stored[n * BLOCK_BYTES] for n in range(num_blocks)] == [1, 2, 3, 4, 5, 6]
    assert all(
        stored[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] == bytes([n + 1]) * BLOCK_BYTES
        for n in range(num_blocks)
    )


def test_a_place_without_conditions_is_used_by_one_writer_only(
    proxy: FaultProxy, store: CloudStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found out before the first record, said loudly, and what is there stays."""

    def without(request: Request, forward: Forward) -> Answer:
        headers = {k: v for k, v in request.headers.items() if k.lower() != "if-none-match"}
        return forward(Request(request.method, request.path, headers, request.body))

    proxy.rule = without
    with caplog.at_level(logging.WARNING, logger="milepost"):
        store.put_new("a", b"1")
    assert not store.traits.exclusive_create
    assert "one writer" in caplog.text
    with pytest.raises(mp.ExistsError):
        store.put_new("a", b"2")
    assert store.get("a") == b"1"
    assert [entry.key for entry in store.list()] == ["a"]


def test_a_place_where_nothing_can_be_deleted_takes_checkpoints(
    proxy: FaultProxy, store: CloudStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Some buckets keep everything on purpose; that pruning will fail is said."""
    proxy.rule = first(
        None, answer_with(403, "AccessDenied"), only=lambda one: one.method == "DELETE"
    )
    with caplog.at_level(logging.WARNING, logger="milepost"):
        store.put_new("a", b"1")
    assert store.traits.exclusive_create
    assert "nothing can be deleted" in caplog.text
    with pytest.raises(mp.AccessError):
        store.delete("a")
    assert store.get("a") == b"1"


def test_a_conflict_with_a_request_under_way_is_not_another_writer(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """The service says 409 when two conditional requests meet, such as two tries of ours."""
    store.put_new("warm", b"")
    proxy.rule = first(2, answer_with(409, "ConditionalRequestConflict"), only=is_put)
    store.put_new("a", b"1")
    assert store.get("a") == b"1"
    proxy.rule = answer_with(409, "ConditionalRequestConflict")
    with pytest.raises(mp.StorageError) as caught:
        store.put_new("b", b"1")
    assert caught.value.facts["code"] == "ConditionalRequestConflict"


def test_an_object_that_cannot_be_looked_at_is_nobodys(
    proxy: FaultProxy, store: CloudStore
) -> None:
    """It may be ours: whoever took it for another's would remove what he has just committed."""
    store.put_new("warm", b"")

    def lose_then_go_down(request: Request, forward: Forward) -> Answer:
        if not is_put(request):
            return error_answer(503, "ServiceUnavailable")
        answer = forward(request)
        if answer.status == 200:
            raise HangUp
        return answer

    proxy.rule = lose_then_go_down
    with pytest.raises(mp.StorageError) as caught:
        store.put_new("a", b"ours")
    assert not isinstance(caught.value, mp.ExistsError)


def test_a_silent_connection_is_noticed_however_large_the_object_is(
    proxy: FaultProxy, s3_endpoint: str
) -> None:
    """By the time without a byte, and not by the time that all of it may take."""
    config = {"endpoint": proxy.endpoint, "access_key_id": KEY, "secret_access_key": SECRET}
    store = CloudStore(
        f"s3://runs/silent/{time.time_ns()}",
        config=config,
        max_retries=1,
        silent_timeout_s=1,
        slowest_bytes_s=1000,  # so that the whole of it may take hours
    )
    data = random.Random(6).randbytes(2 * BLOCK_BYTES)
    write_key(store, "big", data)
    proxy.rule = first(1, stall_answer(100_000), only=lambda one: one.method == "GET")
    assert read_key(store, "big") == data
    proxy.rule = first(None, stall_answer(100_000), only=lambda one: one.method == "GET")
    with pytest.raises(mp.StorageError, match="in time") as caught:
        read_key(store, "big")
    assert caught.value.facts["tries"] == 2


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (answer_with(503, "SlowDown"), mp.StorageError),
        (answer_with(403, "AccessDenied"), mp.AccessError),
        (hang_up, mp.StorageError),
    ],
    ids=["503", "403", "reset"],
)
def test_a_bucket_that_fails_at_the_newest_checkpoint_is_not_resumed_from_an_older_one(
    proxy: FaultProxy, store: CloudStore, trouble: Rule, kind: type[mp.CheckpointError]
) -> None:
    """The newest would be lost without a word; in a minute it can be read again."""
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(store, model=model) as run:
        for name in ("a", "b"):
            run.step()
            run.save(name, wait=True)
    fresh = open_s3(proxy.endpoint, store.url.partition("//runs/")[2])
    is_newest = lambda one: "/b/" in one.path or "b%2F" in one.path  # noqa: E731 - read at once
    proxy.rule = first(None, trouble, only=is_newest)
    with pytest.raises(kind):
        mp.Checkpointer(fresh, model=model).open()
    proxy.rule = first(0, trouble)
    with mp.Checkpointer(fresh, model=model) as run:
        assert run.resumed_from == "b"


def test_stores_of_one_bucket_slow_down_together(proxy: FaultProxy, store: CloudStore) -> None:
    """A service that is asked for more than it can take does not tell whose requests they are."""
    other = open_s3(proxy.endpoint, f"another/{time.time_ns()}")
    store.put_new("warm", b"")
    other.put_new("warm", b"")
    assert other._pace.gap_s == 0
    proxy.rule = answer_with(503, "SlowDown")
    with pytest.raises(mp.StorageError):
        store.get("warm")
    assert other._pace.gap_s > 0
    proxy.rule = first(0, hang_up)
    for _ in range(20):
        assert other.get("warm") == b""
    assert store._pace.gap_s == 0
