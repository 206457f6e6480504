"""Damage is found, and named down to the tensor."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from milepost.errors import AccessError, MissingError, NewerFormatError, StorageError
from milepost.format.canonical import dump_record, load_record
from milepost.format.digest import BLOCK_BYTES
from milepost.format.header import encode_header
from milepost.runs import Level, delete_checkpoint, newest_good, read_manifest, scan, verify
from milepost.stores import LocalStore, PrefixStore
from milepost.testing import Fault, FaultStore

SIZES = {"first": 5_000_000, "second": 6_000_000, "third": 9_000_000}
"""Bytes of three tensors: the second and the third lie across a border of blocks."""


def part() -> bytes:
    header, _ = encode_header([(key, "U8", (size,), size) for key, size in SIZES.items()])
    return header + random.Random(3).randbytes(sum(SIZES.values()))


PART = part()
FILES = {"model.safetensors": PART, "index.json": b'{"a":1}', "empty": b""}


@pytest.fixture
def run(store, begin, save):
    """One checkpoint of our own layout."""
    session = begin(store)
    save(store, session, "ep1", 1, files=FILES)
    manifest = replace(read_manifest(store, "ep1"), layout="milepost")
    store.put("ep1/manifest.json", manifest.to_bytes())
    return store


def flip(store, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.put(key, bytes(data))


@pytest.mark.parametrize("level", list(Level))
def test_a_whole_checkpoint_is_good(run, level):
    """And the report says how much was read to know it."""
    report = verify(run, "ep1", level)
    assert report.is_good
    whole = sum(map(len, FILES.values()))
    assert report.checked_bytes == (whole if level is Level.FULL else len(FILES["index.json"]))


@pytest.mark.parametrize(
    ("at", "block", "names"),
    [
        (0, 0, ()),
        (BLOCK_BYTES - 1, 0, ()),
        (BLOCK_BYTES, 1, ("second", "third")),
        (2 * BLOCK_BYTES, 2, ("third",)),
        (len(PART) - 1, 2, ("third",)),
    ],
)
def test_one_flipped_bit_is_found_and_named(run, at, block, names):
    """By file, block and tensors, so that one knows what is lost; block 0 holds the table."""
    flip(run, "ep1/model.safetensors", at)
    (problem,) = verify(run, "ep1", Level.FULL).problems
    assert (problem.path, problem.block, problem.tensors) == ("model.safetensors", block, names)
    assert problem.expected != problem.found
    for name in names:
        assert name in problem.text


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_found(run, level, file):
    """The half-done copy of a folder."""
    run.delete(f"ep1/{file}")
    (problem,) = verify(run, "ep1", level).problems
    assert (problem.path, problem.found) == (file, "missing")


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_found(run, level, change):
    """Cut off, or written on."""
    data = (PART + b"x")[: len(PART) + change]
    run.put("ep1/model.safetensors", data)
    (problem,) = verify(run, "ep1", level).problems
    assert problem.expected == str(len(PART))
    assert problem.found == str(len(PART) + change)


@pytest.mark.parametrize("level", list(Level))
def test_a_flipped_bit_in_a_record_is_found_quickly(run, level):
    """They are small, so that even the quick look reads them."""
    flip(run, "ep1/index.json", 3)
    (problem,) = verify(run, "ep1", level).problems
    assert (problem.path, problem.block) == ("index.json", 0)


def test_a_part_of_zeros_is_found_quickly(run):
    """What a power cut leaves where nothing was synced: the size is right."""
    run.put("ep1/model.safetensors", bytes(len(PART)))
    (problem,) = verify(run, "ep1", Level.QUICK).problems
    assert problem.path == "model.safetensors"


def test_a_file_of_the_user_may_bear_any_name(store, begin, save):
    """Only our own parts are looked into."""
    save(store, begin(store), "ep1", 1, files={"model.safetensors": b"not one"})
    assert verify(store, "ep1", Level.QUICK).is_good
    assert verify(store, "ep1", Level.FULL).is_good


@pytest.mark.parametrize("at", [0, 40, -10, -1])
def test_a_flipped_bit_in_the_manifest_is_found(run, at):
    """It vouches for everything else."""
    flip(run, "ep1/manifest.json", at)
    for level in Level:
        (problem,) = verify(run, "ep1", level).problems
        assert problem.path == "manifest.json"


def test_no_manifest_and_a_newer_one_are_not_damage(run):
    """They mean other things to the caller."""
    with pytest.raises(MissingError):
        verify(run, "ep2")
    fields = load_record(run.get("ep1/manifest.json"), where="test")
    run.put("ep1/manifest.json", dump_record({**fields, "format": 99}))
    with pytest.raises(NewerFormatError):
        verify(run, "ep1")


def test_a_folder_alone_can_be_verified(run, tmp_path):
    """One checkpoint was copied to another machine."""
    assert verify(PrefixStore(run, "ep1"), "", Level.FULL).is_good
    copy = LocalStore(tmp_path / "copied")
    for entry in run.list("ep1"):
        copy.put_new(entry.key.removeprefix("ep1/"), run.get(entry.key))
    assert verify(copy, "", Level.FULL).is_good
    flip(copy, "model.safetensors", BLOCK_BYTES)
    assert len(verify(copy, "", Level.FULL).problems) == 1


@pytest.mark.parametrize("level", list(Level))
def test_a_deletion_meanwhile_is_not_damage(run, level):
    """Retention may reach a checkpoint while someone looks at it: that is no alarm."""

    def delete_then(number: int, _operation: str) -> None:
        if number == 2:
            delete_checkpoint(run, "ep1")

    with pytest.raises(MissingError, match="deleted while"):
        verify(FaultStore(run, before=delete_then), "ep1", level)


@pytest.mark.parametrize("error", [StorageError("bad sector")])
def test_an_unreadable_block_is_a_problem_and_not_the_end(run, error):
    """The other blocks are still looked at."""
    run.traits = replace(run.traits, is_local=True)
    counting = FaultStore(run)
    verify(counting, "ep1", Level.FULL)
    reads = [n for n, text in enumerate(counting.operations, 1) if text.startswith("read_into")]
    report = verify(FaultStore(run, [Fault(reads[1], error=error)]), "ep1", Level.FULL)
    (problem,) = report.problems
    assert "bad sector" in problem.text


def test_a_refused_read_says_nothing_about_the_bytes(run):
    """It is raised, so that nobody deletes or skips a checkpoint for it."""
    counting = FaultStore(run)
    verify(counting, "ep1", Level.FULL)
    for at, text in enumerate(counting.operations, 1):
        with pytest.raises(AccessError):
            verify(FaultStore(run, [Fault(at, error=AccessError(text))]), "ep1", Level.FULL)


def test_an_unreadable_block_on_a_disk_is_a_problem(run, tmp_path, monkeypatch):
    """With real buffers, which an error may still hold."""
    from milepost.stores import blocks

    copy = LocalStore(tmp_path)
    for entry in run.list("ep1"):
        copy.put_new(entry.key, run.get(entry.key))

    def preadv(*_args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(blocks.os, "preadv", preadv)
    report = verify(copy, "ep1", Level.FULL)
    assert {problem.path for problem in report.problems} == {"model.safetensors", "index.json"}
    assert all("EIO" in problem.text for problem in report.problems)


def test_the_newest_good_one_is_found_past_the_damaged(store, begin, save):
    """With a report on each that was passed over, so that it can be told loudly."""
    session = begin(store)
    for number in range(1, 6):
        save(store, session, f"ep{number}", number)
    save(store, session, "nan/ba9", 6)
    store.delete("nan/ba9/part")
    store.delete("ep5/part")
    store.put("ep4/manifest.json", b"torn")
    flip(store, "ep3/part", 0)
    view = scan(store)
    found, reports = newest_good(store, view)
    assert found.name == "ep3"
    assert [report.name for report in reports] == ["ep5", "ep4"]
    found, reports = newest_good(store, view, level="full")
    assert found.name == "ep2"
    assert [report.name for report in reports] == ["ep5", "ep4", "ep3"]
    assert not any(report.is_good for report in reports)


def test_when_none_is_good_none_is_returned(store, begin, save):
    """And the reports say what happened to each."""
    session = begin(store)
    for number in (1, 2):
        save(store, session, f"ep{number}", number)
        store.delete(f"ep{number}/part")
    found, reports = newest_good(store, scan(store))
    assert found is None
    assert [report.name for report in reports] == ["ep2", "ep1"]


def test_one_deleted_since_the_scan_is_passed_over(store, begin, save):
    """Another process prunes while this one resumes."""
    session = begin(store)
    for number in (1, 2):
        save(store, session, f"ep{number}", number)
    view = scan(store)
    for entry in list(store.list("ep2")):
        store.delete(entry.key)
    found, reports = newest_good(store, view)
    assert found.name == "ep1"
    assert [report.name for report in reports] == ["ep2"]
