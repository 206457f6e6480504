"""What workers are given when they start, and what comes back from them."""

from __future__ import annotations

import json
import sys

import pytest

from milepost.errors import LaunchFailedError, StorageError
from milepost.launch import FailureConfig, RunConfig, ScalingConfig, launch


def test_workers_get_the_environment_of_torchrun(jobs, monkeypatch):
    """Scripts written for torchrun must run unchanged."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = jobs.run('note(f"env-{rank}", json.dumps(dict(os.environ)))', num=2, max_failures=3)
    first, second = (json.loads((jobs.folder / f"env-{rank}").read_text()) for rank in range(2))
    for rank, found in enumerate((first, second)):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            "OMP_NUM_THREADS": 1,
            "MILEPOST_ATTEMPT": 1,
            "MILEPOST_LAUNCH_DIR": result.folder,
        }
        assert {name: found.get(name) for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert "TORCHELASTIC_USE_AGENT_STORE" not in found
        assert found["TORCHELASTIC_RUN_ID"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_script_runs_as_python_would_run_it(jobs):
    """Its arguments, its folder first on the path, and its name as the main program."""
    (jobs.folder / "beside.py").write_text("x = 7")
    job = jobs.script('import beside; note("seen", [sys.argv, __name__, beside.x])')
    launch(job, ["--lr", "0.1"])
    assert (jobs.folder / "seen").read_text() == str([["job.py", "--lr", "0.1"], "__main__", 7])


def test_every_rank_has_a_log_and_the_first_one_is_shown(jobs, capfd):
    """Four workers that all print to one terminal cannot be read."""
    result = jobs.run('print("out", rank); print("err", rank, file=sys.stderr)', num=2)
    logs = [(result.folder / f"attempt-1/rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == ["out 0\nerr 0\n", "out 1\nerr 1\n"]
    assert capfd.readouterr().out == "out 0\nerr 0\n"


def test_function_gets_its_config_and_its_result_comes_back(jobs, monkeypatch):
    """As JSON, from rank 0."""
    (jobs.folder / "job_of_mine.py").write_text(
        "import os\ndef train(config):\n    return {'rank': os.environ['RANK'], **config}\n"
    )
    monkeypatch.syspath_prepend(jobs.folder)
    import job_of_mine  # type: ignore[import-not-found]

    scaling = ScalingConfig(num_workers=2)
    result = launch(job_of_mine.train, config={"lr": [0.1, None]}, scaling=scaling)
    assert result.return_value == {"rank": "0", "lr": [0.1, None]}
    assert result.error is None


def test_function_of_the_main_program_is_found(jobs):
    """Where most people define it."""
    (jobs.folder / "main_job.py").write_text(
        "import milepost as mp\ndef train():\n    return 3\n"
        "if __name__ == '__main__':\n    print(mp.launch(train).return_value)\n"
    )
    process = jobs.started([sys.executable, "main_job.py"])
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("3\n", 0), err


def test_launch_in_the_body_of_a_module_is_refused(jobs):
    """Workers import it again: each would launch workers, and so on."""
    (jobs.folder / "main_job.py").write_text(
        "import milepost as mp\ndef train():\n    return 3\nmp.launch(train)\n"
    )
    process = jobs.started([sys.executable, "main_job.py"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "A worker cannot launch workers" in err


def test_result_that_json_cannot_hold_is_not_tried_again(jobs, monkeypatch):
    """The training is done; doing it again would bring the same."""
    (jobs.folder / "odd_result.py").write_text("def train():\n    return {'loss': (1, 2)}\n")
    monkeypatch.syspath_prepend(jobs.folder)
    import odd_result  # type: ignore[import-not-found]

    failures = FailureConfig(max_failures=5, backoff_s=0.0)
    with pytest.raises(LaunchFailedError, match=r"the return value\['loss'\]") as caught:
        launch(odd_result.train, run=RunConfig(failure_config=failures))
    assert len(caught.value.facts["result"].attempts) == 1


def test_fewer_workers_start_if_fewer_are_available(jobs):
    """Within the bounds that were given; too few are a failure, with words that say so."""
    counts = iter([8, 3, 2])
    result = launch(
        jobs.script('liveness.note_commit("x"); sys.exit(attempt < 3)'),
        scaling=ScalingConfig(num_workers=(2, 4)),
        run=RunConfig(failure_config=FailureConfig(max_failures=5, backoff_s=0.0)),
        available=lambda: next(counts),
    )
    assert [one.num_workers for one in result.attempts] == [4, 3, 2]
    with pytest.raises(LaunchFailedError, match="1 workers are available and 2 are needed"):
        launch("job.py", scaling=ScalingConfig(num_workers=(2, 4)), available=lambda: 1)


def test_port_of_rank_0_is_given_to_nobody_else(jobs):
    """A stranger that came between would make every rank meet the wrong server."""
    jobs.run(
        """
        import socket
        port = int(os.environ["MASTER_PORT"])
        if rank == 1:
            wait_for("tried")
        else:
            for _ in range(3):
                try:
                    with socket.socket() as stranger:
                        stranger.bind(("127.0.0.1", port))
                    raise AssertionError("taken")
                except OSError:
                    pass
            with socket.socket() as server:  # as every server does
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                note("tried")
        """,
        num=2,
    )


def test_folder_that_cannot_be_written_is_a_typed_error(jobs):
    """Before anything was started; nobody should have to tell an OSError by its text."""
    (jobs.folder / "runs").write_text("no folder")
    with pytest.raises(StorageError, match=r"Could not create .*\.launches"):
        jobs.run("note('never')")
    assert not (jobs.folder / "never").exists()


def test_log_that_cannot_be_opened_is_a_failed_attempt(jobs):
    """Later attempts may find the disk in order again; the first one tells at once."""
    result = jobs.fail(
        """
        folder = pathlib.Path(os.environ["MILEPOST_LAUNCH_DIR"], "attempt-2")
        folder.symlink_to("/nowhere/at/all")
        raise ValueError
        """,
        max_failures=1,
    )
    assert "Could not create" in result.error.text
    assert [one.num_workers for one in result.attempts] == [1, 0]


def test_workers_are_lost_and_come_back_as_a_file_says(jobs):
    """Whoever gives machines and takes them away writes there how many are left."""
    (jobs.folder / "slots").write_text("8")
    process = jobs.start(
        """
        size = int(os.environ["WORLD_SIZE"])
        liveness.note_commit(f"ba{attempt}", attempt)
        note(f"up-{attempt}-{rank}", size)
        if attempt < 3:
            if rank == 0:
                while not all((here / f"up-{attempt}-{r}").exists() for r in range(size)):
                    time.sleep(0.01)
                note("slots", {1: 2, 2: 3}[attempt])
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        """,
        "--workers=2:4",
        "--max-failures=1",
        env={"MILEPOST_SLOTS": "slots"},
    )
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    sizes = [sum(1 for _ in jobs.folder.glob(f"up-{attempt}-*")) for attempt in range(1, 4)]
    assert sizes == [4, 2, 3]
