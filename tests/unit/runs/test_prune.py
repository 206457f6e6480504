"""Retention and sweeping: what goes, what stays, and what is finished for others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milepost.errors import (
    AccessError,
    FencedError,
    IncompleteError,
    MissingError,
    StorageError,
    UsageError,
)
from milepost.runs import (
    Decision,
    Identity,
    KeepAll,
    KeepBest,
    KeepLast,
    Level,
    abandon,
    claim,
    decide,
    delete_checkpoint,
    pin,
    prune,
    scan,
    sweep,
    unpin,
    verify,
)
from milepost.runs.keep import may_give_up
from milepost.runs.manifests import ManifestCache
from milepost.stores import LocalStore
from milepost.testing import Fault, FaultStore


@pytest.fixture
def filled(store, begin, save):
    session = begin(store)
    for number in range(1, 6):
        save(store, session, f"ep{number}", number, metrics={"loss": float(number)})
    return session


def names(store) -> list[str]:
    return [found.name for found in scan(store).lineage()]


def verdicts(decisions) -> dict[str, bool]:
    return {decision.name: decision.keep for decision in decisions}


def test_every_decision_gives_its_reasons(store, filled):
    """The same words that a dry run prints."""
    pin(store, "ep2")
    decisions = decide(
        scan(store),
        [KeepLast(2), KeepBest(1, "loss")],
        protect=["ep3"],
        pending=["ep4"],
    )
    assert {d.name: (d.keep, d.reason) for d in decisions} == {
        "ep1": (True, "number 1 of the best 1 by loss (1)"),
        "ep2": (True, "pinned"),
        "ep3": (True, "in use"),
        "ep4": (True, "waits for its validation; one of the last 2"),
        "ep5": (True, "the newest; one of the last 2"),
    }


def test_without_policies_nothing_goes(store, filled):
    """Deleting is never a default."""
    assert all(verdicts(decide(scan(store), [])).values())


def test_what_waits_for_validation_is_neither_ranked_nor_deleted(store, filled):
    """Its score is not known yet, so it takes nobody's place."""
    decisions = decide(scan(store), [KeepBest(1, "loss")], pending=["ep1"])
    assert verdicts(decisions) == {
        "ep1": True,
        "ep2": True,
        "ep3": False,
        "ep4": False,
        "ep5": True,
    }


def test_orphans_and_diagnostics_stay(store, begin, save, filled):
    """They are not counted, so no policy can mean them."""
    save(store, filled, "nan/ba9", 6)
    session = begin(store, origin="ep3")
    save(store, session, "ep4b", 1)
    decisions = decide(scan(store), [KeepLast(1)])
    assert verdicts(decisions) == {
        "ep1": False,
        "ep2": False,
        "ep3": False,
        "ep4": True,
        "ep5": True,
        "nan/ba9": True,
        "ep4b": True,
    }
    report = prune(store, decisions, session=session)
    assert report.deleted == ("ep1", "ep2", "ep3")
    assert {"ep4", "ep5", "nan/ba9"} <= {found.name for found in scan(store).found}


def test_pruning_tells_what_it_freed(store, filled):
    """In bytes, for the log."""
    report = prune(store, decide(scan(store), [KeepLast(2)]), session=filled)
    assert report.deleted == ("ep1", "ep2", "ep3")
    assert report.freed_bytes == 9
    assert report.errors == {}
    assert prune(store, decide(scan(store), [KeepLast(2)])).deleted == ()


def test_victims_are_looked_at_again(store, begin, filled):
    """Between the decision and the deletion one was pinned, and the newest went another way."""
    decisions = decide(scan(store), [KeepLast(1)])
    pin(store, "ep2")
    session = begin(store, origin="ep3")
    report = prune(store, decisions, session=session)
    assert report.deleted == ("ep1",)
    assert set(report.errors) == {"ep2", "ep3"}
    assert names(store) == ["ep2", "ep3"]


def test_a_look_of_the_session_itself_is_not_repeated(store, filled):
    """Retention after a save costs one look at the run, and asks for each victim all the same."""
    pin(store, "ep1")
    view = scan(store)
    decisions = decide(view, [KeepLast(2)])
    store.put("ep2/manifest.json", store.get("ep1/manifest.json"))
    unpin(store, "ep1")
    pin(store, "ep3")
    counting = FaultStore(store)
    report = prune(counting, decisions, session=filled, view=view)
    assert report.deleted == ()
    assert set(report.errors) == {"ep3"}
    assert counting.operations.count("list sessions") == 1
    assert "folders " not in counting.operations
    assert "list " not in counting.operations
    assert names(store)[-3:] == ["ep3", "ep4", "ep5"]


