"""Every store keeps the whole contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.stores import LocalStore, MemoryStore, PrefixStore, Store, posix
from milepost.testing import FaultStore, StoreConformance


class _InFolder(StoreConformance):
    folder: Path

    @pytest.fixture(autouse=True)
    def _take_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path


class TestMemoryStore(StoreConformance):
    def make_store(self) -> Store:
        return MemoryStore()


class TestLocalStore(_InFolder):
    def make_store(self) -> Store:
        return LocalStore(self.folder / "run")


class TestLocalStoreThroughThePageCache(_InFolder):
    def make_store(self) -> Store:
        return LocalStore(self.folder / "run", direct=False)


class TestLocalStoreWithoutHardLinks(_InFolder):
    """As on FAT, and on many network mounts."""

    @pytest.fixture(autouse=True)
    def _refuse_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(posix.os, "link", _refuse)

    def make_store(self) -> Store:
        return LocalStore(self.folder / "run")


class TestLocalStoreWithNeitherLinksNorRenames(TestLocalStoreWithoutHardLinks):
    """Where nothing but exclusive creation is left, and symlinks are refused too."""

    @pytest.fixture(autouse=True)
    def _refuse_renames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(posix, "_renameat2", lambda: None)
        monkeypatch.setattr(posix.os, "symlink", _refuse)


class TestPrefixStore(StoreConformance):
    def make_store(self) -> Store:
        below = MemoryStore()
        below.put_new("outside", b"1")
        return PrefixStore(below, "some/where")


class TestPrefixStoreOnFiles(_InFolder):
    def make_store(self) -> Store:
        return PrefixStore(LocalStore(self.folder), ".milepost")


class TestFaultStoreWithoutFaults(StoreConformance):
    def make_store(self) -> Store:
        return FaultStore(MemoryStore())


def _refuse(*_args: object, **_options: object) -> None:
    raise OSError(95, "Operation not supported")
