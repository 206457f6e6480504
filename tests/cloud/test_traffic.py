"""What goes over the wire: as many bytes as there must, and no more."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.cloud import CloudStore
from milepost.stores.pages import page_memory
from milepost.testing import read_key
from milepost.testing.proxy import FaultProxy, Request, fault_proxy

from ..servers import KEY, SECRET, Server

pytestmark = pytest.mark.cloud


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with fault_proxy(moto.endpoint) as found:
        yield found


@pytest.fixture
def store(proxy: FaultProxy, request: pytest.FixtureRequest) -> CloudStore:
    config = {
        "endpoint": proxy.endpoint,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }
    return CloudStore(f"s3://runs/traffic/{request.node.name}", config=config)


def model() -> nn.Sequential:
    """A frozen part of 24 MB, and one of 2 MB that is trained."""
    torch.manual_seed(0)
    frozen, trained = nn.Linear(2000, 3000), nn.Linear(3000, 200)
    frozen.requires_grad_(False)
    return nn.Sequential(frozen, trained)


def is_of(request: Request, file: str) -> bool:
    return request.path.partition("?")[0].endswith(f"/{file}")


def sent_bytes(seen: list[Request], file: str) -> int:
    """What was put by upload; a copy has no body."""
    headers = [
        {key.lower(): value for key, value in one.headers.items()}
        for one in seen
        if one.method == "PUT" and is_of(one, file)
    ]
    return sum(int(one["content-length"]) for one in headers if "x-amz-copy-source" not in one)


def received_bytes(seen: list[Request], file: str) -> int:
    found = 0
    for one in seen:
        if one.method == "GET" and is_of(one, file):
            header = {key.lower(): value for key, value in one.headers.items()}["range"]
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", header).groups()  # type: ignore[union-attr]
            found += int(last) - int(first) + 1
    return found


def test_what_is_frozen_is_copied_by_the_service(proxy: FaultProxy, store: CloudStore) -> None:
    """Its bytes are sent once; each checkpoint has an object of its own all the same."""
    live, frozen = model(), "model-frozen.safetensors"
    with mp.Checkpointer(store, model=live) as run:
        run.save("a", wait=True)
        frozen_bytes = store.head(f"a/{frozen}").size_bytes
        assert sent_bytes(proxy.seen, frozen) == frozen_bytes > 24_000_000
        for name in ("b", "c"):
            proxy.seen.clear()
            with torch.no_grad():
                live[1].weight.add_(1.0)
            run.save(name, wait=True)
            copies = [one for one in proxy.seen if "x-amz-copy-source" in one.headers]
            assert len(copies) == 1
            assert is_of(copies[0], frozen)
            assert sent_bytes(proxy.seen, frozen) == 0
            trained_bytes = store.head(f"{name}/model.safetensors").size_bytes
            assert sent_bytes(proxy.seen, "model.safetensors") == trained_bytes
    for entry in list(store.list("a")):
        store.delete(entry.key)
    other = model()
    other[1].reset_parameters()
    mp.open_run(store).get("c").load_weights(other)
    state = live.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert mp.open_run(store).get("c").verify("full").is_good


def test_what_cannot_be_copied_is_sent_again(
    proxy: FaultProxy, store: CloudStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 copies no object of more than 5 GiB; a save must not fail for it."""
    monkeypatch.setattr("milepost.stores.cloud._MAX_COPY_BYTES", 1_000_000)
    live, frozen = model(), "model-frozen.safetensors"
    with mp.Checkpointer(store, model=live) as run:
        run.save("a", wait=True)
        proxy.seen.clear()
        run.save("b", wait=True)
    assert not [one for one in proxy.seen if "x-amz-copy-source" in one.headers]
    assert sent_bytes(proxy.seen, frozen) == store.head(f"a/{frozen}").size_bytes
    assert mp.open_run(store).get("b").verify("full").is_good


def test_memory_that_stays_goes_in_larger_pieces(
    proxy: FaultProxy, store: CloudStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer requests cost a service less; but copies that are under way must not take more."""
    monkeypatch.setattr("milepost.stores.cloud._PIECES_AT_LEAST", 1)
    size = 2 * BLOCK_BYTES + 5
    memory = memoryview(page_memory(size))[:size]
    memory[:] = random.Random(8).randbytes(size)
    for name, is_lasting in (("lasting", True), ("copied", False)):
        proxy.seen.clear()
        writer = store.create_writer(name, size)
        write = writer.refer_at if is_lasting else writer.write_at
        for start in range(0, size, BLOCK_BYTES):
            write(start, memory[start : start + BLOCK_BYTES])
        writer.close()
        parts = [one for one in proxy.seen if one.method == "PUT" and is_of(one, name)]
        sizes = [
            int({k.lower(): v for k, v in one.headers.items()}["content-length"]) for one in parts
        ]
        assert sorted(sizes) == ([5, 2 * BLOCK_BYTES] if is_lasting else [5, *[BLOCK_BYTES] * 2])
        assert read_key(store, name) == memory


def test_weights_alone_cost_their_own_bytes(proxy: FaultProxy, store: CloudStore) -> None:
    """A model is a third of its checkpoint, where AdamW keeps two moments of each weight."""
    live = nn.Linear(3000, 2500)
    optimizer = torch.optim.AdamW(live.parameters())
    live(torch.ones(1, 3000)).sum().backward()
    optimizer.step()
    with mp.Checkpointer(store, model=live, optimizer=optimizer) as run:
        run.save("a", wait=True)
        whole_bytes = run_bytes = mp.open_run(store).get("a").manifest.size_bytes
    assert run_bytes > 3 * 30_000_000
    proxy.seen.clear()
    other = nn.Linear(3000, 2500)
    mp.open_run(store).get("a").load_weights(other)
    assert torch.equal(other.weight, live.weight)
    model_bytes = store.head("a/model.safetensors").size_bytes
    assert received_bytes(proxy.seen, "optimizers.safetensors") == 0
    assert received_bytes(proxy.seen, "model.safetensors") == model_bytes  # and no block twice
    assert model_bytes < 0.35 * whole_bytes