def test_a_fenced_session_deletes_nothing_by_its_own_look(store, begin, filled):
    """It looked before the new session began, and decided, and was stopped for an hour."""
    view = scan(store)
    decisions = decide(view, [KeepLast(1)])
    begin(store, origin="ep2")
    counting = FaultStore(store)
    with pytest.raises(FencedError):
        prune(counting, decisions, session=filled, view=view)
    assert {operation.split()[0] for operation in counting.operations} == {"list", "get"}


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([], False),
        ([KeepAll()], False),
        ([KeepLast(1), KeepAll()], False),
        ([KeepLast(1)], True),
        ([KeepBest(1, "loss"), KeepLast(1)], True),
    ],
)
def test_what_keeps_everything_gives_nothing_up(store, filled, policies, expected):
    """Then nobody has to look at the run, and the decisions would say the same."""
    assert may_give_up(policies) is expected
    assert any(not decision.keep for decision in decide(scan(store), policies)) is expected


def test_a_wrong_decision_cannot_delete_the_newest(store, filled):
    """Whoever made it."""
    report = prune(store, [Decision(f"ep{n}", keep=False, reason="") for n in range(1, 6)])
    assert names(store) == ["ep5"]
    assert isinstance(report.errors["ep5"], UsageError)


def test_the_newest_whole_one_stays_when_the_newest_is_damaged(store, filled):
    """Or a run with one broken checkpoint would be left."""
    store.delete("ep5/part")
    store.put("ep4/part", b"longer than it was")
    report = prune(store, decide(scan(store), [KeepLast(1)]), session=filled)
    assert names(store) == ["ep3", "ep5"]
    assert set(report.errors) == {"ep3"}


def test_when_all_are_damaged_all_stay(store, filled):
    """Something is wrong with the place; it is no time for deleting."""
    for number in range(1, 6):
        store.delete(f"ep{number}/part")
    report = prune(store, decide(scan(store), [KeepLast(1)]), session=filled)
    assert report.deleted == ()
    assert len(names(store)) == 5


def test_a_fenced_session_deletes_nothing(store, begin, filled):
    """The run belongs to someone else, with other rules perhaps."""
    decisions = decide(scan(store), [KeepLast(1)])
    begin(store)
    with pytest.raises(FencedError):
        prune(store, decisions, session=filled)
    with pytest.raises(FencedError):
        sweep(store, filled)
    assert len(names(store)) == 5


def test_one_that_cannot_be_deleted_does_not_stop_the_others(store, filled):
    """And is tried again next time, though it is no checkpoint any more."""
    counting = FaultStore(store)
    decisions = decide(scan(store), [KeepLast(3)])
    broken = [f"delete ep1/{file}" for file in ("part",)]

    class Refuses:
        url, traits = store.url, store.traits

        def __getattr__(self, name):
            return getattr(counting, name)

        def delete(self, key):
            if f"delete {key}" in broken:
                raise StorageError("busy")
            counting.delete(key)

    report = prune(Refuses(), decisions, session=filled)
    assert report.deleted == ("ep2",)
    assert set(report.errors) == {"ep1"}
    assert names(store) == ["ep3", "ep4", "ep5"]
    assert sweep(store, filled) == ["ep1"]
    assert store.folders() == ["ep3", "ep4", "ep5", "sessions"]


def test_deleting_unpublishes_first_and_forgets_last(store, filled):
    """The order that a stop at any point can be finished from."""
    seen = FaultStore(store)
    delete_checkpoint(seen, "ep1")
    changes = [o for o in seen.operations if o.split()[0] in ("rename", "delete", "sync_folder")]
    assert changes == [
        "rename ep1/manifest.json ep1/deleted.json",
        "delete ep1/part",
        "sync_folder ep1",
        "delete ep1/attempt.json",
        "sync_folder ep1",
        "delete ep1/deleted.json",
    ]
    delete_checkpoint(store, "ep1")


def test_a_pinned_checkpoint_is_deleted_by_force_only(store, filled):
    """The pin says that someone wants it."""
    pin(store, "ep1")
    with pytest.raises(UsageError, match="Unpin"):
        delete_checkpoint(store, "ep1")
    delete_checkpoint(store, "ep1", force=True)
    unpin(store, "ep1")
    assert names(store) == ["ep2", "ep3", "ep4", "ep5"]


