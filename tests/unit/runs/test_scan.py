"""What is in a run, and which of it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milepost.errors import AccessError, DamagedError, MissingError, StorageError, UsageError
from milepost.format.manifest import Manifest
from milepost.runs import State, list_pins, pin, read_manifest, unpin
from milepost.runs import scan as look_at
from milepost.runs.manifests import ManifestCache
from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Fault, FaultStore

NAN = float("nan")


_way = ""


@pytest.fixture(params=["listed", "by folder", "briefly"], autouse=True)
def store(request, store):
    """By a listing of the whole run, by calls on a file system, by a read of each commit."""
    global _way  # noqa: PLW0603 - every look of a test is of one kind
    _way = request.param
    store.traits = replace(store.traits, is_local=_way == "by folder")
    return store


def scan(store):
    return look_at(store, None if _way == "briefly" else ManifestCache())


def states(store) -> dict[str, State]:
    return {found.name: found.state for found in scan(store).found}


def lineage(store) -> list[str]:
    return [found.name for found in scan(store).lineage()]


def test_latest_ignores_uncommitted(store, begin, save):
    """A folder without a manifest is no checkpoint, however new it is."""
    session = begin(store)
    save(store, session, "ep1", 1)
    store.put_new("ep2/attempt.json", store.get("ep1/attempt.json"))
    store.put_new("ep2/part", b"1")
    assert scan(store).latest().name == "ep1"
    assert states(store)["ep2"] is State.INCOMPLETE


def test_every_state_has_its_folder(store, begin, save):
    """One of each, told apart by what is in the folder and nothing else."""
    session = begin(store)
    for attempt, name in enumerate(["ep1", "torn", "gone", "half", "off", "nan/ba7"], 1):
        save(store, session, name, attempt)
    store.put("torn/manifest.json", store.get("torn/manifest.json")[:-20])
    store.rename("gone/manifest.json", "gone/deleted.json")
    store.link("half/manifest.json", "half/deleted.json")
    store.put_new("foreign/weights.bin", b"1")
    store.put_new("events/1.json", b"1")
    store.put_new("validations/1.json", b"1")
    store.put_new("try/attempt.json", b"torn")
    later = begin(store, origin="ep1")
    save(store, later, "ep2", 1)
    assert states(store) == {
        "ep1": State.COMMITTED,
        "ep2": State.COMMITTED,
        "torn": State.DAMAGED,
        "gone": State.DELETING,
        # Whoever does not delete is shown all that is whole.
        "half": State.ORPHANED if _way == "briefly" else State.DELETING,
        "off": State.ORPHANED,
        "nan/ba7": State.DIAGNOSTIC,
        "try": State.INCOMPLETE,
    }
    assert lineage(store) == ["ep1", "ep2"]
    torn = scan(store).get("torn")
    assert isinstance(torn.error, DamagedError)
    assert (torn.session, torn.attempt) == (1, 2)
    assert [found.name for found in scan(store).found][-1] == "try"


def test_a_rollback_leaves_the_lineage_before_it(store, begin, save):
    """Going on from an older checkpoint is allowed, and deletes nothing."""
    session = begin(store)
    for attempt, name in enumerate(["ep1", "ep2", "ep3"], 1):
        save(store, session, name, attempt)
    again = begin(store, origin="ep2")
    assert lineage(store) == ["ep1", "ep2"]
    save(store, again, "ep3b", 1)
    assert lineage(store) == ["ep1", "ep2", "ep3b"]
    fresh = begin(store, origin=None)
    assert lineage(store) == []
    save(store, fresh, "new", 1)
    assert lineage(store) == ["new"]
    back = begin(store, origin="ep3b")
    save(store, back, "ep4", 1)
    assert lineage(store) == ["ep1", "ep2", "ep3b", "ep4"]
    assert states(store)["ep3"] is State.ORPHANED


def test_a_session_that_is_not_settled_changes_nothing(store, begin, save):
    """It stopped before it chose: what counted still counts."""
    from milepost.runs import ensure_run, open_session

    save(store, begin(store), "ep1", 1)
    open_session(store, ensure_run(store))
    assert lineage(store) == ["ep1"]


def test_folders_copied_by_hand_all_count(store, begin, save):
    """Someone copies the checkpoints and not the records of the run."""
    first = begin(store)
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, first, name, attempt)
    save(store, begin(store, origin="ep1"), "ep10", 1)
    copy = MemoryStore("copy")
    for entry in store.list():
        if entry.key.partition("/")[0] in ("ep1", "ep2", "ep10"):
            copy.put_new(entry.key, store.get(entry.key))
    copy.delete("ep1/attempt.json")
    assert lineage(copy) == ["ep1", "ep2", "ep10"]
    assert scan(copy).run.run_id == scan(store).run.run_id


def test_a_checkpoint_of_another_run_is_not_on_the_lineage(store, begin, save):
    """Its numbers are those of another counting: listed and loadable, never the newest."""
    save(store, begin(store), "ep1", 1)
    other = MemoryStore("other")
    save(other, begin(other), "ep99", 99)
    for entry in other.list("ep99"):
        store.put_new(entry.key, other.get(entry.key))
    assert lineage(store) == ["ep1"]
    assert states(store)["ep99"] is State.ORPHANED


def test_an_empty_place_is_no_run(store):
    """The caller decides whether to begin one."""
    with pytest.raises(MissingError):
        scan(store)
    store.put_new("foreign/weights.bin", b"1")
    with pytest.raises(MissingError):
        scan(store)


def test_a_missing_name_lists_those_there_are(store, begin, save):
    """The next command can be typed without another look."""
    session = begin(store)
    for attempt, name in enumerate(["ep1", "ep2"], 1):
        save(store, session, name, attempt)
    assert scan(store).get("ep1").manifest.attempt == 1
    with pytest.raises(MissingError, match="ep1, ep2"):
        scan(store).get("ep3")


@pytest.mark.parametrize(("mode", "name"), [("max", "c"), ("min", "e")])
def test_best_ignores_nan_and_missing_and_prefers_the_newer(store, begin, save, mode, name):
    """NaN compares false with everything, which must not make it unbeatable."""
    session = begin(store)
    values = {"a": NAN, "b": 0.9, "c": 0.9, "d": None, "e": 0.1, "f": NAN, "g": "0.0"}
    for attempt, (folder, value) in enumerate(values.items(), 1):
        save(store, session, folder, attempt, metrics={"x": value} if value is not None else {})
    assert scan(store).best("x", mode).name == name
    assert scan(store).best("nothing") is None
    with pytest.raises(UsageError):
        scan(store).best("x", "highest")


def test_best_looks_at_the_lineage_only(store, begin, save):
    """A better score of a path that was left is not a checkpoint of this training."""
    session = begin(store)
    save(store, session, "ep1", 1, metrics={"loss": 0.5})
    save(store, session, "ep2", 2, metrics={"loss": 0.1})
    save(store, session, "failed/ep2", 3, metrics={"loss": 0.0})
    begin(store, origin="ep1")
    assert scan(store).best("loss").name == "ep1"


def test_a_refused_read_is_not_a_missing_checkpoint(store, begin, save):
    """Or the run would go on from an older one, or from nothing."""
    save(store, begin(store), "ep1", 1)
    counting = FaultStore(store)
    scan(counting)
    for at in range(1, len(counting.operations) + 1):
        broken = FaultStore(store, [Fault(at, error=AccessError("403"))])
        with pytest.raises(AccessError):
            scan(broken)


def test_a_bad_sector_in_one_manifest_leaves_the_others(store, begin, save):
    """That checkpoint is damaged, and says why. Places without sectors: test_unreachable.py."""
    store.traits = replace(store.traits, is_local=True)
    session = begin(store)
    save(store, session, "ep1", 1)
    save(store, session, "ep2", 2)
    counting = FaultStore(store)
    scan(counting)
    at = counting.operations.index("get ep2/manifest.json") + 1
    view = scan(FaultStore(store, [Fault(at, error=StorageError("bad sector"))]))
    assert [found.name for found in view.lineage()] == ["ep1"]
    assert view.get("ep2").state is State.DAMAGED
    assert "bad sector" in str(view.get("ep2").error)


def test_a_lost_origin_of_a_session_that_published_is_not_guessed(store, begin, save):
    """Without it nobody knows what counts; every checkpoint can still be named."""
    session = begin(store)
    save(store, session, "ep1", 1)
    store.put("sessions/00000001.from.json", b"torn")
    with pytest.raises(DamagedError, match="loaded from its folder"):
        scan(store)
    assert isinstance(read_manifest(store, "ep1"), Manifest)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "lost", [["sessions/00000001.from.json"], ["sessions/00000001.json"], ["both"]]
)
def test_a_missing_record_of_a_session_that_published_is_named(store, begin, save, lost, later):
    """A copy that was cut short must not turn everything into orphans and begin anew."""
    save(store, begin(store, pid=1), "ep1", 1)
    save(store, begin(store, pid=2), "ep2", 1)
    if later:
        begin(store, pid=3)
    if lost == ["both"]:
        lost = ["sessions/00000001.json", "sessions/00000001.from.json"]
    for key in lost:
        store.delete(key)
    with pytest.raises(DamagedError, match="loaded from its folder") as caught:
        scan(store)
    assert caught.value.facts["path"] == lost[0]
    assert lost[0] in str(caught.value)
    assert "wrote ep1" in str(caught.value)
    assert isinstance(read_manifest(store, "ep1"), Manifest)


def test_the_newest_session_without_records_is_not_forgotten(store, begin, save):
    """Its number would be given out again, and its commits be taken for those of another."""
    save(store, begin(store, pid=1), "ep1", 1)
    save(store, begin(store, pid=2), "ep2", 1)
    for key in ("sessions/00000002.json", "sessions/00000002.from.json"):
        store.delete(key)
    with pytest.raises(DamagedError, match="session 2 went on from, which wrote ep2"):
        scan(store)


def test_a_diagnostic_checkpoint_needs_no_origin(store, begin, save):
    """It is on no lineage, so it can hide nothing."""
    save(store, begin(store, pid=1), "ep1", 1)
    save(store, begin(store, pid=2), "nan/ba3", 1)
    store.delete("sessions/00000002.from.json")
    assert lineage(store) == ["ep1"]


def test_a_session_that_begins_during_a_look_is_no_damage(store, begin, save):
    """Its record was not yet there when the sessions were listed, its commit is by now."""
    save(store, begin(store, pid=1), "ep1", 1)
    counting = FaultStore(store)
    scan(counting)
    for at in range(1, len(counting.operations) + 1):
        place = MemoryStore()
        place.traits = store.traits
        for entry in store.list():
            place.put_new(entry.key, store.get(entry.key))

        def take_over(number: int, _operation: str, at=at, place=place) -> None:
            if number == at:
                save(place, begin(place, pid=2), "ep2", 1)

        names = [found.name for found in scan(FaultStore(place, before=take_over)).lineage()]
        assert names in (["ep1"], ["ep1", "ep2"])
        assert lineage(place) == ["ep1", "ep2"]


def test_a_run_that_always_changes_hands_is_an_error(store, begin, save):
    """A look that never ends would be worse."""
    save(store, begin(store), "ep0", 1)

    class Restless:
        url, traits = store.url, store.traits

        def __getattr__(self, name):
            return getattr(store, name)

        def folders(self, folder=""):
            if not folder:
                save(store, begin(store), "ep", 1)
            return store.folders(folder)

        def list(self, folder=""):
            if not folder:
                save(store, begin(store), "ep", 1)
            return store.list(folder)

    with pytest.raises(StorageError, match="changed hands"):
        scan(Restless())


def test_folders_of_others_are_not_read(store, begin, save):
    """Nobody's ten thousand folders are walked through, whatever is in them."""
    save(store, begin(store), "ep1", 1)
    counting = FaultStore(store)
    scan(counting)
    for number in range(50):
        store.put_new(f"mine{number}/a/b/c", b"1")
        store.put_new(f"ep1/sub{number}/manifest.json", b"1")
        store.put_new(f"nan/mine{number}/a/manifest.json", b"1")
    for folder in ("lost+found", "events", ".mine", "a.mine/deeper"):
        store.put_new(f"{folder}/manifest.json", b"1")
    store.put_new("manifest.json", b"1")
    store.put_new("nan/manifest.json", b"1")
    crowded = FaultStore(store)
    assert [found.name for found in scan(crowded).found] == ["ep1"]
    more = crowded.operations[:]
    for operation in counting.operations:
        more.remove(operation)
    kinds = {"briefly": {"get", "head", "folders"}, "by folder": {"head", "folders"}}
    assert {operation.split()[0] for operation in more} <= kinds.get(_way, set())
    assert len(more) == (0 if _way == "listed" else 3 * (50 + 50 + 1) + 1)


