"""The names of a module's parameters, found once and seen to change."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import milepost.state.model as model_part
from milepost.errors import CheckpointError
from milepost.state import fitting, walks
from milepost.state.model import ModelPart
from milepost.state.names import ParameterNames, named_parameters
from milepost.state.report import LoadReport
from milepost.state.setup import capture_setup
from milepost.state.source import MemorySource
from milepost.state.tracked import Tracked
from milepost.state.walks import Walk, walk_of, walked_once


def new_model():
    tied = nn.Linear(2, 2)
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = nn.ModuleDict({"a": inner, "b": tied, "c": nn.ModuleList([tied, nn.Linear(2, 2)])})
    model["c"][1].weight = tied.weight
    return model


def replace_inner(model):
    model["a"][0] = nn.Linear(2, 3)


def swap(model):
    first = model["a"][0]
    first.weight, first.bias = first.bias, first.weight


def untie(model):
    model["c"][1].weight = nn.Parameter(model["b"].weight.detach().clone())


def move_up(model):
    """The same parameter, under the same last name, in the module before."""
    bias = model["a"][1].bias
    del model["a"][1].bias
    model["b"].register_parameter("bias", bias)


def rename(model):
    model["d"] = model["b"]
    del model["b"]


def make_buffer(model):
    weight = model["a"][0].weight
    del model["a"][0].weight
    model["a"][0].register_buffer("weight", weight)


def hook(model):
    model["a"].register_state_dict_post_hook(lambda *of_state: of_state[1].update(extra=1))


def hook_before(model):
    kept = {}

    def swap_in(module, prefix, keep_vars):
        module.bias = kept.setdefault("bias", nn.Parameter(torch.ones(2)))

    model["b"].register_state_dict_pre_hook(swap_in)


class Half(nn.Linear):
    """Saves half of what it has."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}half"] = self.weight.detach()


class WithMore(nn.Linear):
    """Saves what is neither a parameter nor a buffer."""

    def get_extra_state(self):
        return {"more": 1}


class Branded(nn.Parameter):
    """A parameter that is more than one."""


def own_method(model):
    inner = model["a"]
    plain = type(inner).state_dict
    inner.state_dict = lambda *args, **more: plain(inner, *args, **more) or more["destination"]
    model["b"]._save_to_state_dict = lambda destination, prefix, keep_vars: None


def keep_no_more(model):
    model["a"][1]._non_persistent_buffers_set.add("running_mean")


CHANGES = {
    "a hook": hook,
    "a hook before": hook_before,
    "half of it saved": lambda model: model.update({"z": Half(2, 2)}),
    "more of it saved": lambda model: model.update({"z": WithMore(2, 2)}),
    "a class of its own": lambda model: setattr(model["b"], "weight", Branded(torch.ones(2, 2))),
    "a method of one module": own_method,
    "a buffer that is kept no more": keep_no_more,
    "a buffer anew": lambda model: setattr(model["a"][1], "running_mean", torch.ones(3)),
    "other memory": lambda model: setattr(model["b"].weight, "data", torch.ones(2, 2)),
    "nothing": lambda model: None,
    "values": lambda model: model["a"][0].weight.data.zero_(),
    "frozen": lambda model: model["a"][0].requires_grad_(False),
    "one frozen": lambda model: model["b"].bias.requires_grad_(False),
    "evaluated": lambda model: model["a"][1].eval(),
    "all evaluated": lambda model: model.eval(),
    "a module more": lambda model: model.update({"z": nn.Linear(1, 1)}),
    "another module": replace_inner,
    "another parameter": lambda model: model["b"].register_parameter(
        "bias", nn.Parameter(torch.ones(2))
    ),
    "no parameter": lambda model: setattr(model["b"], "bias", None),
    "names swapped": swap,
    "untied": untie,
    "moved to another module": move_up,
    "another name": rename,
    "a buffer more": lambda model: model["b"].register_buffer("n", torch.ones(1)),
    "a buffer that is not kept": lambda model: model["b"].register_buffer(
        "n", torch.ones(1), persistent=False
    ),
    "a buffer of a parameter": make_buffer,
    "no buffer": lambda model: setattr(model["a"][1], "running_mean", None),
    "compiled inside": lambda model: model.update({"b": nn.DataParallel(model["b"])}),
}


