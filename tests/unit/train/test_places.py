"""Folders and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.errors import UsageError
from milepost.train.places import fill_ranks, save_location


def test_absolute_folders_and_uris_are_used_as_they_are(tmp_path) -> None:
    """Nothing is added to them."""
    for folder in (str(tmp_path), tmp_path, "s3://bucket/run"):
        assert save_location(folder, run_name=None, resume="auto") == str(folder)


def test_relative_folders_lie_in_the_run_folder(tmp_path, monkeypatch) -> None:
    """A run without a name gets the time."""
    monkeypatch.chdir(tmp_path)
    named = save_location("a/b", run_name="x", resume="auto")
    assert named == str(tmp_path / "runs" / "x" / "rank_0" / "a" / "b")
    timed = save_location("a", run_name=None, resume="never")
    assert timed is not None
    assert Path(timed).parts[-2:] == ("rank_0", "a")


@pytest.mark.parametrize("run_name", ["", "..", "a/b", "a\\b"])
def test_run_names_stay_in_the_folder(run_name) -> None:
    """A name must not lead out of ./runs."""
    with pytest.raises(UsageError, match="run_name"):
        save_location("a", run_name=run_name, resume="never")


def test_unknown_resume_is_refused() -> None:
    """A typing error must not become a fresh start."""
    with pytest.raises(UsageError, match="resume='yes'"):
        save_location("/a", run_name=None, resume="yes")


def test_ranks_are_filled_in(monkeypatch) -> None:
    """In either spelling; anything else in braces is a mistake."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    assert fill_ranks("/a/{rank}/{RANK}/{local_rank}-{node_rank}.pt") == "/a/5/5/1-2.pt"
    with pytest.raises(UsageError, match="epoch"):
        fill_ranks("/a/ep{epoch}.pt")
