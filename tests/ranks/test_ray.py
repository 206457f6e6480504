"""The same recovery on a Ray cluster: one of this machine's own, and several machines in one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TRAINING = Path(__file__).with_name("training.py")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in a folder, with a home folder of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_of(*options: str) -> list[str]:
    return ["-m", "milepost.cli.app", "run", "--engine", "ray", "--workers", "2", *options]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_training_on_ray_comes_back_and_ends_the_same(trainings, killers, straight_ends, tmp_path):
    """The supervisor is that of one machine; and nothing is left of Ray, nor in the home folder."""
    killed = trainings("killed", pause_s=0.03)
    options = ["--max-failures", "3", "--start-timeout-s", "60"]
    arguments = [str(TRAINING), str(killed.folder), "2", "0.03"]
    with killers(killed, 1, seed=11, train_s=0.5) as killer:
        program = start(tmp_path, *run_of(*options), *arguments)
        _, told = program.communicate(timeout=200)
    assert program.returncode == 0, told
    assert len(killer.told) == 1
    assert "was killed by SIGKILL" in told
    assert "done after" in told
    killed.check_resumes(2)
    assert killed.ends() == straight_ends
    launched = tmp_path / "runs/launched/.launches/1"
    endings = [
        one["ending"] for one in json.loads((launched / "result.json").read_text())["attempts"]
    ]
    assert endings == ["failed", "done"]
    assert not (tmp_path / ".ray").exists()


def test_workers_on_ray_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    """Nor what they have started, nor the supervisor's folder."""
    (tmp_path / "job.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, subprocess, time
            rank, folder = os.environ["RANK"], os.environ["MILEPOST_LAUNCH_DIR"]
            near = subprocess.Popen(["sleep", "600"])
            far = subprocess.Popen(["sleep", "600"], start_new_session=True)
            pathlib.Path(f".{rank}").write_text(f"{os.getpid()} {near.pid} {far.pid} {folder}")
            pathlib.Path(f".{rank}").rename(f"up-{rank}")
            time.sleep(600)
            """
        )
    )
    program = start(tmp_path, *run_of("job.py"))
    wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    told = [(tmp_path / f"up-{rank}").read_text().split() for rank in range(2)]
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=60)
    for *pids, folder in told:
        for pid in pids:
            wait_until(lambda pid=pid: not is_alive(int(pid)))
        wait_until(lambda folder=folder: not Path(folder).exists())


@pytest.mark.campaign
def test_lost_machine_is_left_out_and_the_others_go_on(tmp_path):
    """Three machines in one; one of them goes, and two are enough."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "job.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, time
            rank, attempt = os.environ["RANK"], os.environ["MILEPOST_ATTEMPT"]
            pathlib.Path(f"up-{attempt}-{rank}").write_text(os.environ["NODE_RANK"])
            time.sleep(600 if attempt == "1" else 0)
            """
        )
    )
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import json, os, pathlib, threading, time
            os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
            from ray.cluster_utils import Cluster
            import milepost as mp
            from milepost.launch import RayEngine

            head = {"num_cpus": 1, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            cluster.add_node(num_cpus=1)
            last = cluster.add_node(num_cpus=1)

            def lose():
                while not all(pathlib.Path(f"up-1-{rank}").exists() for rank in range(3)):
                    time.sleep(0.05)
                last.kill_raylet()

            threading.Thread(target=lose).start()
            result = mp.launch(
                "job.py",
                scaling=mp.ScalingConfig(num_workers=(2, 3)),
                run=mp.RunConfig(failure_config=mp.FailureConfig(max_failures=3)),
                engine=RayEngine(cluster.address),
            )
            found = [(one.num_workers, one.ending) for one in result.attempts]
            pathlib.Path("found").write_text(json.dumps([found, result.attempts[0].cause.message]))
            cluster.shutdown()
            """
        )
    )
    program = start(tmp_path, "program.py")
    _, errors = program.communicate(timeout=200)
    assert program.returncode == 0, errors
    found, message = json.loads((tmp_path / "found").read_text())
    assert found[0] == [3, "failed"]
    assert found[-1] == [2, "done"]
    assert "is lost" in message
    assert {(tmp_path / f"up-1-{rank}").read_text() for rank in range(3)} == {"0", "1", "2"}


@pytest.mark.campaign
def test_workers_on_ray_report_and_see_the_gpus_of_their_machine(tmp_path):
    """Ray only counts GPUs, so a machine without any may claim some."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import json, os, pathlib
            import milepost as mp
            from milepost.launch import RayEngine

            def train(config):
                mp.report({"loss": config["loss"]})
                return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OF_OURS"]]

            if __name__ == "__main__":
                os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
                import ray
                ray.init(num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
                pathlib.Path("runs").mkdir()
                result = mp.launch(
                    train,
                    config={"loss": 0.5},
                    scaling=mp.ScalingConfig(num_workers=2),
                    engine=RayEngine(gpus_per_worker=2, variables={"OF_OURS": "x"}),
                )
                try:
                    mp.launch(
                        train,
                        config={"loss": 0.5},
                        run=mp.RunConfig(name="b"),
                        scaling=mp.ScalingConfig(num_workers=3),
                        engine=RayEngine(start_timeout_s=3),
                    )
                except mp.DeadlineError as error:
                    refused = str(error)
                found = [result.return_value, result.metrics, refused, ray.is_initialized()]
                pathlib.Path("found").write_text(json.dumps(found))
            """
        )
    )
    program = start(tmp_path, "program.py")
    _, errors = program.communicate(timeout=200)
    assert program.returncode == 0, errors
    value, metrics, refused, is_still_connected = json.loads((tmp_path / "found").read_text())
    assert value == ["0,1,2,3", "x"]
    assert metrics == {"loss": 0.5}
    assert "no room for 3 workers, each with 1 CPU, within 3 s" in refused
    assert is_still_connected  # it was before we came
