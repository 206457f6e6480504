"""Launchers that are asked to end or killed: every worker can save, and none is left."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_is_passed_on_and_decides_the_exit_code(jobs, number):
    """Every worker can save; and a scheduler sees the code that it knows."""
    process = jobs.start(
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
    workers = jobs.pids("up-0", "up-1")
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert jobs.pids("saved-0", "saved-1") == [number, number]
    assert "attempt 1 (2 workers) was asked to end" in text
    jobs.check_gone(*workers)


def test_worker_that_does_not_end_is_killed_after_the_grace(jobs):
    """The launcher has to be gone when the machine is taken away."""
    process = jobs.start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("up", os.getpid())
        time.sleep(600)
        """,
        "--grace-s=0.3",
    )
    workers = jobs.pids("up")
    process.terminate()
    assert jobs.ended(process) == 143
    jobs.check_gone(*workers)


def test_second_sigterm_changes_nothing(jobs):
    """Launchers like to send two; the save goes on."""
    process = jobs.start(
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
    jobs.wait_until(Path("up").exists)
    process.terminate()
    jobs.wait_until(Path("seen-1").exists)
    process.terminate()
    assert jobs.ended(process) == 143
    assert Path("saved").exists()


def test_second_interrupt_kills_at_once(jobs):
    """A person who presses Ctrl-C twice does not want to wait for the grace."""
    process = jobs.start(
        """
        signal.signal(signal.SIGINT, lambda *_: note("seen"))
        note("up", os.getpid())
        while True:
            signal.pause()
        """,
        "--grace-s=600",
    )
    workers = jobs.pids("up")
    process.send_signal(signal.SIGINT)
    jobs.wait_until(Path("seen").exists)
    process.send_signal(signal.SIGINT)
    assert jobs.ended(process) == 130
    jobs.check_gone(*workers)


def test_signal_during_the_pause_ends_the_launch(jobs):
    """Nobody starts workers on a machine that is about to go."""
    job = jobs.script('note("up"); raise ValueError')
    program = textwrap.dedent(
        f"""
        from milepost.launch import FailureConfig, RunConfig, launch
        config = FailureConfig(max_failures=1, backoff_s=600, max_backoff_s=600)
        launch({job!r}, run=RunConfig(failure_config=config))
        """
    )
    process = jobs.started([sys.executable, "-c", program])
    lines = iter(process.stderr.readline, "")
    assert any("next:" in line and "in 600 s" in line for line in lines)
    process.terminate()
    assert jobs.ended(process) == 143


def test_workers_do_not_outlive_a_launcher_that_was_killed(jobs):
    """Nor what they have started, nor one that was stopped and can notice nothing."""
    process = jobs.start(
        """
        note(f"child-{rank}", subprocess.Popen(["sleep", "600"]).pid)
        note(f"up-{rank}", os.getpid())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        """,
        "--workers=2",
    )
    numbers = jobs.pids("up-0", "up-1", "child-0", "child-1")
    process.kill()
    jobs.check_gone(*numbers)


def test_workers_die_with_their_launcher_even_if_the_keeper_is_gone(jobs):
    """Whatever kills one of our processes may kill the other too."""
    process = jobs.start('note("up", os.getpid()); time.sleep(600)')
    workers = jobs.pids("up")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (keeper,) = {int(child) for child in children} - set(workers)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    jobs.check_gone(*workers)


def test_keeper_that_was_killed_is_started_again(jobs):
    """The next attempt is guarded as the first one was."""
    process = jobs.start(
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
    jobs.pids("up")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if "keeper" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    Path("go").touch()
    numbers = jobs.pids("again", "child")
    process.kill()
    jobs.check_gone(*numbers)


def test_what_has_left_its_group_ends_with_the_workers(jobs):
    """A compiler or a server in a session of its own would hold ports and accelerators."""
    jobs.run(
        """
        far = subprocess.Popen(["sleep", "600"], start_new_session=True)
        free = {**os.environ}
        del free["MILEPOST_WORKERS"]
        stays = subprocess.Popen(
            ["sleep", "600"], start_new_session=True, env=free, stdout=-3, stderr=-3
        )
        note("far", far.pid)
        note("stays", stays.pid)
        """
    )
    far, stays = jobs.pids("far", "stays")
    assert not jobs.is_alive(far)
    assert jobs.is_alive(stays)  # whoever takes the mark away wants it to stay
    os.kill(stays, signal.SIGKILL)


def test_what_has_left_its_group_ends_with_a_launcher_that_was_killed(jobs):
    """The keeper finds it too."""
    process = jobs.start(
        """
        note("far", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        note("up", os.getpid())
        time.sleep(600)
        """
    )
    numbers = jobs.pids("up", "far")
    process.kill()
    jobs.check_gone(*numbers)
