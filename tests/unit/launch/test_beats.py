"""Who has stopped beating, on clocks of numbers that may jump."""

from __future__ import annotations

import os

import pytest

from milepost.launch.beats import Beats


class World:
    """A monotonic clock, a wall clock that can be set, and the files of beats."""

    def __init__(self, folder):
        self.folder, self.now_s, self.wall_s = folder, 100.0, 1_000_000.0

    def go(self, seconds):
        self.now_s += seconds
        self.wall_s += seconds

    def beat(self, rank):
        path = self.folder / f"rank-{rank}.beat"
        path.touch()
        os.utime(path, (self.wall_s, self.wall_s))

    def watch(self, timeout_s=10.0, start_timeout_s=None):
        return Beats(
            self.folder,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            clock=lambda: self.now_s,
            wall=lambda: self.wall_s,
        )


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_rank_without_a_beat_for_the_timeout_hangs(world):
    """And the one that goes on does not."""
    beats = world.watch()
    world.beat(0)
    world.go(6)
    world.beat(1)
    world.go(3.5)
    assert beats.overdue([0, 1]) == {}
    assert beats.next_look_s([0, 1]) == pytest.approx(110.0)
    world.go(0.5)
    assert beats.overdue([0, 1]) == pytest.approx({0: 10.0})


def test_rank_that_never_beat_does_not_hang(world):
    """It may load data for an hour before its first batch."""
    beats = world.watch()
    world.go(1000)
    assert beats.overdue([0]) == {}
    assert beats.next_look_s([0]) == world.now_s + 10


def test_rank_that_never_beats_hangs_once_its_time_to_start_is_over(world):
    """The one that has begun has the other limit from then on."""
    beats = world.watch(start_timeout_s=25.0)
    world.go(20)
    world.beat(1)
    assert beats.overdue([0, 1]) == {}
    world.go(5)
    assert beats.overdue([0, 1]) == {0: 25.0}
    assert not beats.has_beaten(0)
    assert beats.overdue([1]) == {}
    world.go(5)
    assert beats.overdue([1]) == {1: 10.0}


def test_limit_for_the_start_alone_ends_with_the_first_beat(world):
    """Then nobody looks any more."""
    beats = world.watch(timeout_s=None, start_timeout_s=25.0)
    assert beats.next_look_s([0]) == world.now_s + 25
    world.go(24)
    world.beat(0)
    world.go(1)
    assert beats.overdue([0]) == {}
    assert beats.next_look_s([0]) is None


@pytest.mark.parametrize("first_beat_s", [0.5, 9.5, 10.5, 17.0])
def test_every_hang_is_seen_at_the_first_look_after_it_is_one(world, first_beat_s):
    """A launcher that sleeps until the next look notices each at its limit, not some time later."""
    beats = world.watch()
    beat_at_s, is_beaten = world.now_s + first_beat_s, False
    while not beats.overdue([0]):
        due_s = beats.next_look_s([0])
        if not is_beaten and beat_at_s <= due_s:
            world.go(beat_at_s - world.now_s)
            world.beat(0)
            is_beaten = True
        world.go(due_s - world.now_s)
    assert world.now_s - beat_at_s == pytest.approx(10.0)


def test_rank_that_has_ended_does_not_hang(world):
    """Only those that run are looked at."""
    beats = world.watch()
    world.beat(0)
    world.go(50)
    assert beats.overdue([]) == {}


def test_without_a_timeout_nothing_hangs(world):
    """The default; and the loop need not wake up."""
    beats = world.watch(timeout_s=None)
    world.beat(0)
    world.go(10_000)
    assert beats.overdue([0]) == {}
    assert beats.next_look_s([0]) is None


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_wall_clock_that_jumps_makes_no_hang(world, jump_s):
    """Time is set on machines that have just started; a training must not die of it."""
    beats = world.watch()
    world.beat(0)
    world.go(5)
    assert beats.overdue([0]) == {}
    world.beat(0)
    world.wall_s += jump_s
    for _ in range(30):
        world.go(4)
        assert beats.overdue([0]) == {}
        world.beat(0)


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_hang_is_found_even_if_the_wall_clock_jumps(world, jump_s):
    """At most one timeout later."""
    beats = world.watch()
    world.beat(0)
    world.wall_s += jump_s
    looks = 0
    while not beats.overdue([0]):
        world.go(beats.next_look_s([0]) - world.now_s)
        looks += 1
        assert looks <= 2
