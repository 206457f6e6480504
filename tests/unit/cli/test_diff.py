"""What ``diff`` finds between two checkpoints."""

from __future__ import annotations

import math

import pytest

WEIGHTS = {"a.weight": (1.0, 2.0), "b": (3.0,)}


def test_diff_of_equal_checkpoints(milepost, make_run):
    """Equal is told in words and by the exit code."""
    maker = make_run()
    maker.save("one", weights=WEIGHTS, values={"epoch": 1})
    maker.save("two", weights=WEIGHTS, values={"epoch": 1})
    found = milepost.json("diff", maker.folder / "one", maker.folder / "two")
    assert found["is_equal"] is True
    assert found["num_equal_tensors"] == 2
    assert found["tensors"] == found["values"] == []


def test_diff_names_each_change(milepost, make_run):
    """Added, removed, reshaped and changed tensors, and other values by path."""
    maker = make_run()
    maker.save(
        "one",
        weights={"same": (1.0,), "value": (1.0, 2.0), "shape": (1.0,), "gone": (1.0,)},
        values={"epoch": 1, "old": 2},
    )
    maker.save(
        "two",
        weights={"same": (1.0,), "value": (1.0, 2.5), "shape": (1.0, 1.0), "new": (1.0,)},
        values={"epoch": 3, "fresh": [1, {"$": "tuple", "v": [1]}]},
    )
    found = milepost.json("diff", maker.folder / "one", maker.folder / "two", code=1)
    changes = {c["tensor"]: (c["change"], c["before"], c["after"]) for c in found["tensors"]}
    assert changes == {
        "model/value": ("changed", "float32 [2]", "float32 [2]"),
        "model/shape": ("changed", "float32 [1]", "float32 [2]"),
        "model/gone": ("removed", "float32 [1]", None),
        "model/new": ("added", None, "float32 [1]"),
    }
    assert found["num_equal_tensors"] == 1
    values = {c["path"]: (c["change"], c["before"], c["after"]) for c in found["values"]}
    assert values == {
        "timer['epoch']": ("changed", "1", "3"),
        "timer['old']": ("removed", "2", None),
        "timer['fresh'][0]": ("added", None, "1"),
        "timer['fresh'][1][0]": ("added", None, "1"),
    }


def test_diff_sees_negative_zero_and_equal_nan(milepost, make_run):
    """Tensors are compared by their bytes: -0.0 is not 0.0, and NaN equals itself."""
    maker = make_run()
    maker.save("one", weights={"a": (0.0,), "b": (math.nan,)}, values={})
    maker.save("two", weights={"a": (-0.0,), "b": (math.nan,)}, values={})
    found = milepost.json("diff", maker.folder / "one", maker.folder / "two", code=1)
    assert [change["tensor"] for change in found["tensors"]] == ["model/a"]


def test_diff_finds_equal_tensors_at_other_places(milepost, make_run):
    """A tensor that moved within its file because another one grew has not changed."""
    maker = make_run()
    maker.save("one", weights={"a": (1.0,), "b": (7.0, 8.0)}, values={})
    maker.save("two", weights={"a": (1.0,) * 3_000, "b": (7.0, 8.0)}, values={})
    found = milepost.json("diff", maker.folder / "one", maker.folder / "two", code=1)
    assert [change["tensor"] for change in found["tensors"]] == ["model/a"]


def test_diff_sees_two_tensors_that_changed_places(milepost, make_run):
    """Equal checksums of a block say nothing where the names in it are others."""
    maker = make_run()
    pad = (0.0,) * (3 * 1024 * 1024)
    maker.save("one", weights={"pad": pad, "x": (1.0,), "y": (2.0,)}, values={})
    maker.save("two", weights={"pad": pad, "y": (1.0,), "x": (2.0,)}, values={})
    found = milepost.json("diff", maker.folder / "one", maker.folder / "two", code=1)
    assert [change["tensor"] for change in found["tensors"]] == ["model/x", "model/y"]


