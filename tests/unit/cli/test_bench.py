"""What ``bench`` tells."""

from __future__ import annotations


def test_bench_tells_what_a_checkpoint_costs(milepost, run):
    """For the size that was asked for, or that of the newest checkpoint there."""
    before = sorted(run.folder.rglob("*"))
    found = milepost.json("bench", run.folder, "--probe", "16MiB", "--seconds", "1")
    assert sorted(run.folder.rglob("*")) == before
    assert found["num_rounds"] >= 1
    newest = next(one for one in milepost.json("ls", run.folder) if one["is_latest"])
    assert found["costs"]["size_bytes"] == newest["bytes"]
    text = milepost(
        "bench", run.folder, "--probe", "16MiB", "--seconds", "1", "--size", "2GiB"
    ).stdout
    assert "A checkpoint of 2.0 GiB here:" in text
    assert "save every" in text


def test_bench_refuses_sizes_that_are_none(milepost, tmp_path):
    """A slip of the fingers costs no minute."""
    milepost("bench", tmp_path, "--size", "ten", code=2)
    milepost("bench", tmp_path, "--probe", "1KiB", code=2)
    assert not list(tmp_path.iterdir())
