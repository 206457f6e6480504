"""A store that fails at any one of its operations: a report is committed, or it raises."""

from __future__ import annotations

import pytest

import milepost as mp
from milepost.stores.memory import MemoryStore
from milepost.testing import Fault, FaultStore

CONFIG = mp.CheckpointConfig(num_to_keep=1)


@pytest.fixture
def files(tmp_path):
    place = tmp_path / "local"
    (place / "sub").mkdir(parents=True)
    (place / "a").write_text("1")
    (place / "sub" / "b").write_text("2" * 10_000)
    return mp.Checkpoint.from_directory(place)


def operations_of(files, mode) -> tuple[list[str], int, int]:
    """Return every operation, and between which ones the second report was made."""
    store = FaultStore(MemoryStore())
    with mp.Reports(store, checkpoint_config=CONFIG):
        make(store, files, mode, "one")
        first = len(store.operations)
        make(store, files, mode, "two")
        return store.operations, first, len(store.operations)


def make(store, files, mode, name):
    """Report the files, uploaded or already there."""
    checkpoint = files
    if mode is mp.CheckpointUploadMode.NO_UPLOAD:
        below = store._store
        below.put(f"{name}/a", b"1")
        below.put(f"{name}/sub/b", b"2" * 10_000)
        checkpoint = mp.Checkpoint(store, name)
    return mp.report({"n": name}, checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)


@pytest.mark.parametrize("mode", ["sync", "no_upload"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_store_that_fails_once_anywhere_costs_at_most_one_report(files, mode, is_after):
    """With an answer that got lost too. What was acknowledged is there, and the next one works."""
    mode = mp.CheckpointUploadMode(mode)
    operations, first, last = operations_of(files, mode)
    assert last - first > 10
    num_raised = 0
    for at in range(first + 1, last + 1):
        below = MemoryStore()
        error = mp.StorageError("By hand.", operation="write", path="x")
        store = FaultStore(below, [Fault(at, is_after=is_after, error=error)])
        with mp.Reports(store, checkpoint_config=CONFIG):
            make(store, files, mode, "one")
            try:
                acknowledged = make(store, files, mode, "two").name
            except mp.CheckpointError:
                acknowledged, num_raised = None, num_raised + 1
            run = mp.open_run(below)
            newest = run.latest().name
            assert newest == acknowledged or acknowledged is None, operations[at - 1]
            assert newest in ("one", "two")
            assert mp.get_checkpoint().name in (newest, "one")
            assert make(store, files, mode, "three").name.startswith("three")
        run = mp.open_run(below)
        assert run.latest().name.startswith("three")
        for one in run.checkpoints():
            assert one.verify("full").is_good, operations[at - 1]
        with mp.Reports(below, checkpoint_config=CONFIG, if_finished="continue"):
            assert mp.get_checkpoint().name == run.latest().name
        left = {found.name for found in mp.open_run(below).view.found}
        assert left == {run.latest().name}, operations[at - 1]
    assert num_raised > 0
