"""Claims, commits, and attempts that are given up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from milepost.errors import (
    DamagedError,
    ExistsError,
    FencedError,
    IncompleteError,
    StorageError,
    UsageError,
)
from milepost.runs import (
    Claim,
    Identity,
    State,
    abandon,
    claim,
    ensure_run,
    open_session,
    point_latest,
    publish,
    read_manifest,
    scan,
    withdraw,
)
from milepost.stores import LocalStore
from milepost.testing import Fault, FaultStore, write_key

ME = Identity("host", 1, "boot", "1@ns")


@pytest.fixture
def prepared(store, begin, save):
    """A session with one checkpoint, and the manifest of a second one whose files are there."""
    session = begin(store)
    save(store, session, "ep1", 1)
    claimed = claim(store, session, "ep2", 2)
    write_key(store, "ep2/part", b"ep2")
    first = read_manifest(store, "ep1")
    manifest = replace(
        first,
        name="ep2",
        attempt=2,
        write_id=claimed.write_id,
        files=(replace(first.files[0], size_bytes=3),),
    )
    return session, manifest


def keys(store, folder: str) -> set[str]:
    return {entry.key for entry in store.list(folder)}


def test_a_claim_takes_the_name_if_it_is_free(store, begin):
    """And only one attempt gets it."""
    session = begin(store)
    folders = [claim(store, session, "ep1", attempt).folder for attempt in (1, 2, 3)]
    assert folders == ["ep1", "ep1-s1", "ep1-s1a3"]
    with pytest.raises(ExistsError, match="another name"):
        claim(store, session, "ep1", 3)


def test_a_claim_keeps_out_of_used_folders(store, begin):
    """A user's folder of the same name is not written into."""
    store.put_new("ep1/mine.txt", b"1")
    assert claim(store, begin(store), "ep1", 1).folder == "ep1-s1"
    assert claim(store, begin(store), "nan/ba7", 1).folder == "nan/ba7"
    assert claim(store, begin(store), "nan/ba7", 1).folder == "nan/ba7-s3"


def test_a_claim_beside_what_is_being_removed_is_withdrawn(store, begin):
    """Since the first look another attempt came and went, and is not yet wholly gone."""
    session = begin(store)

    class Busy:
        url, traits = store.url, store.traits

        def __getattr__(self, name):
            return getattr(store, name)

        def put_new(self, key, data):
            if key == "ep1/attempt.json":
                store.put_new("ep1/deleted.json", b"torn")
            store.put_new(key, data)

    assert claim(Busy(), session, "ep1", 1).folder == "ep1-s1"
    assert keys(store, "ep1") == {"ep1/deleted.json"}


def test_threads_get_different_folders(store, begin):
    """Two saves at once must not write into one folder."""
    session = begin(store)
    with ThreadPoolExecutor(3) as pool:
        claims = list(pool.map(lambda n: claim(store, session, "ep1", n), range(1, 4)))
    assert len({one.folder for one in claims}) == 3
    assert len({one.write_id for one in claims}) == 3


@pytest.mark.parametrize(
    "name", ["", "a/b", "../a", "run.json", "sessions", "nan", "nan/..", "x" * 200]
)
def test_a_claim_needs_a_proper_name(store, begin, name):
    """At the call, and not in the file system."""
    with pytest.raises(UsageError):
        claim(store, begin(store), name, 1)


def test_a_session_must_be_settled_to_write(store, prepared):
    """Otherwise its commits would be on no lineage."""
    session = open_session(store, ensure_run(store), identity=ME)
    with pytest.raises(UsageError, match="record_origin"):
        claim(store, session, "ep3", 1)
    with pytest.raises(UsageError, match="record_origin"):
        publish(store, session, prepared[1])


def test_publishing_makes_it_the_newest(store, prepared):
    """The manifest is the commit, and nothing else is needed."""
    session, manifest = prepared
    assert scan(store).latest().name == "ep1"
    publish(store, session, manifest)
    assert scan(store).latest().name == "ep2"
    publish(store, session, manifest)
    assert read_manifest(store, "ep2") == manifest


def test_a_missing_file_is_not_committed(store, prepared):
    """A manifest that promises what is not there would be picked by the next resume."""
    session, manifest = prepared
    store.delete("ep2/part")
    with pytest.raises(IncompleteError, match="ep2/part is missing"):
        publish(store, session, manifest)
    assert scan(store).latest().name == "ep1"


def test_a_file_of_another_size_is_not_committed(store, prepared):
    """The upload was cut off, and nobody said so."""
    session, manifest = prepared
    store.put("ep2/part", b"e")
    with pytest.raises(DamagedError) as caught:
        publish(store, session, manifest)
    assert (caught.value.facts["expected"], caught.value.facts["found"]) == (3, 1)
    assert scan(store).latest().name == "ep1"


def test_a_fenced_session_does_not_commit(store, begin, prepared):
    """It stops at the first look already."""
    session, manifest = prepared
    begin(store)
    with pytest.raises(FencedError):
        publish(store, session, manifest)
    assert "ep2/manifest.json" not in keys(store, "ep2")


def test_a_session_fenced_while_publishing_is_not_told_that_it_saved(store, begin, prepared):
    """The new session may have chosen before it saw this commit."""
    session, manifest = prepared

    class TakesOver:
        def __init__(self, below):
            self.below = below
            self.url, self.traits = below.url, below.traits

        def __getattr__(self, name):
            return getattr(self.below, name)

        def put_new(self, key, data):
            if key == "ep2/manifest.json":
                begin(store, pid=2)
            self.below.put_new(key, data)

    with pytest.raises(FencedError, match="process 2"):
        publish(TakesOver(store), session, manifest)
    view = scan(store)
    assert view.latest().name == "ep1"
    assert view.get("ep2").state is State.ORPHANED


