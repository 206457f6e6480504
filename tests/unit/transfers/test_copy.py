"""Copies of one checkpoint."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from milepost.checkpoint import Checkpoint, open_checkpoint, open_run
from milepost.errors import (
    DamagedError,
    ExistsError,
    InUseError,
    MissingError,
    StorageError,
    UsageError,
)
from milepost.format.canonical import dump_record, load_record
from milepost.runs import claim, ensure_run, verify
from milepost.runs.identity import process_start
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Crash, Fault, FaultStore
from milepost.transfers.claims import Commit, claim_copy
from milepost.transfers.one import copy_checkpoint


def contents(store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list()}


def without_claim(found: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in found.items() if key != "attempt.json"}


@pytest.fixture(params=["folder", "elsewhere"])
def target(request, tmp_path):
    return LocalStore(tmp_path / "copy") if request.param == "folder" else MemoryStore("copy")


def test_a_copy_is_the_same_bytes_and_opens(run, target):
    """All of it: the files, the commit, and what users have put beside."""
    run.store.put("ep2/notes.txt", b"mine")
    Checkpoint(run.store, "ep2").set_metadata({"a": 1})
    seen = []
    report = copy_checkpoint(
        open_run(run.store).get("ep2"), target, verify=True, progress=seen.append
    )
    before = {key[4:]: data for key, data in contents(run.store).items() if key.startswith("ep2/")}
    assert without_claim(contents(target)) == without_claim(before)
    assert verify(target, "", "full").is_good
    assert Checkpoint(target, "").get_metadata() == {"a": 1}
    size = Checkpoint(run.store, "ep2").manifest.size_bytes
    assert (report.is_new, report.sent_bytes, report.verified_bytes) == (True, size, size)
    assert sum(seen) == 2 * size


def test_a_second_copy_sends_nothing(run, target):
    """The same commit is there: nothing is written again."""
    source = Checkpoint(run.store, "ep3")
    copy_checkpoint(source, target)
    watched = FaultStore(target)
    report = copy_checkpoint(source, watched)
    assert not report.is_new
    assert not [one for one in watched.operations if one.split()[0] in ("put", "put_new", "delete")]


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_stop_anywhere_leaves_no_half_copy_and_the_next_try_ends_it(run, is_after):
    """The program may be killed at each operation on the target."""
    source = Checkpoint(run.store, "ep2")
    watched = FaultStore(MemoryStore("copy"))
    copy_checkpoint(source, watched, num_threads=1)
    for at in range(1, len(watched.operations) + 1):
        below = MemoryStore("copy")
        with suppress(Crash):
            copy_checkpoint(
                source, FaultStore(below, [Fault(at, is_after=is_after)]), num_threads=1
            )
        if Checkpoint(below, "").is_committed:
            assert verify(below, "", "full").is_good
        found = contents(below)
        whole = [k for k in ("own.bin", "frozen.bin") if found.get(k) == run.store.get(f"ep2/{k}")]
        again = FaultStore(below)
        report = copy_checkpoint(source, again)
        assert verify(below, "", "full").is_good
        if report.is_new:
            # What was whole is compared and not sent again.
            sent = [one for one in again.operations if one.startswith("create_writer")]
            assert len(sent) == 2 - len(whole)


def test_an_error_of_the_target_leaves_whole_files_for_the_next_try(run):
    """A full disk, and room again."""
    source = Checkpoint(run.store, "ep2")
    watched = FaultStore(MemoryStore("copy"))
    copy_checkpoint(source, watched, num_threads=1)
    at = 1 + watched.operations.index("put_new manifest.json")
    below = MemoryStore("copy")
    error = StorageError("no room", operation="create")
    with pytest.raises(StorageError):
        copy_checkpoint(source, FaultStore(below, [Fault(at, error=error)]), num_threads=1)
    assert not Checkpoint(below, "").is_committed
    report = copy_checkpoint(source, below)
    assert report.sent_bytes == 0
    assert report.present_bytes == source.manifest.size_bytes
    assert verify(below, "", "full").is_good


def test_what_an_earlier_try_left_is_compared_before_it_counts(run, target):
    """A file of the right size and other bytes, as a killed program leaves on a disk."""
    source = Checkpoint(run.store, "ep1")
    commit = Commit.read(run.store, "ep1")
    with claim_copy(target, "", commit):
        target.put("own.bin", b"?" * 1000)
        target.put("frozen.bin", run.store.get("ep1/frozen.bin"))
    report = copy_checkpoint(source, target)
    assert (report.sent_bytes, report.present_bytes) == (1000, source.manifest.size_bytes - 1000)
    assert verify(target, "", "full").is_good


def test_a_damaged_block_is_never_copied(run, target):
    """The error names it, and there is no checkpoint."""
    data = bytearray(run.store.get("ep2/own.bin"))
    data[-1] ^= 1
    run.store.put("ep2/own.bin", bytes(data))
    with pytest.raises(DamagedError, match=r"Block 1 of .*own\.bin"):
        copy_checkpoint(Checkpoint(run.store, "ep2"), target)
    assert not Checkpoint(target, "").is_committed


def test_verify_finds_what_the_target_did_not_keep(run):
    """A place that acknowledges bytes and holds others."""

    below = MemoryStore("copy")

    def rot(_: int, operation: str) -> None:
        if operation == "put_new manifest.json":
            below.put("own.bin", b"?" * 1000)

    with pytest.raises(DamagedError, match="not what was sent"):
        copy_checkpoint(Checkpoint(run.store, "ep1"), FaultStore(below, before=rot), verify=True)


def test_nothing_is_copied_over_what_is_there(run, tmp_path):
    """Another checkpoint, an attempt of a training, files of people."""
    source = Checkpoint(run.store, "ep1")
    other = tmp_path / "other"
    copy_checkpoint(Checkpoint(run.store, "ep2"), other)
    with pytest.raises(ExistsError, match="another checkpoint"):
        copy_checkpoint(source, other)
    held = claim(run.store, run.session, "ep9", 9)
    with pytest.raises(ExistsError):
        copy_checkpoint(source, LocalStore(tmp_path / "run" / held.folder))
    people = MemoryStore("copy")
    people.put("ep1/mine.txt", b"x")
    with pytest.raises(ExistsError, match="other files"):
        copy_checkpoint(source, people)  # below it, under its own name
    assert contents(people) == {"ep1/mine.txt": b"x"}


def test_a_folder_with_other_files_gets_the_copy_below_it(run, tmp_path):
    """As the program of that name does; so does one whose name ends in a slash."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").write_text("x")
    for to in (tmp_path / "models", f"{tmp_path}/fresh/"):
        report = copy_checkpoint(tmp_path / "run" / "ep1", to)
        assert report.url == f"file://{Path(to) / 'ep1'}"
        assert open_checkpoint(Path(to) / "ep1").verify().is_good
        assert not copy_checkpoint(tmp_path / "run" / "ep1", to).is_new
    copy_checkpoint(tmp_path / "run" / "latest", f"{tmp_path}/fresh/")
    assert open_checkpoint(tmp_path / "fresh" / "ep3").is_committed