def test_a_torn_origin_of_a_session_that_never_published_is_no_matter(store, begin, save):
    """It stopped while recording, so it is as if it had not."""
    save(store, begin(store), "ep1", 1)
    begin(store)
    store.put("sessions/00000002.from.json", b"torn")
    assert lineage(store) == ["ep1"]


def test_a_pin_that_cannot_be_read_counts(store, begin, save):
    """Deleting because a note is torn would be the worst of readings."""
    session = begin(store)
    for attempt, name in enumerate(["ep1", "ep2", "nan/ba3"], 1):
        save(store, session, name, attempt)
    pin(store, "ep1", "for the paper")
    pin(store, "nan/ba3")
    assert list_pins(store) == {"ep1": "for the paper", "nan/ba3": ""}
    store.put("pins/ep1.json", b"torn")
    view = scan(store)
    assert [found.name for found in view.found if found.is_pinned] == ["ep1", "nan/ba3"]
    assert "cannot be read" in view.pins["ep1"]
    unpin(store, "ep1")
    unpin(store, "ep1")
    assert not scan(store).get("ep1").is_pinned


def test_only_what_exists_can_be_pinned(store, begin, save):
    """A typing error must not give a false sense of safety."""
    save(store, begin(store), "ep1", 1)
    for name in ("ep2", "nan/ep1"):
        with pytest.raises(MissingError):
            pin(store, name)
    with pytest.raises(UsageError):
        pin(store, "../ep1")


def test_sizes_are_those_of_the_files(store, begin, save):
    """What retention says it frees."""
    session = begin(store)
    save(store, session, "ep1", 1, files={"a": b"12345", "b": b""})
    store.put_new("ep2/attempt.json", b"123")
    store.put_new("ep2/part", b"1234")
    assert scan(store).get("ep1").size_bytes == 5
    assert scan(store).get("ep2").size_bytes == 7


def test_a_run_can_be_moved(tmp_path, begin, save):
    """Nothing in it says where it is."""
    store = LocalStore(tmp_path / "a" / "run")
    session = begin(store)
    save(store, session, "ep1", 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "run").rename(tmp_path / "b" / "elsewhere")
    moved = LocalStore(tmp_path / "b" / "elsewhere")
    assert lineage(moved) == ["ep1"]
    save(moved, begin(moved), "ep2", 1)
    assert lineage(moved) == ["ep1", "ep2"]
