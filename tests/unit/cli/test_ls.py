"""What ``ls`` tells of a run."""

from __future__ import annotations

import datetime

from milepost import runs


def test_ls_json_has_the_documented_fields(milepost, run):
    """Scripts build on these names."""
    records = milepost.json("ls", run.folder)
    assert [record["name"] for record in records] == ["ep1", "ep2", "ep3"]
    first, last = records[0], records[-1]
    assert set(first) == {
        *("name", "state", "created", "time", "bytes", "new_bytes", "metrics", "reason"),
        *("is_final", "is_pinned", "is_latest", "session", "notes", "error"),
        "validation",
    }
    assert first["time"] == {"epoch": 1, "batch": 10}
    assert first["metrics"] == {"loss": 1.0}
    assert datetime.datetime.fromisoformat(first["created"]).timestamp() == 1_700_000_001
    folder = run.folder / "ep1"
    written = sum((folder / name).stat().st_size for name in ("model.safetensors", "index.json"))
    assert first["bytes"] == first["new_bytes"] == written
    assert (first["is_latest"], last["is_latest"]) == (False, True)
    assert (first["is_final"], last["is_final"]) == (False, True)
    assert last["notes"] == ["the order of a sampler is not stored"]
    assert first["session"] == 1


def test_ls_counts_shared_files_once(milepost, run):
    """The size of a run is the sum of what is new in each checkpoint."""
    made = run.save("ep4", linked_from="ep3")
    record = milepost.json("ls", run.folder)[-1]
    assert record["bytes"] == made.size_bytes
    assert record["new_bytes"] == made.file("index.json").size_bytes


def test_ls_json_stays_json_with_nan(milepost, make_run):
    """A loss that became NaN must not break the scripts that look for it."""
    maker = make_run()
    maker.save("ep1", metrics={"loss": float("nan"), "top": float("-inf")})
    (record,) = milepost.json("ls", maker.folder)
    assert record["metrics"] == {"loss": "NaN", "top": "-Infinity"}


def test_ls_hides_what_does_not_count_and_says_so(milepost, run):
    """An attempt without a commit must never be taken for a checkpoint."""
    run.claim("ep9")
    plain = milepost("ls", run.folder)
    assert "ep9" not in plain.stdout
    assert "1 more" in plain.stderr
    records = {record["name"]: record for record in milepost.json("ls", "--all", run.folder)}
    assert records["ep9"]["state"] == "incomplete"
    assert records["ep9"]["created"] is None


def test_ls_all_tells_orphans_and_damage(milepost, run):
    """What is left of a run that went on from further back stays visible."""
    first = runs.read_manifest(run.store, "ep1")
    run.begin(runs.Origin("ep1", first.session, first.attempt))
    run.save("other")
    (run.folder / "other" / "manifest.json").write_bytes(b"{}")
    records = {record["name"]: record for record in milepost.json("ls", "--all", run.folder)}
    assert {name: record["state"] for name, record in records.items()} == {
        "ep1": "committed",
        "ep2": "orphaned",
        "ep3": "orphaned",
        "other": "damaged",
    }
    assert records["other"]["error"]
    assert [record["name"] for record in milepost.json("ls", run.folder)] == ["ep1"]


def test_ls_table_marks(milepost, run):
    """The words carry the meaning; colour is never the only sign."""
    milepost("pin", run.folder / "ep1", "--note", "for the paper")
    lines = milepost("ls", run.folder).stdout.splitlines()
    assert lines[0].split()[:4] == ["name", "made", "epoch", "batch"]
    assert lines[1].split()[0] == "ep1"
    assert lines[1].endswith("pinned")
    assert lines[3].endswith("latest final inexact")
    assert "loss=0.5" in lines[2]
    assert not any("\033" in line for line in lines)


def test_ls_of_a_run_without_checkpoints(milepost, make_run):
    """A job that has just begun is not an error."""
    maker = make_run()
    assert milepost.json("ls", maker.folder) == []
    assert milepost("ls", maker.folder).stdout == ""


def test_ls_finds_hidden_records(milepost, make_run):
    """Runs of single files keep their records in a hidden folder; people name the visible one."""
    maker = make_run("visible/.milepost")
    maker.save("ep1")
    for place in (maker.folder, maker.folder.parent, f"file://{maker.folder.parent}"):
        assert [record["name"] for record in milepost.json("ls", place)] == ["ep1"]


def test_ls_takes_a_home_folder(milepost, run, monkeypatch):
    """A quoted ``~`` reaches us as it is."""
    monkeypatch.setenv("HOME", str(run.folder.parent))
    assert len(milepost.json("ls", "~/run")) == 3


def test_ls_of_nothing_is_missing(milepost, tmp_path):
    """Nothing there is told apart from an empty run."""
    result = milepost("ls", tmp_path, code=3)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert " hint: " in result.stderr


def test_ls_of_an_unknown_kind_of_place(milepost):
    """A typing error in a scheme is a wrong call, not a missing run."""
    milepost("ls", "s4://bucket/run", code=2)


def test_ls_and_show_tell_of_validations(milepost, run):
    """The metrics that count, and whether more are to come."""
    from milepost.runs.validations import (
        Request,
        Validation,
        record_verdict,
        request_validation,
        validation_id,
    )

    view = runs.scan(run.store)
    for name in ("ep1", "ep2"):
        request_validation(run.store, name, view.get(name).write_id, Request())
    which = view.get("ep2").write_id
    verdict = Validation(
        "ep2", validation_id(which), runs.ValidationStatus.VALIDATED, {"loss": 0.125}, "", 1
    )
    record_verdict(run.store, verdict, write_id=which)
    records = milepost.json("ls", run.folder)
    assert [record["validation"] and record["validation"]["status"] for record in records] == [
        "pending_validation",
        "validated",
        None,
    ]
    assert records[1]["metrics"] == {"loss": 0.125}
    lines = milepost("ls", run.folder).stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["pending_validation", "validated"]
    assert "validated, loss 0.125" in milepost("show", run.folder / "ep2").stdout
    assert milepost.json("show", run.folder / "ep2")["metrics"] == {"loss": 0.125}
