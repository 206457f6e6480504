"""Again, or not: the rules on a clock of numbers."""

from __future__ import annotations

import pytest

from milepost.errors import UsageError
from milepost.launch.policy import (
    AttemptEnd,
    Ending,
    FailureConfig,
    FailurePolicy,
    Restart,
    Stop,
)


def end(signature="boom", *, new=False, ending=Ending.FAILED, final=False):
    return AttemptEnd(ending=ending, has_new_checkpoint=new, is_final=final, signature=signature)


def policy(**options):
    options = {"max_failures": -1, "max_attempts_without_progress": 1000, **options}
    return FailurePolicy(FailureConfig(**options))


def decisions(found, *ends, step_s=1.0):
    return [found.decide(one, now_s=step_s * number) for number, one in enumerate(ends)]


def test_nothing_is_retried_unless_asked_for():
    """The default: an error comes out."""
    decision = FailurePolicy(FailureConfig()).decide(end(new=True), now_s=0.0)
    assert isinstance(decision, Stop)
    assert "max_failures is 0" in decision.reason


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_budget_is_spent_by_failures(limit):
    """As many new attempts as were allowed, and not one more."""
    found = decisions(policy(max_failures=limit), *[end(str(n)) for n in range(limit + 1)])
    assert [type(one) for one in found] == [Restart] * limit + [Stop]


def test_progress_wipes_the_slate_clean():
    """A run that fails once a day for a month has not failed thirty times in a row."""
    found = decisions(policy(max_failures=1, backoff_s=1.0), *[end(new=True)] * 30)
    assert found == [found[0]] * 30
    assert found[0].delay_s == 1.0


def test_failures_are_forgotten_after_the_window():
    """Two failures within ten seconds are too many; one every ten are not."""
    options = {"max_failures": 1, "window_s": 10.0}
    slow = decisions(policy(**options), *[end()] * 5, step_s=10.0)
    assert {type(one) for one in slow} == {Restart}
    fast = decisions(policy(**options), *[end()] * 2, step_s=9.9)
    assert [type(one) for one in fast] == [Restart, Stop]
    assert "within 10 s" in fast[1].reason


def test_waits_double_up_to_a_bound():
    """The same each time, so that a log can be understood."""
    found = decisions(policy(backoff_s=0.5, max_backoff_s=3.0), *[end()] * 2000)
    assert [one.delay_s for one in found if isinstance(one, Restart)][:5] == [
        0.5,
        1.0,
        2.0,
        3.0,
        3.0,
    ]


def test_circles_end_whatever_the_budget():
    """Three attempts that gained nothing, by default."""
    config = FailureConfig(max_failures=-1)
    found = decisions(FailurePolicy(config), *[end()] * 3)
    assert [type(one) for one in found] == [Restart, Restart, Stop]
    assert "3 attempts in a row ended without a new checkpoint" in found[2].reason
    assert "for the same reason" in found[2].reason


def test_progress_in_between_is_no_circle():
    """Only attempts in a row count."""
    ends = [end(), end(), end(new=True)] * 5
    found = decisions(FailurePolicy(FailureConfig(max_failures=-1)), *ends)
    assert {type(one) for one in found} == {Restart}


def test_circles_for_several_reasons_are_told_apart():
    """The hint for a deterministic error would mislead."""
    ends = [end("a"), end("b"), end("a")]
    found = decisions(FailurePolicy(FailureConfig(max_failures=-1)), *ends)
    assert isinstance(found[2], Stop)
    assert "same reason" not in found[2].reason


def test_preemptions_cost_nothing():
    """Neither budget nor time: the machine was taken away, the training is fine."""
    preempted = end("", new=True, ending=Ending.PREEMPTED)
    found = decisions(policy(max_failures=0), *[preempted] * 50)
    assert found == [found[0]] * 50
    assert found[0].delay_s == 0.0


def test_preemptions_that_save_nothing_are_circles_too():
    """A script that ends with 143 by itself would be started for ever."""
    preempted = end("", ending=Ending.PREEMPTED)
    found = decisions(FailurePolicy(FailureConfig(max_failures=9)), *[preempted] * 3)
    assert [type(one) for one in found] == [Restart, Restart, Stop]


def test_hangs_are_failures():
    """They use up the budget alike."""
    found = decisions(policy(max_failures=1), end(ending=Ending.HUNG), end(ending=Ending.HUNG))
    assert [type(one) for one in found] == [Restart, Stop]


def test_final_errors_are_not_retried():
    """A function that cannot be imported will not be there a second later."""
    assert isinstance(policy().decide(end(final=True), now_s=0.0), Stop)


@pytest.mark.parametrize(
    "options",
    [
        {"max_failures": -2},
        {"window_s": 0.0},
        {"backoff_s": -1.0},
        {"max_backoff_s": float("nan")},
        {"max_attempts_without_progress": 0},
        {"grace_s": -1.0},
        {"hang_timeout_s": 0.0},
    ],
)
def test_senseless_limits_are_refused(options):
    """At once, and by name; not in the night, when the first worker fails."""
    with pytest.raises(UsageError, match=next(iter(options))):
        FailureConfig(**options)
