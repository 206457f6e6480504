"""Copies of whole runs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from milepost.checkpoint import Checkpoint, open_checkpoint, open_run
from milepost.errors import ExistsError, FencedError, InUseError, UsageError
from milepost.runs import (
    Origin,
    ensure_run,
    open_session,
    pin,
    record_origin,
    scan,
    verify,
)
from milepost.runs.prune import delete_checkpoint
from milepost.runs.validations import Request, request_validation
from milepost.stores import LocalStore, MemoryStore
from milepost.stores.prefix import PrefixStore
from milepost.testing import Crash, Fault, FaultStore
from milepost.transfers.claims import Commit, claim_copy
from milepost.transfers.one import copy_checkpoint
from milepost.transfers.whole import plan_sync, sync_run


def shape(store):
    """What a run is to whoever reads it."""
    view = scan(store)
    found = [(f.name, f.state, f.is_pinned, f.manifest, f.validation) for f in view.found]
    return view.run, view.sessions, found, view.pins


def files(store) -> dict[str, bytes]:
    """Everything but claims, which say who wrote here, and the pointer for people."""
    return {
        entry.key: store.get(entry.key)
        for entry in store.list()
        if not entry.key.endswith("attempt.json") and entry.key != "latest"
    }


@pytest.fixture
def rich(run):
    """A run with all that there can be."""
    first = run.store
    pin(first, "ep1", "best so far")
    run.begin(Origin("ep2", 1, 2))  # ep3 is orphaned by this
    made = run.save("ep4")
    run.save("nan/ba7")
    request_validation(first, "ep4", made.write_id, Request())
    Checkpoint(first, "ep4").set_metadata({"a": 1})
    first.put("events/reports-00000001.jsonl", b"{}\n")
    first.put("logs/train.txt", b"hello")
    return run


@pytest.fixture(params=["folder", "elsewhere"])
def target(request, tmp_path):
    return LocalStore(tmp_path / "copy") if request.param == "folder" else MemoryStore("copy")


def test_a_copy_of_a_run_is_that_run(rich, target):
    """The same checkpoints count; records, pins, diagnostics and files of others are there."""
    report = sync_run(open_run(rich.store), target, verify=True)
    assert files(target) == files(rich.store)
    assert shape(target) == shape(rich.store)
    assert [one.name for one in report.copied] == ["ep4", "ep2", "ep1", "ep3", "nan/ba7"]
    assert not report.errors
    if isinstance(target, LocalStore):
        assert open_checkpoint(target.local_path("latest")).manifest.name == "ep4"
    else:
        assert target.get("latest") == b"ep4\n"
    sizes = sum(found.size_bytes for found in scan(target).found)
    assert report.verified_bytes == sizes


def test_shared_files_are_sent_once(run, target):
    """On a disk they stay one file; elsewhere the store makes them itself."""
    report = sync_run(open_run(run.store), target)
    assert [bool(one.shared_bytes) for one in report.copied] == [False, True, True]
    if isinstance(target, LocalStore):
        paths = [Path(target.local_path(f"ep{n}/frozen.bin")) for n in (1, 2, 3)]
        assert len({path.stat().st_ino for path in paths}) == 1


def test_files_that_are_alike_by_chance_are_not_shared(make, target):
    """Equal checksums prove nothing where the source does not say that they are one file."""
    maker = make()
    maker.save("ep1", link=False)
    maker.save("ep2", link=False)
    report = sync_run(open_run(maker.store), target)
    assert [one.shared_bytes for one in report.copied] == [0, 0]


def test_only_what_is_new_is_copied_the_next_time(run, target):
    """Nothing else is written; a log that grew is written again."""
    run.store.put("log.txt", b"one")
    sync_run(open_run(run.store), target)
    watched = FaultStore(target)
    report = sync_run(open_run(run.store), watched)
    assert (report.copied, report.num_records) == ((), 0)
    assert report.present == ("ep3", "ep2", "ep1")
    assert {one.split()[0] for one in watched.operations} <= {
        *("get", "head", "list", "folders", "sync_folder", "point")
    }
    run.save("ep4")
    run.store.put("log.txt", b"one two")
    report = sync_run(open_run(run.store), target)
    assert [one.name for one in report.copied] == ["ep4"]
    assert target.get("log.txt") == b"one two"
    assert shape(target) == shape(run.store)


def test_nothing_is_deleted_unless_asked_for(run, target):
    """And then only checkpoints that the run has lost, pinned ones excepted."""
    target.put_new("run.json", run.store.get("run.json"))
    target.put("mine.txt", b"x")
    sync_run(open_run(run.store), target)
    pin(target, "ep1")
    for name in ("ep1", "ep2"):
        delete_checkpoint(run.store, name)
    assert sync_run(open_run(run.store), target).deleted == ()
    report = sync_run(open_run(run.store), target, delete=True)
    assert report.deleted == ("ep2",)
    assert not report.errors
    assert [one.name for one in scan(target).lineage()] == ["ep1", "ep3"]
    assert target.get("mine.txt") == b"x"


def test_a_checkpoint_that_was_made_anew_takes_the_place_of_the_old_one_if_asked(run, target):
    """Of one name and another attempt: by itself nothing is deleted."""
    sync_run(open_run(run.store), target)
    delete_checkpoint(run.store, "ep2")
    made = run.save("ep2")
    report = sync_run(open_run(run.store), target)
    assert isinstance(report.errors["ep2"], ExistsError)
    report = sync_run(open_run(run.store), target, delete=True)
    assert not report.errors
    assert scan(target).get("ep2").write_id == made.write_id
    assert shape(target) == shape(run.store)


def test_nothing_is_deleted_while_something_could_not_be_copied(run, target):
    """The old ones may be all that is whole."""
    sync_run(open_run(run.store), target)
    for name in ("ep1", "ep2", "ep3"):
        if name != "ep3":
            delete_checkpoint(run.store, name)
    run.save("ep4")
    run.store.put("ep4/own.bin", b"?" * 1000)
    report = sync_run(open_run(run.store), target, delete=True)
    assert list(report.errors) == ["ep4"]
    assert report.deleted == ()
    assert [one.name for one in scan(target).lineage()] == ["ep1", "ep2", "ep3"]


def test_what_retention_deletes_meanwhile_is_left_out(run):
    """One that is being read on a disk is not deleted; one that comes later is gone."""
    below = MemoryStore("copy")
    refused = []

    def retire(_: int, operation: str) -> None:
        if operation == "create_writer ep2/own.bin":
            with pytest.raises(InUseError):
                delete_checkpoint(run.store, "ep2")
            refused.append("ep2")
            delete_checkpoint(run.store, "ep1")

    report = sync_run(open_run(run.store), FaultStore(below, before=retire))
    assert refused == ["ep2"]
    assert not report.errors
    assert [one.name for one in scan(below).found] == ["ep2", "ep3"]


def test_what_was_begun_of_a_checkpoint_that_is_gone_is_removed(run):
    """Deleted at the source while it was copied from afar, or after the copy was killed."""
    far = MemoryStore("far")
    sync_run(open_run(run.store), far)
    below = MemoryStore("copy")

    def retire(_: int, operation: str) -> None:
        if operation == "put_new ep2/attempt.json":
            delete_checkpoint(far, "ep2")

    report = sync_run(open_run(far), FaultStore(below, before=retire))
    assert not report.errors
    assert [one.name for one in scan(below).found] == ["ep1", "ep3"]
    with claim_copy(below, "ep9", Commit.read(run.store, "ep2")):
        below.put("ep9/own.bin", b"x")
    assert sync_run(open_run(far), below).deleted == ()
    assert sync_run(open_run(far), below, delete=True).deleted == ("ep9",)
    assert not list(below.list("ep9"))


def test_one_that_is_damaged_does_not_stop_the_others(run, target):
    """It is named, and what cannot even be read is left out."""
    run.store.put("ep2/own.bin", b"?" * (8 * 1024 * 1024 + 5))
    run.store.put("ep1/manifest.json", b"?")
    report = sync_run(open_run(run.store), target)
    assert list(report.errors) == ["ep2"]
    assert list(report.skipped) == ["ep1"]
    assert [one.name for one in report.copied] == ["ep3"]
    assert [one.name for one in scan(target).lineage()] == ["ep3"]


def _tear(store, key: str) -> None:
    store.put(key, b"\0" * store.head(key).size_bytes)


@pytest.mark.parametrize(
    "harm",
    [
        lambda store: [_tear(store, f"ep2/{f}.json") for f in ("manifest", "attempt")],
        lambda store: (_tear(store, "ep2/manifest.json"), store.delete("ep2/attempt.json")),
        lambda store: _tear(store, "ep2/manifest.json"),
        lambda store: [store.delete(f"ep2/{f}.json") for f in ("manifest", "attempt")],
        lambda store: store.delete("ep2/manifest.json"),
        lambda store: (store.delete("ep2/manifest.json"), _tear(store, "ep2/attempt.json")),
    ],
    ids=["both", "torn-lost", "commit-torn", "both-lost", "commit-lost", "lost-torn"],
)
def test_what_came_to_harm_at_the_source_is_not_deleted_from_the_copy(run, target, harm):
    """It is not gone; the copy is all that is left of it."""
    sync_run(open_run(run.store), target)
    harm(run.store)
    report = sync_run(open_run(run.store), target, delete=True)
    assert report.deleted == ()
    assert [one.name for one in scan(target).lineage()] == ["ep1", "ep2", "ep3"]
    assert verify(target, "ep2", "full").is_good


def test_while_one_is_damaged_at_the_source_nothing_is_deleted(run, target):
    """Nobody knows what else has come to harm there, a whole folder perhaps."""
    sync_run(open_run(run.store), target)
    delete_checkpoint(run.store, "ep1")
    _tear(run.store, "ep2/manifest.json")
    report = sync_run(open_run(run.store), target, delete=True)
    assert (report.deleted, list(report.skipped)) == ((), ["ep2"])
    for entry in list(run.store.list("ep2")):
        run.store.delete(entry.key)
    run.store.put("ep1/mine.txt", b"x")  # stays where it is when a checkpoint is deleted
    assert sync_run(open_run(run.store), target, delete=True).deleted == ("ep1", "ep2")


def test_what_is_left_out_for_its_name_is_told(run, tmp_path, target):
    """Whoever deletes the original must know. Of a folder only the folder is told."""
    folder = tmp_path / "run"
    for name in (
        "my notes.txt",
        "w#1",
        "p\u00e4per.txt",
        "tb/a:2",
        "ep1/a (1).md",
        "x y/1",
        "x y/2",
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_text("x")
    (folder / "a link").symlink_to("ep1")
    (folder / "tb" / "good").write_text("x")
    names = ["ep1/a (1).md", "my notes.txt", "p\u00e4per.txt", "tb/a:2", "w#1", "x y/", "\\xff"]
    plan = plan_sync(folder, target)
    assert sorted(plan.skipped) == sorted(names)
    report = plan.run()
    assert (sorted(report.skipped), report.errors) == (sorted(names), {})
    assert target.get("tb/good") == b"x"
    copied = copy_checkpoint(folder / "ep1", tmp_path / "alone")
    assert list(copied.skipped) == ["a (1).md"]
    copied = copy_checkpoint(Checkpoint(run.store, "ep1"), tmp_path / "again")
    assert list(copied.skipped) == ["a (1).md"]
    assert PrefixStore(run.store, "tb").strangers() == ["a:2"]


def test_two_runs_are_never_mixed(run, make, tmp_path):
    """Another run, files of people, or the run itself at the place."""
    other = make("other")
    other.save("x")
    for to in (other.store, LocalStore(tmp_path)):
        with pytest.raises(ExistsError):
            sync_run(open_run(run.store), to)
    for to in (run.store, LocalStore(tmp_path / "run" / "below")):
        with pytest.raises(UsageError, match="in the run itself"):
            sync_run(open_run(run.store), to)


def test_a_copy_that_was_trained_on_is_left_alone(run, target):
    """Checkpoints of two trainings do not make one run; the other way it can be copied."""
    sync_run(open_run(run.store), target)
    session = record_origin(target, open_session(target, ensure_run(target)), Origin("ep3", 1, 3))
    run.save("ep4")
    before = files(target)
    with pytest.raises(FencedError, match=f"session {session.number}"):
        sync_run(open_run(run.store), target)
    run.begin(Origin("ep4", 1, 4))  # the same number, another session
    with pytest.raises(FencedError):
        sync_run(open_run(run.store), target)
    assert files(target) == before


def test_a_training_that_begins_at_the_target_stops_the_copy(run):
    """From then on what is there is its."""
    below = MemoryStore("copy")

    def begin(_: int, operation: str) -> None:
        if operation == "put_new ep3/manifest.json":
            session = open_session(below, ensure_run(below))
            record_origin(below, session, None)

    with pytest.raises(FencedError):
        sync_run(open_run(run.store), FaultStore(below, before=begin))
    assert not Checkpoint(below, "ep2").is_committed


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_stop_anywhere_leaves_a_run_and_the_next_try_ends_it(rich, is_after):
    """Whoever reads the copy then sees checkpoints that are whole, and counts them rightly."""
    watched = FaultStore(MemoryStore("copy"))
    source = open_run(rich.store)
    sync_run(source, watched, num_threads=1)
    lineage = [one.name for one in scan(rich.store).lineage()]
    for at in range(1, len(watched.operations) + 1):
        below = MemoryStore("copy")
        with suppress(Crash):
            sync_run(source, FaultStore(below, [Fault(at, is_after=is_after)]), num_threads=1)
        if any(entry.key == "run.json" for entry in below.list()):
            names = [one.name for one in scan(below).lineage()]
            assert names == lineage[len(lineage) - len(names) :]  # the newest come first
            assert all(verify(below, name, "full").is_good for name in names)
        if at % 5 == 0:
            report = sync_run(source, below)
            assert not report.errors
            assert files(below) == files(rich.store)


def test_a_plan_says_what_would_be_done_and_does_nothing(run, target):
    """For whoever wants to look first."""
    plan = plan_sync(open_run(run.store), target)
    assert [one.name for one in plan.missing] == ["ep3", "ep2", "ep1"]
    assert list(target.list()) == []
    assert plan.run().errors == {}
    assert shape(target) == shape(run.store)


def test_single_files_keep_their_names(tmp_path, target):
    """A run that shows single files shows them in the copy too."""
    import torch

    import milepost as mp

    with mp.Checkpointer(tmp_path / "shown", save_format="torch", model=torch.nn.Linear(2, 1)) as r:
        r.save("a", wait=True)
        r.save("b", wait=True)
    (tmp_path / "shown" / "log.txt").write_text("x")
    report = sync_run(tmp_path / "shown", target)
    assert [one.name for one in report.copied] == ["b", "a"]
    keys = [entry.key for entry in target.list() if not entry.key.startswith(".")]
    assert keys == ["a.pt", "b.pt", "log.txt"]
    assert shape(open_run(target).store) == shape(open_run(tmp_path / "shown").store)
    delete_checkpoint(open_run(tmp_path / "shown").store, "a")
    assert sync_run(tmp_path / "shown", target, delete=True).deleted == ("a",)
    assert [e.key for e in target.list() if not e.key.startswith(".")] == ["b.pt", "log.txt"]
