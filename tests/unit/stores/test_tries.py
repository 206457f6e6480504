"""Requests are tried again as long as that may help, and a refusal slows everybody down."""

from __future__ import annotations

import itertools
import math
import random
import threading

import pytest

from milepost.errors import (
    AccessError,
    CheckpointError,
    DamagedError,
    MissingError,
    StorageError,
)
from milepost.stores.pace import Pace, pace_of
from milepost.stores.tries import Tries


class Time:
    """A clock that goes on when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


class RefusedError(Exception):
    """What the client raises here, with the status of the answer or none."""

    def __init__(self, status: int | None) -> None:
        super().__init__("a text with a secret in it")
        self.status = status


def explain(error: Exception, tries: int) -> CheckpointError:
    assert isinstance(error, RefusedError)
    kind = {403: AccessError, 404: MissingError}.get(error.status or 0, StorageError)
    return kind(f"{error.status}", status=error.status, code=None, tries=tries)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pace(time: Time) -> Pace:
    return Pace(clock=time.clock, sleep=time.sleep)


def tries(pace: Pace, max_retries: int = 12, timeout_s: float = 120.0) -> Tries:
    return Tries(pace, max_retries=max_retries, timeout_s=timeout_s, errors=(RefusedError,))


def failing(times: int, status: int | None):
    """Return a request that is refused so often, and what counts it."""
    calls: list[int] = []

    def request() -> str:
        calls.append(len(calls) + 1)
        if len(calls) <= times:
            raise RefusedError(status)
        return "answer"

    return request, calls


@pytest.mark.parametrize("status", [None, 408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(pace, status):
    """And the caller sees nothing of it."""
    request, calls = failing(2, status)
    assert tries(pace).run(request, explain) == "answer"
    assert calls == [1, 2, 3]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 412])
def test_what_cannot_pass_is_raised_after_one_try(pace, time, status):
    """Hopeless errors that are retried for minutes hide what is wrong."""
    request, calls = failing(99, status)
    with pytest.raises(CheckpointError) as caught:
        tries(pace).run(request, explain)
    assert (calls, time.pauses_s, caught.value.facts["tries"]) == ([1], [], 1)


def test_h31_pauses_grow_and_vary(time):
    """Clients that were refused together must not come back together."""
    seen = []
    for _ in range(2):
        time = Time()
        request, calls = failing(99, 500)
        with pytest.raises(StorageError):
            tries(Pace(clock=time.clock, sleep=time.sleep), max_retries=8).run(request, explain)
        assert len(calls) == 9
        seen.append(time.pauses_s)
    for pauses_s in seen:
        assert all(later > earlier / 1.5 for earlier, later in itertools.pairwise(pauses_s))
        assert pauses_s[-1] > 20 * pauses_s[0]
    assert seen[0] != seen[1]


def test_no_try_begins_after_the_deadline(pace, time):
    """The caller waits no longer than it was told, plus one request."""
    request, calls = failing(99, 500)
    with pytest.raises(StorageError) as caught:
        tries(pace, max_retries=99, timeout_s=7).run(request, explain)
    assert time.now_s <= 107
    assert caught.value.facts["tries"] == len(calls) > 3


def test_what_takes_long_by_itself_may_begin_again_late(pace, time):
    """An upload of many pieces is refused after minutes; each of its requests has its own time."""
    calls: list[int] = []

    def upload() -> str:
        calls.append(1)
        time.now_s += 1000.0
        if len(calls) == 1:
            raise RefusedError(500)
        return "answer"

    assert tries(pace).run(upload, explain, timeout_s=math.inf) == "answer"
    calls.clear()
    with pytest.raises(StorageError):
        tries(pace).run(upload, explain)
    assert calls == [1]


def test_a_place_that_never_answered_is_given_up_sooner(pace, time):
    """It is more likely mistyped than unwell; one that has answered before is waited for."""
    request, calls = failing(99, None)
    one = tries(pace)
    with pytest.raises(StorageError):
        one.run(request, explain)
    assert len(calls) == 7
    assert time.now_s < 115
    answered, _ = failing(0, None)
    one.run(answered, explain)
    request, calls = failing(99, None)
    with pytest.raises(StorageError):
        one.run(request, explain)
    assert len(calls) > 7


def test_harmed_bytes_are_asked_for_again(pace):
    """A flip on the way is not a flip in the bucket; what comes wrong time after time is."""
    calls = []

    def once_harmed() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise DamagedError("harmed")
        return "answer"

    def always_harmed() -> str:
        calls.append(1)
        raise DamagedError("harmed")

    assert tries(pace).run(once_harmed, explain) == "answer"
    calls.clear()
    with pytest.raises(DamagedError):
        tries(pace).run(always_harmed, explain)
    assert len(calls) == 4


def test_the_text_of_the_client_stays_behind(pace):
    """It may hold signed addresses; tracebacks end up in logs."""
    request, _ = failing(99, 403)
    with pytest.raises(AccessError) as caught:
        tries(pace).run(request, explain)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_a_refusal_slows_the_requests_of_others(pace, time):
    """One that was told to slow down speaks for all."""
    others, _ = failing(0, None)
    tries(pace).run(others, explain)
    assert time.pauses_s == []
    request, _ = failing(1, 503)
    tries(pace).run(request, explain)
    time.pauses_s.clear()
    for _ in range(3):
        tries(pace).run(others, explain)
    assert len(time.pauses_s) == 3


def test_the_pace_is_bounded_and_comes_back(pace, time):
    """However long the trouble was, it is over some time."""
    for _ in range(50):
        pace.slow_down()
        time.now_s += 10
    assert 0 < pace.gap_s <= 0.1
    for _ in range(30):
        pace.speed_up()
    assert pace.gap_s == 0
    time.pauses_s.clear()
    pace.wait(time.now_s + 100)
    assert time.pauses_s == []


def test_refusals_of_one_moment_count_once(pace, time):
    """Requests that had all started before the first refusal say the same thing."""
    pace.slow_down()
    gap_s = pace.gap_s
    for _ in range(20):
        pace.slow_down()
    assert pace.gap_s == gap_s
    time.now_s += 1
    pace.slow_down()
    assert pace.gap_s == 2 * gap_s


def test_requests_start_one_after_the_other(pace, time):
    """Each waits for its turn, and not all for the same moment."""
    pace.slow_down()
    starts_s = []
    for _ in range(5):
        before_s = time.now_s
        pace.wait(before_s + 100)
        starts_s.append(time.now_s)
        time.now_s = before_s  # all of them come at once
    assert starts_s == sorted(starts_s)
    assert len(set(starts_s)) == 5


def test_nobody_waits_for_his_turn_beyond_his_deadline(pace, time):
    """A queue of others must not hold back an error for ever."""
    for _ in range(9):
        pace.slow_down()
        time.now_s += 5
    for _ in range(50):
        pace.wait(time.now_s)
    start_s = time.now_s
    pace.wait(start_s + 3)
    assert time.now_s <= start_s + 3


def test_stores_of_one_bucket_share_their_pace():
    """And those of another bucket have their own."""
    one, same, other = pace_of("s3 a"), pace_of("s3 a"), pace_of("s3 b")
    assert one is same
    assert one is not other


def test_the_generators_of_the_training_are_left_alone(pace):
    """A retry during training must not change what the training draws."""
    random.seed(7)
    before = random.getstate()
    request, _ = failing(5, 503)
    tries(pace).run(request, explain)
    assert random.getstate() == before


def test_many_threads_may_be_slowed_down_at_once():
    """With the real clock: all of them come through."""
    pace, answers = Pace(), []

    def work() -> None:
        request, _ = failing(1, 503)
        answers.append(tries(pace).run(request, explain))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == ["answer"] * 8
