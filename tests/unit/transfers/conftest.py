"""A run of plain files, some of which its checkpoints share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from milepost.format.digest import block_crcs
from milepost.format.manifest import FileEntry, Manifest
from milepost.runs import claim, ensure_run, open_session, point_latest, publish, record_origin
from milepost.stores import LocalStore
from milepost.stores.base import Store
from milepost.testing import write_key

BLOCK = 8 * 1024 * 1024
FROZEN = bytes(range(256)) * 3000


@dataclass
class Maker:
    """Writes checkpoints through the records, as a training does."""

    store: Store

    def __post_init__(self) -> None:
        self.begin(None)

    def begin(self, origin) -> None:
        run = ensure_run(self.store)
        self.session = record_origin(self.store, open_session(self.store, run), origin)
        self.attempt = 0
        self.parent = origin.name if origin else None
        self.last: tuple[str, FileEntry] | None = None

    def save(self, name: str, size_bytes: int = 1000, *, link: bool = True) -> Manifest:
        """Commit a checkpoint of a file of its own and one that is the same in all."""
        self.attempt += 1
        held = claim(self.store, self.session, name, self.attempt)
        own = (name.encode() * size_bytes)[:size_bytes]
        write_key(self.store, f"{held.folder}/own.bin", own)
        entries = [FileEntry("own.bin", len(own), tuple(block_crcs(own)))]
        if self.last is not None and link:
            folder, entry = self.last
            self.store.link(f"{folder}/frozen.bin", f"{held.folder}/frozen.bin")
            entries.append(replace(entry, linked_from=folder))
        else:
            write_key(self.store, f"{held.folder}/frozen.bin", FROZEN)
            entries.append(FileEntry("frozen.bin", len(FROZEN), tuple(block_crcs(FROZEN))))
        self.last = held.folder, entries[-1]
        manifest = Manifest(
            name=held.folder,
            run_id=self.session.run_id,
            session=self.session.number,
            attempt=self.attempt,
            write_id=held.write_id,
            parent=self.parent,
            reason="manual",
            is_final=False,
            created_s=float(self.attempt),
            time={"epoch": self.attempt},
            metrics={"loss": 1.0 / self.attempt},
            world_size=1,
            layout="files",
            items=(),
            files=tuple(entries),
            software={},
        )
        publish(self.store, self.session, manifest)
        if "/" not in name:
            self.parent = held.folder
            point_latest(self.store, held.folder)
        return manifest


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Maker]:
    return lambda where="run": Maker(
        where if isinstance(where, Store) else LocalStore(tmp_path / where)
    )


@pytest.fixture
def run(make) -> Maker:
    """Three checkpoints; the second one has a file of two blocks."""
    maker = make()
    maker.save("ep1")
    maker.save("ep2", BLOCK + 5)
    maker.save("ep3")
    return maker