def seen(model):
    """All that is asked of a walk, by the names that a module gives itself."""
    walk = walk_of(model)
    frozen = {name for name, one in named_parameters(model) if not one.requires_grad}
    assert walk.frozen() == frozen
    assert dict(walk.parameters) == {name: id(one) for name, one in named_parameters(model)}
    assert [name for name, _ in walk.parameters] == [name for name, _ in named_parameters(model)]
    buffers = {walk.clean(n) for n, _ in model.named_buffers(remove_duplicate=False)}
    assert walk.buffers == buffers
    modules = [one for _, one in model.named_modules()]
    assert all(one is other for one, other in zip(walk.modules(), modules, strict=True))
    names = [walk.clean(f"{name}.").rstrip(".") for name, _ in model.named_modules()]
    assert walk.module_names == names
    told = {walk.clean(name): value for name, value in model.state_dict().items()}
    captured = ModelPart(model).capture()
    assert list(captured) == list(told)
    for name, value in told.items():
        if isinstance(value, torch.Tensor):
            assert is_same_memory(captured[name], value)
        else:
            assert captured[name] == value
    return walk


def is_same_memory(one, other):
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_every_change_of_a_module_is_seen(change):
    """An old name would give one parameter the state of another."""
    model = new_model()
    tracked = Tracked()
    tracked.add("model", model)
    seen(model)
    tracked.parameter_names()
    CHANGES[change](model)
    seen(model)
    names = tracked.parameter_names()
    for name, parameter in named_parameters(model):
        first = next(n for n, one in named_parameters(model) if one is parameter)
        assert names.of(parameter) == first == names.first[id(parameter)]
        assert name in names.all()
    captured = {item.name: item for item in tracked.capture()}
    frozen = {name for name, one in named_parameters(model) if not one.requires_grad}
    kept = {leaf.key for leaf in captured["model"].leaves if leaf.is_frozen}
    assert kept <= frozen
    modes = capture_setup({"model": model})["models"]["model"]
    assert modes["frozen"] == sorted(frozen)
    assert modes["is_training"] == model.training


def test_an_unchanged_module_is_walked_through_once(monkeypatch):
    """Also in later saves, and for all that asks for names."""
    model = new_model()
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.SGD([p for p in model.parameters()], lr=0.1))  # noqa: C416
    tracked.capture()
    names = tracked.parameter_names()

    def refuse(self, module):
        raise AssertionError("walked through again")

    monkeypatch.setattr(Walk, "__init__", refuse)
    monkeypatch.setattr(ParameterNames, "__init__", refuse)
    for _ in range(2):
        with torch.no_grad():
            model["b"].weight.add_(1)
        tracked.capture()
    assert tracked.parameter_names() is names


def test_a_restore_finds_names_once_for_each_optimizer(monkeypatch):
    """And anew after a model was restored, which may have other parameters for it."""
    model = new_model()
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9))
    source = MemorySource.from_packed("a", tracked.capture())
    found = []
    init = ParameterNames.__init__
    monkeypatch.setattr(
        ParameterNames, "__init__", lambda self, models: found.append(1) or init(self, models)
    )
    tracked.restore(source)
    assert not found
    model.register_load_state_dict_post_hook(lambda module, keys: untie(module))
    tracked.restore(source)
    assert len(found) == 1


def test_within_a_save_a_module_is_looked_at_once(monkeypatch):
    """Five parts of a save ask for its names."""
    model = new_model()
    tracked = Tracked()
    tracked.add("model", model)
    tracked.capture()
    looked = []
    is_current = Walk.is_current
    monkeypatch.setattr(
        Walk, "is_current", lambda self, module: looked.append(1) or is_current(self, module)
    )
    tracked.capture()
    assert len(looked) <= 2
    with walked_once():
        assert walk_of(model) is walk_of(model)


def test_within_a_save_it_is_found_once_what_is_frozen(monkeypatch):
    """What is stored as frozen and what the setup says of it are one answer; a save later anew."""
    model = new_model()
    tracked = Tracked()
    tracked.add("model", model)
    tracked.capture()
    looked = []
    monkeypatch.setattr(walks, "_is_trained", lambda one: looked.append(1) or one.requires_grad)
    for is_trained in (True, False):
        model["b"].bias.requires_grad_(is_trained)
        looked.clear()
        items = {item.name: item for item in tracked.capture()}
        assert len(looked) == len(walk_of(model).parameters)
        frozen = [] if is_trained else ["b.bias", "c.0.bias"]
        assert items["setup"].tree["models"]["model"]["frozen"] == frozen
        assert {leaf.key for leaf in items["model"].leaves if leaf.is_frozen} == set(frozen[:1])


