"""Checkpoints that are copied into a run: only those that are of this very run, and known to it."""

from __future__ import annotations

import pytest

from milepost.checkpoint import Checkpoint, open_run
from milepost.errors import ExistsError, UsageError
from milepost.runs import Origin
from milepost.runs.prune import delete_checkpoint
from milepost.stores import LocalStore, MemoryStore
from milepost.transfers.one import copy_checkpoint
from milepost.transfers.whole import sync_run


def names(place) -> list[str]:
    return [one.name for one in open_run(place).checkpoints()]


@pytest.fixture
def copy(run, make, tmp_path):
    """A copy of the run; both were trained on since, each as session 2."""
    sync_run(open_run(run.store), LocalStore(tmp_path / "copy"))
    run.begin(Origin("ep2", 1, 2))
    run.save("ep4")
    made = make("copy")
    for name in ("x4", "x5", "x6"):
        made.save(name)
    return made


def test_what_was_written_on_another_branch_does_not_come_into_a_run(run, copy, tmp_path):
    """Sessions of equal numbers are not equal; it would count as the newest of a run not its own.

    Neither from the other copy, named in each way, nor by a detour as a checkpoint alone.
    """
    copy_checkpoint(tmp_path / "copy" / "x5", tmp_path / "alone")
    before = names(run.store)
    for source in (
        tmp_path / "copy" / "x5",
        Checkpoint(copy.store, "x5"),
        tmp_path / "alone",  # ep4 is the one before it here, and not x4
    ):
        for to in (f"{tmp_path}/run/", tmp_path / "run" / "x5"):
            with pytest.raises(ExistsError, match="another branch"):
                copy_checkpoint(source, to)
    assert names(run.store) == before
    assert not list(run.store.list("x5"))


def test_what_came_before_the_branches_parted_is_that_of_both(run, copy, tmp_path):
    """Session 1 is the same in both: a checkpoint that one has lost comes from the other."""
    delete_checkpoint(run.store, "ep1")
    assert copy_checkpoint(tmp_path / "copy" / "ep1", f"{tmp_path}/run/").is_new
    assert names(run.store) == ["ep1", "ep2", "ep4"]


def test_a_run_is_not_broken_by_a_session_that_it_does_not_know(run, make, tmp_path):
    """An older copy: a commit of a later session would make a damaged run of it."""
    target = MemoryStore("copy")
    sync_run(open_run(run.store), target)
    run.begin(Origin("ep3", 1, 3))
    run.save("ep4")
    copy_checkpoint(tmp_path / "run" / "ep4", tmp_path / "alone")
    for source in (tmp_path / "run" / "ep4", tmp_path / "alone"):
        with pytest.raises(UsageError, match="nothing of session 2"):
            copy_checkpoint(source, target)
    assert names(target) == ["ep1", "ep2", "ep3"]
    assert sync_run(open_run(run.store), target).errors == {}
    delete_checkpoint(target, "ep4")
    assert copy_checkpoint(tmp_path / "run" / "ep4", target).is_new
    assert names(target) == ["ep1", "ep2", "ep3", "ep4"]


def test_one_that_stands_alone_must_fit_between_those_that_are_there(run, copy, tmp_path):
    """The first of a session, one of the middle, the last; each also as that of another branch."""
    run.save("ep5")
    run.save("ep6")
    for name in ("ep4", "ep5", "ep6"):
        copy_checkpoint(tmp_path / "run" / name, tmp_path / f"safe-{name}")
    for name in ("x4", "x5", "x6"):
        copy_checkpoint(tmp_path / "copy" / name, tmp_path / f"safe-{name}")
    for lost, other in (("ep4", "x4"), ("ep5", "x5"), ("ep6", "x6")):
        delete_checkpoint(run.store, lost)
        with pytest.raises(ExistsError, match="another branch"):
            copy_checkpoint(tmp_path / f"safe-{other}", f"{tmp_path}/run/")
        assert copy_checkpoint(tmp_path / f"safe-{lost}", f"{tmp_path}/run/").is_new
    assert names(run.store) == ["ep1", "ep2", "ep4", "ep5", "ep6"]
