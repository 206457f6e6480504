"""How often to save: the share of the time it takes, the work that is lost, and what is remembered.

A training is simulated with a clock of its own. What saves really cost is known to the simulation
alone; the pacing sees only what it would see: a clock, ends of batches, and saves on their way.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepost.progress.pacing import Pacing, make_pacing


@dataclass
class Disk:
    """What a place costs that is written to.

    Attributes:
        stall_s: How long a save holds training up.
        write_s: How long it is written afterwards.
        slowdown: By which part batches take longer meanwhile.
        first_stall_s: The same for the first save of a process.
    """

    stall_s: float
    write_s: float
    slowdown: float = 0.0
    first_stall_s: float | None = None


@dataclass
class Training:
    """A training on a clock that stands still unless it is moved.

    Attributes:
        disk: Where it saves.
        batch_s: How long a batch takes.
        jitter: By which part that changes, at random.
        options: Of the pacing.
    """

    disk: Disk
    batch_s: float
    jitter: float = 0.0
    options: dict = field(default_factory=dict)
    now_s: float = 0.0
    ends_s: float = 0.0
    added_s: float = 0.0
    saves: list = field(default_factory=list)
    durable: list = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(7))

    name: str = "a"
    stats: dict = field(default_factory=dict)
    is_copying: bool = False

    def __post_init__(self) -> None:
        self.pacing = Pacing(clock=lambda: self.now_s, **self.options)
        self.pacing.start()

    def done(self) -> bool:
        """What the pacing asks a save on its way."""
        return self.now_s >= self.ends_s

    def run_batch(self) -> None:
        """Train on a batch, and save if it is due."""
        took_s = self.batch_s * (1 + self.jitter * self.random.uniform(-1, 1))
        if self.is_copying:
            self.is_copying = False
            took_s += self.stats["barrier_s"]
            self.added_s += self.stats["barrier_s"]
        writing_s = min(max(0.0, self.ends_s - self.now_s), took_s)
        self.added_s += self.disk.slowdown * writing_s
        self.now_s += took_s + self.disk.slowdown * writing_s
        self.pacing.end_batch()
        if self.pacing.is_due():
            self.save()

    def save(self) -> None:
        """Save, as the loop would."""
        stall_s = self.disk.stall_s
        if not self.saves and self.disk.first_stall_s is not None:
            stall_s = self.disk.first_stall_s
        began_s = self.now_s
        self.saves.append(began_s)
        self.now_s += stall_s
        self.added_s += stall_s
        self.ends_s = self.now_s + self.disk.write_s
        self.durable.append((self.ends_s, began_s))
        self.pacing.note_save(self, stall_s=stall_s)
        self.is_copying = "barrier_s" in self.stats

    def overhead(self, *, num_saves: int) -> float:
        """Return the share of the time that saves take, once the training is under way."""
        while len(self.saves) < 4:
            self.run_batch()
        began_s, added_s = self.now_s, self.added_s
        for _ in range(10_000_000):
            if len(self.saves) >= 4 + num_saves:
                break
            self.run_batch()
        return (self.added_s - added_s) / (self.now_s - began_s)


FAST = Disk(stall_s=0.08, write_s=0.5, slowdown=0.1, first_stall_s=2.0)
SLOW = Disk(stall_s=0.08, write_s=5.0, slowdown=0.1, first_stall_s=2.0)
WAITED = Disk(stall_s=0.5, write_s=0.0)
WAITED_SLOW = Disk(stall_s=5.0, write_s=0.0)


@pytest.mark.parametrize("disk", [FAST, SLOW, WAITED, WAITED_SLOW], ids=str)
@pytest.mark.parametrize(("batch_s", "jitter"), [(0.1, 0.1), (7.0, 0.002)])
@pytest.mark.parametrize("budget", [None, 0.003, 0.05])
def test_saves_take_the_share_of_the_time_that_they_may(disk, batch_s, jitter, budget):
    """On disks of which one is ten times as fast, whatever a batch takes."""
    training = Training(disk, batch_s, jitter=jitter, options={"overhead_budget": budget})
    found, wanted = training.overhead(num_saves=20), budget or 0.01
    cost_s = disk.stall_s + disk.slowdown * disk.write_s
    most = cost_s / max(batch_s + cost_s, disk.write_s + disk.stall_s)  # more is not possible
    assert 0.8 * min(wanted, most) <= found <= 1.2 * wanted


@pytest.mark.parametrize("write_s", [0.2, 5.0], ids=["short", "long"])
@pytest.mark.parametrize("slowdown", [0.0, 0.1])
def test_a_batch_that_waits_for_the_copy_is_counted_once(write_s, slowdown):
    """Where it is copied late, the call is short, and the first batch afterwards is long."""
    training = Training(Disk(0.001, write_s, slowdown), 0.3, jitter=0.01)
    training.stats = {"barrier_s": 0.15}
    assert 0.8 <= training.overhead(num_saves=20) / 0.01 <= 1.2


def test_a_disk_that_cannot_keep_up_is_written_to_without_a_pause():
    """The budget would allow more; two saves at once would hold training up."""
    training = Training(Disk(stall_s=0.001, write_s=30.0), 0.5)
    assert training.overhead(num_saves=10) < 0.0001
    gaps = [b - a for a, b in zip(training.saves[2:], training.saves[3:], strict=False)]
    assert all(30.0 <= gap <= 31.0 for gap in gaps)
    assert "until the last one is written" in training.pacing.why


def test_saves_that_cost_nothing_come_after_every_batch():
    """There is nothing to lose by it."""
    training = Training(Disk(stall_s=1e-5, write_s=0.0), 0.5)
    while len(training.saves) < 10:
        training.run_batch()
    assert training.saves[9] - training.saves[5] == pytest.approx(2.0, abs=0.01)
    assert training.pacing.why.startswith("after every batch")


def test_the_first_save_comes_early_and_the_second_does_not_wait_for_its_lesson():
    """The first one takes memory: by what it has cost, the second would come 25 times too late."""
    training = Training(Disk(0.08, 0.5, first_stall_s=2.0), 0.1)
    while len(training.saves) < 3:
        training.run_batch()
    first_s, second_s, third_s = training.saves
    assert first_s == pytest.approx(10 * 0.1)
    assert second_s - first_s == pytest.approx(2.0 / 0.01 / 10, abs=0.2)
    assert third_s - second_s == pytest.approx(0.08 / 0.01, abs=0.2)


@given(
    stall_s=st.floats(1e-4, 30),
    write_s=st.floats(0, 30),
    batch_s=st.floats(0.01, 10),
    budget=st.one_of(st.none(), st.floats(0.001, 0.2)),
    mean_s=st.one_of(st.none(), st.floats(600, 1e6)),
)
def test_the_interval_is_the_longest_of_the_three(stall_s, write_s, batch_s, budget, mean_s):
    """Up to an hour, from a batch on; on the mean it is met exactly, not rounded up to batches."""
    options = {"overhead_budget": budget, "mean_time_between_failures_s": mean_s}
    training = Training(Disk(stall_s, write_s), batch_s, options=options)
    training.pacing.learn({"stall_s": stall_s, "write_s": write_s, "batch_s": batch_s})
    training.save()
    wanted_s = 0.0 if mean_s is None else math.sqrt(2 * stall_s * mean_s)
    if budget or mean_s is None:
        wanted_s = max(wanted_s, stall_s / (budget or 0.01))
    wanted_s = min(wanted_s, 3600.0)
    if wanted_s / batch_s > 2000:
        training.now_s += wanted_s - 1000 * batch_s  # as if trained for so long
    for _ in range(100_000):
        if len(training.saves) >= 6 or wanted_s / batch_s > 2000:
            break
        training.run_batch()
    gaps = [b - a for a, b in zip(training.saves, training.saves[1:], strict=False)]
    longest_s = max(wanted_s, write_s + stall_s, batch_s + stall_s)
    # After a thousand batches with a save, a few are without one, to compare with.
    pause = 8 if write_s / batch_s > 100 else 0
    for gap in gaps:
        assert longest_s - batch_s * 1.001 <= gap <= longest_s + batch_s * (pause + 1.001)
    # That a save has been written is seen at the end of a batch.
    if wanted_s >= write_s + stall_s + batch_s * 9 and len(gaps) >= 4:
        assert abs(sum(gaps) - len(gaps) * wanted_s) <= 1.001 * batch_s + stall_s


def waste(disk, batch_s, mean_s, failures):
    """Return the seconds that saves and failures cost a training.

    Args:
        failures: How long each start lasts. The next goes on from what was durable then.
    """
    done_s, restart = 0.0, {}
    for lasts_s in failures:
        training = Training(disk, batch_s, options={"mean_time_between_failures_s": mean_s})
        training.pacing.learn(restart)
        progress = [(0.0, done_s, restart)]  # when it was durable, how far, what was known
        while training.now_s < lasts_s:
            training.run_batch()
            done_s += batch_s
            if len(training.saves) == len(progress):
                progress.append((training.ends_s, done_s, training.pacing.record))
        _, done_s, restart = [one for one in progress if one[0] <= lasts_s][-1]
    return sum(failures) - done_s


def waste_of_every(num_batches, disk, batch_s, failures):
    """Return the same for a save after every so many batches."""
    done_s = 0.0
    for lasts_s in failures:
        first_s = num_batches * batch_s + (disk.first_stall_s or disk.stall_s) + disk.write_s
        if lasts_s >= first_s:
            more = (lasts_s - first_s) // (num_batches * batch_s + disk.stall_s)
            done_s += (1 + more) * num_batches * batch_s
    return sum(failures) - done_s


@pytest.mark.parametrize(
    ("disk", "batch_s", "mean_s"),
    [
        (Disk(2.0, 6.0, first_stall_s=5.0), 4.0, 3600.0),
        (Disk(0.2, 0.5, first_stall_s=3.0), 1.0, 900.0),
        (Disk(20.0, 0.0), 20.0, 14_400.0),
    ],
    ids=["hour", "quarter of an hour", "waited for"],
)
def test_kills_and_saves_together_cost_hardly_more_than_the_best_interval(disk, batch_s, mean_s):
    """The best of all fixed intervals is found by trying, with the kills known beforehand."""
    draw = random.Random(5)
    failures = [draw.expovariate(1 / mean_s) for _ in range(200)]
    ours_s = waste(disk, batch_s, mean_s, failures)
    least = max(1, math.ceil(disk.write_s / batch_s))
    best_s = min(waste_of_every(n, disk, batch_s, failures) for n in range(least, 500))
    assert ours_s <= 1.1 * best_s


def test_a_run_that_goes_on_begins_with_what_it_knew():
    """The early saves of a start would be paid for again after every crash."""
    first = Training(FAST, 0.1)
    first.overhead(num_saves=12)
    second = Training(FAST, 0.1)
    second.pacing.learn(first.pacing.record)
    assert second.pacing.interval_s == pytest.approx(first.pacing.interval_s)
    while len(second.saves) < 3:
        second.run_batch()
    gaps = [second.saves[0], second.saves[1] - second.saves[0]]
    assert gaps == pytest.approx([first.pacing.interval_s] * 2, rel=0.05)


def test_a_slower_disk_is_noticed_within_a_few_saves():
    """What was learned elsewhere holds only until there is something of one's own."""
    known = Training(WAITED, 0.1)
    known.overhead(num_saves=5)
    training = Training(WAITED_SLOW, 0.1)
    training.pacing.learn(known.pacing.record)
    assert training.pacing.interval_s == pytest.approx(50, rel=0.05)
    while len(training.saves) < 2:
        training.run_batch()
    assert training.pacing.interval_s == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("stall_s", [None, "1", -1.0, math.nan, math.inf, True, [1]], ids=str)
