"""Uploads: what is seen of one that is under way, and of one that comes twice."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.stores import open_store
from milepost.testing import FaultProxy, fault_proxy
from milepost.testing.proxy import Answer, Forward, Request
from milepost.testing.ranks import run_ranks

from ..servers import BUCKET, Server, s3_client

pytestmark = pytest.mark.cloud
_numbers = itertools.count()

BODY = """
import os
import milepost as mp

torch.manual_seed(0)
model = torch.nn.Linear(500, 500)
optimizer = torch.optim.AdamW(model.parameters())
with mp.Checkpointer(os.environ["PLACE"], model=model, optimizer=optimizer) as run:
    for name in ("a", "b"):
        model(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        run.save(name).wait()
"""
KILLED = """
import sys
import torch
import milepost as mp

model = torch.nn.Linear(500, 500)
optimizer = torch.optim.AdamW(model.parameters())
with mp.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as run:
    print(run.resumed_from, flush=True)
    run.step()
    run.save("c")
    print("returned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def proxy(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A network on which a byte takes its time, that of the last rank five times as long."""

    def slow(request: Request, forward: Forward) -> Answer:
        if request.method == "PUT":
            factor = 5 if "-r00002" in request.path else 1
            time.sleep((0.02 + len(request.body) / 5_000_000) * factor)
        return forward(request)

    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with fault_proxy(moto.endpoint) as one:
        one.rule = slow
        monkeypatch.setenv("AWS_ENDPOINT_URL", one.endpoint)
        yield one


@contextmanager
def watching(moto: Server, prefix: str) -> Iterator[list[str]]:
    """Look all the time at what the pointer and every commit name; yield the pointers seen."""
    client = s3_client(moto)
    is_over = threading.Event()
    pointers: list[str] = []
    problems: list[str] = []

    def look() -> None:
        while not is_over.wait(0.05):
            objects = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", ())
            keys = {one["Key"] for one in objects}
            names = [key.split("/")[-2] for key in keys if key.endswith("/manifest.json")]
            if f"{prefix}/latest" in keys:
                found = client.get_object(Bucket=BUCKET, Key=f"{prefix}/latest")["Body"].read()
                pointers.append(found.decode().strip())
                names.append(pointers[-1])
            for name in names:
                problems.extend(missing(name))

    def missing(name: str) -> list[str]:
        try:
            got = client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}/manifest.json")
        except client.exceptions.NoSuchKey:
            return [f"{name} has no commit"]
        listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/{name}/")["Contents"]
        sizes = {one["Key"]: one["Size"] for one in listed}
        files = json.loads(got["Body"].read())["files"]
        assert files
        return [
            f"{name} lacks {file['path']}"
            for file in files
            if sizes.get(f"{prefix}/{name}/{file['path']}") != file["size"]
        ]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield pointers
    finally:
        is_over.set()
        thread.join(30)
    assert problems == []


@pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(3, marks=[pytest.mark.campaign, pytest.mark.dist])]
)
def test_h26_the_pointer_never_names_what_is_not_there(
    proxy: FaultProxy, moto: Server, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Small objects are quick and large ones slow: the commit waits for all, the pointer for it."""
    prefix = f"h26/{next(_numbers)}"
    place = f"s3://{BUCKET}/{prefix}"
    monkeypatch.setenv("PLACE", place)
    with watching(moto, prefix) as pointers:
        if num_ranks == 1:
            exec(BODY, {"torch": torch})
        else:
            run_ranks(BODY, num_ranks)
        assert set(pointers) >= {"a"}
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"b\n"
            assert process.stdout.readline() == b"returned\n"
            time.sleep(0.1)
            process.kill()
        model = torch.nn.Linear(500, 500)
        optimizer = torch.optim.AdamW(model.parameters())
        with mp.Checkpointer(place, model=model, optimizer=optimizer) as run:
            assert run.resumed_from == "b"
            run.step()
            run.save("d", wait=True)
    assert [one.name for one in mp.open_run(place).checkpoints()] == ["a", "b", "d"]


def test_h30_a_copy_that_comes_twice_lands_in_the_same_place(moto: Server, tmp_path: Path) -> None:
    """And not one folder deeper, with and without a slash at the end; with the new bytes."""
    source, place = tmp_path / "run", moto.open(f"h30/{next(_numbers)}")
    with mp.Checkpointer(source, model=torch.nn.Linear(2, 2)) as run:
        run.save("ck0", wait=True)
    (source / "ck0" / "sub").mkdir()
    theirs = {"ck0/x.pt": b"first", "ck0/sub/y.pt": b"below"}
    keys: list[list[str]] = []
    for number, spelling in enumerate((str(source), f"{source}/")):
        theirs["ck0/x.pt"] = f"written {number}".encode()
        for key, data in theirs.items():
            (source / key).write_bytes(data)
        mp.sync_run(spelling, place)
        keys.append([entry.key for entry in place.list()])
        assert {key: place.get(key) for key in theirs} == theirs
    assert keys[0] == keys[1]
    here = {entry.key for entry in open_store(str(source)).list()}
    assert set(keys[0]) == here | {"latest"}
