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

    def watch(self, timeout_s=10.0):
        return Beats(
            self.folder,
            timeout_s=timeout_s,
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
