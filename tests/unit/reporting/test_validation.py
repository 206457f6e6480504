"""Reports with a validation: verdicts become metrics, change what is kept, and outlive a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import milepost as mp

from .conftest import report_on_ranks

VALIDATORS = """
import os, pathlib, time

def read(checkpoint, add=0.0, gate=None, fail=None):
    if gate is not None:
        while not pathlib.Path(gate).exists():
            time.sleep(0.01)
    if fail == "raise":
        raise ValueError("by hand")
    if fail == "die":
        os._exit(9)
    with checkpoint.as_directory() as folder:
        score = float(pathlib.Path(folder, "score").read_text())
    return {"val": {"score": score + add}}
"""


@pytest.fixture
def validation(tmp_path):
    """Return a maker of configurations for a function that reads the score in the files."""
    (tmp_path / "validators_of_test.py").write_text(VALIDATORS)

    def make(**options) -> mp.ValidationConfig:
        kwargs = {name: options.pop(name) for name in ("gate", "fail") if name in options}
        task = mp.ValidationTaskConfig(fn_kwargs={k: str(v) for k, v in kwargs.items()})
        return mp.ValidationConfig(
            "validators_of_test:read",
            task,
            sys_path=(str(tmp_path), *sys.path),
            max_retries=0,
            grace_s=0.5,
            **options,
        )

    return make


def names(run: Path) -> list[str]:
    return [one.name for one in mp.open_run(run).checkpoints()]


def test_verdicts_are_metrics_and_say_what_is_kept(tmp_path, folder, validation):
    """Nothing that waits is ranked or deleted; with its verdict it is, and the best stays."""
    gate, run = tmp_path / "gate", tmp_path / "run"
    config = mp.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val/score")
    with mp.Reports(
        run, checkpoint_config=config, validation=validation(gate=gate, max_concurrent=2)
    ):
        for score in (0.9, 0.2, 0.1):
            mp.report({"score": score}, folder(score=str(score)), validation=True)
        reported = mp.get_all_reported_checkpoints(mp.CheckpointConsistencyMode.COMMITTED)
        assert {one.status.value for one in reported} == {"pending_validation"}
        assert len(reported) == 3
        with pytest.raises(mp.DeadlineError, match="report-1"):
            mp.get_all_reported_checkpoints(timeout_s=0.1)
        gate.write_text("")
        reported = mp.get_all_reported_checkpoints(timeout_s=60)
        assert [one.checkpoint.name for one in reported] == ["report-1", "report-3"]
        assert {one.status.value for one in reported} == {"validated"}
        assert reported[0].metrics == {"score": 0.9, "val/score": 0.9}
        mp.report(
            {},
            folder(score="0.5"),
            validation=mp.ValidationTaskConfig(fn_kwargs={"add": 7.0}),
        )
    result = mp.Result.from_path(run)
    assert [one.name for one, _ in result.best_checkpoints] == ["report-4"]
    assert result.best_checkpoints[0][1]["val/score"] == 7.5


@pytest.mark.parametrize("fail", ["raise", "die"])
def test_a_validation_that_fails_ends_no_training(tmp_path, folder, validation, fail):
    """Its checkpoint is whole, has a status that says so, and does not come out as the best."""
    run = tmp_path / "run"
    with mp.Reports(run, validation=validation(fail=fail)) as reports:
        mp.report({}, folder(score="1"), validation=True)
        (one,) = mp.get_all_reported_checkpoints(timeout_s=60)
        assert one.status is mp.ReportedCheckpointStatus.VALIDATION_FAILED
        mp.report({}, folder(score="1"))
        assert reports.result().get_best_checkpoint("val/score", "max") is None
    assert names(run) == ["report-1", "report-2"]


def test_a_stop_leaves_no_validation_unasked(tmp_path, folder, validation):
    """Killed right after the commit, before the request is on record: the next start asks."""
    run = tmp_path / "run"
    script = f"""
import os, signal, sys
import milepost as mp
from milepost.reporting import validating
validating.Validations.submit = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
config = mp.ValidationConfig("validators_of_test:read", sys_path=({str(tmp_path)!r}, *sys.path))
with mp.Reports({str(run)!r}, validation=config):
    mp.report({{}}, mp.Checkpoint.from_directory({str(tmp_path / "local")!r}), validation=True)
"""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/score").write_text("3")
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (one,) = mp.open_run(run).view.lineage()
    assert one.validation is None
    with mp.Reports(run, validation=validation()):
        (reported,) = mp.get_all_reported_checkpoints(timeout_s=60)
    assert reported.metrics == {"val/score": 3.0}


def test_what_has_no_verdict_at_the_end_gets_it_at_the_next_start(tmp_path, folder, validation):
    """A training that failed waits for no validation, and none is lost by that."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    with pytest.raises(ZeroDivisionError):
        with mp.Reports(run, validation=validation(gate=gate)):
            mp.report({}, folder(score="3"), validation=True)
            raise ZeroDivisionError
    assert mp.open_run(run).view.latest().is_pending_validation
    gate.write_text("")
    with mp.Reports(run, validation=validation(gate=gate)):
        pass
    assert mp.open_run(run).latest().name == "report-1"
    assert mp.open_run(run).view.latest().metrics == {"val/score": 3.0}


