"""What changed between two starts of a run is told or refused, and never passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

import milepost as mp


def save_twice(folder: Path, save_format: str = "milepost") -> None:
    model = nn.Linear(2, 2)
    with mp.Checkpointer(folder, save_format=save_format, model=model) as run:
        for _ in range(2):
            run.step(num_samples=1)
            run.save(wait=True)


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_a_lost_run_record_makes_no_other_run(tmp_path: Path, save_format: str) -> None:
    """A fresh identity would leave every checkpoint behind, as one of another run."""
    save_twice(tmp_path, save_format)
    next(tmp_path.rglob("run.json")).unlink()
    with mp.Checkpointer(tmp_path, save_format=save_format, model=nn.Linear(2, 2)) as run:
        assert run.resumed_from == "ba2"
        run.step(num_samples=1)
        run.save(wait=True)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["ba1", "ba2", "ba3"]


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_a_lost_run_record_does_not_change_the_layout(tmp_path: Path, save_format: str) -> None:
    """Folders would be mixed with single files, each with a lineage of its own."""
    save_twice(tmp_path, save_format)
    next(tmp_path.rglob("run.json")).unlink()
    other = {"milepost": "torch", "torch": "milepost"}[save_format]
    with pytest.raises(mp.UsageError, match=save_format):
        mp.Checkpointer(tmp_path, save_format=other, model=nn.Linear(2, 2)).open()


def test_checkpoints_beside_the_record_of_another_run_are_refused(tmp_path: Path) -> None:
    """A start from the beginning would waste what was trained, and nobody would look at the log."""
    save_twice(tmp_path / "a")
    save_twice(tmp_path / "b")
    shutil.copy(tmp_path / "b/run.json", tmp_path / "a/run.json")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with pytest.raises(mp.MismatchError, match="another run"):
        mp.Checkpointer(tmp_path / "a", model=nn.Linear(2, 2)).open()
    assert set(before) <= {path.name for path in (tmp_path / "a").iterdir()}


def test_a_checkpoint_that_was_copied_alone_is_not_passed_over(tmp_path: Path) -> None:
    """Readers see it, so a writer must not begin anew beside it."""
    save_twice(tmp_path / "a")
    shutil.copytree(tmp_path / "a/ba2", tmp_path / "b/ba2")
    with pytest.raises(mp.IncompleteError, match="sessions/"):
        mp.Checkpointer(tmp_path / "b", model=nn.Linear(2, 2)).open()
