"""A checkpoint far away, and an empty cache."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from milepost.runs import ensure_run, open_session, record_origin
from milepost.stores import LocalStore
from milepost.testing import save_files

BLOCK = 8 * 1024 * 1024
FILES = {
    "a.bin": bytes(range(256)) * 100,
    "big.bin": b"0123456789abcdef" * (BLOCK // 16 + 500),  # two blocks
    "sub/empty.bin": b"",
    "sub/c.txt": b"text",
}


@pytest.fixture
def files():
    return FILES


@pytest.fixture
def far(tmp_path):
    """Return the folder of a run with the checkpoint ep1."""
    folder = tmp_path / "far"
    store = LocalStore(folder)
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    save_files(store, session, name="ep1", attempt=1, files=FILES)
    return folder


@pytest.fixture
def make_remote(far):
    remote = runpy.run_path(str(Path(__file__).with_name("remote.py")))["RemoteStore"]
    return lambda **options: remote(far, **options)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Name a cache in the environment, for child processes too, and return its folder."""
    monkeypatch.setenv("MILEPOST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"milepost-copies-{os.getuid()}"
