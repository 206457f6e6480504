"""A run in memory, and the processes that write to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from milepost.runs import (
    Identity,
    Origin,
    Session,
    ensure_run,
    open_session,
    record_origin,
    scan,
)
from milepost.stores import MemoryStore, Store
from milepost.testing import save_files


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("run")


@pytest.fixture
def begin() -> Callable[..., Session]:
    """Open a session that goes on from the newest checkpoint, or from the one given."""

    def begin(store: Store, *, pid: int = 1, origin: str | None = "") -> Session:
        me = Identity("host", pid, f"boot-{pid}", f"{pid}@ns", "machine")
        session = open_session(store, ensure_run(store), identity=me, clock=lambda: 7.0)
        view = scan(store)
        found = view.latest() if origin == "" else view.get(origin) if origin else None
        chosen = Origin(found.name, found.session, found.attempt) if found else None
        return record_origin(store, session, chosen)

    return begin


@pytest.fixture
def save() -> Callable[..., str]:
    def save(store: Store, session: Session, name: str, attempt: int, **options) -> str:
        files = options.pop("files", {"part": name.encode()})
        return save_files(store, session, name=name, attempt=attempt, files=files, **options).name

    return save
