"""The average of the weights, and stopping early."""

from __future__ import annotations

import math

import pytest
import torch

from milepost.errors import MismatchError, MissingError, UsageError
from milepost.train import EMA, EarlyStop, Event, State
from milepost.train.names import name_all


def _state(value: float = 0.0) -> State:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return State(model, max_duration="9ba", rank_zero_seed=0, train_dataloader=[])


def _step(state: State, average: EMA, value: float) -> None:
    torch.nn.init.constant_(state.model.weight, value)
    state.timer.on_batch_complete(1)
    average.run_event(Event.BATCH_END, state)


def test_average_is_the_recurrence() -> None:
    """0.9 of the old and 0.1 of the new, from the weights at the start."""
    state, average = _state(), EMA(0.9)
    average.run_event(Event.INIT, state)
    expected = 0.0
    for value in (1.0, 2.0, 3.0, 4.0):
        _step(state, average, value)
        expected = 0.9 * expected + 0.1 * value
        assert average.average["weight"].item() == pytest.approx(expected)
    assert expected == pytest.approx(0.9049)


def test_update_every_counts_batches_of_the_run() -> None:
    """A counter of its own would start again after a resume."""
    state, average = _state(), EMA(0.5, update_every="2ba")
    average.run_event(Event.INIT, state)
    _step(state, average, 8.0)
    assert average.average["weight"].item() == 0.0
    _step(state, average, 8.0)
    assert average.average["weight"].item() == 4.0


def test_the_average_is_in_the_model_only_during_an_evaluation() -> None:
    """And cutting one off twice brings the raw weights back once."""
    state, average = _state(), EMA(0.5)
    average.run_event(Event.INIT, state)
    _step(state, average, 8.0)
    average.run_event(Event.EVAL_START, state)
    assert (state.model.weight.item(), average.average["weight"].item()) == (4.0, 4.0)
    average.run_event(Event.EVAL_END, state)
    average.run_event(Event.EVAL_END, state)
    assert (state.model.weight.item(), average.average["weight"].item()) == (8.0, 4.0)


def test_an_average_of_another_model_is_refused() -> None:
    """It would silently be the average of something else."""
    average = EMA(0.5)
    average.run_event(Event.INIT, _state())
    with pytest.raises(MismatchError, match="weight"):
        average.load_state_dict({"is_swapped": False, "weights": {"weight": torch.zeros(2, 1)}})


def test_parameters_without_values_cannot_be_averaged(make) -> None:
    """A lazy module gets them from its first batch, after the average would have begun."""
    model = torch.nn.LazyLinear(1)
    with pytest.raises(UsageError, match=r"weight, bias.*one batch"):
        make(model=model, algorithms=EMA(0.5))


@pytest.mark.parametrize(("decay", "every"), [(1.0, "1ba"), (-0.1, "1ba"), (0.5, "3sp")])
def test_values_that_make_no_average_are_refused(decay, every) -> None:
    """A decay of one never learns."""
    with pytest.raises(UsageError):
        EMA(decay, update_every=every)


def _evaluate(stop: EarlyStop, state: State, values: list[float]) -> list[int]:
    stopped = []
    for number, value in enumerate(values):
        state.current_metrics = {"eval": {"Accuracy": torch.tensor(value)}}
        stop.eval_end(state)
        if state.stopped_for is not None:
            stopped.append(number)
    return stopped


def test_early_stop_waits_for_its_patience() -> None:
    """Two evaluations without an improvement are accepted, the third is not."""
    stop = EarlyStop("Accuracy", mode="max", patience_evals=2)
    assert _evaluate(stop, _state(), [0.5, 0.6, 0.6, 0.5, 0.4]) == [4]


def test_early_stop_never_takes_nan_for_better() -> None:
    """A NaN that came first must not be unbeatable, and one later must count as worse."""
    stop = EarlyStop("eval/Accuracy", mode="min", patience_evals=9)
    _evaluate(stop, _state(), [math.nan, 0.5, math.nan])
    assert (stop.best, stop.num_worse) == (0.5, 1)


def test_early_stop_goes_on_counting_after_a_resume() -> None:
    """Or a training interrupted often enough would never stop."""
    first, second = EarlyStop("Accuracy", mode="max"), EarlyStop("Accuracy", mode="max")
    _evaluate(first, _state(), [0.9, 0.5])
    second.load_state_dict(first.state_dict())
    assert _evaluate(second, _state(), [0.5]) == [0]


def test_early_stop_names_the_metrics_there_are() -> None:
    """A typing error must not end in a training that never stops."""
    with pytest.raises(MissingError, match="eval/Accuracy"):
        _evaluate(EarlyStop("accuracy", mode="max"), _state(), [0.1])


def test_algorithms_have_stable_names() -> None:
    """Their class, as in the guide."""
    assert list(name_all([EMA(0.1), EMA(0.2)], kind="algorithm")) == ["EMA", "EMA-2"]
