"""Records of validations: merged into what counts, kept apart from what does not."""

from __future__ import annotations

import json
import math

import pytest

from milepost.checkpoint import open_run
from milepost.errors import FormatError, StorageError, UsageError
from milepost.runs import (
    KeepBest,
    KeepLast,
    ValidationStatus,
    decide,
    delete_checkpoint,
    list_validations,
    prune,
    scan,
    sweep,
)
from milepost.runs.manifests import ManifestCache
from milepost.runs.validations import (
    Request,
    Validation,
    begin_attempt,
    end_attempt,
    read_request,
    record_verdict,
    request_validation,
    validation_id,
)
from milepost.stores import LocalStore
from milepost.testing import Fault, FaultStore

FAILED, VALIDATED = ValidationStatus.FAILED, ValidationStatus.VALIDATED


@pytest.fixture
def session(store, begin, save):
    session = begin(store)
    for number, loss in enumerate([0.5, 0.4, 0.3, 0.2], start=1):
        save(store, session, f"ep{number}", number, metrics={"loss": loss})
    return session


@pytest.fixture
def write_id(store):
    return lambda name: scan(store).get(name).write_id


@pytest.fixture
def ask(store, session, write_id):
    def ask(name, **options):
        request_validation(store, name, write_id(name), Request(**options))

    return ask


@pytest.fixture
def answer(store, write_id):
    def answer(name, status=VALIDATED, error="", **metrics):
        which = write_id(name)
        verdict = Validation(name, validation_id(which), status, metrics, error, 1)
        return record_verdict(store, verdict, write_id=which)

    return answer


def one(store, name) -> Validation:
    return scan(store).get(name).validation


def kept(store, *policies) -> set[str]:
    return {decision.name for decision in decide(scan(store), policies) if decision.keep}


def test_a_request_is_pending_until_its_verdict(store, ask, answer):
    """And then its metrics lie over those of the commit."""
    assert one(store, "ep1") is None
    ask("ep1")
    assert one(store, "ep1").is_pending
    answer("ep1", loss=0.01, accuracy=0.9)
    found = scan(store).get("ep1")
    assert found.validation.status is VALIDATED
    assert found.metrics == {"loss": 0.01, "accuracy": 0.9}
    assert found.manifest.metrics == {"loss": 0.5}
    checkpoint = open_run(store).get("ep1")
    assert checkpoint.metrics == {"loss": 0.01, "accuracy": 0.9}
    assert checkpoint.validation.status is VALIDATED


def test_a_verdict_changes_the_best_and_what_retention_keeps(store, session, ask, answer):
    """A pending one is neither ranked nor deleted, whichever way the metric is better."""
    for name in ("ep1", "ep4"):
        ask(name)
    assert scan(store).best("loss", "min").name == "ep3"
    assert kept(store, KeepBest(1, "loss", "min")) == {"ep1", "ep3", "ep4"}
    assert kept(store, KeepBest(1, "loss", "max")) == {"ep1", "ep2", "ep4"}
    answer("ep1", loss=0.01)
    assert scan(store).best("loss", "min").name == "ep1"
    assert kept(store, KeepBest(1, "loss", "min")) == {"ep1", "ep4"}
    prune(store, decide(scan(store), [KeepBest(1, "loss", "min")]), session=session)
    assert [found.name for found in scan(store).lineage()] == ["ep1", "ep4"]


@pytest.mark.parametrize("status", [FAILED, ValidationStatus.TIMEOUT])
def test_a_verdict_without_metrics_leaves_those_of_the_commit(store, ask, answer, status):
    """It is ranked by what was reported, and no longer protected."""
    ask("ep1")
    answer("ep1", status, error="Traceback: it broke")
    found = scan(store).get("ep1")
    assert (found.metrics, found.validation.error) == ({"loss": 0.5}, "Traceback: it broke")
    assert kept(store, KeepLast(1)) == {"ep4"}


