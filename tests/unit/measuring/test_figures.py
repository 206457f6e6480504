"""What figures of a place say about checkpoints of other sizes."""

from __future__ import annotations

import pytest

from milepost.measuring.figures import Limits, PlaceFigures, StateFigures, costs_of

GIB = 1024**3


def figures(small: StateFigures, large: StateFigures) -> PlaceFigures:
    return PlaceFigures("/place", 3, 10.0, Limits(1e9, 1e9, 1e9), small, large)


def test_a_step_is_a_fixed_part_and_one_that_grows():
    """Measured at 0 and at 1 GiB, told for 10."""
    found = costs_of(
        figures(StateFigures(0, 0.5, 0.1, 1.0, 0.2), StateFigures(GIB, 2.5, 0.3, 3.0, 1.2)),
        10 * GIB,
    )
    assert found.blocking_s == pytest.approx(2.1)
    assert found.first_blocking_s == pytest.approx(20.5)
    assert found.durable_s == pytest.approx(21.0)
    assert found.load_s == pytest.approx(10.2)
    assert found.interval_s == pytest.approx(210.0)  # 2.1 s of it are 1 percent


def test_the_sizes_that_were_measured_cost_what_was_measured():
    """The line goes through both points."""
    both = StateFigures(GIB // 4, 0.5, 0.1, 1.0, 0.2), StateFigures(GIB, 2.5, 0.3, 3.0, 1.2)
    for state in both:
        found = costs_of(figures(*both), state.size_bytes)
        assert found.blocking_s == pytest.approx(state.blocking_s)
        assert found.load_s == pytest.approx(state.load_s)


def test_no_save_begins_before_the_one_before_is_safe():
    """Where the place is slow, that is what limits how often."""
    found = costs_of(
        figures(StateFigures(0, 0.0, 0.001, 0.1, 0.1), StateFigures(GIB, 0.1, 0.1, 60.0, 1.0)),
        GIB,
    )
    assert found.interval_s == pytest.approx(60.0)


def test_noise_never_makes_a_larger_checkpoint_cheaper():
    """The small one happened to be slower than the large one."""
    both = StateFigures(1000, 2.0, 2.0, 2.0, 2.0), StateFigures(GIB, 1.0, 1.0, 1.0, 1.0)
    found = costs_of(figures(*both), 10 * GIB)
    assert found.durable_s == pytest.approx(10.0)
    assert costs_of(figures(*both), 0).durable_s == 0.0