def test_a_record_without_a_sensible_number_teaches_nothing(stall_s):
    """It comes from a file."""
    training = Training(FAST, 0.1)
    training.pacing.learn({"stall_s": stall_s, "write_s": 1.0})
    assert training.pacing.interval_s is None
    assert training.pacing.record["stall_s"] is None


def test_a_hiccup_does_not_leave_the_training_unsafe_for_long():
    """One save that takes a hundred times as long says little about the next."""
    training = Training(WAITED, 0.1)
    training.overhead(num_saves=8)
    before_s = training.pacing.interval_s
    training.disk = Disk(stall_s=50.0, write_s=0.0)
    training.save()
    training.disk = WAITED
    assert training.pacing.interval_s < 2 * before_s


def longest_gap_s(training, *, until_s, before_batch=lambda: None):
    """Return the longest time without a save from the start of the training on."""
    while training.now_s < until_s:
        before_batch()
        training.run_batch()
    return max(b - a for a, b in pairwise([0.0, *training.saves, training.now_s]))


@pytest.mark.parametrize("number", range(5))
def test_one_long_stall_does_not_stop_saves_for_hours(number):
    """Of the second save it would be a half of all that is known."""
    usual, long = Disk(stall_s=0.3, write_s=5.0), Disk(stall_s=600.0, write_s=5.0)
    training = Training(usual, 1.0)

    def choose():
        training.disk = long if len(training.saves) == number else usual

    gap_s = longest_gap_s(training, until_s=9000.0, before_batch=choose)
    # The stall itself, and what the interval is then; an hour if nothing else is known.
    assert gap_s <= 600.0 + (150.0 if number else 3001.0)


