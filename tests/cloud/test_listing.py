"""What it costs to see a run in a bucket: requests, counted by a proxy before the server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import app
from milepost.runs import pin, read_manifest
from milepost.stores import Store
from milepost.testing.proxy import FaultProxy, Request, fault_proxy

from ..servers import Server

pytestmark = pytest.mark.cloud


def kind_of(request: Request) -> str:
    if request.method == "GET" and "list-type=2" in request.path:
        return "list"
    return f"{request.method} {request.path.partition('?')[0].rpartition('/')[2]}"


@pytest.fixture
def proxy(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with fault_proxy(moto.endpoint) as proxy:
        yield proxy


def fill(store: Store, place: str, count: int) -> None:
    """Save one checkpoint, and make it many."""
    with mp.Checkpointer(place, model=torch.nn.Linear(1, 1)) as run:
        run.save("ba1", wait=True)
    made = read_manifest(store, "ba1")
    files = [entry.path for entry in made.files]
    assert len(files) > 2

    def copy(number: int) -> None:
        name = f"ba{number}"
        commit = replace(made, name=name, attempt=number, metrics={"loss": float(number)})
        for file in files:
            store.link(f"ba1/{file}", f"{name}/{file}")
        store.put(f"{name}/manifest.json", commit.to_bytes())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(copy, range(2, count + 1)))


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(600)])]
)
def test_a_run_is_listed_by_its_folders_and_one_read_each(
    proxy: FaultProxy, moto: Server, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files a checkpoint has; and nothing is asked twice."""
    prefix = f"listing/{count}"
    place = f"{moto.url}/{prefix}"
    fill(moto.open(prefix), place, count)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    wanted = [f"ba{number}" for number in range(1, count + 1)]

    def pages(num_checkpoints: int) -> int:
        # The folders, run.json, latest and sessions/, a thousand by one request.
        return -(-(num_checkpoints + 3) // 1000)

    proxy.seen.clear()
    found = mp.open_run(place).checkpoints()
    assert [one.name for one in found] == wanted
    assert [one.metrics.get("loss", 1.0) for one in found] == [float(n + 1) for n in range(count)]
    seen = Counter(map(kind_of, proxy.seen))
    assert seen.pop("GET manifest.json") == count
    # Besides the folders, the sessions are listed; there are no pins and no validations.
    assert seen.pop("list") == pages(count) + 1
    # Which of two places the run is in, what run it is, and the two records of its session.
    assert seen == {
        "HEAD run.json": 1,
        "GET run.json": 1,
        "GET 00000001.json": 1,
        "GET 00000001.from.json": 1,
    }

    proxy.seen.clear()
    listed = CliRunner().invoke(app, ["ls", place])
    assert listed.exit_code == 0, listed.output
    assert sum("list-type=2" in one.path for one in proxy.seen) == pages(count) + 1
    assert len(proxy.seen) <= count + pages(count) + 5

    pin(moto.open(prefix), "ba7", "why")
    assert [one.is_pinned for one in mp.open_run(place).view.found].index(True) == 6


def test_a_resume_reads_each_commit_once(
    proxy: FaultProxy, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it looks before it takes the run and after: an object with an old time is the same."""
    prefix = "listing/resume"
    place = f"{moto.url}/{prefix}"
    fill(moto.open(prefix), place, 12)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

    def read_for_a_start(newest: str) -> Counter[str]:
        proxy.seen.clear()
        with mp.Checkpointer(place, model=torch.nn.Linear(1, 1)) as run:
            assert run.resumed_from == newest
        reads = (
            one.path.partition("?")[0].split("/")[-2:] for one in proxy.seen if one.method == "GET"
        )
        return Counter(name for name, file in reads if file == "manifest.json")

    # A moment old, they might have been replaced between the two looks.
    assert set(read_for_a_start("ba12").values()) >= {2}
    monkeypatch.setattr("milepost.opening._MAX_SKEW_S", 0.0)
    time.sleep(1.1)  # times are whole seconds
    reads = read_for_a_start("ba12")
    # The newest is read again where its files are compared with it.
    assert set(reads) == {f"ba{number}" for number in range(1, 13)}
    assert {count for name, count in reads.items() if name != "ba12"} == {1}


def test_looks_of_a_writer_do_not_read_what_it_knows(
    proxy: FaultProxy, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save costs what it cost before, however many checkpoints are kept."""
    prefix = "listing/kept"
    place = f"{moto.url}/{prefix}"
    fill(moto.open(prefix), place, 30)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    model = torch.nn.Linear(1, 1)
    costs = []
    with mp.Checkpointer(place, keep=mp.KeepLast(100), model=model) as run:
        assert run.resumed_from == "ba30"
        for _ in range(3):
            run.step()
            proxy.seen.clear()
            run.save(wait=True)
            costs.append(Counter(map(kind_of, proxy.seen)))
    assert costs[1] == costs[2]
    assert costs[1]["GET manifest.json"] == 1