def test_every_rank_can_wait_for_verdicts(tmp_path, folder, validation):
    """The processes are rank 0's; the others hear of them. The lowest rank with files decides."""

    def body(reports):
        rank = reports.test_board.rank
        checkpoint = folder(score="2") if rank == 1 else None
        reports.report({}, checkpoint, validation=rank == 1)
        reports.report({}, folder(score="2"), validation=rank == 1)
        found = reports.get_all_reported_checkpoints(timeout_s=60)
        return [(one.checkpoint.name, one.status.value) for one in found]

    expected = [("report-1", "validated"), ("report-2", "committed")]
    ended = report_on_ranks(tmp_path / "run", body, body, validation=validation())
    assert ended == [expected, expected]


def test_a_launched_function_validates_its_checkpoints(tmp_path, monkeypatch, validation):
    """Through launch, with a worker that ends before its last verdict has come."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("reporter_of_test.py").write_text("""
import pathlib, tempfile
import milepost as mp

def train(config):
    for score in (1, 3, 2):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "score").write_text(str(score))
            mp.report({}, mp.Checkpoint.from_directory(folder), validation=True)
""")
    import reporter_of_test

    keep = mp.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val/score")
    result = mp.launch(
        reporter_of_test.train,
        run=mp.RunConfig(name="a", checkpoint_config=keep),
        validation=validation(),
    )
    assert result.get_best_checkpoint("val/score", "max").name == "report-2"
    assert names(Path("runs/a")) == ["report-2", "report-3"]
    assert os.environ.get("MILEPOST_REPORTS") is None


def test_what_was_found_lies_over_what_was_reported():
    """Nested as it was reported; new names as they came."""
    from milepost.metrics import flatten, with_found

    reported = {"n": 1, "val": {"loss": 5.0, "deep": {"a": 1, "b": 2}}, "x": {}}
    found = {"val/loss": -1.0, "val/deep/b": 3, "val/new": 4, "score": 101.0, "n": 2}
    merged = with_found(reported, found)
    assert merged == {
        "n": 2,
        "val": {"loss": -1.0, "deep": {"a": 1, "b": 3}, "new": 4},
        "x": {},
        "score": 101.0,
    }
    assert flatten(merged) == {**flatten(reported), **found}
    assert reported["val"]["loss"] == 5.0


def test_a_request_that_cannot_be_recorded_fails_no_report(tmp_path, folder, validation):
    """The checkpoint is committed, and the next start asks."""
    run = tmp_path / "run"
    with mp.Reports(run, validation=validation()) as reports:
        validator = reports._leader._coordinator.validator

        def refuse(*_):
            raise mp.StorageError("The disk is full.")

        validator.submit, submit = refuse, validator.submit
        assert mp.report({}, folder(score="2"), validation=True).name == "report-1"
        validator.submit = submit
    assert mp.open_run(run).latest().validation is None
    with mp.Reports(run, validation=validation(), if_finished="continue"):
        pass
    assert mp.open_run(run).latest().metrics == {"val/score": 2.0}


SCRIPT = """
import pathlib, sys, tempfile
import milepost as mp

def validate(checkpoint):
    return {"score": 1.0}

def train(config=None):
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "x").write_text("x")
        mp.report({"n": 1}, mp.Checkpoint.from_directory(folder), validation=True)

"""


def run_script(folder: Path, text: str) -> str:
    """Run a script that trains, and return the status of its checkpoint and the error."""
    (folder / "script.py").write_text(SCRIPT + text)
    done = subprocess.run(
        [sys.executable, "script.py"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    view = mp.open_run(folder / "runs/a").view
    assert len(view.sessions) == 1
    (one,) = view.lineage()
    return f"{one.validation.status} {one.validation.error}"


@pytest.mark.parametrize(
    "body",
    [
        'with mp.Reports("runs/a", validation=mp.ValidationConfig(validate)):\n        train()\n',
        'mp.launch(train, run=mp.RunConfig(name="a"), validation=mp.ValidationConfig(validate))\n',
    ],
    ids=["Reports", "launch"],
)
def test_a_script_may_name_a_function_of_its_own(tmp_path, body):
    """It is imported by the process that validates."""
    assert run_script(tmp_path, f'if __name__ == "__main__":\n    {body}') == "validated "


def test_a_script_without_a_guard_does_not_train_where_it_is_imported(tmp_path):
    """It would take the run away from the training that it is imported for."""
    body = 'with mp.Reports("runs/a", validation=mp.ValidationConfig(validate)):\n    train()\n'
    told = run_script(tmp_path, body)
    assert told.startswith("validation_failed")
    assert "script opened a run while it was imported" in told
    assert '__name__ == "__main__"' in told
