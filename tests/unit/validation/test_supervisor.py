"""Every validation ends in a verdict, whatever its function does; nothing is left running."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from milepost.checkpoint import open_run
from milepost.errors import DeadlineError, StorageError, UsageError
from milepost.runs import KeepBest, ValidationStatus, decide, delete_checkpoint
from milepost.stores import MemoryStore
from milepost.testing import Fault, FaultStore
from milepost.validation.config import ValidationTaskConfig
from milepost.validation.supervisor import Validations

WAIT_S = 60.0
VALIDATED, FAILED = ValidationStatus.VALIDATED, ValidationStatus.FAILED


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def hear_pids(log: Path) -> list[int]:
    """Wait until a validator has noted its processes."""
    deadline_s = time.monotonic() + WAIT_S
    while not log.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return [int(word) for word in log.read_text().split()]


def gone(pids) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while any(map(is_running, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_a_verdict_carries_the_metrics_and_changes_the_best(run, supervise):
    """Reports override single arguments; nested metrics become flat."""
    for name, loss in (("ep1", 0.9), ("ep2", 0.7), ("ep3", 0.8)):
        write_id = run.save(name, loss=loss)
        if name == "ep1":
            first = write_id
    heard = []
    validations = supervise("good", fn_kwargs={"a": 1, "b": 2}, on_verdict=heard.append)
    validations.submit("ep1", first, ValidationTaskConfig(fn_kwargs={"b": 3}))
    assert run.validation("ep1").is_pending or run.validation("ep1").status is VALIDATED
    validations.wait(timeout_s=WAIT_S)
    assert validations.pending() == []
    found = run.validation("ep1")
    assert found.status is VALIDATED
    assert found.metrics == {"loss": 0.5, "nested/text": "ep1", "a": 1, "b": 3}
    assert [one.metrics for one in heard] == [found.metrics]
    assert open_run(run.store).best("loss", "min").name == "ep1"
    kept = decide(open_run(run.store).view, [KeepBest(1, "loss", "min")])
    assert {one.name for one in kept if one.keep} == {"ep1", "ep3"}
    validations.submit("ep1", first)  # has its verdict
    validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep1").num_attempts == 1


@pytest.mark.parametrize(
    ("fn", "kwargs", "words"),
    [
        ("raises", {}, "ValueError: the data are gone"),
        ("raises", {"code": 3}, "SystemExit: 3"),
        ("returns_list", {}, "returned a list and no dictionary"),
        ("odd_metrics", {"kind": "array"}, "is not one number but ndarray of 3 elements"),
        ("odd_metrics", {"kind": "object"}, "is not one number but object"),
        ("odd_metrics", {"kind": "key"}, "the key 3"),
        ("odd_metrics", {"kind": "huge"}, "more than 524,288 bytes"),
        ("good", {"loss": 1, "missing": None, "unknown": [1]}, "'unknown' is not one number"),
        ("no_such_function", {}, "no function no_such_function"),
    ],
)
def test_an_exception_is_a_verdict_at_once(run, supervise, fn, kwargs, words):
    """Trying again would end in the same way."""
    validations = supervise(fn, fn_kwargs=kwargs)
    validations.submit("ep1", run.save("ep1", loss=0.9))
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert (found.status, found.num_attempts) == (FAILED, 1)
    assert words in found.error
    assert run.found("ep1").metrics == {"loss": 0.9}


def test_numbers_of_numpy_and_nan_come_back(run, supervise):
    """As plain numbers, to the bit."""
    validations = supervise("odd_metrics", max_concurrent=2)
    for kind in ("numpy", "nan"):
        task = ValidationTaskConfig(fn_kwargs={"kind": kind})
        validations.submit(f"of-{kind}", run.save(f"of-{kind}"), task)
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("of-numpy").metrics
    assert found == {"loss": 0.25, "count": 3, "flag": True}
    assert [type(found[name]) for name in ("loss", "count", "flag")] == [float, int, bool]
    assert math.isnan(run.validation("of-nan").metrics["loss"])
    assert run.validation("of-nan").metrics["worst"] == -math.inf


@pytest.mark.parametrize("how", ["exit", "SIGKILL"])
def test_a_process_that_dies_is_tried_again_and_then_given_up(run, supervise, tmp_path, how):
    """What kills its process would do so for ever."""
    log = tmp_path / "log"
    validations = supervise("dies", fn_kwargs={"how": how, "log": str(log)}, max_retries=1)
    validations.submit("ep1", run.save("ep1"))
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert (found.status, found.num_attempts) == (FAILED, 2)
    assert len(log.read_text().split()) == 2
    assert "started 2 times" in found.error
    assert "about to die" in found.error
    assert ("exit code 0" if how == "exit" else "SIGKILL") in found.error


def test_one_that_dies_once_is_validated(run, supervise, tmp_path):
    """Out of memory for a moment is no verdict."""
    validations = supervise("dies_once", fn_kwargs={"log": str(tmp_path / "log")})
    validations.submit("ep1", run.save("ep1"))
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert (found.status, found.metrics, found.num_attempts) == (VALIDATED, {"loss": 0.125}, 2)


@pytest.mark.parametrize("ignores", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_one_that_is_too_slow_is_ended_with_all_it_has_started(run, supervise, tmp_path, ignores):
    """And the ones behind it get their turn."""
    log = tmp_path / "log"
    validations = supervise("hangs", fn_kwargs={"ignores": ignores}, timeout_s=1.5, grace_s=0.2)
    kwargs = {"log": str(log)}
    validations.submit("ep1", run.save("ep1"), ValidationTaskConfig(fn_kwargs=kwargs))
    pids = hear_pids(log)
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert found.status is ValidationStatus.TIMEOUT
    assert "longer than 1.5 s" in found.error
    assert gone(pids)


def test_an_answer_counts_although_the_process_does_not_end(run, supervise, tmp_path):
    """A thread of the user's may hang for ever; the numbers are there."""
    log = tmp_path / "log"
    validations = supervise("hangs", fn_kwargs={"log": str(log), "answers": True}, timeout_s=3.0)
    validations.submit("ep1", run.save("ep1"))
    pids = hear_pids(log)
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert (found.status, found.metrics) == (VALIDATED, {"loss": 1.5})
    assert gone(pids)


