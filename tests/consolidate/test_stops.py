"""A consolidation that stops, fails or meets damage leaves nothing half to be seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.errors import DamagedError, StorageError
from milepost.runs.scan import scan
from milepost.stores import LocalStore, MemoryStore, posix
from milepost.tensors.pack import pack_item
from milepost.testing import Crash, Fault, FaultStore

from ..property.simulated_ranks import Spec, as_held
from .saving_ranks import raw, save_on_ranks

WEIGHTS = {
    "w": torch.arange(60.0).reshape(6, 10),
    "b": torch.arange(10, dtype=torch.bfloat16),
    "n": torch.tensor(7),
}
SPECS = {
    "w": Spec((6, 10), torch.float32, (1,)),
    "b": Spec((10,), torch.bfloat16, (0,)),
    "n": Spec((), torch.int64, None),
}


def save_old(store) -> mp.Checkpoint:
    states = [
        [
            pack_item("model", {k: as_held(WEIGHTS[k], SPECS[k], (2,), rank) for k in WEIGHTS}),
            pack_item("rng", [{"torch": torch.tensor([rank])}], home="each"),
        ]
        for rank in range(2)
    ]
    save_on_ranks(store, states)
    return mp.open_run(store).get("ep3")


@pytest.fixture(scope="module")
def old() -> mp.Checkpoint:
    return save_old(MemoryStore())


def operations(old) -> list[str]:
    store = FaultStore(MemoryStore())
    mp.consolidate(old, store)
    return store.operations


def committed(store) -> list[str]:
    """Return the folders with a commit, without any of our code."""
    keys = [entry.key for entry in store.list()]
    return [key.partition("/")[0] for key in keys if key.endswith("/manifest.json")]


def look(store, *, must_be_whole: bool) -> None:
    """What a reader sees is a whole checkpoint or none."""
    found = committed(store)
    assert len(found) <= 1
    if found:
        checkpoint = mp.open_run(store).get(found[0])
        assert checkpoint.verify().is_good
        assert raw(checkpoint.load()["state"]["model"]) == raw(WEIGHTS)
    assert found or not must_be_whole


@pytest.mark.parametrize("is_after", [False, True])
def test_a_stop_at_any_call_shows_nothing_half(old, is_after):
    """And the next try makes a whole one, unless the first had it already."""
    names = operations(old)
    assert {"create_writer", "write_at", "close", "put_new"} <= {one.split()[0] for one in names}
    for at in range(1, len(names) + 1):
        below = MemoryStore()
        with pytest.raises(Crash):
            mp.consolidate(old, FaultStore(below, [Fault(at, is_after)]))
        look(below, must_be_whole=False)
        if not committed(below):
            mp.consolidate(old, below)
        look(below, must_be_whole=True)


def test_an_error_at_any_call_leaves_nothing(old):
    """What was written is removed, and what was read is not touched."""
    names = operations(old)
    for at in range(1, len(names) + 1):
        below = MemoryStore()
        fault = Fault(at, error=StorageError("broken", operation="send"))
        try:
            mp.consolidate(old, FaultStore(below, [fault]))
        except StorageError:
            if committed(below):  # the last look at the sessions failed: it is whole all the same
                assert names[at - 1] == "list sessions"
                continue
            parts = [one.key for one in below.list() if one.key.endswith(".safetensors")]
            is_removing = names[at - 1].split()[0] in ("rename", "delete", "list", "get", "head")
            assert not parts or is_removing, names[at - 1]
        look(below, must_be_whole=False)


def test_damage_in_any_file_is_found(tmp_path: Path):
    """Whatever byte it is: a consolidated checkpoint must not look whole with other bytes in it."""
    store = LocalStore(tmp_path / "old")
    old = save_old(store)
    for path in sorted((tmp_path / "old" / "ep3").iterdir()):
        if path.name in ("attempt.json", "manifest.json"):
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        target = tmp_path / f"new-{path.name}"
        with pytest.raises(DamagedError):
            mp.consolidate(mp.Checkpoint(store, "ep3"), target)
        assert not list(target.rglob("manifest.json"))
        assert not list(target.rglob("*.safetensors"))
        path.write_bytes(whole)
    with pytest.raises(DamagedError):
        part = tmp_path / "old" / "ep3" / "model-r00000.safetensors"
        part.write_bytes(part.read_bytes()[:-1])
        mp.consolidate(old, tmp_path / "x.safetensors", format="safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_file_is_whole_or_not_there(old, tmp_path: Path, monkeypatch):
    """An error half way leaves no file, not even a hidden one."""
    written = []
    write_all = posix.write_all

    def fail(descriptor, data):
        written.append(len(data))
        write_all(descriptor, memoryview(data)[:10])
        raise OSError(28, "full")

    monkeypatch.setattr(posix, "write_all", fail)
    with pytest.raises(mp.NoSpaceError):
        mp.consolidate(old, tmp_path / "a.safetensors", format="safetensors")
    assert written
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import milepost as mp
from milepost.stores import LocalStore
from milepost.testing import FaultStore

def before(number, operation):
    if operation.startswith("close ep3/model"):
        os.kill(os.getpid(), signal.SIGKILL)

mp.consolidate(sys.argv[1], FaultStore(LocalStore(sys.argv[2]), before=before))
"""


def test_a_killed_one_is_made_again_under_the_same_name(tmp_path: Path):
    """What it left is removed: it is certain that its process has ended."""
    save_old(LocalStore(tmp_path / "old"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "old" / "ep3"), str(tmp_path / "new")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "new" / "ep3" / "attempt.json").is_file()
    assert committed(LocalStore(tmp_path / "new")) == []
    made = mp.consolidate(tmp_path / "old" / "ep3", tmp_path / "new")
    assert made.name == "ep3"
    look(LocalStore(tmp_path / "new"), must_be_whole=True)
    claims = [json.loads(path.read_text()) for path in (tmp_path / "new").rglob("attempt.json")]
    assert [claim["pid"] for claim in claims] == [os.getpid()]
    assert [one.name for one in scan(LocalStore(tmp_path / "new")).lineage()] == ["ep3"]
