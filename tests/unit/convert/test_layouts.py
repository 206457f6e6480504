"""Which layouts are recognised, and what becomes of them."""

from __future__ import annotations

import pytest
import torch

from milepost.convert.layouts import items_of, name_positions
from milepost.errors import FormatError


def numbered(shapes, *, groups=None, kept="momentum_buffer"):
    """Return the state dict of an optimizer in torch's own form."""
    groups = groups or [list(range(len(shapes)))]
    state = {n: {kept: torch.full(shape, float(n))} for n, shape in enumerate(shapes)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": params} for params in groups]}


def test_a_bare_state_dict_is_a_model():
    """What ``torch.save(model.state_dict(), ...)`` writes."""
    weights = {"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}
    assert items_of(weights) == {"model": weights}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_taken_off(prefix):
    """Weights belong to the model, not to what it was wrapped in."""
    found = items_of({f"{prefix}a": torch.ones(1), f"{prefix}b.module.c": torch.ones(1)})
    assert list(found["model"]) == ["a", "b.module.c"]


def test_a_prefix_that_not_all_have_is_a_name():
    """A model may well have a child called module."""
    assert list(items_of({"module.a": torch.ones(1), "b": torch.ones(1)})["model"]) == [
        "module.a",
        "b",
    ]


def test_members_of_the_state_are_items():
    """The layout that single-file checkpoints have."""
    model = {"w": torch.ones(1)}
    found = items_of({"state": {"model": model, "timer": {"epoch": 3}}, "rng": []})
    assert found == {"model": model, "timer": {"epoch": 3}}


def test_an_rng_in_our_form_stays():
    """Only the foreign form is rewritten, and a list keeps one entry for each rank."""
    states = [{"python": (3, (1,), None), "numpy": {"kind": "MT19937"}} for _ in range(2)]
    assert items_of({"state": {}, "rng": states})["rng"] == states


def test_lightning_keeps_the_weights():
    """The rest of such a file belongs to its own trainer."""
    weights = {"net.w": torch.ones(1)}
    found = items_of({"epoch": 3, "state_dict": weights, "optimizer_states": [{}]})
    assert found == {"model": weights}


@pytest.mark.parametrize("key", ["model", "model_state_dict", "state_dict"])
@pytest.mark.parametrize("suffix", ["", "_state_dict"])
def test_what_most_loops_write_is_taken_by_habit(key, suffix):
    """Such files are the commonest of all: weights, optimizer and scheduler beside the epoch."""
    weights = {"module.a.weight": torch.ones(4, 3), "module.a.bias": torch.ones(4)}
    value = {
        "epoch": 5,
        key: weights,
        f"optimizer{suffix}": numbered([(4, 3), (4,)]),
        f"scheduler{suffix}": {"last_epoch": 5},
        "loss": 0.1,
        "args": {"lr": 0.1},
    }
    found = items_of(value)
    assert list(found) == ["model", "optimizer", "scheduler"]
    assert list(found["model"]) == ["a.weight", "a.bias"]
    assert list(found["optimizer"]["state"]) == ["a.weight", "a.bias"]
    assert found["scheduler"] == {"last_epoch": 5}


def test_what_is_no_optimizer_is_not_taken_for_one():
    """The key may hold the name of one, or its options."""
    weights = {"w": torch.ones(1)}
    assert items_of({"model": weights, "optimizer": "adamw"}) == {"model": weights}
    assert items_of({"model": weights, "optimizer": {"lr": 0.1}}) == {"model": weights}


@pytest.mark.parametrize(
    "more",
    [
        {"state_dict": {"w": torch.zeros(1)}},
        {"optimizer": numbered([(1,)]), "optimizer_state_dict": numbered([(1,)])},
    ],
    ids=["weights", "optimizers"],
)
def test_two_of_one_kind_are_refused(more):
    """One of them may be an average of the other: which is wanted is the user's to say."""
    with pytest.raises(FormatError, match="nothing says which"):
        items_of({"model": {"w": torch.ones(1)}, **more})


@pytest.mark.parametrize(
    "value",
    [
        {"weights": 1, "config": {}},
        {},
        [torch.ones(1)],
        torch.ones(1),
        {"state": {0: {}}, "param_groups": []},
        {"model": {"w": torch.ones(1), "config": {}}, "epoch": 1},
        {"model": {}, "optimizer": {"state": {}, "param_groups": []}},
        {"classy_state_dict": {"base_model": {}}},
        {"classy_state_dict": {"base_model": {"model": {"trunk": None}}}},
    ],
)
def test_unknown_layouts_are_refused(value):
    """Guessing would restore nonsense without a word."""
    with pytest.raises(FormatError):
        items_of(value)


def test_the_refusal_lists_what_was_found():
    """So that its reader sees where the weights are."""
    with pytest.raises(FormatError, match="weights, config"):
        items_of({"weights": 1, "config": {}})


MODEL = {
    "a.weight": torch.ones(4, 3),
    "a.bias": torch.ones(4),
    "bn.weight": torch.ones(4),
    "bn.running_mean": torch.ones(4),
    "bn.running_var": torch.ones(4),
    "bn.num_batches_tracked": torch.tensor(7),
}


def test_positions_get_the_names_of_the_model():
    """One group, as many parameters, and every kept tensor of the right shape."""
    named = name_positions(numbered([(4, 3), (4,), (4,)]), MODEL)
    assert list(named["state"]) == ["a.weight", "a.bias", "bn.weight"]
    assert named["param_groups"][0]["params"] == ["a.weight", "a.bias", "bn.weight"]
    assert named["param_groups"][0]["lr"] == 0.1
    assert named["state"]["a.bias"]["momentum_buffer"][0] == 1.0
    assert named["other"] == {}


def test_positions_of_several_optimizers_get_names():
    """Trainers store optimizers by the name of their class."""
    found = items_of(
        {"state": {"model": MODEL, "optimizers": {"SGD": numbered([(4, 3), (4,), (4,)])}}}
    )
    assert list(found["optimizers"]["SGD"]["state"]) == ["a.weight", "a.bias", "bn.weight"]


@pytest.mark.parametrize(
    "optimizer",
    [
        numbered([(4, 3), (4,)]),
        numbered([(4,), (4, 3), (4,)]),
        numbered([(4, 3), (4,), (4,)], groups=[[0], [1, 2]]),
        numbered([(4, 3), (4,), (4,)], groups=[[0, 1, 2], []]),
        numbered([(4, 3), (4,), (4,), (4,), (4,)]),
    ],
    ids=["fewer", "another order", "two groups", "an empty group", "one for each buffer"],
)
def test_positions_stay_where_names_would_be_a_guess(optimizer):
    """A swap of two moments goes unnoticed for ever; a refusal does not."""
    assert name_positions(optimizer, MODEL) is optimizer


def test_tied_weights_count_once():
    """An optimizer knows one parameter, the state dict two names of it."""
    shared = torch.ones(3, 2)
    model = {"embed.weight": shared, "head.weight": shared, "head.bias": torch.ones(3)}
    named = name_positions(numbered([(3, 2), (3,)]), model)
    assert list(named["state"]) == ["embed.weight", "head.bias"]


def test_names_stay_as_they_are():
    """Our own files hold names already."""
    optimizer = {"state": {"a": {}}, "param_groups": [{"params": ["a"]}]}
    assert name_positions(optimizer, {"a": torch.ones(1)}) is optimizer