def test_the_first_verdict_counts(store, ask, answer):
    """Two supervisors may have been at it; nothing that was decided by the first may change."""
    ask("ep1")
    answer("ep1", loss=1.0)
    assert answer("ep1", loss=2.0).metrics == {"loss": 1.0}
    assert one(store, "ep1").metrics == {"loss": 1.0}


def test_numbers_that_json_has_no_form_for_come_back(store, ask, answer):
    """NaN is a finding too, and ranks nowhere."""
    ask("ep1")
    answer("ep1", loss=math.nan, other=-math.inf, count=3)
    found = one(store, "ep1").metrics
    assert math.isnan(found["loss"])
    assert (found["other"], found["count"]) == (-math.inf, 3)
    assert scan(store).best("loss", "min").name == "ep4"


def test_a_request_comes_back_as_it_was_and_the_second_changes_nothing(store, ask, write_id):
    """Whoever resumes it must run what was asked for."""
    ask("ep1", fn_kwargs={"split": "test", "rate": math.inf}, timeout_s=3.5)
    ask("ep1", fn_kwargs={})
    found = read_request(store, "ep1", write_id("ep1"))
    assert found == Request({"split": "test", "rate": math.inf}, 3.5)


def test_attempts_are_counted_but_those_that_were_stopped(store, ask, write_id):
    """One whose end nobody saw counts: it may have taken its machine with it."""
    ask("ep1")
    which = write_id("ep1")
    assert begin_attempt(store, "ep1", which, 0) == 1
    end_attempt(store, "ep1", which, 1, is_stopped=True, text="closed")
    assert begin_attempt(store, "ep1", which, 1) == 2
    end_attempt(store, "ep1", which, 2, is_stopped=False, text="was killed by SIGKILL")
    assert begin_attempt(store, "ep1", which, 1) == 3  # another supervisor has taken 2
    found = one(store, "ep1")
    assert (found.num_attempts, found.last_number) == (2, 3)
    assert (found.is_pending, found.error) == (True, "was killed by SIGKILL")


def test_deleting_a_checkpoint_deletes_its_records(store, session, ask, answer, write_id):
    """And no others, however alike the names."""
    ask("ep1")
    begin_attempt(store, "ep1", write_id("ep1"), 0)
    answer("ep1")
    ask("ep2")
    delete_checkpoint(store, "ep1")
    assert {name for name, _ in list_validations(store)} == {"ep2"}


def test_a_stop_at_any_call_of_a_deletion_leaves_no_records_behind(store, session, ask, answer):
    """Whoever finishes the deletion finishes with them."""
    ask("ep1")
    answer("ep1")
    everything = {entry.key: store.get(entry.key) for entry in store.list()}
    counting = FaultStore(store)
    delete_checkpoint(counting, "ep1")
    for at in range(1, len(counting.operations) + 1):
        for entry in list(store.list()):
            store.delete(entry.key)
        for key, data in everything.items():
            store.put(key, data)
        with pytest.raises(StorageError):
            delete_checkpoint(FaultStore(store, [Fault(at, error=StorageError("down"))]), "ep1")
        delete_checkpoint(store, "ep1")
        assert not [entry.key for entry in store.list() if "ep1" in entry.key]


def test_a_checkpoint_made_anew_has_no_part_in_old_records(store, session, ask, answer, save):
    """Its name is the same and its weights are not."""
    ask("ep4")
    answer("ep4", loss=9.0)
    delete_checkpoint(store, "ep4")
    save(store, session, "ep4", 5, metrics={"loss": 0.1})
    assert one(store, "ep4") is None
    assert scan(store).get("ep4").metrics == {"loss": 0.1}


