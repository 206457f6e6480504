"""What is asked of a bucket, and shown meanwhile, as options say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost import fetching
from milepost.errors import UsageError
from milepost.fetching import Fetching
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import LocalStore, MemoryStore, Store

MODEL = "model.safetensors"


class Asked:
    """A store that notes the requests for the model, as a service would see them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_reader(self, key: str) -> Any:
        reader: Any = self._store.open_reader(key)
        if key.endswith(MODEL) and hasattr(reader, "lend"):
            lend, requests = reader.lend, self.requests

            def noted(offset: int, length: int) -> memoryview:
                requests.append(length)
                return lend(offset, length)  # type: ignore[no-any-return]

            reader = type("Noted", (), {"lend": staticmethod(noted)})()
            inner = self._store.open_reader(key)
            reader.size_bytes, reader.close = inner.size_bytes, inner.close
            reader.read_into = inner.read_into
        return reader


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """What bars were shown: of what, how much, and where they stood at the end."""
    found: list[tuple[str, int, float]] = []

    class Bar:
        done = 0.0

        def update(self, done: float) -> None:
            self.done = done

    @contextmanager
    def loading_bar(title: str, *, total_bytes: int, is_shown: bool) -> Iterator[Bar]:
        bar = Bar()
        yield bar
        if is_shown:
            found.append((title, total_bytes, bar.done))

    monkeypatch.setattr(fetching, "loading_bar", loading_bar)
    return found


def run_once(place: Any, **options: Any) -> nn.Module:
    model = nn.Linear(2500, 5000)  # 50 MB
    torch.nn.init.constant_(model.bias, 2.0)
    with mp.Checkpointer(place, model=model, handle_signals=False, **options) as run:
        if run.resumed_from is None:
            torch.nn.init.constant_(model.bias, 3.0)
            run.save("a", wait=True)
    return model


def test_a_resume_from_a_bucket_asks_in_pieces_and_shows_it(bars: list[Any]) -> None:
    """The options reach the requests, and the bar is right at the end."""
    store = MemoryStore()
    run_once(store)
    asked: Any = Asked(store)
    model = run_once(asked, load_chunk_bytes=4 * BLOCK_BYTES, load_progress_bar=True)
    assert bool((model.get_parameter("bias") == 3.0).all())
    assert max(asked.requests) == 4 * BLOCK_BYTES
    all_bytes = store.head(f"a/{MODEL}").size_bytes  # with the block that the header is in
    assert bars == [("a", all_bytes, all_bytes)]


def test_nothing_is_shown_of_what_is_here_or_small_or_not_asked_for(
    bars: list[Any], tmp_path: Any
) -> None:
    """A bar that is gone before it can be read is noise."""
    for place in (LocalStore(tmp_path), MemoryStore()):
        run_once(place)
        run_once(place, load_progress_bar=place.traits.is_local)
    small = MemoryStore()
    for _ in range(2):
        with mp.Checkpointer(small, model=nn.Linear(2, 2), load_progress_bar=True) as run:
            run.save(wait=True)
    assert bars == []


@pytest.mark.parametrize("chunk_bytes", [-1, 1.5, "1MB", True])
def test_a_size_is_a_count_of_bytes(chunk_bytes: Any) -> None:
    """Said where it is given, and not where it is used."""
    with pytest.raises(UsageError):
        Fetching(chunk_bytes)
