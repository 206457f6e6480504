"""Functions that report under a launcher: killed, failed, done; what is committed is gone on from.

Everything here is real processes. Functions that run alone load no torch, so they start quickly.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import milepost as mp

HEAD = """
import json, os, pathlib, signal, tempfile
import milepost as mp

def save(metrics, **options):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in options.pop("files").items():
            pathlib.Path(folder, name).write_text(text)
        return mp.report(metrics, mp.Checkpoint.from_directory(folder), **options)

def start():
    checkpoint = mp.get_checkpoint()
    if checkpoint is None:
        return 0, 0.0
    with checkpoint.as_directory() as folder:
        return tuple(json.loads(pathlib.Path(folder, "state").read_text()))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a maker of functions that workers can import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(body: str):
        Path("job_of_test.py").write_text(HEAD + textwrap.dedent(body))
        importlib.invalidate_caches()
        sys.modules.pop("job_of_test", None)
        return importlib.import_module("job_of_test").train

    yield make
    sys.modules.pop("job_of_test", None)


def config(**options) -> mp.RunConfig:
    failures = mp.FailureConfig(max_failures=options.pop("max_failures", 3), backoff_s=0.0)
    return mp.RunConfig(failure_config=failures, name="a", **options)


def test_two_workers_come_back_to_the_newest_commit_and_end_the_same(job, capfd):
    """One is killed in the middle, after a report that it had returned from; nobody helps.

    They meet without a process group, and each goes on from the same checkpoint.
    """
    train = job(
        """
        def train(config):
            context = mp.get_context()
            rank, attempt = context.get_world_rank(), int(os.environ["MILEPOST_ATTEMPT"])
            assert context.get_world_size() == 2 and context.get_experiment_name() == "a"
            first, weight = start()
            pathlib.Path(f"from-{attempt}-{rank}").write_text(str(first))
            for step in range(first, 6):
                weight = weight * 0.5 + step
                mp.report({"step": step})
                files = {f"of-{rank}": str(weight)}
                if rank == 0:
                    files["state"] = json.dumps([step + 1, weight])
                save({"weight": weight}, files=files)
                if (attempt, rank, step) in [(1, 1, 1), (2, 0, 3)]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return weight
        """
    )
    keep = mp.CheckpointConfig(num_to_keep=2)
    result = mp.launch(
        train, scaling=mp.ScalingConfig(num_workers=2), run=config(checkpoint_config=keep)
    )
    starts = [int(Path(f"from-{n}-{rank}").read_text()) for n in (1, 2, 3) for rank in range(2)]
    assert starts == [0, 0, 2, 2, 4, 4]
    expected = 0.0
    for step in range(6):
        expected = expected * 0.5 + step
    assert result.return_value == expected
    assert len(result.attempts) == 3
    assert result.metrics == {"weight": expected}
    assert result.checkpoint.metrics == {"weight": expected}
    assert len(result.best_checkpoints) == 2
    assert result.last_commit == result.checkpoint.name
    paths = [entry.path for entry in result.checkpoint.manifest.files]
    assert paths == ["of-0", "of-1", "state"]
    again = mp.launch(train, scaling=mp.ScalingConfig(num_workers=2), run=config())
    assert (again.return_value, again.attempts) == (expected, ())
    assert "is finished, so nothing was started" in capfd.readouterr().err
    assert not Path("from-4-0").exists()


def test_h36_the_retry_goes_on_from_the_newest_and_not_from_the_best(job):
    """Scores get worse, so the best is the first; the retry must begin at the last all the same."""
    train = job(
        """
        def train(config):
            step, weight = start()
            with open("starts", "a") as file:
                file.write(f"{step} {weight}\\n")
            while step < 10:
                step, weight = step + 1, weight + 1
                if step == 7 and os.environ["MILEPOST_ATTEMPT"] == "1":
                    raise ValueError("at step 7")
                if step % 2 == 0:
                    save({"score": -step}, files={"state": json.dumps([step, weight])})
            return weight
        """
    )
    keep = mp.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = mp.launch(train, run=config(max_failures=1, checkpoint_config=keep))
    assert Path("starts").read_text() == "0 0.0\n6 6.0\n"
    assert (result.return_value, len(result.attempts)) == (10.0, 2)
    assert result.get_best_checkpoint("score", "max").metrics == {"score": -2}


def test_a_failed_launch_carries_what_was_reported(job):
    """The checkpoints of a training that failed in the end are what a person wants to look at."""
    train = job(
        """
        def train(config):
            save({"loss": 0.5}, files={"state": "[1, 1.0]"})
            raise ValueError("by hand")
        """
    )
    with pytest.raises(mp.LaunchFailedError, match="by hand") as caught:
        mp.launch(train, run=config(max_failures=0))
    result = caught.value.result
    assert isinstance(result, mp.LaunchResult)
    assert isinstance(result, mp.Result)
    assert result.checkpoint.name == "report-1"
    assert result.metrics == {"loss": 0.5}
    assert result.error.text == "ValueError: by hand"