def test_a_verdict_after_the_deletion_is_swept(store, session, ask, answer, write_id):
    """The process that validated was slower than whoever deleted."""
    ask("ep1")
    which = write_id("ep1")
    delete_checkpoint(store, "ep1")
    record_verdict(store, Validation("ep1", validation_id(which), VALIDATED, {}), write_id=which)
    ask("ep2")
    sweep(store, session)
    assert {name for name, _ in list_validations(store)} == {"ep2"}


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":1}\n'], ids=["empty", "torn", "bare"])
def test_a_damaged_verdict_is_pending_and_gives_way(store, ask, answer, caplog, damage):
    """It protects the checkpoint as long as nobody knows what it said."""
    ask("ep1")
    answer("ep1", loss=0.0)
    (key,) = [entry.key for entry in store.list("validations") if "verdict" in entry.key]
    store.put(key, damage)
    cache = ManifestCache()
    for _ in range(3):
        found = scan(store, cache).get("ep1")
        assert found.is_pending_validation
    assert caplog.text.count("counts as pending") == 1
    assert answer("ep1", loss=0.7).metrics == {"loss": 0.7}
    assert scan(store, cache).get("ep1").metrics == {"loss": 0.7}


def test_other_damaged_records_hide_nothing(store, ask, write_id, caplog):
    """A request by its name alone keeps its checkpoint; a stranger's file is nobody's record."""
    ask("ep1")
    which = write_id("ep1")
    begin_attempt(store, "ep1", which, 0)
    end_attempt(store, "ep1", which, 1, is_stopped=True, text="")
    for entry in list(store.list("validations")):
        store.put(entry.key, b"torn")
    store.put("validations/notes.txt", b"mine")
    store.put("validations/ep2-123.verdict.json", b"mine")
    found = one(store, "ep1")
    assert found.is_pending
    assert found.num_attempts == 1  # not known to have been stopped
    assert one(store, "ep2") is None
    with pytest.raises(FormatError):
        read_request(store, "ep1", which)


def test_a_newer_verdict_is_neither_used_nor_replaced(store, ask, answer):
    """A newer Milepost knows better; until it is asked, the checkpoint stays."""
    from milepost.format.canonical import dump_record, load_record

    ask("ep1")
    answer("ep1", loss=0.0)
    (key,) = [entry.key for entry in store.list("validations") if "verdict" in entry.key]
    newer = dump_record({**load_record(store.get(key), where=key), "format": 99})
    store.put(key, newer)
    assert one(store, "ep1").is_pending
    with pytest.raises(FormatError):
        answer("ep1", loss=0.7)
    assert store.get(key) == newer


def test_verdicts_are_read_once(store, ask, answer):
    """A run looks at all of them after every save."""
    for name in ("ep1", "ep2"):
        ask(name)
        answer(name, loss=0.0)
    counting, cache = FaultStore(store), ManifestCache()
    for _ in range(3):
        scan(counting, cache)
    assert sum("verdict" in line for line in counting.operations) == 2


def test_a_name_that_leads_away_is_refused(store, session):
    """Records lie in one folder."""
    with pytest.raises(UsageError):
        request_validation(store, "../ep1", "0" * 32, Request())


def test_records_are_files_that_people_can_read(tmp_path, begin, save):
    """On a disk, with their temporary files swept like those of other records."""
    store = LocalStore(tmp_path / "run")
    save(store, begin(store), "ep1.5-x", 1)
    which = scan(store).get("ep1.5-x").write_id
    request_validation(store, "ep1.5-x", which, Request({"n": 1}))
    record_verdict(
        store,
        Validation("ep1.5-x", validation_id(which), VALIDATED, {"loss": 0.25}),
        write_id=which,
    )
    folder = tmp_path / "run" / "validations"
    files = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    stem = f"ep1.5-x-{which[:16]}"
    assert set(files) == {f"{stem}.request.json", f"{stem}.verdict.json"}
    assert files[f"{stem}.verdict.json"]["metrics"] == {"loss": 0.25}
    assert files[f"{stem}.request.json"]["fn_kwargs"] == {"n": 1}
    (folder / ".tmp-1-0123456789abcdef").write_text("x")
    assert store.sweep_temporary(-1.0) == ["validations/.tmp-1-0123456789abcdef"]
