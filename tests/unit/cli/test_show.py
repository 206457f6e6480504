"""What ``show`` tells of a checkpoint."""

from __future__ import annotations

import pytest


def test_show_takes_every_way_to_name_a_checkpoint(milepost, run):
    """A run is its newest; ``latest`` and a folder work like a name."""
    places = {
        str(run.folder): "ep3",
        f"{run.folder}/": "ep3",
        f"{run.folder}/latest": "ep3",
        f"{run.folder}/ep1": "ep1",
        f"{run.folder}/ep1/": "ep1",
        f"file://{run.folder}/ep2": "ep2",
    }
    for place, name in places.items():
        assert milepost.json("show", place)["name"] == name, place


def test_show_a_folder_that_stands_alone(milepost, run, tmp_path):
    """A checkpoint that was copied out of its run is whole in itself."""
    copy = tmp_path / "elsewhere" / "best"
    copy.parent.mkdir()
    (run.folder / "ep2").rename(copy)
    assert milepost.json("show", copy)["name"] == "best"
    assert len(milepost.json("show", copy, "--tensors")["tensors"]) == 2


def test_show_facts(milepost, run):
    """Everything in the commit is told."""
    facts = milepost.json("show", run.folder / "ep3")
    assert facts["state"] == "committed"
    assert facts["is_final"] is True
    assert facts["items"] == ["model", "timer"]
    assert facts["session"] == 1
    assert facts["attempt"] == 3
    text = milepost("show", run.folder / "ep3").stdout
    assert "committed, final" in text
    assert "loss 0.3333" in text
    assert "inexact" in text


def test_show_what_the_save_has_cost(milepost, make_run):
    """Figures for programs, words for people."""
    maker = make_run()
    stats = {"written_bytes": 24_000, "write_s": 0.012, "blocking_s": 0.0015}
    maker.save("ep1", stats=stats)
    assert milepost.json("show", maker.folder)["stats"] == stats
    text = milepost("show", maker.folder).stdout
    assert "23.4 KiB written in 12 ms (1.9 MiB/s), training held up for 1.5 ms" in text
    assert "copied" not in text
    for late, words in ((0, "all"), (2048, "2.0 KiB while training went on, the rest")):
        maker.save("ep1", stats={"late_bytes": late, "eager_reason": "tensors on cuda"})
        text = milepost("show", f"{maker.folder}/latest").stdout
        assert f"copied      {words} before the save returned: tensors on cuda" in text


def test_show_tensors_from_headers(milepost, run):
    """Names, dtypes and shapes cost no read of the values."""
    tensors = milepost.json("show", run.folder / "ep1", "--tensors")["tensors"]
    assert tensors == [
        {
            "item": "model",
            "name": name,
            "dtype": "float32",
            "shape": [length],
            "bytes": 4 * length,
            "file": "model.safetensors",
        }
        for name, length in (("a.weight", 2), ("b", 1))
    ]
    text = milepost("show", run.folder / "ep1", "--tensors").stdout
    assert "2 tensors, 12 B" in text.splitlines()[-1]


def test_show_tree(milepost, run):
    """The structure names what each tensor is."""
    run.save("ep4", values={"epoch": 4, "betas": {"$": "tuple", "v": [0.9, 0.99]}})
    lines = milepost("show", run.folder / "ep4", "--tree").stdout.splitlines()
    assert lines == [
        "model: dict of 2",
        "  a.weight: float32 [2]",
        "  b: float32 [1]",
        "timer: dict of 2",
        "  epoch: 4",
        "  betas: tuple [0.9, 0.99]",
    ]


def test_show_files(milepost, run):
    """The checksum of a whole file can be compared with that of another tool."""
    files = {f["path"]: f for f in milepost.json("show", run.folder / "ep1", "--files")["files"]}
    data = (run.folder / "ep1" / "index.json").read_bytes()
    assert files["index.json"]["bytes"] == len(data)
    assert int(files["index.json"]["crc32c"], 16) == castagnoli(data)
    assert files["model.safetensors"]["linked_from"] is None


def castagnoli(data: bytes) -> int:
    """CRC32C from its definition."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_show_what_has_no_commit_is_incomplete(milepost, run):
    """An attempt is neither a checkpoint nor missing."""
    run.claim("ep9")
    result = milepost("show", run.folder / "ep9", code=5)
    assert "incomplete" in result.stderr


def test_show_a_name_that_is_not_there(milepost, run):
    """The message lists the names there are."""
    result = milepost("show", run.folder / "ep77", code=3)
    assert "ep1, ep2, ep3" in result.stderr


@pytest.mark.parametrize("option", ["--tensors", "--tree"])
def test_show_refuses_a_damaged_index(milepost, run, option):
    """A structure that does not match its checksum is not shown as if it were true."""
    path = run.folder / "ep1" / "index.json"
    path.write_bytes(path.read_bytes().replace(b"model", b"modal", 1))
    result = milepost("show", run.folder / "ep1", option, code=1)
    assert "checksum" in result.stderr
    assert result.stdout == ""


def test_show_refuses_a_damaged_header(milepost, run):
    """Nor are names and shapes from a header that was altered."""
    path = run.folder / "ep1" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"a.weight", b"c.weight"))
    assert "checksum" in milepost("show", run.folder / "ep1", "--tensors", code=1).stderr


def test_show_refuses_a_part_that_was_cut(milepost, run):
    """The reader finds the end too early; that is damage, with the name of the file."""
    path = run.folder / "ep1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    result = milepost("show", run.folder / "ep1", "--tensors", code=1)
    assert "model.safetensors" in result.stderr
