"""How often a sharded model is called, so that no rank waits for another in vain."""

from __future__ import annotations

import logging

import pytest

import milepost as mp
from milepost.train.evaluating import _even_rounds


def test_every_rank_calls_the_model_as_often_as_the_one_with_the_most_batches() -> None:
    """Those with fewer call it on their last batch again."""
    assert _even_rounds("eval", [3, 2, 3]) == 3
    assert _even_rounds("eval", [0, 0]) == 0


def test_a_rank_without_a_batch_is_named_before_anything_is_called() -> None:
    """It has nothing to call the model on, and the others would wait for it."""
    with pytest.raises(mp.UsageError, match="Rank 1, 2 has no batch") as caught:
        _even_rounds("eval", [1, 0, 0])
    assert caught.value.facts["ranks"] == [1, 2]


def test_lengths_that_are_not_known_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be evened out then."""
    with caplog.at_level(logging.WARNING, logger="milepost"):
        assert _even_rounds("eval", [3, None]) == 0
    assert "does not know its length" in caplog.text
