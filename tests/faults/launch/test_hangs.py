"""Workers that hang are found, and their stacks are told."""

from __future__ import annotations

from milepost.launch import Ending


def test_hang_is_ended_and_its_stack_is_told(jobs, capfd):
    """A worker that waits for ever costs as much as one that computes."""
    result = jobs.run(
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


def test_worker_that_was_stopped_hangs(jobs):
    """It can print no stack, and it is killed all the same."""
    result = jobs.fail(
        """
        liveness.beat()
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        hang_timeout_s=0.5,
    )
    assert result.attempts[0].ending is Ending.HUNG


def test_hang_before_the_first_beat_is_found(jobs, capfd):
    """A rank that never meets the others would wait for half an hour, and all with it."""
    result = jobs.run(
        """
        def never_met():
            time.sleep(600)
        if attempt == 1 and rank == 1:
            never_met()
        for _ in range(60 if attempt == 1 else 1):
            liveness.beat()
            time.sleep(0.1)
        """,
        num=2,
        max_failures=1,
        start_timeout_s=2.0,
    )
    assert [one.ending for one in result.attempts] == [Ending.HUNG, Ending.DONE]
    (cause,) = result.attempts[0].failures
    assert cause.rank == 1
    assert "never_met" in cause.traceback
    assert "no first beat within" in capfd.readouterr().err
