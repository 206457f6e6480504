"""The state's attributes mean what the guide says."""

from __future__ import annotations

import pytest
import torch

from milepost.errors import UsageError
from milepost.train import Precision, State, Time


def _state(**options) -> State:
    model = torch.nn.Linear(2, 1)
    options.setdefault("max_duration", "4ep")
    options.setdefault("train_dataloader", [torch.zeros(2, 2)] * 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return State(model, rank_zero_seed=7, optimizers=optimizer, **options)


def test_serialized_attributes_are_those_of_the_guide() -> None:
    """Readers of checkpoints rely on these names."""
    assert _state().serialized_attributes == [
        "model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timer",
        "rank_zero_seed", "current_metrics",
    ]  # fmt: skip


def test_max_duration_takes_text_numbers_and_times() -> None:
    """A whole number counts epochs."""
    state = _state(max_duration=3)
    assert state.max_duration == Time(3, "ep")
    state.max_duration = "24h"
    assert state.max_duration == Time(86400, "sec")
    with pytest.raises(UsageError, match="fraction"):
        state.max_duration = "0.5dur"
    with pytest.raises(UsageError, match="below zero"):
        state.max_duration = "-1ep"


def test_elapsed_duration_is_a_fraction_of_the_maximum() -> None:
    """Measured in the unit of the maximum."""
    state = _state(max_duration="8ba")
    state.timer.on_batch_complete(2)
    assert state.get_elapsed_duration() == Time(0.125, "dur")


def test_stop_training_ends_where_it_stands() -> None:
    """In the middle of an epoch it must not wait for the end of it."""
    state = _state(max_duration="4ep")
    state.timer.on_batch_complete(2)
    state.stop_training()
    assert state.max_duration == Time(1, "ba")
    assert state.stopped_for == "4ep"


def test_steps_per_epoch_warns_when_the_loader_has_fewer() -> None:
    """Nobody should believe that more is trained than there is."""
    state = _state()
    assert state.steps_per_epoch == 5
    state.steps_per_epoch = 3
    assert state.steps_per_epoch == 3
    with pytest.warns(UserWarning, match="more than the 5 batches"):
        state.steps_per_epoch = 9
    assert state.steps_per_epoch == 5


def test_steps_per_epoch_is_unknown_for_streams() -> None:
    """An iterable without a length tells nothing."""
    assert _state(train_dataloader=iter([])).steps_per_epoch is None


def test_batch_views_check_the_kind_of_batch() -> None:
    """An algorithm for pairs must not misread a dict."""
    state = _state()
    state.batch = (1, 2)
    assert state.batch_pair == (1, 2)
    with pytest.raises(UsageError, match="not a dict"):
        _ = state.batch_dict
    state.batch = {"x": 1}
    assert state.batch_dict == {"x": 1}
    with pytest.raises(UsageError, match="not a pair"):
        _ = state.batch_pair


def test_precision_is_parsed_and_gives_its_context() -> None:
    """bfloat16 works on every CPU."""
    state = _state(precision="amp_bf16")
    assert state.precision is Precision.AMP_BF16
    with state.precision_context:
        assert state.model(torch.zeros(1, 2)).dtype is torch.bfloat16
    state.precision = "fp32"
    with state.precision_context:
        assert state.model(torch.zeros(1, 2)).dtype is torch.float32
    with pytest.raises(UsageError, match="use one of"):
        state.precision = "fp7"


def test_setting_optimizers_keeps_the_list() -> None:
    """Others hold on to the list."""
    state = _state()
    held, new = state.optimizers, torch.optim.SGD(state.model.parameters(), lr=1.0)
    state.optimizers = new
    assert held == [new]


def test_wrappers_are_told_apart() -> None:
    """DDP and DeepSpeed are asked for without importing DeepSpeed."""
    state = _state()
    assert not state.is_model_ddp
    assert not state.is_model_deepspeed
    with pytest.raises(UsageError, match="not a DeepSpeed"):
        _ = state.deepspeed_model


def test_state_dict_goes_round_and_leaves_out_what_was_removed() -> None:
    """Only the serialized attributes are written and read."""
    state, other = _state(), _state()
    state.timer.on_batch_complete(2)
    state.serialized_attributes.remove("rank_zero_seed")
    stored = state.state_dict()
    assert "rank_zero_seed" not in stored
    other.rank_zero_seed = 99
    other.load_state_dict({**stored, "rank_zero_seed": 1, "strange": 2}, strict=True)
    assert other.timer.batch == 1
    assert torch.equal(other.model.weight, state.model.weight)


@pytest.mark.parametrize("grad_accum", [0, -1, 1.5, True])
def test_grad_accum_is_a_whole_number(grad_accum: object) -> None:
    """Half a microbatch makes no sense."""
    with pytest.raises(UsageError, match="grad_accum"):
        _state(grad_accum=grad_accum)