def test_an_upload_in_flight_survives_the_error_that_ended_the_loop(job):
    """The process waits for it on its way out, and the next attempt goes on from it."""
    train = job(
        """
        def slow(checkpoint, name):
            import time
            place = pathlib.Path(mp.get_context().get_run_path(), name)
            place.mkdir()
            time.sleep(0.5)
            (place / "state").write_text("[5, 5.0]")
            return mp.Checkpoint.from_directory(place)

        def train(config):
            first, _ = start()
            if first:
                return first
            folder = tempfile.mkdtemp()
            mp.report({}, mp.Checkpoint.from_directory(folder), checkpoint_upload_fn=slow,
                      checkpoint_upload_mode=mp.CheckpointUploadMode.ASYNC)
            raise ValueError("by hand")
        """
    )
    assert mp.launch(train, run=config(max_failures=1)).return_value == 5


def test_an_upload_that_fails_after_the_loop_fails_the_attempt(job):
    """A function that returned has not succeeded as long as its last checkpoint has not."""
    train = job(
        """
        def bad(checkpoint, name):
            raise OSError(28, "No space left on device")

        def train(config):
            folder = tempfile.mkdtemp()
            mp.report({}, mp.Checkpoint.from_directory(folder), checkpoint_upload_fn=bad,
                      checkpoint_upload_mode=mp.CheckpointUploadMode.ASYNC)
            return 1
        """
    )
    with pytest.raises(mp.LaunchFailedError, match="No space left on device") as caught:
        mp.launch(train, run=config(max_failures=0))
    assert caught.value.result.return_value is None


def test_without_workers_everything_is_the_same(job):
    """num_workers=0 is for debuggers and laptops: it keeps, fails, resumes and ends as with one."""
    train = job(
        """
        def train(config):
            first, weight = start()
            for step in range(first, config["steps"]):
                weight += 1
                save({"step": step}, files={"state": json.dumps([step + 1, weight])})
                if step == config["fail"]:
                    raise ValueError("by hand")
            return [first, weight, mp.get_context().get_experiment_name()]
        """
    )
    here = mp.ScalingConfig(num_workers=0)
    keep = mp.CheckpointConfig(num_to_keep=2)
    run = config(checkpoint_config=keep)
    with pytest.raises(mp.LaunchFailedError, match="by hand") as caught:
        mp.launch(train, config={"steps": 5, "fail": 2}, scaling=here, run=run)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.result.checkpoint.name == "report-3"
    result = mp.launch(train, config={"steps": 5, "fail": -1}, scaling=here, run=run)
    assert result.return_value == [3, 5.0, "a"]
    assert [one.name for one, _ in result.best_checkpoints] == ["report-4", "report-5"]
    again = mp.launch(train, config={"steps": 9, "fail": -1}, scaling=here, run=run)
    assert (again.return_value, again.checkpoint.name) == (result.return_value, "report-5")
    more = mp.launch(
        train,
        config={"steps": 9, "fail": -1},
        run=config(checkpoint_config=keep, if_finished="continue"),
    )
    assert more.return_value == [5, 9.0, "a"]
    with pytest.raises(mp.ExistsError, match="is finished"):
        mp.launch(train, config={}, run=config(if_finished="error"))
    with pytest.raises(mp.UsageError, match="workers only"):
        mp.launch("job_of_test.py", scaling=here, run=config(if_finished="continue"))


def test_a_function_that_reports_nothing_leaves_no_run(job):
    """It may keep checkpoints elsewhere, or under this very name with a Checkpointer."""
    train = job("def train(config):\n    return 5\n")
    result = mp.launch(train, run=config())
    assert (result.return_value, result.checkpoint, result.metrics) == (5, None, None)
    assert not Path("runs/a/run.json").exists()
    assert len(mp.launch(train, run=config()).attempts) == 1


def test_a_child_of_a_worker_does_not_report_in_its_name(job):
    """It inherits the environment, and would take the run over from its parent."""
    train = job(
        """
        import subprocess, sys

        def train(config):
            save({}, files={"state": "[1, 1.0]"})
            code = "import milepost as mp; mp.report({})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            save({}, files={"state": "[2, 2.0]"})
            return done.stderr
        """
    )
    result = mp.launch(train, run=config(max_failures=0))
    assert "nothing is reported to" in result.return_value
    assert result.checkpoint.name == "report-2"


