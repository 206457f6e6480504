"""Every operation of a store meets every fault: it succeeds, or it says what failed.

A fault hits one kind of request, once or every time, between the client and a server; what is in
the bucket afterwards is looked at with another client. The server is put behind a gate that
compares bodies with their checksums as S3 does, which the server alone does not. Left out is an
error in an answer that begins with 200 to a listing or to a deletion: no service is known to do
that, and nothing tells it from an empty folder, or from success.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import milepost as mp
from milepost.format.digest import BLOCK_BYTES, crc32c
from milepost.stores.again import read_twice
from milepost.stores.cloud import CloudStore
from milepost.stores.pages import page_memory
from milepost.testing import FaultProxy, fault_proxy, write_key
from milepost.testing.proxy import (
    Answer,
    Forward,
    Request,
    Rule,
    answer_with,
    cut_answer,
    error_answer,
    first,
    flip_received,
    flip_sent,
    hang_up,
    lose_answer,
    stall,
    with_header,
)

from ..servers import BUCKET, KEY, SECRET, Server, s3_client

pytestmark = pytest.mark.cloud

_numbers = itertools.count()
_RETRIES = 2
OLD = random.Random(1).randbytes(50_000)
NEW = random.Random(2).randbytes(40_000)
BIG = random.Random(3).randbytes(2 * BLOCK_BYTES - 5)
OBJECTS = {"old": OLD, "f/a": b"a", "g/h/b": b"b"}


def read(store: CloudStore, key: str) -> bytes:
    """Read as the engine does: in blocks, with the checksum that was committed."""
    reader = store.open_reader(key)
    view = memoryview(page_memory(reader.size_bytes))[: reader.size_bytes]
    if read_twice(reader, 0, view, expected=crc32c(OLD)) != crc32c(OLD):
        raise mp.DamagedError(f"{store.url}/{key} is damaged.", operation="read", path=key)
    return bytes(view)


@dataclass(frozen=True)
class Operation:
    """What is asked of a store.

    Attributes:
        ask: Does it.
        is_hit: Whether a request is the one that the fault is for.
        result: What it returns when it succeeds.
        key: The object that an error must name; empty for the whole place.
        becomes: What its object must hold after success; ``None`` is no object.
    """

    ask: Callable[[CloudStore], Any]
    is_hit: Callable[[Request], bool]
    result: Any = None
    key: str = ""
    becomes: bytes | None = None


def is_part(request: Request) -> bool:
    return "partNumber=" in request.path


OPERATIONS = {
    "create": Operation(
        lambda store: store.put_new("new", NEW),
        lambda one: one.method == "PUT" and one.path.endswith("/new"),
        key="new",
        becomes=NEW,
    ),
    "put": Operation(
        lambda store: store.put("new", NEW),
        lambda one: one.method == "PUT" and one.path.endswith("/new"),
        key="new",
        becomes=NEW,
    ),
    "get": Operation(
        lambda store: store.get("old"),
        lambda one: one.method == "GET" and one.path.endswith("/old"),
        result=OLD,
        key="old",
        becomes=OLD,
    ),
    "range": Operation(
        lambda store: read(store, "old"),
        lambda one: one.method == "GET" and one.path.endswith("/old"),
        result=OLD,
        key="old",
        becomes=OLD,
    ),
    "head": Operation(
        lambda store: store.head("old").size_bytes,
        lambda one: one.method == "HEAD",
        result=len(OLD),
        key="old",
        becomes=OLD,
    ),
    "list": Operation(
        lambda store: [(one.key, one.size_bytes) for one in store.list()],
        lambda one: "list-type" in one.path,
        result=sorted((key, len(data)) for key, data in OBJECTS.items()),
    ),
    "folders": Operation(
        lambda store: store.folders(),
        lambda one: "list-type" in one.path,
        result=["f", "g"],
    ),
    "delete": Operation(
        lambda store: store.delete("old"),
        lambda one: one.method == "DELETE",
        key="old",
    ),
    "copy": Operation(
        lambda store: store.link("old", "new"),
        lambda one: "x-amz-copy-source" in one.headers,
        key="old",
        becomes=OLD,
    ),
    "begin": Operation(
        lambda store: write_key(store, "big", BIG),
        lambda one: one.method == "POST" and one.path.endswith("?uploads="),
        key="big",
        becomes=BIG,
    ),
    "part": Operation(lambda store: write_key(store, "big", BIG), is_part, key="big", becomes=BIG),
    "complete": Operation(
        lambda store: write_key(store, "big", BIG),
        lambda one: one.method == "POST" and "uploadId=" in one.path,
        key="big",
        becomes=BIG,
    ),
}
"""``copy`` is from "old" to "new"; see ``target``."""

PASSING: dict[str, Rule] = {
    "500": answer_with(500, "InternalError"),
    "503": answer_with(503, "SlowDown"),
    "429": answer_with(429, "TooManyRequests"),
    "408": answer_with(408, "RequestTimeout"),
    "reset": hang_up,
    "stall": stall,
    "cut": cut_answer(20),
    "error200": answer_with(200, "InternalError"),
    "lost": lose_answer,
    "etag": with_header("ETag", '"00000000000000000000000000000000"'),
    "sent": flip_sent(3),
    "received": flip_received(2),
}
HOPELESS: dict[str, tuple[Rule, type[mp.CheckpointError], str]] = {
    "denied": (answer_with(403, "AccessDenied"), mp.AccessError, "credentials"),
    "expired": (answer_with(400, "ExpiredToken"), mp.AccessError, "expired"),
    "redirect": (answer_with(301, "PermanentRedirect"), mp.StorageError, "another region"),
    "region": (
        answer_with(400, "AuthorizationHeaderMalformed"),
        mp.StorageError,
        "another region",
    ),
    "bucket": (answer_with(404, "NoSuchBucket"), mp.StorageError, "no such bucket"),
}
NEVER_ANSWERED = ("500", "503", "429", "408", "reset", "stall")
IN_ONE_PIECE = frozenset(
    {("part", "sent"), ("complete", "sent"), ("part", "etag"), ("part", "error200")}
)
"""Refused for good by the service, which the client takes for the end of the upload."""

CHEAP = frozenset(
    {
        *(("create", fault) for fault in ("500", "lost", "sent", "denied")),
        *(("put", fault) for fault in ("429", "sent", "redirect")),
        *(("get", fault) for fault in ("reset", "received", "cut", "error200", "bucket")),
        *(("range", fault) for fault in ("received", "cut")),
        *(("head", fault) for fault in ("503", "error200")),
        *(("list", fault) for fault in ("received", "denied", "expired")),
        *(("delete", fault) for fault in ("408", "denied")),
        *(("copy", fault) for fault in ("error200", "region")),
        *(("complete", fault) for fault in ("error200", "lost")),
        *(("part", fault) for fault in ("denied",)),
    }
)


def cells(faults: Iterator[str] | list[str], *, times: str) -> list[Any]:
    """Return a row for each operation with each fault; most only in campaigns."""
    rows = []
    for name, fault in itertools.product(OPERATIONS, faults):
        if name in ("list", "folders", "delete") and fault == "error200":
            continue
        is_cheap = (name, fault) in CHEAP and times != "lasting"
        marks = () if is_cheap else pytest.mark.campaign
        rows.append(pytest.param(name, fault, id=f"{name}-{fault}-{times}", marks=marks))
    return rows


@dataclass
class Place:
    """A folder of a bucket, seen through the proxy, and by another client."""

    proxy: FaultProxy
    prefix: str
    client: Any

    def __post_init__(self) -> None:
        self.store = self.open()

    def open(self) -> CloudStore:
        config = {
            "endpoint": self.proxy.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }
        return CloudStore(
            f"s3://{BUCKET}/{self.prefix}",
            config=config,
            max_retries=_RETRIES,
            retry_timeout_s=20,
            silent_timeout_s=1,
            slowest_bytes_s=5_000_000,
        )

    def data(self, key: str) -> bytes | None:
        try:
            found = self.client.get_object(Bucket=BUCKET, Key=f"{self.prefix}/{key}")
        except self.client.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def num_uploads(self) -> int:
        found = self.client.list_multipart_uploads(Bucket=BUCKET)
        return sum(one["Key"].startswith(self.prefix) for one in found.get("Uploads", ()))

    def meet(self, rule: Rule, operation: Operation, *, times: int | None) -> Any:
        """Carry out an operation while a fault is in force; return its result or its error."""
        rule = _behind_gate(rule)
        self.proxy.rule = first(times, rule, only=operation.is_hit)
        try:
            return operation.ask(self.store)
        except mp.CheckpointError as error:
            return error
        finally:
            self.proxy.rule = lambda request, forward: forward(request)


def _behind_gate(rule: Rule) -> Rule:
    def behind(request: Request, forward: Forward) -> Answer:
        def gate(request: Request) -> Answer:
            said = request.headers["x-amz-content-sha256"]
            if said != hashlib.sha256(request.body).hexdigest():
                return error_answer(400, "XAmzContentSHA256Mismatch")
            return forward(request)

        return rule(request, gate)

    return behind


@pytest.fixture
def place(moto: Server) -> Iterator[Place]:
    prefix = f"matrix/{next(_numbers)}"
    client = s3_client(moto)
    with fault_proxy(moto.endpoint) as proxy:
        place = Place(proxy, prefix, client)
        for key, data in OBJECTS.items():
            place.store.put_new(key, data)
        proxy.seen.clear()
        yield place


def target(name: str) -> str:
    return "new" if name == "copy" else OPERATIONS[name].key


def check_right(place: Place, name: str, outcome: Any) -> None:
    """Require that an operation did all of what it was asked for."""
    operation = OPERATIONS[name]
    assert outcome == operation.result, outcome
    if operation.key:
        assert place.data(target(name)) == operation.becomes
    assert place.num_uploads() == 0


def check_said(place: Place, name: str, error: mp.CheckpointError) -> None:
    """Require that an error says what failed, and that nothing half done counts."""
    operation = OPERATIONS[name]
    assert not isinstance(error, mp.MissingError | mp.ExistsError), error
    assert f"{place.store.url}/{operation.key}".rstrip("/") in str(error)
    assert error.facts["path"] == operation.key
    assert error.facts["operation"]
    assert isinstance(error, mp.DamagedError) or error.facts["tries"] >= 1
    before = OBJECTS.get(target(name))
    if operation.key:
        assert place.data(target(name)) in (before, operation.becomes)


@pytest.mark.parametrize(("name", "fault"), cells(list(PASSING), times="once"))
def test_a_fault_that_passes_is_not_noticed(place: Place, name: str, fault: str) -> None:
    """The operation succeeds, whatever was lost or altered on the way."""
    outcome = place.meet(PASSING[fault], OPERATIONS[name], times=1)
    if (name, fault) in IN_ONE_PIECE and isinstance(outcome, mp.CheckpointError):
        check_said(place, name, outcome)
        assert place.num_uploads() == 0
    elif name == "begin" and fault in ("lost", "cut", "received"):
        assert place.data("big") == BIG
        assert place.num_uploads() == 1  # one that nobody knows of: what rules of buckets are for
    else:
        check_right(place, name, outcome)


@pytest.mark.parametrize(("name", "fault"), cells(list(PASSING), times="lasting"))
def test_a_fault_that_stays_is_said(place: Place, name: str, fault: str) -> None:
    """With the object, the operation and the number of tries; what is there is whole."""
    outcome = place.meet(PASSING[fault], OPERATIONS[name], times=None)
    if isinstance(outcome, mp.CheckpointError):
        check_said(place, name, outcome)
    else:
        assert fault not in NEVER_ANSWERED
        check_right(place, name, outcome)
    if fault in NEVER_ANSWERED:
        assert isinstance(outcome, mp.StorageError)
        assert outcome.facts["tries"] == _RETRIES + 1


@pytest.mark.parametrize(("name", "fault"), cells(list(HOPELESS), times="hopeless"))
def test_what_cannot_pass_is_said_at_once(place: Place, name: str, fault: str) -> None:
    """By one request, with what to do about it; a refusal is never "nothing there"."""
    rule, kind, said = HOPELESS[fault]
    operation = OPERATIONS[name]
    if name == "head":  # its answers have no body, so that the reason takes a second request
        place.store = place.open()
        operation = replace(operation, is_hit=lambda _: True)
    outcome = place.meet(rule, operation, times=None)
    assert type(outcome) is kind, outcome
    check_said(place, name, outcome)
    assert said in outcome.hint
    assert outcome.facts["tries"] == 1
    num_hits = sum(operation.is_hit(one) for one in place.proxy.seen)
    assert num_hits <= {"head": 2, "part": 8}.get(name, 1)


def test_the_matrix_is_as_large_as_it_says() -> None:
    """A row that is lost is a fault that nobody looks at."""
    rows = [cells(list(PASSING), times=one) for one in ("once", "lasting")]
    rows.append(cells(list(HOPELESS), times="hopeless"))
    every = [row for part in rows for row in part]
    assert len(OPERATIONS) == 12
    assert len(every) == 342
    assert sum(not row.marks for row in every) == len(CHEAP) >= 25
