"""What ``verify`` finds, and how it ends."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_verify_whole(milepost, run):
    """Whole checkpoints end with 0, after every byte was read."""
    records = milepost.json("verify", "--all", run.folder)
    assert [(record["name"], record["verdict"]) for record in records] == [
        ("ep1", "good"),
        ("ep2", "good"),
        ("ep3", "good"),
    ]
    folder = run.folder / "ep1"
    read = sum((folder / name).stat().st_size for name in ("model.safetensors", "index.json"))
    assert records[0]["checked_bytes"] == read


def test_verify_names_file_block_and_tensor(milepost, make_run):
    """One flipped bit in the second block of 8 MiB, in one of two tensors."""
    maker = make_run()
    num = 3 * 1024 * 1024
    maker.save("ep1", weights={"first": (0.0,) * num, "second": (0.0,) * 16})
    flip(maker.folder / "ep1" / "model.safetensors", 9 * 1024 * 1024)
    (record,) = milepost.json("verify", maker.folder / "ep1", code=1)
    assert record["verdict"] == "damaged"
    (problem,) = record["problems"]
    assert (problem["file"], problem["block"]) == ("model.safetensors", 1)
    assert problem["tensors"] == ["first", "second"]
    text = milepost("verify", maker.folder / "ep1", code=1).stdout
    assert "ep1: damaged (1 problem)" in text
    assert "Block 1 of model.safetensors" in text
    assert "second" in text


def test_verify_quick_looks_at_sizes_only(milepost, run):
    """Quick finds a cut, not a flipped bit of a tensor; full finds both."""
    part = run.folder / "ep3" / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    assert milepost.json("verify", "--level", "quick", run.folder)[0]["verdict"] == "good"
    milepost("verify", run.folder, code=1)
    part.write_bytes(part.read_bytes()[:-1])
    milepost("verify", "--level", "quick", run.folder, code=1)


def test_verify_missing_file_is_incomplete(milepost, run):
    """A half-done copy is told apart from rot."""
    (run.folder / "ep1" / "model.safetensors").unlink()
    (record,) = milepost.json("verify", run.folder / "ep1", code=5)
    assert record["verdict"] == "incomplete"
    flip(run.folder / "ep2" / "model.safetensors", 4100)
    milepost("verify", "--all", run.folder, code=1)


def test_verify_attempts_are_shown_and_not_counted(milepost, run):
    """A save that is going on must not fail a nightly check; asking for it by name does."""
    run.claim("ep9")
    records = milepost.json("verify", "--all", run.folder)
    assert records[-1]["name"] == "ep9"
    assert records[-1]["verdict"] == "incomplete"
    milepost("verify", run.folder / "ep9", code=5)


def test_verify_unreadable_commit_is_damaged(milepost, run):
    """A torn manifest is damage, by name and among all."""
    (run.folder / "ep2" / "manifest.json").write_bytes(b'{"torn')
    (record,) = milepost.json("verify", run.folder / "ep2", code=1)
    assert record["problems"][0]["file"] == "manifest.json"
    records = milepost.json("verify", "--all", run.folder, code=1)
    verdicts = {record["name"]: record["verdict"] for record in records}
    assert verdicts == {"ep1": "good", "ep2": "damaged", "ep3": "good"}


def test_verify_when_the_records_of_the_run_are_damaged(milepost, run):
    """A checkpoint can be looked at by name although its run cannot tell what counts."""
    (run.folder / "sessions" / "00000001.from.json").write_bytes(b"{}")
    assert milepost.json("verify", run.folder / "ep1")[0]["verdict"] == "good"
    milepost("ls", run.folder, code=1)


def test_verify_nothing(milepost, tmp_path):
    """Nothing to verify is not success."""
    milepost("verify", tmp_path, code=3)