def test_several_run_at_once_and_no_more(run, supervise, tmp_path):
    """Three meet; a fourth would have to wait."""
    (tmp_path / "met").mkdir()
    kwargs = {"folder": str(tmp_path / "met"), "number": 3}
    validations = supervise("meets", fn_kwargs=kwargs, max_concurrent=3)
    for name in ("ep1", "ep2", "ep3"):
        validations.submit(name, run.save(name))
    assert validations.pending() == ["ep1", "ep2", "ep3"]
    validations.wait(timeout_s=WAIT_S)
    assert [run.validation(f"ep{n}").metrics for n in (1, 2, 3)] == [{"seen": 3}] * 3


def test_closing_stops_what_runs_and_the_next_life_takes_it_up(run, supervise, tmp_path):
    """Being stopped costs no attempt; what waited is taken up too, the oldest first."""
    log = tmp_path / "log"
    first = supervise("hangs", fn_kwargs={"log": str(log)}, max_retries=0, grace_s=1.0)
    order = ["ep2", "ep1", "ep3"]
    for name in order:
        first.submit(name, run.save(name))
    pids = hear_pids(log)
    with pytest.raises(DeadlineError, match="ep1, ep2, ep3"):
        first.wait(timeout_s=0.01)
    first.close(timeout_s=0.01)
    assert gone(pids)
    with pytest.raises(UsageError, match="closed"):
        first.submit("ep1", run.found("ep1").write_id)
    assert all(run.validation(name).is_pending for name in order)
    assert [run.validation(name).num_attempts for name in order] == [0, 0, 0]
    delete_checkpoint(run.store, "ep3")
    heard = []
    second = supervise("good", on_verdict=heard.append, max_retries=0)
    assert second.resume_pending() == 2
    assert second.resume_pending() == 0
    second.wait(timeout_s=WAIT_S)
    assert [one.name for one in heard] == ["ep2", "ep1"]
    assert {one.status for one in heard} == {VALIDATED}


def test_attempts_are_counted_across_lives(run, supervise, tmp_path):
    """A poison pill that takes its supervisor with it ends in a verdict all the same."""
    from milepost.runs.validations import Request, begin_attempt, request_validation

    write_id = run.save("ep1")
    request_validation(run.store, "ep1", write_id, Request({}, None))
    for number in range(2):
        begin_attempt(run.store, "ep1", write_id, number)
    validations = supervise("good", max_retries=2)
    assert validations.resume_pending() == 1
    validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep1").status is VALIDATED  # the third try was the last one allowed

    write_id = run.save("ep2")
    request_validation(run.store, "ep2", write_id, Request({}, None))
    for number in range(3):
        begin_attempt(run.store, "ep2", write_id, number)
    assert validations.resume_pending() == 1
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep2")
    assert (found.status, found.num_attempts) == (FAILED, 3)
    assert "started 3 times" in found.error


