"""What ``prune`` deletes, and when it refuses to."""

from __future__ import annotations

import pytest


def names(milepost, folder):
    return [record["name"] for record in milepost.json("ls", folder)]


def test_prune_dry_run_deletes_nothing(milepost, run):
    """A look at what would happen must be free of risk."""
    before = sorted(path for path in run.folder.rglob("*"))
    found = milepost.json("prune", run.folder, "--keep-last", 1, "--dry-run")
    assert sorted(path for path in run.folder.rglob("*")) == before
    assert found["deleted"] == []
    kept = {decision["name"]: decision["keep"] for decision in found["decisions"]}
    assert kept == {"ep1": False, "ep2": False, "ep3": True}


def test_prune_deletes_what_no_policy_keeps(milepost, run):
    """Policies add up; what went is told with its size."""
    run.save("ep4", metrics={"loss": 5.0})
    found = milepost.json("prune", run.folder, "--keep-last", 1, "--keep-best", "loss:min", "--yes")
    assert found["deleted"] == ["ep1", "ep2"]
    sizes = {d["name"]: d["bytes"] for d in found["decisions"]}
    assert found["freed_bytes"] == sizes["ep1"] + sizes["ep2"]
    assert names(milepost, run.folder) == ["ep3", "ep4"]
    assert not (run.folder / "ep1").exists()


def test_prune_spares_pinned_ones(milepost, run):
    """A pin beats every policy."""
    milepost("pin", run.folder / "ep1")
    milepost("prune", run.folder, "--keep-last", 1, "--yes")
    assert names(milepost, run.folder) == ["ep1", "ep3"]


def test_prune_does_not_delete_unasked(milepost, run):
    """In a script nobody answers, so the deletion has to be asked for in words."""
    result = milepost("prune", run.folder, "--keep-last", 1, code=2, stdin="y\n")
    assert "--yes" in result.stderr
    assert "Nothing was deleted" in result.stderr
    assert len(names(milepost, run.folder)) == 3


def test_prune_why_gives_a_reason_for_each(milepost, run):
    """Every checkpoint stands with its verdict and the reason."""
    text = milepost(
        "prune", run.folder, "--keep-last", 1, "--keep-every", "2ep", "--why", "--dry-run"
    ).stdout
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "remove" in lines["ep1"]
    assert "kept by no policy" in lines["ep1"]
    assert "first at or after 1 x 2ep" in lines["ep2"]
    assert "the newest" in lines["ep3"]


def test_prune_leaves_attempts_alone(milepost, run):
    """They may be saves that are going on."""
    run.claim("ep9")
    milepost("prune", run.folder, "--keep-last", 1, "--yes")
    assert (run.folder / "ep9" / "attempt.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--keep-last", "0"),
        ("--keep-best", "loss"),
        ("--keep-best", "loss:lowest"),
        ("--keep-best", ":min"),
        ("--keep-best", "loss:min:0"),
        ("--keep-every", "2"),
        ("--keep-within", "3ep"),
    ],
)
def test_prune_refuses_policies_that_make_no_sense(milepost, run, options):
    """A slip in a policy must not delete by another one."""
    milepost("prune", run.folder, *options, "--yes", code=2)
    assert len(names(milepost, run.folder)) == 3


def test_prune_best_of_a_metric_with_colons(milepost, make_run):
    """Metrics are often called after what they were measured on."""
    maker = make_run()
    for number, value in enumerate((0.1, 0.3, 0.2), start=1):
        maker.save(f"ep{number}", metrics={"val:acc": value})
    found = milepost.json("prune", maker.folder, "--keep-best", "val:acc:max:2", "--yes")
    assert found["deleted"] == ["ep1"]


def test_prune_within_a_duration(milepost, make_run):
    """Ages count from the newest checkpoint, so that a stopped run keeps its own."""
    maker = make_run()
    for number, created_s in enumerate((0.0, 7000.0, 10000.0), start=1):
        maker.save(f"ep{number}", created_s=created_s)
    found = milepost.json("prune", maker.folder, "--keep-within", "1h", "--yes")
    assert found["deleted"] == ["ep1"]