def test_diff_reads_checked_bytes_only(milepost, run):
    """Damage is told as damage, never as a change."""
    part = run.folder / "ep1" / "model.safetensors"
    run.save("ep4", weights={"a.weight": (9.0, 9.0), "b": (3.0,)})
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    result = milepost("diff", run.folder / "ep1", run.folder / "ep4", code=1)
    assert result.stdout == ""
    assert "checksum" in result.stderr


def test_diff_values_measures_the_distance(milepost, make_run):
    """Largest difference and relative norm, as computed by hand."""
    maker = make_run()
    maker.save("one", weights={"far": (3.0, 4.0), "near": (1.0,)}, values={})
    maker.save("two", weights={"far": (3.0, 4.5), "near": (1.25,)}, values={})
    found = milepost.json("diff", "--values", maker.folder / "one", maker.folder / "two", code=1)
    far, near = found["tensors"]
    assert (far["tensor"], far["max_abs"]) == ("model/far", 0.5)
    assert far["relative_l2"] == pytest.approx(0.1)
    assert (near["tensor"], near["max_abs"], near["relative_l2"]) == ("model/near", 0.25, 0.25)


def test_diff_top_cuts_the_text_and_says_so(milepost, make_run):
    """A large model must not flood the terminal; JSON holds everything."""
    maker = make_run()
    maker.save("one", weights={f"w{n}": (1.0,) for n in range(5)}, values={})
    maker.save("two", weights={f"w{n}": (2.0,) for n in range(5)}, values={})
    places = (maker.folder / "one", maker.folder / "two")
    text = milepost("diff", "--top", "2", *places, code=1).stdout
    assert text.count("model/w") == 2
    assert "3 more tensors" in text
    assert len(milepost.json("diff", "--top", "2", *places, code=1)["tensors"]) == 5


def test_diff_does_not_count_how_long_it_took(milepost, make_run):
    """A resume that is right bit for bit took other seconds: equal, and the seconds are told."""
    maker = make_run()
    maker.save("one", weights=WEIGHTS, values={"batch": 4, "wall_s": 1.5})
    maker.save("two", weights=WEIGHTS, values={"batch": 4, "wall_s": 2.25})
    maker.save("old", weights=WEIGHTS, values={"batch": 4})
    one, two, old = (maker.folder / name for name in ("one", "two", "old"))
    found = milepost.json("diff", one, two)
    assert found["is_equal"] is True
    assert found["values"] == []
    assert found["not_counted"] == [{"path": "timer['wall_s']", "before": "1.5", "after": "2.25"}]
    text = milepost("diff", one, two).stdout
    assert "0 other differences" in text
    assert "not counted: timer['wall_s'], the time it took: 1.5 s -> 2.25 s" in text
    assert milepost.json("diff", one, old, code=1)["values"][0]["path"] == "timer['wall_s']"


def test_diff_of_the_items_that_were_named(milepost, make_run):
    """Other values do not count then; an item that neither has is no answer of "equal"."""
    maker = make_run()
    maker.save("one", weights=WEIGHTS, values={"batch": 4})
    maker.save("two", weights=WEIGHTS, values={"batch": 5})
    one, two = maker.folder / "one", maker.folder / "two"
    found = milepost.json("diff", "--only", "model", one, two)
    assert (found["is_equal"], found["num_equal_tensors"]) == (True, 2)
    found = milepost.json("diff", "--only", "timer", one, two, code=1)
    assert found["num_equal_tensors"] == 0
    assert [change["path"] for change in found["values"]] == ["timer['batch']"]
    told = milepost("diff", "--only", "modle", one, two, code=3).stderr
    assert "'modle'" in told
    assert "model, timer" in told


def test_diff_says_of_which_runs(milepost, make_run):
    """Two runs name their checkpoints alike: "ep4 -> ep4" would not say which is which."""
    for name in ("a", "b"):
        make_run(name).save("ep4", weights=WEIGHTS, values={})
    first = make_run("c").folder.parent
    text = milepost("diff", first / "a", f"{first}/b/latest").stdout
    assert text.startswith(f"{first}/a/ep4 -> {first}/b/ep4: ")
    text = milepost("diff", first / "a" / "ep4", first / "b" / "ep4").stdout
    assert text.startswith(f"{first}/a/ep4 -> {first}/b/ep4: ")