def test_a_lost_request_ends_in_a_verdict(run, supervise):
    """Nobody knows what was asked; but the checkpoint must not be pending for ever."""
    from milepost.runs.validations import Request, request_validation

    write_id = run.save("ep1")
    request_validation(run.store, "ep1", write_id, Request({}, None))
    (key,) = [entry.key for entry in run.store.list("validations")]
    run.store.put(key, b"torn")
    assert supervise("good").resume_pending() == 0
    found = run.validation("ep1")
    assert found.status is FAILED
    assert "request is lost" in found.error


def test_a_checkpoint_that_is_gone_or_another_fails(run, supervise):
    """The weights that were asked about are not there."""
    validations = supervise("good")
    old = run.save("ep1")
    delete_checkpoint(run.store, "ep1")
    run.save("ep1")
    validations.submit("ep1", old)
    validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep1") is None  # the new one was not asked about
    records = [
        json.loads(path.read_text()) for path in (run.folder / "validations").glob("*.verdict.json")
    ]
    assert "there is another one" in records[0]["error"]


def test_a_validation_is_no_rank(run, supervise, monkeypatch):
    """With the environment of one it would join the training's process group."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "KEPT"):
        monkeypatch.setenv(name, "7")
    validations = supervise("environment")
    validations.submit("ep1", run.save("ep1"))
    validations.wait(timeout_s=WAIT_S)
    expected = {"RANK": None, "WORLD_SIZE": None, "MASTER_PORT": None, "KEPT": "7"}
    assert run.validation("ep1").metrics == expected


def test_a_store_that_refuses_the_verdict_is_told_to_who_waits(run, supervise, configure):
    """And the validation stays pending on record, and the supervisor goes on."""
    failing = FaultStore(run.store, before=lambda number, text: fail(text))

    def fail(text):
        if text.startswith("put_new validations/ep1") and "verdict" in text:
            raise StorageError("The disk is full.")

    validations = Validations(failing, run_id=run.run.run_id, config=configure("good"))
    for name in ("ep1", "ep2"):
        validations.submit(name, run.save(name))
    with pytest.raises(StorageError, match="disk is full"):
        validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep1").is_pending
    assert run.validation("ep2").status is VALIDATED
    assert supervise("good").resume_pending() == 1


def test_a_request_that_is_not_on_record_is_not_taken_on(run, configure):
    """Else a restart would lose it without a word."""
    write_id = run.save("ep1")
    failing = FaultStore(run.store, [Fault(1, error=StorageError("down"))])
    validations = Validations(failing, run_id=run.run.run_id, config=configure("good"))
    with pytest.raises(StorageError):
        validations.submit("ep1", write_id)
    assert validations.pending() == []


def test_a_run_that_no_other_process_can_open_is_refused(configure):
    """At the start, and not with the first checkpoint hours later."""
    with pytest.raises(UsageError, match="cannot open"):
        Validations(MemoryStore("run"), run_id="0" * 32, config=configure("good"))


def test_nothing_is_left_of_a_supervisor_that_had_nothing_to_do(run, supervise):
    """No thread, no process, no file."""
    import threading

    before = threading.active_count()
    validations = supervise("good")
    validations.wait(timeout_s=0)
    validations.close(timeout_s=0)
    assert threading.active_count() == before
    assert not (run.folder / "validations").exists()
    assert os.getpid()  # still here


def test_a_supervisor_that_is_killed_leaves_no_process_behind(run, supervise, tmp_path):
    """The kernel and the keeper see to it; the next life takes the validation up."""
    log, script = tmp_path / "log", Path(__file__).with_name("supervisor_script.py")
    write_id = run.save("ep1")
    with subprocess.Popen(
        [sys.executable, str(script), str(run.folder), str(log), "ep1", write_id]
    ) as process:
        pids = hear_pids(log)
        process.kill()
    assert gone(pids)
    found = run.validation("ep1")
    assert (found.is_pending, found.num_attempts) == (True, 1)
    validations = supervise("good")
    assert validations.resume_pending() == 1
    validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep1").status is VALIDATED


def test_an_interpreter_that_ends_waits_for_what_it_has_taken_on(run):
    """A script that forgets close() still gets its verdicts."""
    write_id = run.save("ep1")
    program = f"""