def test_a_killed_launcher_loses_nothing_that_was_reported(job, tmp_path):
    """The launcher takes no part in a commit: what a report returned from is there."""
    job(
        """
        def train(config):
            first, weight = start()
            with open("starts", "a") as file:
                file.write(f"{first}\\n")
            for step in range(first, 4):
                weight += 1
                save({"step": step}, files={"state": json.dumps([step + 1, weight])})
                if step == 1 and first == 0:
                    os.kill(int(os.environ["MILEPOST_LAUNCHER_PID"]), signal.SIGKILL)
                    signal.pause()
            return weight

        if __name__ == "__main__":
            result = mp.launch(train, run=mp.RunConfig(name="a"))
            print(result.return_value, result.checkpoint.name)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ends = [
        subprocess.run(
            [sys.executable, "job_of_test.py"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        for _ in range(2)
    ]
    assert [one.returncode for one in ends] == [-signal.SIGKILL, 0], ends[1].stderr
    assert ends[1].stdout == "4.0 report-4\n"
    assert Path("starts").read_text() == "0\n2\n"


PHASES = {
    "before files are written": ("milepost.reporting.files:write_files", "before", 2),
    "when a file is written": ("milepost.stores.blocks:LocalWriter.close", "after", 2),
    "when all files are written": ("milepost.reporting.files:write_files", "after", 2),
    "before the commit": ("milepost.reporting.commit:publish", "before", 2),
    "after the commit": ("milepost.reporting.commit:publish", "after", 3),
    "before old ones are deleted": ("milepost.reporting.commit:prune", "before", 3),
    "while old ones are deleted": ("milepost.runs.prune:_finish_deletion", "before", 3),
    "when old ones are deleted": ("milepost.reporting.commit:prune", "after", 3),
}


@pytest.mark.parametrize("phase", list(PHASES))
def test_a_kill_in_any_phase_leaves_a_whole_run(job, phase):
    """After it a reader sees whole checkpoints only, and the next start goes on from the newest."""
    place, when, newest = PHASES[phase]
    module, _, name = place.partition(":")
    script = f"""
import importlib, operator, os, signal
import job_of_test as job, milepost as mp

*above, name = {name!r}.split(".")
owner = importlib.import_module({module!r})
for one in above:
    owner = getattr(owner, one)
original = getattr(owner, name)
def die(*arguments, **options):
    if {when!r} == "before" and job.ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*arguments, **options)
    if job.ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, die)
with mp.Reports("runs/a", checkpoint_config=mp.CheckpointConfig(num_to_keep=1)):
    job.save({{"n": 1}}, files={{"state": "[1, 1.0]", "big": "x" * 100_000}})
    job.save({{"n": 2}}, files={{"state": "[2, 2.0]", "big": "x" * 100_000}})
    job.ARMED = True
    job.save({{"n": 3}}, files={{"state": "[3, 3.0]", "big": "x" * 100_000}})
"""
    job("ARMED = False\ntrain = None\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], check=False, env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    run = mp.open_run("runs/a")
    for one in run.checkpoints():
        assert one.verify("full").is_good
    assert run.latest().name == f"report-{newest}"
    with mp.Reports("runs/a", checkpoint_config=mp.CheckpointConfig(num_to_keep=1)):
        with mp.get_checkpoint().as_directory() as folder:
            assert json.loads(Path(folder, "state").read_text())[0] == newest
        assert [path.name for path in Path("runs/a").glob("report-*")] == [f"report-{newest}"]


VALIDATED = """
def validate(checkpoint, offset=0.0):
    with checkpoint.as_directory() as folder:
        step = json.loads(pathlib.Path(folder, "state").read_text())[0]
    if os.environ.get("RANK") or not offset:
        raise ValueError("not as a rank, and with what the launch was given")
    if step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"score": step + offset}

def train():
    step, _ = start()
    while step < 3:
        step += 1
        save({"step": step}, files={"state": json.dumps([step, 0.5])}, validation=True)
        if step == 2 and os.environ.get("MILEPOST_ATTEMPT") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    return [one.status.value for one in mp.get_all_reported_checkpoints()]
"""


@pytest.mark.parametrize("num_workers", [1, 0])
def test_validation_goes_on_across_attempts_and_the_launch_waits(job, num_workers):
    """The worker is killed with validations under way; each ends in a verdict all the same."""
    train = job(VALIDATED)
    module = sys.modules["job_of_test"]
    task = mp.ValidationTaskConfig(fn_kwargs={"offset": 10.0})
    result = mp.launch(
        train,
        scaling=mp.ScalingConfig(num_workers=num_workers),
        run=config(max_failures=1),
        validation=mp.ValidationConfig(module.validate, task, max_retries=2),
    )
    assert result.return_value == ["validation_failed", "validated", "validated"]
    found = {one.name: metrics for one, metrics in result.best_checkpoints}
    assert [found[name].get("score") for name in sorted(found)] == [None, 12.0, 13.0]
    assert len(result.attempts) == (2 if num_workers else 0)


def test_launching_a_finished_run_again_validates_what_was_left(job):
    """The end of a training waits for so long, and no longer."""
    train = job(
        """
        import time

        def validate(checkpoint, path):
            deadline_s = time.monotonic() + 60
            while not pathlib.Path(path).exists() and time.monotonic() < deadline_s:
                time.sleep(0.02)
            return {"score": 1.0}

        def train():
            save({"step": 1}, files={"state": "1"}, validation=True)
        """
    )
    task = mp.ValidationTaskConfig(fn_kwargs={"path": str(Path("word").absolute())})
    validate = sys.modules["job_of_test"].validate
    checks = mp.ValidationConfig(validate, task)
    short = mp.CheckpointConfig(validation_timeout_s=0.3)
    first = mp.launch(train, run=config(checkpoint_config=short), validation=checks)
    assert first.checkpoint.validation.is_pending
    Path("word").touch()
    again = mp.launch(train, run=config(), validation=checks)
    assert not again.attempts
    assert again.checkpoint.validation.metrics == {"score": 1.0}