def test_an_attempt_is_not_deleted_as_a_checkpoint(store, filled):
    """Its writer may be alive."""
    claim(store, filled, "ep6", 6)
    with pytest.raises(IncompleteError):
        delete_checkpoint(store, "ep6")
    assert store.folders()[-2:] == ["ep6", "sessions"]


def test_a_rename_that_left_both_names_is_finished(store, filled):
    """Where a rename takes two steps, a stop may fall between them."""
    store.link("ep1/manifest.json", "ep1/deleted.json")
    left = ["ep2", "ep3", "ep4", "ep5"]
    assert [one.name for one in scan(store, ManifestCache()).lineage()] == left
    # All of it is there as long as its commit is: a mere reader may still take it.
    assert names(store) == ["ep1", *left]
    assert verify(store, "ep1", Level.FULL).is_good
    assert sweep(store, filled) == ["ep1"]
    assert "ep1" not in store.folders()
    assert names(store) == left


@pytest.mark.parametrize("error", [AccessError, StorageError])
def test_a_manifest_that_stays_keeps_its_files(store, filled, error):
    """Readers take what has a manifest for a checkpoint: it must not lose its files under them."""
    store.link("ep1/manifest.json", "ep1/deleted.json")
    before = {entry.key for entry in store.list("ep1")}

    def refuse(number, operation):
        del number
        if operation == "delete ep1/manifest.json":
            raise error("no", operation="delete", path="ep1/manifest.json")

    with pytest.raises(error):
        delete_checkpoint(FaultStore(store, before=refuse), "ep1")
    assert {entry.key for entry in store.list("ep1")} == before
    assert verify(store, "ep1", Level.FULL).is_good
    delete_checkpoint(store, "ep1")
    assert "ep1" not in store.folders()


def test_sweeping_spares_the_living_and_what_is_being_written(store, begin, filled):
    """Only what certainly nobody will finish goes."""
    claim(store, filled, "dead", 6)
    other = begin(store, pid=2)
    claim(store, other, "unknown", 1)
    here = begin(store, pid=3)
    claim(store, here, "writing", 1)
    claim(store, here, "failed-one", 2)
    me = Identity("host", 3, "boot-3", "3@ns", "machine")
    store.put("sessions/00000002.json", store.get("sessions/00000002.json").replace(b'"', b"'"))
    gone = sweep(store, here, own_attempts=["writing"], identity=me)
    assert gone == ["dead", "failed-one"]
    assert {"unknown", "writing"} <= set(store.folders())


def test_an_unreadable_claim_goes_when_all_others_have_ended(store, begin, filled):
    """It may be any session's."""
    store.put_new("torn/attempt.json", b"torn")
    here = begin(store, pid=3)
    elsewhere = Identity("elsewhere", 3, "boot-3", "3@ns", "machine")
    assert sweep(store, here, identity=elsewhere) == []
    me = replace(elsewhere, host="host")
    assert sweep(store, here, identity=me) == ["torn"]


def test_sweeping_tries_everything_before_it_complains(store, filled):
    """One stubborn file must not keep the rest."""
    for attempt, name in enumerate(["a", "b"], 6):
        claim(store, filled, name, attempt)
    counting = FaultStore(store)
    assert sweep(counting, filled) == ["a", "b"]
    for attempt, name in enumerate(["a", "b"], 8):
        claim(store, filled, name, attempt)
    at = counting.operations.index("delete a/deleted.json") + 1
    with pytest.raises(IncompleteError):
        sweep(FaultStore(store, [Fault(at, error=StorageError("busy"))]), filled)
    assert "a" in store.folders()
    assert "b" not in store.folders()
    assert abandon(store, "a") == []


def test_sweeping_removes_old_temporary_files(tmp_path, begin, save):
    """A killed writer leaves them, hidden, and they fill the disk."""
    import os

    store = LocalStore(tmp_path)
    session = begin(store)
    save(store, session, "ep1", 1)
    old, young = (tmp_path / "ep1" / f".tmp-1-{digit * 16}" for digit in "ab")
    for file in (old, young):
        file.write_bytes(b"1")
    os.utime(old, (0, 0))
    assert sweep(store, session) == [f"ep1/{old.name}"]
    assert young.exists()


def test_nothing_of_a_deleted_checkpoint_stays_on_the_disk(tmp_path, begin, save):
    """Nor an empty folder, which would look like a checkpoint to a person."""
    store = LocalStore(tmp_path)
    session = begin(store)
    for number in (1, 2):
        save(store, session, f"ep{number}", number, files={"a": b"1", "sub/dir/b": b"2"})
    prune(store, decide(scan(store), [KeepLast(1)]), session=session)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ep2",
        "latest",
        "run.json",
        "sessions",
    ]


