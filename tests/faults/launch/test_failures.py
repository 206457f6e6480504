"""Workers that fail in every way: the cause is told, the rest ends, and it goes on."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

from milepost.errors import LaunchFailedError
from milepost.launch import Ending


def num_held() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len([*Path("/proc/self/fd").iterdir()]), len([*Path("/proc/self/task").iterdir()])


def test_cause_is_told_and_not_what_followed_from_it(jobs, capfd):
    """Peers of a worker that failed fail too, often in a louder way."""
    result = jobs.fail(
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


def test_killed_worker_is_the_cause_even_if_a_peer_complains_first(jobs):
    """The kernel needs a moment to tell of a death; a lost connection is seen at once."""
    result = jobs.fail(
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
def test_every_end_but_zero_is_a_failure(jobs, body, text):
    """With words that say which."""
    assert jobs.fail(body).error.text == text


def test_others_end_with_all_that_they_started(jobs):
    """A loader worker that stays behind holds memory, ports and accelerators."""
    jobs.fail(
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
    jobs.check_gone(*jobs.pids("self", "child"))


def test_what_a_dead_worker_had_started_ends_too(jobs):
    """Its group outlives it."""
    jobs.fail(
        """
        note("child", subprocess.Popen(["sleep", "600"]).pid)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    jobs.check_gone(*jobs.pids("child"))


def test_worker_that_hangs_on_its_way_out_has_failed(jobs):
    """A thread or a connection may keep a process that has raised; nobody waits for it."""
    result = jobs.fail(
        """
        threading.Thread(target=lambda: time.sleep(600)).start()
        raise ValueError("but the thread goes on")
        """,
        grace_s=0.1,
    )
    assert result.error.text == "ValueError: but the thread goes on"


def test_the_others_have_their_grace_after_a_failure(jobs):
    """They may have a save to finish."""
    jobs.fail(
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
    assert (jobs.folder / "saved").exists()


def test_training_goes_on_after_a_failure(jobs, capfd):
    """The whole point; and the summary says from where, and what was lost."""
    result = jobs.run(
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
    assert (result.error, result.last_commit) == (None, "ba10")
    text = capfd.readouterr().err
    assert "checkpoint: ba10 (batch 10); 3 batches lost" in text
    assert "done after" in text
    record = json.loads((result.folder / "result.json").read_text())
    assert [one["ending"] for one in record["attempts"]] == ["failed", "done"]


def test_twenty_restarts_leave_nothing_behind(jobs):
    """No process, thread or open file more than after the first."""
    before, num_threads = num_held(), threading.active_count()
    result = jobs.run(
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
    jobs.wait_until(lambda: num_held() == before)
    jobs.check_gone(*jobs.pids(*(f"pid-{attempt}" for attempt in range(1, 22))))


def test_circles_are_left(jobs):
    """An error that comes back before each first checkpoint would be retried for ever."""
    result = jobs.fail("raise ValueError(f'always, attempt {attempt}')", max_failures=-1)
    assert len(result.attempts) == 3
    with pytest.raises(LaunchFailedError, match="for the same reason"):
        jobs.run("raise ValueError('always')", max_failures=-1)


def test_same_checkpoint_again_is_no_progress(jobs):
    """An error of the loop leaves one of the batch before it, each time it comes back."""
    with pytest.raises(LaunchFailedError, match="3 attempts in a row") as caught:
        jobs.run("liveness.note_commit('ba7', 7); raise ValueError('always')", max_failures=-1)
    assert len(caught.value.facts["result"].attempts) == 4


def test_preempted_worker_is_no_failure(jobs):
    """It has saved and left, as its machine was to be taken away; the budget is for failures."""
    result = jobs.run(
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


def test_group_that_trains_together_is_brought_back(jobs):
    """With torch.distributed: one rank is killed, and the next attempt meets no old peer."""
    result = jobs.run(
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
    assert json.loads((jobs.folder / "state.json").read_text()) == [6, 18.0]