def test_a_lost_checkpoint_comes_back_into_its_run(run, make, tmp_path):
    """From a copy, under its own name only: counted twice it would be two."""
    copy_checkpoint(tmp_path / "run" / "ep2", tmp_path / "safe")
    for entry in list(run.store.list("ep2")):
        run.store.delete(entry.key)
    with pytest.raises(ExistsError, match="keeps its name"):
        copy_checkpoint(tmp_path / "safe", tmp_path / "run" / "ep8")
    copy_checkpoint(tmp_path / "safe", f"{tmp_path}/run/")
    assert [one.name for one in open_run(run.store).checkpoints()] == ["ep1", "ep2", "ep3"]
    other = make("other")
    other.save("x1")
    copy_checkpoint(tmp_path / "safe", tmp_path / "other")
    found = open_run(other.store).view.get("ep2")
    assert found.state.value == "orphaned"  # of another run: there, and never the newest


def test_two_copies_into_one_folder_do_not_meet(run, tmp_path):
    """The second one is refused while the first one lives, and goes on once it does not."""
    store = LocalStore(tmp_path / "copy")
    with claim_copy(store, "", Commit.read(run.store, "ep1")):
        with pytest.raises(InUseError, match="copying"):
            copy_checkpoint(tmp_path / "run" / "ep1", tmp_path / "copy")
    assert copy_checkpoint(tmp_path / "run" / "ep1", tmp_path / "copy").is_new


def test_in_a_bucket_the_claim_of_a_living_process_is_respected(run):
    """There are no locks there; that of a process that is known to have ended is taken over."""
    source, commit = Checkpoint(run.store, "ep1"), Commit.read(run.store, "ep1")
    for pid, is_living in ((os.getppid(), True), (2**22 + 1, False)):
        store = MemoryStore("copy")
        with claim_copy(store, "", commit):
            fields = load_record(store.get("attempt.json"), where="attempt.json")
        fields.pop("digest", None)
        start = process_start(os.getppid())
        store.put("attempt.json", dump_record({**fields, "pid": pid, "process_start": start}))
        if is_living:
            with pytest.raises(InUseError, match=f"Process {pid}"):
                copy_checkpoint(source, store)
        else:
            assert copy_checkpoint(source, store).is_new


def test_a_swept_copy_is_not_committed(run):
    """Another program removed the claim and took the folder: what is there is not ours."""
    below = MemoryStore("copy")

    def sweep(_: int, operation: str) -> None:
        if operation == "get attempt.json":
            below.delete("attempt.json")

    with pytest.raises(MissingError):
        copy_checkpoint(Checkpoint(run.store, "nope"), below)
    with suppress(Exception):
        copy_checkpoint(Checkpoint(run.store, "ep1"), FaultStore(below, before=sweep))
    assert not Checkpoint(below, "").is_committed


def test_single_files_are_not_mixed_into_a_run(run, tmp_path):
    """A run that shows single files keeps records that a copied folder would not have."""
    hidden = LocalStore(tmp_path / "shown" / ".milepost")
    ensure_run(hidden, layout="torch")
    with pytest.raises(UsageError):
        copy_checkpoint(tmp_path / "run" / "ep1", tmp_path / "shown")
    with pytest.raises(UsageError):
        copy_checkpoint(tmp_path / "run" / "ep1", tmp_path / "shown" / "ep1")