class Meanwhile:
    """Does something once, just before or after an operation on a store."""

    def __init__(self, store, when, what, *, is_after=False):
        self.when, self.what, self.is_after, self.store = when, what, is_after, store

    def __call__(self, operation):
        def call(*args, **kwargs):
            is_it = self.what is not None and (operation.__name__, args[0]) == self.when
            what, self.what = (self.what, None) if is_it else (None, self.what)
            if what and not self.is_after:
                what()
            answer = operation(*args, **kwargs)
            if what and self.is_after:
                what()
            return answer

        return call


def disturb(store, monkeypatch, when, what, *, is_after=False):
    meanwhile = Meanwhile(store, when, what, is_after=is_after)
    monkeypatch.setattr(store, when[0], meanwhile(getattr(store, when[0])))


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("how", ["prune", "delete"])
def test_a_pin_between_the_look_and_the_rename_saves_the_checkpoint(
    store, filled, monkeypatch, how, is_after
):
    """Its owner was told that it is pinned; after the rename he may be told that it is not."""
    before, told = dict.fromkeys(store.list("ep1")), []

    def meanwhile():
        try:
            pin(store, "ep1", "in the paper")
            told.append("pinned")
        except MissingError as error:
            told.append(error.kind)

    def late():
        store.put("pins/ep1.json", b"{}")  # its own look came before the rename

    # One that pins after the rename has looked for the commit before it.
    disturb(
        store,
        monkeypatch,
        ("rename", "ep1/manifest.json"),
        late if is_after else meanwhile,
        is_after=is_after,
    )
    if how == "prune":
        report = prune(store, decide(scan(store), [KeepLast(4)]), session=filled)
        assert report.deleted == ()
        assert isinstance(report.errors["ep1"], UsageError)
    else:
        with pytest.raises(UsageError, match="pinned"):
            delete_checkpoint(store, "ep1")
    assert told == ([] if is_after else ["pinned"])
    assert [one.key for one in store.list("ep1")] == [one.key for one in before]
    assert names(store)[0] == "ep1"
    assert verify(store, "ep1", Level.FULL).is_good


def test_a_pin_that_comes_too_late_is_not_reported_as_set(store, filled, monkeypatch):
    """The deletion had looked at the pins for the last time."""

    def delete():
        assert prune(store, decide(scan(store), [KeepLast(4)])).deleted == ("ep1",)

    disturb(store, monkeypatch, ("put", "pins/ep1.json"), delete)
    with pytest.raises(MissingError, match="was being deleted"):
        pin(store, "ep1")
    assert "ep1" not in names(store)


@pytest.mark.parametrize("has_both", [False, True])
def test_a_deletion_that_was_killed_before_its_look_at_the_pins_is_taken_back(
    store, begin, filled, has_both
):
    """The pin was set between the look of the deletion and its rename."""
    pin(store, "ep1")
    if has_both:  # killed in the middle of a rename in two steps
        store.put("ep1/deleted.json", store.get("ep1/manifest.json"))
    else:
        store.rename("ep1/manifest.json", "ep1/deleted.json")
    assert sweep(store, begin(store, pid=2)) == []
    assert names(store)[0] == "ep1"
    assert verify(store, "ep1", Level.FULL).is_good
    assert "ep1/deleted.json" not in {entry.key for entry in store.list("ep1")}


def test_a_pinned_checkpoint_that_has_lost_files_is_not_put_back(store, begin, filled):
    """A commit whose files are missing is worse than none."""
    pin(store, "ep1")
    store.rename("ep1/manifest.json", "ep1/deleted.json")
    store.delete("ep1/part")
    assert sweep(store, begin(store, pid=2)) == ["ep1"]
    assert list(store.list("ep1")) == []


def test_what_was_put_back_while_another_removed_it_is_no_checkpoint(
    store, begin, filled, monkeypatch
):
    """The other one had looked at the pins before there was one, and at the record just now."""
    pin(store, "ep1")
    store.rename("ep1/manifest.json", "ep1/deleted.json")
    disturb(store, monkeypatch, ("rename", "ep1/deleted.json"), lambda: store.delete("ep1/part"))
    assert sweep(store, begin(store, pid=2)) == ["ep1"]
    assert "ep1" not in names(store)


def test_by_force_a_pinned_one_goes_though_it_is_looked_at_again(store, filled):
    """That is what force is for."""
    pin(store, "ep1")
    store.rename("ep1/manifest.json", "ep1/deleted.json")
    delete_checkpoint(store, "ep1", force=True)
    assert list(store.list("ep1")) == []
