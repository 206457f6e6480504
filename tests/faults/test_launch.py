"""Launched workers that fail in every way: the cause is told, the rest ends, and it goes on.

Everything here is real processes. A worker that must not end by itself waits for ten minutes, so a
launcher that forgets one runs into the timeout of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from milepost.errors import LaunchFailedError
from milepost.launch import Ending, FailureConfig, RunConfig, ScalingConfig, launch

HEAD = """
import json, os, pathlib, signal, subprocess, sys, threading, time
from milepost import liveness
rank, attempt = int(os.environ["RANK"]), int(os.environ["MILEPOST_ATTEMPT"])
here = pathlib.Path(__file__).parent
def note(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").rename(here / name)
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate(timeout=60)


def script(body: str) -> str:
    Path("job.py").write_text(HEAD + textwrap.dedent(body))
    return "job.py"


def run(body: str, *, num: int = 1, **failures):
    options = {"backoff_s": 0.0, "grace_s": 60.0, **failures}
    return launch(
        script(body),
        scaling=ScalingConfig(num_workers=num),
        run=RunConfig(failure_config=FailureConfig(**options)),
    )


def fail(body: str, **options):
    with pytest.raises(LaunchFailedError) as caught:
        run(body, **options)
    return caught.value.facts["result"]


def start(body: str, *options: str) -> subprocess.Popen[str]:
    """Start the program in a process of its own."""
    command = [sys.executable, "-m", "milepost.cli.app", "run", *options, script(body)]
    return started(command)


def started(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
    return STARTED[-1]


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for the end of a program, and return its exit code."""
    process.communicate(timeout=60)
    return process.returncode


def num_held() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len([*Path("/proc/self/fd").iterdir()]), len([*Path("/proc/self/task").iterdir()])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pids(*names: str) -> list[int]:
    for name in names:
        wait_until(Path(name).exists)
    return [int(Path(name).read_text()) for name in names]


def check_gone(*numbers: int) -> None:
    for number in numbers:
        wait_until(lambda number=number: not is_alive(number))


def test_workers_get_the_environment_of_torchrun(place, monkeypatch):
    """Scripts written for torchrun must run unchanged."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = run('note(f"env-{rank}", json.dumps(dict(os.environ)))', num=2, max_failures=3)
    first, second = (json.loads((place / f"env-{rank}").read_text()) for rank in range(2))
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


def test_script_runs_as_python_would_run_it(place):
    """Its arguments, its folder first on the path, and its name as the main program."""
    (place / "beside.py").write_text("x = 7")
    job = script('import beside; note("seen", [sys.argv, __name__, beside.x])')
    launch(job, ["--lr", "0.1"])
    assert (place / "seen").read_text() == str([["job.py", "--lr", "0.1"], "__main__", 7])


def test_every_rank_has_a_log_and_the_first_one_is_shown(place, capfd):
    """Four workers that all print to one terminal cannot be read."""
    result = run('print("out", rank); print("err", rank, file=sys.stderr)', num=2)
    logs = [(result.folder / f"attempt-1/rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == ["out 0\nerr 0\n", "out 1\nerr 1\n"]
    assert capfd.readouterr().out == "out 0\nerr 0\n"


def test_function_gets_its_config_and_its_result_comes_back(place, monkeypatch):
    """As JSON, from rank 0."""
    (place / "job_of_mine.py").write_text(
        "import os\ndef train(config):\n    return {'rank': os.environ['RANK'], **config}\n"
    )
    monkeypatch.syspath_prepend(place)
    import job_of_mine  # type: ignore[import-not-found]

    scaling = ScalingConfig(num_workers=2)
    result = launch(job_of_mine.train, config={"lr": [0.1, None]}, scaling=scaling)
    assert result.return_value == {"rank": "0", "lr": [0.1, None]}
    assert result.error is None


def test_function_of_the_main_program_is_found(place):
    """Where most people define it."""
    (place / "main_job.py").write_text(
        "import milepost as mp\ndef train():\n    return 3\n"
        "if __name__ == '__main__':\n    print(mp.launch(train).return_value)\n"
    )
    process = started([sys.executable, "main_job.py"])
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("3\n", 0), err


def test_launch_in_the_body_of_a_module_is_refused(place):
    """Workers import it again: each would launch workers, and so on."""
    (place / "main_job.py").write_text(
        "import milepost as mp\ndef train():\n    return 3\nmp.launch(train)\n"
    )
    process = started([sys.executable, "main_job.py"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "A worker cannot launch workers" in err


def test_result_that_json_cannot_hold_is_not_tried_again(place, monkeypatch):
    """The training is done; doing it again would bring the same."""
    (place / "odd_result.py").write_text("def train():\n    return {'loss': (1, 2)}\n")
    monkeypatch.syspath_prepend(place)
    import odd_result  # type: ignore[import-not-found]

    failures = FailureConfig(max_failures=5, backoff_s=0.0)
    with pytest.raises(LaunchFailedError, match=r"the return value\['loss'\]") as caught:
        launch(odd_result.train, run=RunConfig(failure_config=failures))
    assert len(caught.value.facts["result"].attempts) == 1


def test_cause_is_told_and_not_what_followed_from_it(place, capfd):
    """Peers of a worker that failed fail too, often in a louder way."""
    result = fail(
        """
        if rank == 2:
            note("up")
            raise ValueError("sample 7 is broken")
        wait_for("up")
        def lost(number, frame):
            raise ConnectionError("lost a peer")
        signal.signal(signal.SIGTERM, lost)
        time.sleep(600)
        """,
        num=3,
    )
    assert (result.error.rank, result.error.text) == (2, "ValueError: sample 7 is broken")
    assert "worker.py" not in result.error.traceback
    assert 'job.py", line' in result.error.traceback
    assert {one.rank for one in result.attempts[0].failures} <= {0, 1, 2}
    text = capfd.readouterr().err
    assert "cause:      rank 2: ValueError: sample 7 is broken" in text
    log = (result.folder / "attempt-1/rank-2.log").read_text()
    assert log == result.error.traceback


def test_killed_worker_is_the_cause_even_if_a_peer_complains_first(place):
    """The kernel needs a moment to tell of a death; a lost connection is seen at once."""
    result = fail(
        """
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("dying")
        raise ConnectionError("lost a peer")
        """,
        num=2,
    )
    assert (result.error.rank, result.error.code) == (1, -signal.SIGKILL)
    assert "SIGKILL" in result.error.message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        ("os._exit(4)", "the process ended with exit code 4"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "the process was killed by SIGTERM"),
    ],
)
def test_every_end_but_zero_is_a_failure(place, body, text):
    """With words that say which."""
    assert fail(body).error.text == text


def test_others_end_with_all_that_they_started(place):
    """A loader worker that stays behind holds memory, ports and accelerators."""
    fail(
        """
        if rank == 1:
            wait_for("child")
            raise ValueError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        note("self", os.getpid())
        note("child", child.pid)
        time.sleep(600)
        """,
        num=2,
        grace_s=0.2,
    )
    check_gone(*pids("self", "child"))


def test_what_a_dead_worker_had_started_ends_too(place):
    """Its group outlives it."""
    fail(
        """
        note("child", subprocess.Popen(["sleep", "600"]).pid)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    check_gone(*pids("child"))


def test_worker_that_hangs_on_its_way_out_has_failed(place):
    """A thread or a connection may keep a process that has raised; nobody waits for it."""
    result = fail(
        """
        threading.Thread(target=lambda: time.sleep(600)).start()
        raise ValueError("but the thread goes on")
        """,
        grace_s=0.1,
    )
    assert result.error.text == "ValueError: but the thread goes on"


def test_the_others_have_their_grace_after_a_failure(place):
    """They may have a save to finish."""
    fail(
        """
        def end(number, frame):
            time.sleep(0.3)
            note("saved")
            sys.exit(0)
        if rank == 1:
            wait_for("up")
            raise ValueError
        signal.signal(signal.SIGTERM, end)
        note("up")
        time.sleep(600)
        """,
        num=2,
    )
    assert (place / "saved").exists()


def test_training_goes_on_after_a_failure(place, capfd):
    """The whole point; and the summary says from where, and what was lost."""
    result = run(
        """
        if attempt == 1:
            liveness.beat(12)
            liveness.beat(13)
            liveness.note_commit("ba10", 10)
            raise OSError("the disk hiccuped")
        """,
        max_failures=1,
    )
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]
    assert (result.error, result.checkpoint) == (None, "ba10")
    text = capfd.readouterr().err
    assert "checkpoint: ba10 (batch 10); 3 batches lost" in text
    assert "done after" in text
    record = json.loads((result.folder / "result.json").read_text())
    assert [one["ending"] for one in record["attempts"]] == ["failed", "done"]


def test_twenty_restarts_leave_nothing_behind(place):
    """No process, thread or open file more than after the first."""
    before, num_threads = num_held(), threading.active_count()
    result = run(
        """
        note(f"pid-{attempt}", os.getpid())
        if attempt <= 20:
            liveness.note_commit(f"ba{attempt}", attempt)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        max_failures=1,
    )
    assert [one.ending for one in result.attempts] == [Ending.FAILED] * 20 + [Ending.DONE]
    assert threading.active_count() == num_threads
    # A thread that was joined has left Python, and leaves the kernel a moment later.
    wait_until(lambda: num_held() == before)
    check_gone(*pids(*(f"pid-{attempt}" for attempt in range(1, 22))))


def test_circles_are_left(place):
    """An error that comes back before each first checkpoint would be retried for ever."""
    result = fail("raise ValueError(f'always, attempt {attempt}')", max_failures=-1)
    assert len(result.attempts) == 3
    with pytest.raises(LaunchFailedError, match="for the same reason"):
        run("raise ValueError('always')", max_failures=-1)


def test_same_checkpoint_again_is_no_progress(place):
    """An error of the loop leaves one of the batch before it, each time it comes back."""
    with pytest.raises(LaunchFailedError, match="3 attempts in a row") as caught:
        run("liveness.note_commit('ba7', 7); raise ValueError('always')", max_failures=-1)
    assert len(caught.value.facts["result"].attempts) == 4


def test_preempted_worker_is_no_failure(place):
    """It has saved and left, as its machine was to be taken away; the budget is for failures."""
    result = run(
        """
        import milepost as mp
        if attempt <= 2 and rank == 1:
            liveness.note_commit(f"ba{attempt}", attempt)
            raise mp.Preempted(signal.SIGTERM, f"ba{attempt}")
        if attempt <= 2:
            time.sleep(600)
        """,
        num=2,
    )
    endings = [one.ending for one in result.attempts]
    assert endings == [Ending.PREEMPTED, Ending.PREEMPTED, Ending.DONE]
    assert result.attempts[0].signal_number == signal.SIGTERM


def test_hang_is_ended_and_its_stack_is_told(place, capfd):
    """A worker that waits for ever costs as much as one that computes."""
    result = run(
        """
        def stuck_here():
            time.sleep(600)
        liveness.beat()
        if attempt == 1 and rank == 1:
            stuck_here()
        for _ in range(20 if attempt == 1 else 1):
            time.sleep(0.1)
            liveness.beat()
        """,
        num=2,
        max_failures=1,
        hang_timeout_s=1.5,
    )
    assert [one.ending for one in result.attempts] == [Ending.HUNG, Ending.DONE]
    cause = result.attempts[0].cause
    assert cause.rank == 1
    assert "stuck_here" in cause.traceback
    assert "no beat for" in capfd.readouterr().err


def test_worker_that_was_stopped_hangs(place):
    """It can print no stack, and it is killed all the same."""
    result = fail(
        """
        liveness.beat()
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        hang_timeout_s=0.5,
    )
    assert result.attempts[0].ending is Ending.HUNG


def test_fewer_workers_start_if_fewer_are_available(place):
    """Within the bounds that were given; too few are a failure, with words that say so."""
    counts = iter([8, 3, 2])
    result = launch(
        script('liveness.note_commit("x"); sys.exit(attempt < 3)'),
        scaling=ScalingConfig(num_workers=(2, 4)),
        run=RunConfig(failure_config=FailureConfig(max_failures=5, backoff_s=0.0)),
        available=lambda: next(counts),
    )
    assert [one.num_workers for one in result.attempts] == [4, 3, 2]
    with pytest.raises(LaunchFailedError, match="1 workers are available and 2 are needed"):
        launch("job.py", scaling=ScalingConfig(num_workers=(2, 4)), available=lambda: 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_is_passed_on_and_decides_the_exit_code(place, number):
    """Every worker can save; and a scheduler sees the code that it knows."""
    process = start(
        """
        def end(number, frame):
            note(f"saved-{rank}", number)
            sys.exit(128 + number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, end)
        note(f"up-{rank}", os.getpid())
        time.sleep(600)
        """,
        "--workers=2",
        "--max-failures=5",
    )
    workers = pids("up-0", "up-1")
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert pids("saved-0", "saved-1") == [number, number]
    assert "attempt 1 (2 workers) was asked to end" in text
    check_gone(*workers)


def test_worker_that_does_not_end_is_killed_after_the_grace(place):
    """The launcher has to be gone when the machine is taken away."""
    process = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("up", os.getpid())
        time.sleep(600)
        """,
        "--grace-s=0.3",
    )
    workers = pids("up")
    process.terminate()
    assert ended(process) == 143
    check_gone(*workers)


def test_second_sigterm_changes_nothing(place):
    """Launchers like to send two; the save goes on."""
    process = start(
        """
        seen = []
        signal.signal(signal.SIGTERM, lambda *_: (seen.append(1), note(f"seen-{len(seen)}")))
        note("up")
        while len(seen) < 2:
            signal.pause()
        note("saved")
        sys.exit(143)
        """
    )
    wait_until(Path("up").exists)
    process.terminate()
    wait_until(Path("seen-1").exists)
    process.terminate()
    assert ended(process) == 143
    assert Path("saved").exists()


def test_second_interrupt_kills_at_once(place):
    """A person who presses Ctrl-C twice does not want to wait for the grace."""
    process = start(
        """
        signal.signal(signal.SIGINT, lambda *_: note("seen"))
        note("up", os.getpid())
        while True:
            signal.pause()
        """,
        "--grace-s=600",
    )
    workers = pids("up")
    process.send_signal(signal.SIGINT)
    wait_until(Path("seen").exists)
    process.send_signal(signal.SIGINT)
    assert ended(process) == 130
    check_gone(*workers)


def test_signal_during_the_pause_ends_the_launch(place):
    """Nobody starts workers on a machine that is about to go."""
    job = script('note("up"); raise ValueError')
    program = textwrap.dedent(
        f"""
        from milepost.launch import FailureConfig, RunConfig, launch
        config = FailureConfig(max_failures=1, backoff_s=600, max_backoff_s=600)
        launch({job!r}, run=RunConfig(failure_config=config))
        """
    )
    process = started([sys.executable, "-c", program])
    lines = iter(process.stderr.readline, "")
    assert any("next:" in line and "in 600 s" in line for line in lines)
    process.terminate()
    assert ended(process) == 143


def test_workers_do_not_outlive_a_launcher_that_was_killed(place):
    """Nor what they have started, nor one that was stopped and can notice nothing."""
    process = start(
        """
        note(f"child-{rank}", subprocess.Popen(["sleep", "600"]).pid)
        note(f"up-{rank}", os.getpid())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        """,
        "--workers=2",
    )
    numbers = pids("up-0", "up-1", "child-0", "child-1")
    process.kill()
    check_gone(*numbers)


def test_workers_die_with_their_launcher_even_if_the_keeper_is_gone(place):
    """Whatever kills one of our processes may kill the other too."""
    process = start('note("up", os.getpid()); time.sleep(600)')
    workers = pids("up")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (keeper,) = {int(child) for child in children} - set(workers)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    check_gone(*workers)


def test_keeper_that_was_killed_is_started_again(place):
    """The next attempt is guarded as the first one was."""
    process = start(
        """
        if attempt == 1:
            note("up", os.getppid())
            wait_for("go")
            liveness.note_commit("ba1")
            raise ValueError
        note("child", subprocess.Popen(["sleep", "600"]).pid)
        note("again", os.getpid())
        time.sleep(600)
        """,
        "--max-failures=1",
    )
    pids("up")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if "keeper" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    Path("go").touch()
    numbers = pids("again", "child")
    process.kill()
    check_gone(*numbers)


def test_group_that_trains_together_is_brought_back(place):
    """With torch.distributed: one rank is killed, and the next attempt meets no old peer."""
    result = run(
        """
        import torch, torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        state = here / "state.json"
        step, total = json.loads(state.read_text()) if state.exists() else (0, 0.0)
        while step < 6:
            value = torch.tensor(float(rank + 1))
            dist.all_reduce(value)
            step, total = step + 1, total + value.item()
            liveness.beat(step)
            if rank == 0:
                (here / "next.json").write_text(json.dumps([step, total]))
                (here / "next.json").rename(state)
                liveness.note_commit(f"ba{step}", step)
            dist.barrier()
            if attempt == 1 and rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        """,
        num=2,
        max_failures=1,
    )
    first, second = result.attempts
    assert (first.ending, second.ending) == (Ending.FAILED, Ending.DONE)
    assert (first.cause.rank, first.cause.code) == (1, -signal.SIGKILL)
    assert json.loads((place / "state.json").read_text()) == [6, 18.0]