def test_a_walk_keeps_nothing_alive():
    """Neither a model that is gone nor a layer that was replaced."""
    model = new_model()
    layer = weakref.ref(model["a"][0])
    walk_of(model)
    replace_inner(model)
    gc.collect()
    assert layer() is None
    whole = weakref.ref(model)
    del model
    gc.collect()
    assert whole() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_is_walked_like_any_other():
    """Its tables are of a kind of their own: no dicts, though they look like them."""
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    tracked = Tracked()
    tracked.add("model", model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        parameters["0.weight"].fill_(2.0)
    parameters["1.bias"].requires_grad_(False)
    seen(model)
    held = {item.name: item for item in tracked.capture()}["model"]
    kept = {leaf.key: tensor for leaf, tensor in zip(held.leaves, held.tensors, strict=True)}
    assert sorted(kept) == sorted(model.state_dict())
    assert bool((kept["0.weight"] == 2).all())
    assert {leaf.key for leaf in held.leaves if leaf.is_frozen} == {"1.bias"}
    assert walk_of(model).is_current(model)


class Loud(nn.Linear):
    """Has a word to say when it is loaded."""

    def _load_from_state_dict(self, state_dict, prefix, *more):
        super()._load_from_state_dict(state_dict, prefix, *more)
        with torch.no_grad():
            self.weight.add_(1)


class Own(nn.ModuleDict):
    """Loads in a way of its own."""

    def load_state_dict(self, state_dict, **more):
        super().load_state_dict({k: v * 2 for k, v in state_dict.items()}, **more)


def hook_load(model):
    model["a"].register_load_state_dict_pre_hook(
        lambda module, state, prefix, *more: state.update(
            {f"{prefix}1.bias": state[f"{prefix}1.bias"] + 1}
        )
    )


def hook_loaded(model):
    def louder(module, keys):
        module.bias.data.add_(1)

    model["b"].register_load_state_dict_post_hook(louder)


def load_in_own_way(model):
    load = model.load_state_dict
    model.load_state_dict = lambda state, **more: load({k: v + 1 for k, v in state.items()}, **more)


def fill_one_in_own_way(model):
    member = model["c"][1]
    load = member._load_from_state_dict

    def loaded(*args):
        load(*args)
        member.bias.data.add_(1)

    member._load_from_state_dict = loaded


LOADS = {
    **CHANGES,
    "a hook of loads": hook_load,
    "a hook after loads": hook_loaded,
    "a module that loads in its own way": lambda model: model.update({"b": Loud(2, 2)}),
    "a class that loads in its own way": lambda model: setattr(model, "__class__", Own),
    "a model that loads in its own way": load_in_own_way,
    "one module that loads in its own way": fill_one_in_own_way,
    "another dtype": lambda model: model["a"].double(),
    "another shape": lambda model: model.update({"b": nn.Linear(2, 5)}),
    "as many elements": lambda model: setattr(model["b"].weight, "data", torch.ones(4, 1)),
    "turned": lambda model: setattr(model["b"].weight, "data", torch.ones(2, 2).t()),
    "gaps": lambda model: setattr(model["b"].weight, "data", torch.ones(2, 4)[:, ::2]),
    "elsewhere": lambda model: model.to("meta"),
    "sparse": lambda model: model["a"][1].register_buffer("mean", torch.eye(3).to_sparse()),
}
TAKEN_TOGETHER = (
    "a buffer anew",
    "a buffer of a parameter",
    "a buffer that is not kept",
    "all evaluated",
    "another module",
    "another parameter",
    "compiled inside",
    "evaluated",
    "frozen",
    "gaps",
    "nothing",
    "one frozen",
    "other memory",
    "turned",
    "untied",
    "values",
)


def loaded(change, stored, *, strict):
    """Load into a model that was changed, and return all that can be seen of it."""
    torch.manual_seed(3)
    live = new_model()
    LOADS[change](live)
    part = ModelPart(live, strict=strict)
    source = MemorySource.from_packed("a", stored)
    report = LoadReport("a")
    try:
        part.check(source, "model", report)
        part.apply(source, "model", report)
        outcome = ""
    except (CheckpointError, RuntimeError, NotImplementedError) as error:
        outcome = f"{type(error)}: {error}"
    state = {
        key: value if value.is_meta else value.to_dense().clone()
        for key, value in live.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    return outcome, report, state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", sorted(LOADS))
def test_whatever_is_loaded_together_is_as_if_one_by_one(monkeypatch, change, strict):
    """What fits not, what has hooks, and what was tied, frozen or put elsewhere meanwhile."""
    torch.manual_seed(1)
    tracked = Tracked()
    tracked.add("model", new_model())
    stored = [item for item in tracked.capture() if item.name == "model"]
    together = []
    find = fitting.find_fit

    def noting(*of_item):
        together.append(find(*of_item) is not None)
        return find(*of_item)

    monkeypatch.setattr(model_part, "find_fit", noting)
    outcome, report, state = loaded(change, stored, strict=strict)
    monkeypatch.setattr(model_part, "find_fit", lambda *of_item: None)
    other_outcome, other_report, other_state = loaded(change, stored, strict=strict)
    assert (outcome, report) == (other_outcome, other_report)
    assert list(state) == list(other_state)
    for key, value in state.items():
        assert value.is_meta or torch.equal(value, other_state[key]), key
    assert set(together) <= {change in TAKEN_TOGETHER or "load" in change}