from milepost.stores import LocalStore
from milepost.validation.config import ValidationConfig
from milepost.validation.supervisor import Validations
config = ValidationConfig("validators:good", sys_path=({str(Path(__file__).parent)!r},))
validations = Validations(LocalStore({str(run.folder)!r}), run_id="", config=config)
validations.submit("ep1", {write_id!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)
    assert run.validation("ep1").status is VALIDATED


def test_an_interrupt_ends_the_wait_and_leaves_no_process(run, tmp_path):
    """Ctrl-C at the end of a training: once is enough, and nothing is lost."""
    write_id = run.save("ep1")
    program = f"""
from milepost.stores import LocalStore
from milepost.validation.config import ValidationConfig, ValidationTaskConfig
from milepost.validation.supervisor import Validations
task = ValidationTaskConfig(fn_kwargs={{"log": {str(tmp_path / "log")!r}}})
config = ValidationConfig("validators:hangs", task, sys_path=({str(Path(__file__).parent)!r},))
validations = Validations(LocalStore({str(run.folder)!r}), run_id="", config=config)
validations.submit("ep1", {write_id!r})
validations.close(timeout_s=600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        pids = hear_pids(tmp_path / "log")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    assert b"KeyboardInterrupt" in told
    assert gone(pids)
    found = run.validation("ep1")
    assert (found.is_pending, found.num_attempts) == (True, 0)


def test_asking_again_in_a_later_life_does_not_start_the_count_anew(run, supervise, tmp_path):
    """Whoever submits in place of resuming must not feed a poison pill for ever."""
    log = tmp_path / "log"
    options = {"fn_kwargs": {"how": "exit", "log": str(log)}, "max_retries": 1}
    write_id = run.save("ep1")
    from milepost.runs.validations import Request, begin_attempt, request_validation

    request_validation(run.store, "ep1", write_id, Request({}, None))
    begin_attempt(run.store, "ep1", write_id, 0)
    validations = supervise("dies", **options)
    validations.submit("ep1", write_id)
    validations.wait(timeout_s=WAIT_S)
    found = run.validation("ep1")
    assert (found.status, found.num_attempts) == (FAILED, 2)
    assert len(log.read_text().split()) == 1


def test_a_lost_verdict_is_told_once_and_to_all_who_wait(run, configure):
    """It is the news of its own round: the waits of the hours after it must not fail as well."""
    gate = threading.Event()

    def fail(number, text):
        if text.startswith("put_new validations/ep1") and "verdict" in text:
            assert gate.wait(WAIT_S)
            raise StorageError("The disk is full.")

    failing = FaultStore(run.store, before=fail)
    validations = Validations(failing, run_id=run.run.run_id, config=configure("good"))
    validations.submit("ep1", run.save("ep1"))
    told = []

    def wait():
        try:
            validations.wait(timeout_s=WAIT_S)
        except StorageError as error:
            told.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + WAIT_S
    while len(validations._changed._waiters) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert told == ["The disk is full."] * 2
    validations.submit("ep2", run.save("ep2"))
    validations.wait(timeout_s=WAIT_S)
    assert run.validation("ep2").status is VALIDATED
    validations.close(timeout_s=WAIT_S)


def test_a_supervisor_that_fails_has_lost_what_it_ran(run, configure, tmp_path):
    """Not only what waited for its turn: whoever asks must hear of each."""

    def fail(number, text):
        if "verdict" in text and text.startswith("put_new"):
            raise RuntimeError("broken")

    failing = FaultStore(run.store, before=fail)
    config = configure(
        "meets", fn_kwargs={"folder": str(tmp_path / "met"), "number": 2}, max_concurrent=2
    )
    (tmp_path / "met").mkdir()
    validations = Validations(failing, run_id=run.run.run_id, config=config)
    for name in ("ep1", "ep2", "ep3"):
        validations.submit(name, run.save(name))
    with validations._changed:
        assert validations._changed.wait_for(lambda: validations._thread is None, WAIT_S)
    assert set(validations._lost) == {"ep1", "ep2", "ep3"}
    assert validations.pending() == []
    with pytest.raises(RuntimeError, match="broken"):
        validations.close(timeout_s=WAIT_S)
