"""The state of an optimizer by name is the one that it tells of, whatever has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from milepost.state.tracked import Tracked


class Loud(torch.optim.SGD):
    """Has a state dict of its own."""

    def state_dict(self):
        return {**super().state_dict(), "loud": True}


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
    optimizer.step()


def replace_weight(model, optimizer):
    old, new = model[0].weight, nn.Parameter(torch.ones(2, 2))
    model[0].weight = new
    group = optimizer.param_groups[0]
    group["params"] = [new if one is old else one for one in group["params"]]
    optimizer.state.pop(old, None)


def rename(model, optimizer):
    first, second = model[0].weight, model[1].weight
    model[0].weight, model[1].weight = second, first


def swap_in_group(model, optimizer):
    parameters = optimizer.param_groups[0]["params"]
    parameters[0], parameters[1] = parameters[1], parameters[0]


def another_order(model, optimizer):
    first = next(iter(optimizer.state))
    optimizer.state[first] = optimizer.state.pop(first)


def double_memory(model, optimizer):
    for row in optimizer.state.values():
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                row[name] = value.clone()


def move_to_new_group(model, optimizer):
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.5})


CHANGES = {
    "nothing": lambda model, optimizer: None,
    "a step": step,
    "two steps": lambda model, optimizer: (step(model, optimizer), step(model, optimizer)),
    "a rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.25),
    "an option more": lambda model, optimizer: optimizer.param_groups[0].update(initial_lr=1.0),
    "a stray parameter": lambda model, optimizer: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "another group": move_to_new_group,
    "another parameter": replace_weight,
    "names swapped": rename,
    "places swapped": swap_in_group,
    "states in another order": another_order,
    "other memory": double_memory,
    "no state any more": lambda model, optimizer: optimizer.state.clear(),
    "a state less": lambda model, optimizer: optimizer.state.popitem(),
    "a state of nothing": lambda model, optimizer: optimizer.state.update({"all": {"n": 1}}),
    "a state of another kind": lambda model, optimizer: optimizer.state.update(
        {model[0].weight: [torch.ones(1), 2]}
    ),
    "frozen": lambda model, optimizer: model[0].requires_grad_(False),
    "a hook": lambda model, optimizer: optimizer.register_state_dict_post_hook(
        lambda one, state: {**state, "hooked": 1}
    ),
    "a hook before": lambda model, optimizer: optimizer.register_state_dict_pre_hook(
        lambda one: one.param_groups[0].update(seen=True)
    ),
    "a method of its own": lambda model, optimizer: setattr(
        optimizer, "state_dict", lambda: {**type(optimizer).state_dict(optimizer), "own": 1}
    ),
    "a method of its class": lambda model, optimizer: setattr(optimizer, "__class__", Loud),
}


def told(model, optimizer):
    """What torch's own state dict says, with names in the place of numbers."""
    state = optimizer.state_dict()
    name_of = {}
    for name, parameter in model.named_parameters():
        name_of[id(parameter)] = name
    names = []
    for g, group in enumerate(optimizer.param_groups):
        names += [name_of.get(id(one), f"group{g}/{i}") for i, one in enumerate(group["params"])]
    stored = dict(state["state"])
    known = [key for key in stored if type(key) is int]
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        **state,
        "param_groups": groups,
        "state": {names[key]: stored[key] for key in known},
        "other": {key: value for key, value in stored.items() if key not in known},
    }


def flat(value, path=()):
    """Every value in containers by its path, in order; tensors by their memory."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*path, key))
    elif isinstance(value, list):
        yield path, len(value)
        for index, item in enumerate(value):
            yield from flat(item, (*path, index))
    elif isinstance(value, torch.Tensor):
        yield path, (value.data_ptr(), value.dtype, tuple(value.shape))
    else:
        yield path, value


def new_pair(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if kind == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_every_change_of_an_optimizer_is_seen(kind, is_stepped, change):
    """An old name would give one parameter the moments of another."""
    if change == "a method of its class" and kind == "adamw":
        pytest.skip("it is another class for SGD")
    model, optimizer = new_pair(kind)
    if is_stepped:
        step(model, optimizer)
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    ((_, _, part),) = tracked.optimizers()
    tracked.capture()
    before = part.capture()
    assert list(flat(before)) == list(flat(told(model, optimizer)))
    try:
        CHANGES[change](model, optimizer)
    except (KeyError, StopIteration):
        return  # there is no state yet that could change in this way
    for _ in range(2):
        expected = list(flat(told(model, optimizer)))
        assert list(flat(part.capture())) == expected
        items = {item.name: item for item in tracked.capture()}
        addresses = {one.data_ptr() for one in items["optimizer"].tensors}
        assert addresses == {v[0] for _, v in expected if isinstance(v, tuple) and len(v) == 3}
