"""Symbolic links where a checkpoint, or a file of one, was."""

from __future__ import annotations

from milepost.runs import scan, verify
from milepost.stores import LocalStore


def test_a_link_in_the_place_of_a_checkpoint_is_told_of_once(tmp_path, begin, save, caplog):
    """It was moved to another disk: training would begin from an earlier one, and no word said."""
    store = LocalStore(tmp_path / "run")
    session = begin(store)
    save(store, session, "ep1", 1)
    save(store, session, "ep2", 2)
    (tmp_path / "run/ep2").rename(tmp_path / "moved")
    (tmp_path / "run/ep2").symlink_to(tmp_path / "moved")
    assert (tmp_path / "run/latest").is_symlink()
    (tmp_path / "run/ep3").symlink_to("/nowhere")
    for _ in range(2):
        assert [one.name for one in scan(store).found] == ["ep1"]
    warned = [one for one in caplog.messages if "symbolic link" in one]
    assert [one.partition(" ")[0] for one in warned] == [
        f"{tmp_path}/run/ep2",
        f"{tmp_path}/run/ep3",
    ]


def test_a_link_in_the_place_of_a_part_is_called_one(tmp_path, begin, save):
    """For whoever looks into the folder it is not missing."""
    store = LocalStore(tmp_path / "run")
    save(store, begin(store), "ep1", 1)
    (tmp_path / "run/ep1/part").rename(tmp_path / "part")
    (tmp_path / "run/ep1/part").symlink_to(tmp_path / "part")
    (problem,) = verify(store, "ep1").problems
    assert problem.text == "part is a symbolic link, and links are not followed."
