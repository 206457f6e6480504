"""The manifest: the record whose existence is the commit."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from milepost.errors import DamagedError, FormatError, NewerFormatError
from milepost.format import canonical
from milepost.format.digest import BLOCK_BYTES
from milepost.format.manifest import FORMAT_VERSION, FileEntry, Manifest, check_version

FILES = (
    FileEntry("model.safetensors", BLOCK_BYTES + 1, (0xDEADBEEF, 0x0000000A)),
    FileEntry("sub/index.json", 17, (0x1,), linked_from="ep2"),
    FileEntry("empty.bin", 0, ()),
)
MANIFEST = Manifest(
    name="ep3",
    run_id="0123456789abcdef",
    session=2,
    attempt=7,
    write_id="feedface",
    parent="ep2",
    reason="interval",
    is_final=False,
    created_s=1_700_000_000.25,
    time={"epoch": 3, "batch": 1500, "wall_s": 12.5},
    metrics={"loss": 0.125, "best": float("-inf")},
    world_size=1,
    layout="milepost",
    items=("model", "optimizers"),
    files=FILES,
    software={"milepost": "0.1.0", "torch": "2.13.0"},
    notes=("The order of the loader's workers is not reproduced.",),
    stats={"stage_s": 0.5, "written_bytes": 123},
    interval={"every": "auto", "interval_s": 12.5, "stall_s": None},
)
BODY = json.loads(MANIFEST.to_bytes())


def reading(**changes: object) -> Manifest:
    body = {**BODY, **changes}
    return Manifest.from_bytes(canonical.dump_record(body), where="ep3/manifest.json")


def without(field: str) -> Manifest:
    body = {key: value for key, value in BODY.items() if key != field}
    return Manifest.from_bytes(canonical.dump_record(body), where="ep3/manifest.json")


def test_manifest_comes_back_as_it_was():
    """Every field, tuples and infinities included."""
    assert Manifest.from_bytes(MANIFEST.to_bytes(), where="m") == MANIFEST


def test_manifest_is_plain_json():
    """Other programs may read it without this package."""
    assert BODY["format"] == FORMAT_VERSION == 1
    assert BODY["files"][0] == {
        "path": "model.safetensors",
        "size": BLOCK_BYTES + 1,
        "crc32c": "deadbeef0000000a",
    }
    assert BODY["files"][1]["linked_from"] == "ep2"
    assert (BODY["name"], BODY["time"]["batch"], BODY["items"]) == (
        "ep3",
        1500,
        ["model", "optimizers"],
    )


def test_nan_metric_survives():
    """A NaN must rank worst later, which it cannot if it was lost or became null."""
    nan = dataclasses.replace(MANIFEST, metrics={"loss": float("nan")})
    again = Manifest.from_bytes(nan.to_bytes(), where="m")
    assert math.isnan(again.metrics["loss"])


def test_unknown_fields_are_kept():
    """What a later version of the same format adds survives a rewrite by this one."""
    manifest = reading(colour={"deep": [1, {"x": None}]})
    assert manifest.extra == {"colour": {"deep": [1, {"x": None}]}}
    assert json.loads(manifest.to_bytes())["colour"] == {"deep": [1, {"x": None}]}
    assert Manifest.from_bytes(manifest.to_bytes(), where="m") == manifest


def test_optional_fields_may_be_missing():
    """An older writer did not have them."""
    assert without("notes").notes == ()
    assert without("stats").stats == {}
    assert without("interval").interval == {}
    assert "interval" not in json.loads(without("interval").to_bytes())


@pytest.mark.parametrize(
    "field",
    [
        "name", "run_id", "session", "attempt", "write_id", "parent", "reason", "is_final",
        "created_s", "world_size", "layout", "files",
    ],
)  # fmt: skip
def test_missing_field_is_named(field):
    """A record that is whole, but of something else."""
    with pytest.raises(FormatError, match=field):
        without(field)


def test_newer_format_is_refused_with_the_way_out():
    """Guessing at a newer format would load something wrong."""
    with pytest.raises(NewerFormatError, match="pip install --upgrade milepost") as caught:
        reading(format=3)
    assert caught.value.facts["found"] == 3
    assert caught.value.facts["expected"] == 2
    with pytest.raises(NewerFormatError):  # every other record
        check_version(FORMAT_VERSION + 1, where="m")


@pytest.mark.parametrize("version", [None, 0, -1, "1", 1.0, True, [1]], ids=repr)
def test_version_that_is_none_is_refused(version):
    """``True == 1`` in Python; a version is a whole number."""
    with pytest.raises(FormatError, match="no format version"):
        check_version(version, where="m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("name", None),
        ("name", "../../etc"),
        ("name", "/abs"),
        ("run_id", None),
        ("session", "2"),
        ("session", 2.0),
        ("session", True),
        ("attempt", None),
        ("parent", 1),
        ("parent", "../up"),
        ("is_final", 0),
        ("is_final", "false"),
        ("created_s", "now"),
        ("created_s", True),
        ("world_size", [1]),
        ("layout", {}),
        ("items", "model"),
        ("items", [1]),
        ("items", {"model": 1}),
        ("notes", [None]),
        ("time", []),
        ("time", {"$": "tuple", "v": []}),
        ("metrics", None),
        ("metrics", {"$": "no such tag"}),
        ("software", "torch"),
        ("stats", {"$": "set", "v": [1]}),
        ("interval", "1ep"),
        ("files", {}),
        ("files", [1]),
        ("files", ["model"]),
        ("files", [None]),
    ],
)
def test_field_of_the_wrong_kind_is_refused(field, value):
    """Retention, resume and listing rest on these; a wrong kind must not reach them."""
    with pytest.raises(FormatError, match=r"ep3/manifest\.json"):
        reading(**{field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../model"},
        {"path": "/etc/passwd"},
        {"path": "a\0"},
        {"path": None},
        {"size": -1},
        {"size": 1.0},
        {"size": True},
        {"size": "17"},
        {"size": 2**60 + 1},
        {"size": 0},
        {"size": BLOCK_BYTES + 1},
        {"crc32c": ""},
        {"crc32c": "0000001"},
        {"crc32c": "000000010"},
        {"crc32c": "0000000100000002"},
        {"crc32c": "+0000001"},
        {"crc32c": "0x000001"},
        {"crc32c": "0_000001"},
        {"crc32c": "0000000G"},
        {"crc32c": "0000000A"},
        {"crc32c": ["00000001"]},
        {"crc32c": 1},
        {"linked_from": 3},
        {"linked_from": "../ep2"},
    ],
    ids=repr,
)
def test_malformed_file_entry_is_refused(change):
    """Paths are opened, sizes allocated, checksums trusted."""
    good = {"path": "index.json", "size": 17, "crc32c": "00000001"}
    assert FileEntry.from_json(good, where="m") == FileEntry("index.json", 17, (1,))
    with pytest.raises(FormatError):
        FileEntry.from_json({**good, **change}, where="m")


def test_file_listed_twice_is_refused():
    """Of two entries for one file, one would go unchecked."""
    with pytest.raises(FormatError, match="twice"):
        reading(files=[BODY["files"][1], BODY["files"][1]])


def test_every_flipped_bit_is_detected():
    """One wrong bit in a committed manifest is damage, whatever field it hits."""
    data = MANIFEST.to_bytes()
    missed = []
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        try:
            Manifest.from_bytes(bytes(flipped), where="m")
        except DamagedError:
            continue
        missed.append(position)
    assert missed == []


def test_file_is_found_by_path():
    """The reader asks for files by name."""
    assert MANIFEST.file("sub/index.json") is FILES[1]
    assert MANIFEST.size_bytes == BLOCK_BYTES + 18
    with pytest.raises(FormatError, match="no file nothing"):
        MANIFEST.file("nothing")