def test_another_commit_in_the_folder_is_not_ours(store, prepared):
    """The write id tells a lost answer from a lost race."""
    session, manifest = prepared
    other = replace(manifest, write_id="other")
    store.put_new("ep2/manifest.json", other.to_bytes())
    with pytest.raises(ExistsError):
        publish(store, session, manifest)
    assert read_manifest(store, "ep2").write_id == "other"


def test_a_claim_that_was_swept_is_not_published_into(store, prepared):
    """The folder belongs to another attempt by now."""
    session, manifest = prepared
    store.delete("ep2/attempt.json")
    with pytest.raises(IncompleteError, match="no longer claimed"):
        publish(store, session, manifest)


@pytest.mark.parametrize("changes", [{"session": 9}, {"run_id": "another"}])
def test_a_manifest_of_another_session_is_refused(store, prepared, changes):
    """It would be counted where it does not belong."""
    session, manifest = prepared
    with pytest.raises(UsageError):
        publish(store, session, replace(manifest, **changes))


def test_the_folder_is_synced_before_the_manifest(store, prepared):
    """A manifest that survives a power cut must find its files' names."""
    session, manifest = prepared
    seen = FaultStore(store)
    publish(seen, session, manifest)
    assert seen.operations.index("head ep2/part") < seen.operations.index("sync_folder ep2")
    at = seen.operations.index("put_new ep2/manifest.json")
    assert seen.operations.index("sync_folder ep2") < at
    assert seen.operations[at + 1 :] == ["list sessions"]


def test_abandoning_removes_the_attempt(store, prepared):
    """The room is free again, and the name."""
    session, _ = prepared
    assert abandon(store, "ep2") == []
    assert keys(store, "ep2") == set()
    held = claim(store, session, "ep2", 3)
    assert held.folder == "ep2"
    assert abandon(store, held) == []
    assert abandon(store, held) == []
    assert keys(store, "ep2") == set()
    assert abandon(store, "never") == []


def test_a_late_writer_takes_back_what_it_wrote_after_the_attempt_was_given_up(store, begin):
    """Files that nobody claims would keep the folder from being used, and be swept by nobody."""
    held = claim(store, begin(store), "ep1", 1)
    abandon(store, held)
    write_key(store, "ep1/late", b"late")
    assert withdraw(store, held, ["late"]) == ["ep1/late"]
    assert keys(store, "ep1") == set()


def test_a_writer_takes_nothing_back_while_the_folder_is_claimed_or_committed(store, prepared):
    """Whoever claimed it removes everything, and what is committed stays."""
    session, manifest = prepared
    held = Claim("ep2", session.number, 2, manifest.write_id)
    assert withdraw(store, held, ["part"]) == []
    publish(store, session, manifest)
    store.delete("ep2/attempt.json")
    assert withdraw(store, held, ["part"]) == []
    assert "ep2/part" in keys(store, "ep2")


def test_a_commit_is_not_abandoned(store, prepared):
    """A clean-up that was called on the wrong path must not lose a checkpoint."""
    session, manifest = prepared
    publish(store, session, manifest)
    for held in ("ep2", Claim("ep2", 1, 2, manifest.write_id)):
        with pytest.raises(UsageError):
            abandon(store, held)
    assert abandon(store, Claim("ep2", 1, 2, "of an attempt that was here before")) == []
    assert scan(store).latest().name == "ep2"
    assert keys(store, "ep2") == {"ep2/attempt.json", "ep2/part", "ep2/manifest.json"}


def test_a_folder_that_is_not_ours_is_not_abandoned(store):
    """There is no claim in it, so there is nothing to give up."""
    store.put_new("mine/notes.txt", b"1")
    assert abandon(store, "mine") == []
    assert keys(store, "mine") == {"mine/notes.txt"}


def test_what_cannot_be_deleted_is_told_and_keeps_its_claim(store, prepared):
    """Files without a mark would belong to nobody, for ever."""
    session, _ = prepared
    held = claim(store, session, "ep3", 3)
    write_key(store, "ep3/part", b"ep3")
    counting = FaultStore(store)
    assert abandon(counting, Claim("ep2", 1, 2, prepared[1].write_id)) == []
    at = counting.operations.index("delete ep2/part") + 1
    broken = FaultStore(store, [Fault(at, error=StorageError("busy"))])
    assert abandon(broken, held) == ["ep3/part", "ep3/deleted.json"]
    assert keys(store, "ep3") == {"ep3/part", "ep3/deleted.json"}
    assert scan(store).get("ep3").state is State.DELETING
    assert claim(store, session, "ep3", 4).folder == "ep3-s1"
    assert abandon(store, replace(held, write_id="another")) == []
    assert keys(store, "ep3") == {"ep3/part", "ep3/deleted.json"}
    assert abandon(store, held) == []
    assert keys(store, "ep3") == set()


def test_the_hint_cannot_fail_a_save(store, tmp_path, monkeypatch):
    """Its error is handed back, for the log."""
    error = StorageError("no links here")
    assert point_latest(FaultStore(store, [Fault(1, error=error)]), "ep1") is error
    assert point_latest(store, "ep1") is None
    files = LocalStore(tmp_path)
    files.put_new("latest/in-the-way", b"1")
    assert point_latest(files, "ep1") is not None
