"""What ``cp`` and ``sync`` tell, and how they end."""

from __future__ import annotations

from milepost.checkpoint import open_run
from milepost.runs import pin


def test_cp_says_where_the_copy_is_and_what_it_took(milepost, run, tmp_path):
    """For people on one line, for programs as an object."""
    found = milepost.json("cp", run.folder / "ep2", tmp_path / "copy", "--verify")
    assert found["name"] == "ep2"
    assert found["is_new"] is True
    assert found["sent_bytes"] == found["verified_bytes"] > 0
    again = milepost("cp", run.folder / "ep2", tmp_path / "copy").stdout
    assert again == f"{tmp_path}/copy (was there already)\n"
    assert "good" in milepost("verify", tmp_path / "copy").stdout
    milepost("cp", run.folder, f"{tmp_path}/below/")
    assert (tmp_path / "below" / "ep3" / "manifest.json").is_file()


def test_cp_ends_with_the_code_of_its_error(milepost, run, tmp_path):
    """Damaged, missing, in the way."""
    milepost("cp", run.folder / "nope", tmp_path / "copy", code=3)
    milepost("cp", run.folder / "ep1", tmp_path / "copy")
    milepost("cp", run.folder / "ep2", tmp_path / "copy", code=2)
    part = run.folder / "ep2" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    milepost("cp", run.folder / "ep2", tmp_path / "other", code=1)
    milepost("ls", tmp_path / "other", code=3)


def test_sync_copies_tells_and_ends_well(milepost, run, tmp_path):
    """And a second one finds everything there."""
    plan = milepost.json("sync", run.folder, tmp_path / "copy", "--dry-run")
    assert [one["name"] for one in plan["to_copy"]] == ["ep3", "ep2", "ep1"]
    assert not (tmp_path / "copy").exists()
    assert "3 to copy" in milepost("sync", run.folder, tmp_path / "copy", "--dry-run").stdout
    found = milepost.json("sync", run.folder, tmp_path / "copy", "--verify")
    assert [one["name"] for one in found["copied"]] == ["ep3", "ep2", "ep1"]
    assert milepost.json("ls", tmp_path / "copy") == milepost.json("ls", run.folder)
    again = milepost("sync", run.folder, tmp_path / "copy").stdout
    assert again == f"{tmp_path}/copy: 0 copied, 3 there already.\n"


def test_sync_tells_what_it_could_not_do(milepost, run, tmp_path):
    """One is pinned there, and one is damaged here; the others are copied."""
    milepost("sync", run.folder, tmp_path / "copy")
    pin(open_run(tmp_path / "copy").store, "ep1")
    milepost("prune", run.folder, "--keep-last", "2", "--yes")
    milepost("sync", run.folder, tmp_path / "copy", "--delete")
    assert [one["name"] for one in milepost.json("ls", tmp_path / "copy")] == ["ep1", "ep2", "ep3"]
    part = run.folder / "ep2" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    result = milepost("sync", run.folder, tmp_path / "new", code=1)
    assert "ep2" in result.stderr
    assert [one["name"] for one in milepost.json("ls", tmp_path / "new")] == ["ep3"]


def test_sync_refuses_another_run(milepost, run, make_run, tmp_path):
    """What is there stays as it is."""
    make_run("other").save("x")
    milepost("sync", run.folder, tmp_path / "other", code=2)
    assert [one["name"] for one in milepost.json("ls", tmp_path / "other")] == ["x"]


def test_sync_to_a_file_says_that_it_is_one(milepost, run, tmp_path):
    """Not that the source is no run."""
    (tmp_path / "file").write_text("mine")
    result = milepost("sync", run.folder, tmp_path / "file", code=2)
    assert "is a file" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_a_copy_into_the_folder_of_another_checkpoint_is_refused(milepost, run):
    """Retention would leave it there, in a folder that is no checkpoint any more."""
    before = sorted(run.folder.rglob("*"))
    for target in (run.folder / "ep2/copy", f"{run.folder}/ep2/"):
        result = milepost("cp", run.folder / "ep1", target, code=2)
        assert "ep2 is the folder of a checkpoint" in result.stderr
    assert sorted(run.folder.rglob("*")) == before
