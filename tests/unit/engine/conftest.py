"""Saving and looking at stores, for the tests of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from milepost.checkpoint import Checkpoint
from milepost.engine.save import Saver, SaveRequest
from milepost.runs import ensure_run, open_session, record_origin
from milepost.stores import MemoryStore
from milepost.tensors.pack import pack_item


class Lab:
    """One session that saves values."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.store = store
        self.session = record_origin(store, open_session(store, ensure_run(store)), None)
        self.saver: Saver[Any] = Saver(
            store, self.session, on_commit=lambda manifest: manifest, **options
        )

    def begin(
        self,
        name: str,
        items: dict[str, Any],
        *,
        frozen: dict[str, Any] | None = None,
        **options: Any,
    ):
        frozen = frozen or {}
        packed = [pack_item(n, v, frozen=frozen.get(n, ())) for n, v in items.items()]
        return self.saver.save(packed, SaveRequest(name=name, reason="manual"), **options)

    def save(self, name: str, items: dict[str, Any], **options: Any) -> Checkpoint:
        return Checkpoint(self.store, self.begin(name, items, **options).wait(30).name)


@pytest.fixture
def new_lab() -> Callable[..., Lab]:
    """Make a lab on a store."""
    return lambda store=None, **options: Lab(store or MemoryStore(), **options)


class CountingStore:
    """Notes which blocks of which keys are read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.url, self.traits = store.url, store.traits
        self.reads: Counter[tuple[str, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_reader(self, key: str) -> Any:
        reader, reads = self._store.open_reader(key), self.reads
        read_into = reader.read_into

        class Counting:
            size_bytes = reader.size_bytes
            close = staticmethod(reader.close)

            @staticmethod
            def read_into(offset: int, buffer: memoryview) -> None:
                reads[key, offset] += 1
                read_into(offset, buffer)

        return Counting()

    def blocks(self, file: str) -> list[int]:
        """The blocks of a file that were read, in order."""
        size = 8 * 1024 * 1024
        return sorted(offset // size for key, offset in self.reads if key.endswith(file))


@pytest.fixture
def counting() -> type[CountingStore]:
    """A store that notes what is read."""
    return CountingStore
