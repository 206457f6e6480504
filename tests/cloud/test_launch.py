"""Launches whose run is in a bucket: everything is as with a folder, and logs stay here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.stores import open_store
from milepost.testing import fault_proxy

from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud

JOB = """
import json, os, pathlib, signal, tempfile, time
import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.stores import open_store

def save(rank, step, **options):
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, f"of-{rank}").write_bytes(bytes([step]) * 3000)
    if rank == 0:
        pathlib.Path(folder, "step").write_text(str(step))
    return mp.report({"step": step}, mp.Checkpoint.from_directory(folder), **options)

def wait_for(*names):
    deadline_s = time.monotonic() + 60
    while not all(map(os.path.exists, names)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

def train(config):
    context = mp.get_context()
    rank, attempt = context.get_world_rank(), os.environ["MILEPOST_ATTEMPT"]
    first, checkpoint = 1, mp.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            pathlib.Path(f"in-{rank}").write_text(folder)
            wait_for("in-0", "in-1")  # both read it at a time
            first = int(pathlib.Path(folder, "step").read_text()) + 1
            assert pathlib.Path(folder, f"of-{rank}").read_bytes() == bytes([first - 1]) * 3000
    pathlib.Path(f"from-{attempt}-{rank}").write_text(str(first))
    for step in range(first, 4):
        if step == 2:
            pending = save(rank, step, checkpoint_upload_mode=mp.CheckpointUploadMode.ASYNC)
            assert pending.wait(30).metrics == {"step": 2}
        else:
            save(rank, step)
        if (attempt, rank, step) == ("1", 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
    place = f"{context.get_run_path()}/by-hand"
    if rank == 0:
        open_store(place).put_new("shard", b"1")
        by_hand = mp.Checkpoint.from_directory(place)
        no_upload = mp.CheckpointUploadMode.NO_UPLOAD
        mp.report({"step": 4}, by_hand, checkpoint_upload_mode=no_upload, validation=True)
    else:
        mp.report({})
    found = mp.get_all_reported_checkpoints(timeout_s=60)
    return [[one.checkpoint.name, dict(one.metrics), one.status.value] for one in found]

def validate(checkpoint):
    with checkpoint.as_directory() as folder:
        return {"score": float(pathlib.Path(folder, "shard").read_text())}
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address below which runs are kept, and a working folder with a job."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
        ("MILEPOST_CACHE_DIR", str(tmp_path / "copies")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("job_in_bucket.py").write_text(JOB)
    importlib.invalidate_caches()
    sys.modules.pop("job_in_bucket", None)
    return f"s3://runs/{tmp_path.name}"


def test_workers_that_report_to_a_bucket_come_back_from_there(
    s3_endpoint: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One is killed; both go on from the newest commit, which the machine downloads once.

    All three ways to upload, retention, a validation, and what is told afterwards.
    """
    job = importlib.import_module("job_in_bucket")
    with fault_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        result = mp.launch(
            job.train,
            scaling=mp.ScalingConfig(num_workers=2),
            run=mp.RunConfig(
                storage_path=place,
                name="a",
                failure_config=mp.FailureConfig(max_failures=1, backoff_s=0.0),
                checkpoint_config=mp.CheckpointConfig(num_to_keep=3),
            ),
            validation=mp.ValidationConfig(fn=job.validate),
        )
        downloads = [
            one.path for one in proxy.seen if one.method == "GET" and "report-2/of-" in one.path
        ]
    assert [Path(f"from-{n}-{rank}").read_text() for n in (1, 2) for rank in (0, 1)] == [
        *("1", "1"),
        *("3", "3"),
    ]
    assert Path("in-0").read_text() == Path("in-1").read_text()
    assert len(downloads) == len(set(downloads)) == 2  # a file of each rank, once for both
    assert [name for name, *_ in result.return_value] == ["report-2", "report-3", "by-hand"]
    assert result.return_value[2][1:] == [{"step": 4, "score": 1.0}, "validated"]

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    assert result.path == f"{place}/a"
    found = mp.Result.from_path(f"{place}/a")
    assert found.metrics == {"step": 4}
    assert found.checkpoint is not None
    assert found.checkpoint.name == "by-hand"
    assert [(c.name, m) for c, m in found.best_checkpoints] == [
        (c.name, m) for c, m in result.best_checkpoints
    ]
    assert all(one.verify().is_good for one in mp.open_run(f"{place}/a").checkpoints())

    # What the launch itself writes down is on this machine, and nothing else is.
    assert result.folder == tmp_path / "runs" / "a" / ".launches" / "1"
    assert len(list(result.folder.glob("attempt-*/rank-*.log"))) == 4
    keys = {entry.key.partition("/")[0] for entry in open_store(f"{place}/a").list()}
    assert keys == {
        *("run.json", "sessions", "events", "latest", "validations"),
        *("report-2", "report-3", "by-hand"),
    }
    again = mp.launch(
        job.train, run=mp.RunConfig(storage_path=place, name="a", local_path="elsewhere")
    )
    assert (again.return_value, again.attempts) == (result.return_value, ())
    assert not Path("elsewhere").exists()


def test_reported_files_are_kept_on_this_machine_if_wanted(
    s3_endpoint: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start there reads them from the disk; in this process, as under torchrun."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(9_000_000))
    run = mp.RunConfig(
        storage_path=place, name="b", local_cache=tmp_path / "cache", if_finished="continue"
    )

    def first() -> str:
        pending = mp.report({"n": 1}, mp.Checkpoint.from_directory(folder))
        assert pending is not None
        return pending.wait().name

    def second() -> str:
        found = mp.get_checkpoint()
        assert found is not None
        assert found.verify().is_good
        proxy.seen.clear()
        with found.as_directory() as copy:
            same = Path(copy, "weights").read_bytes() == (folder / "weights").read_bytes()
        return f"{found.name} {same}"

    with fault_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        here = mp.ScalingConfig(num_workers=0)
        assert mp.launch(first, scaling=here, run=run).return_value == "report-1"
        assert mp.launch(second, scaling=here, run=run).return_value == "report-1 True"
        assert not [one for one in proxy.seen if one.path.endswith("weights")]
    (kept,) = (tmp_path / "cache").glob("*/*/*/weights")
    assert kept.read_bytes() == (folder / "weights").read_bytes()


SCRIPT = """
import os, pathlib, signal, sys, tempfile
import torch.distributed as dist
import milepost as mp

def train(config):
    rank, died = dist.get_rank(), pathlib.Path("died")
    first, found = 1, mp.get_checkpoint()
    if found is not None:
        with found.as_directory() as folder:
            first = int(pathlib.Path(folder, f"of-{rank}").read_text()) + 1
    for step in range(first, 4):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, f"of-{rank}").write_text(str(step))
            mp.report({"step": step, "first": first}, mp.Checkpoint.from_directory(folder))
        if (rank, step) == (1, 2) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    if len(sys.argv) > 1:
        run = mp.RunConfig(storage_path=sys.argv[1], name="c", if_finished="continue")
        mp.launch(train, scaling=mp.ScalingConfig(num_workers=0), run=run)
    else:
        train(None)
"""


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=130, check=False
    )


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["torchrun", "ray"])
def test_torchrun_and_ray_come_back_from_a_bucket_too(
    s3_endpoint: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    """Whoever starts the workers again, the bucket is where they go on from."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("script.py").write_text(SCRIPT)
    if engine == "torchrun":
        # Started anew and not by itself: its own restarts meet the dead workers of before.
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["script.py", place]
        assert call(*command).returncode == 1
    else:
        pytest.importorskip("ray")
        command = ["-m", "milepost.cli.app", "run", "--engine", "ray", "--workers", "2"]
        command += ["--max-failures", "1", "--storage-path", place, "--name", "c", "script.py"]
    ended = call(*command)
    assert ended.returncode == 0, ended.stderr
    found = mp.Result.from_path(f"{place}/c")
    assert found.metrics == {"step": 3, "first": 3}
    assert [c.name for c, _ in found.best_checkpoints] == ["report-1", "report-2", "report-3"]
    assert Path("runs/c/.launches/1/result.json").exists() == (engine == "ray")
    with open_checkpoint(f"{place}/c/report-3").as_directory() as folder:
        assert {one.name for one in Path(folder).iterdir()} == {"manifest.json", "of-0", "of-1"}


def test_places_that_make_no_sense_are_refused_at_once() -> None:
    """Before anything is started, and without the secret that an address may hold."""
    with pytest.raises(mp.UsageError, match="not a folder on this machine"):
        mp.RunConfig(storage_path="s3://b/runs", local_path="s3://b/logs")
    with pytest.raises(mp.UsageError, match="storage_path= is a folder"):
        mp.RunConfig(storage_path="runs", local_cache="cache")
    for wrong in ("nope://b/runs", f"s3://key:{SECRET}@b/runs"):
        with pytest.raises(mp.UsageError) as caught:
            mp.launch(json.dumps, run=mp.RunConfig(storage_path=wrong))
        assert SECRET not in str(caught.value)
