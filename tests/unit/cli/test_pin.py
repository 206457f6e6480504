"""Pins from the command line."""

from __future__ import annotations

from milepost import runs


def test_pin_and_unpin(milepost, run):
    """The pin is the one that retention looks at."""
    said = milepost.json("pin", run.folder / "ep1", "--note", "for the paper")
    assert said == {"name": "ep1", "is_pinned": True, "note": "for the paper"}
    assert runs.list_pins(run.store) == {"ep1": "for the paper"}
    assert milepost.json("ls", run.folder)[0]["is_pinned"] is True
    assert milepost("unpin", run.folder / "ep1").stdout == "ep1 is no longer pinned.\n"
    assert runs.list_pins(run.store) == {}
    assert milepost("unpin", run.folder / "ep1").stdout == "ep1 was not pinned.\n"


def test_pin_wants_a_name(milepost, run):
    """A run means its newest elsewhere; here it would pin something else every time."""
    result = milepost("pin", run.folder, code=2)
    assert f"{run.folder}/ep3" in result.stderr
    assert runs.list_pins(run.store) == {}


def test_pin_the_latest(milepost, run):
    """``latest`` says that the newest is meant; the pin is on its name."""
    assert milepost.json("pin", run.folder / "latest")["name"] == "ep3"


def test_pin_what_is_not_there(milepost, run):
    """A pin on a slip of the pen protects nothing."""
    milepost("pin", run.folder / "ep8", code=3)
    assert runs.list_pins(run.store) == {}


def test_pin_in_a_run_of_single_files(milepost, make_run):
    """The visible file names the checkpoint."""
    maker = make_run("visible/.milepost")
    maker.save("ep1")
    visible = maker.folder.parent
    assert milepost.json("pin", visible / "ep1.pt")["name"] == "ep1"
    assert milepost.json("unpin", visible / ".milepost" / "ep1")["name"] == "ep1"


def test_pin_a_diagnostic_checkpoint(milepost, run):
    """What shows a failure may be worth keeping too."""
    run.save("nan/ba7", reason="nan")
    assert milepost.json("pin", run.folder / "nan" / "ba7")["name"] == "nan/ba7"
    assert list(runs.list_pins(run.store)) == ["nan/ba7"]


def test_pin_outside_of_a_run(milepost, run, tmp_path):
    """A folder by itself is threatened by no retention."""
    (run.folder / "ep2").rename(tmp_path / "alone")
    milepost("pin", tmp_path / "alone", code=2)