@pytest.mark.parametrize("factor", [0.5, 1.1, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("num", [150, 280, 3037])
def test_batches_that_change_their_pace_are_no_cost_of_saves(factor, num):
    """Longer sequences from some day on; the place is so slow that saves follow each other."""
    training = Training(Disk(stall_s=0.3, write_s=290.0), 1.0, jitter=0.01)
    for _ in range(num):
        training.run_batch()
    training.batch_s = factor
    assert longest_gap_s(training, until_s=training.now_s + 9000.0) <= 290.3 + 10.0 * max(factor, 1)


@pytest.mark.parametrize("has_rested", [False, True])
def test_what_saves_cost_is_seen_where_they_follow_each_other(has_rested):
    """No batch is without a save then: once in a while a few must be, to compare with."""
    training = Training(Disk(stall_s=0.3, write_s=60.0), 1.0, jitter=0.01)
    if has_rested:  # it knows well of saves that were no cost
        training.disk.stall_s = 2.0
        longest_gap_s(training, until_s=3000.0)
        training.disk.stall_s = 0.3
    longest_gap_s(training, until_s=training.now_s + 2500.0)
    assert training.pacing.interval_s == pytest.approx(60.0, abs=2.0)
    training.disk.slowdown = 0.15
    longest_gap_s(training, until_s=training.now_s + 4500.0)
    assert training.pacing.interval_s == pytest.approx((0.3 + 0.15 * 60) / 0.01, rel=0.15)


def test_no_interval_is_longer_than_an_hour_and_a_long_one_is_told(caplog):
    """Whoever has not asked for it will not expect it, and may lose what lies between."""
    training = Training(Disk(stall_s=100.0, write_s=0.0), 10.0)
    with caplog.at_level(logging.WARNING, logger="milepost"):
        assert longest_gap_s(training, until_s=20_000.0) <= 3610.0
    assert len(training.saves) >= 6
    (message,) = caplog.messages
    assert "Nothing was saved for 30 min, and nothing will be for another 30 min" in message
    slow = Training(WAITED, 1000.0)
    assert longest_gap_s(slow, until_s=9000.0) <= 4000.0  # before anything is known, too


def test_evaluations_between_batches_do_not_look_like_slow_batches():
    """They happen to fall together with saves, and have nothing to do with them."""
    training = Training(Disk(stall_s=0.1, write_s=2.0), 0.1)
    for number in range(20_000):
        if number % 100 == 99:
            training.now_s += 30.0
        training.run_batch()
    assert training.pacing.record["slowdown_s"] == 0.0
    assert training.pacing.record["stall_s"] == pytest.approx(0.1)


def test_other_saves_begin_the_interval_anew_and_teach_nothing():
    """A save that was waited for costs more, by the wish of whoever waits."""
    training = Training(WAITED, 0.1)
    training.overhead(num_saves=4)
    before_s = training.pacing.interval_s
    training.now_s += 20.0
    training.pacing.note_save(training, stall_s=None)
    assert training.pacing.interval_s == before_s
    assert training.pacing.due_s == pytest.approx(training.now_s + before_s)


def test_the_rank_that_is_held_up_longest_counts():
    """Ranks train in step, so that all of them wait for it."""
    training = Training(WAITED, 0.1)
    training.stats = {"slowest_blocking_s": 2.5}
    training.overhead(num_saves=4)
    training.run_batch()
    assert training.pacing.record["stall_s"] == pytest.approx(2.5)


def test_a_save_that_does_not_end_is_told_once(caplog):
    """Training goes on, and nothing of it is safe: nobody would notice before the next failure."""
    training = Training(WAITED, 0.1)
    training.overhead(num_saves=4)
    training.run_batch()
    training.disk = Disk(0.5, math.inf)
    training.save()
    num_saves = len(training.saves)
    with caplog.at_level(logging.WARNING, logger="milepost"):
        while training.now_s < training.saves[-1] + 499:
            training.run_batch()
        assert not caplog.messages
        while training.now_s < training.saves[-1] + 5000:
            training.run_batch()
    assert len(training.saves) == num_saves
    assert len(caplog.messages) == 1
    assert "save of a is on its way for 8.3" in caplog.messages[0]


def test_ranks_save_when_the_leader_says_so():
    """Each has a clock of its own."""
    training = Training(FAST, 0.1)
    training.pacing.hear(is_due=True)
    assert training.pacing.is_due()
    training.now_s += 1e6
    training.pacing.hear(is_due=False)
    assert not training.pacing.is_due()


def test_a_new_interval_is_told_once_and_again_when_it_has_changed_much():
    """The log must explain why saves come as they do, and not repeat it."""
    training = Training(WAITED, 0.1)
    told = []
    for _ in range(40_000):
        before = len(training.saves)
        training.run_batch()
        if len(training.saves) > before:
            told.append(training.pacing.news())
    assert [text for text in told if text] == [
        "every 50 s: a save costs 500 ms, and saves may take 1 % of the time"
    ]
    training.disk = WAITED_SLOW
    while not (text := training.pacing.news()):
        training.run_batch()
    assert text.startswith("every 1")
    hourly = Training(WAITED, 0.1, options={"mean_time_between_failures_s": 3600.0})
    hourly.overhead(num_saves=2)
    expected = "every 1 min: a save costs 500 ms, and a failure is expected every 1 h"
    assert hourly.pacing.why == expected


WRONG = [
    {"overhead_budget": 0},
    {"overhead_budget": 1.0},
    {"overhead_budget": -0.1},
    {"overhead_budget": float("nan")},
    {"overhead_budget": "1%"},
    {"overhead_budget": True},
    {"mean_time_between_failures": "3ep"},
    {"mean_time_between_failures": 3600},
    {"mean_time_between_failures": "0sec"},
    {"mean_time_between_failures": "often"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_what_makes_no_sense_is_refused(options):
    """Silently saving at other times than was meant is worse than an error."""
    given_options = {"overhead_budget": None, "mean_time_between_failures": None, **options}
    with pytest.raises(UsageError):
        make_pacing(is_wanted=True, option="every", clock=float, **given_options)


def test_options_of_auto_without_it_are_refused():
    """They would have no effect."""
    none = {"overhead_budget": None, "mean_time_between_failures": None}
    assert make_pacing(is_wanted=False, option="every", clock=float, **none) is None
    for given_options in ({**none, "overhead_budget": 0.1}, {"mean_time_between_failures": "6h"}):
        with pytest.raises(UsageError, match='every="auto"'):
            make_pacing(is_wanted=False, option="every", clock=float, **{**none, **given_options})
