"""Optimizers of every kind: they go on as if they had never stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.testing.asserts import assert_equal_states


def new_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def grouped(model):
    """Two groups with options of their own, the second in another order than the model's."""
    return [
        {"params": [model[1].bias, model[0].weight], "lr": 0.05, "weight_decay": 0.1},
        {"params": [model[0].bias, model[1].weight]},
    ]


OPTIMIZERS = {
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "SGD plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "Adam foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "Adam tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr_decay=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=2),
    "groups": lambda m: torch.optim.AdamW(grouped(m), lr=0.01),
    "own load": lambda m: OwnLoad(m.parameters(), lr=0.01),
}


class OwnLoad(torch.optim.Adam):
    """An optimizer that loads in its own way, and gets a state dict in torch's own form."""

    def load_state_dict(self, state_dict):
        assert set(state_dict) >= {"state", "param_groups"}
        assert all(type(index) is int for index in state_dict["state"])
        super().load_state_dict(state_dict)


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(5, 3, generator=generator)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_restored_optimizer_takes_the_same_steps(tmp_path, kind):
    """State, options and counters of every torch optimizer, to the bit."""
    model = new_model(1)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, 3, seed=5)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live = new_model(2)
    live_optimizer = OPTIMIZERS[kind](live)
    train(live, live_optimizer, 1, seed=9)  # whatever it held before is gone
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer) as run:
        assert run.load_report.is_exact
    assert_equal_states(live_optimizer.state_dict(), optimizer.state_dict())
    train(model, optimizer, 3, seed=6)
    train(live, live_optimizer, 3, seed=6)
    assert_equal_states(dict(live.state_dict()), dict(model.state_dict()))
    assert_equal_states(live_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_gradients_and_their_optimizer_go_on(tmp_path):
    """An embedding with sparse gradients has an optimizer of its own."""

    def new(seed):
        torch.manual_seed(seed)
        model = nn.Embedding(10, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.tensor([1, 4, 4])).square().sum().backward()
        optimizer.step()

    model, optimizer = new(1)
    step(model, optimizer)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live, live_optimizer = new(2)
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer):
        pass
    step(model, optimizer)
    step(live, live_optimizer)
    assert_equal_states(dict(live.state_dict()), dict(model.state_dict()))
    assert_equal_states(live_optimizer.state_dict(), optimizer.state_dict())


def test_options_of_groups_come_back_to_the_group_of_their_parameters(tmp_path):
    """Also when the groups are made in another order."""
    model = new_model(1)
    optimizer = torch.optim.SGD(grouped(model), lr=0.3, momentum=0.5)
    optimizer.param_groups[0]["lr"] = 0.007
    optimizer.param_groups[0]["own"] = {"nested": [1, (2,)]}
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live = new_model(2)
    live_optimizer = torch.optim.SGD(grouped(live)[::-1], lr=0.9)
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer):
        pass
    first, second = live_optimizer.param_groups
    assert second["lr"] == 0.007
    assert second["own"] == {"nested": [1, (2,)]}
    assert (first["lr"], first["momentum"]) == (0.3, 0.5)
    assert second["params"][0] is live[1].bias


@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnLoad])
def test_a_group_without_stored_parameters_keeps_its_options(tmp_path, kind):
    """As when a rank holds none of them; there is no stored group that it could be."""

    def new(seed, lr):
        model = new_model(seed)
        groups = [{"params": list(model.parameters())}, {"params": [], "lr": lr}]
        return model, kind(groups, lr=lr / 2)

    model, optimizer = new(1, 0.25)
    train(model, optimizer, 2, seed=5)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live, live_optimizer = new(2, 0.5)
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer):
        pass
    first, second = live_optimizer.param_groups
    assert (first["lr"], second["lr"], second["params"]) == (0.125, 0.5, [])
    train(model, optimizer, 2, seed=6)
    train(live, live_optimizer, 2, seed=6)
    assert_equal_states(dict(live.state_dict()), dict(model.state_dict()))


def test_other_groups_than_before_are_refused_and_nothing_changes(tmp_path):
    """One group cannot have the options of two."""
    model = new_model(1)
    optimizer = torch.optim.SGD(grouped(model), lr=0.3, momentum=0.9)
    train(model, optimizer, 1, seed=1)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live = new_model(2)
    live_optimizer = torch.optim.SGD(live.parameters(), lr=0.9, momentum=0.9)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    with pytest.raises(mp.MismatchError, match="form one group now and were in 2 groups"):
        mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer).open()
    assert_equal_states(dict(live.state_dict()), before)
    assert live_optimizer.param_groups[0]["lr"] == 0.9


def test_two_models_keep_their_parameters_apart(tmp_path):
    """Names that are equal in both models must not meet in one optimizer."""

    def new(seed):
        models = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
        torch.manual_seed(seed)
        for model in models.values():
            nn.init.normal_(model.weight)
        parameters = [p for model in models.values() for p in model.parameters()]
        return models, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    models, optimizer = new(1)
    for number, model in enumerate(models.values()):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    with mp.Checkpointer(tmp_path, **models, optimizer=optimizer) as run:
        stored = run.save("a").wait().load()["state"]["optimizer"]
    assert list(stored["state"]) == [
        "first/weight",
        "first/bias",
        "second/weight",
        "second/bias",
    ]
    live, live_optimizer = new(2)
    with mp.Checkpointer(tmp_path, **live, optimizer=live_optimizer):
        pass
    momentum = live_optimizer.state[live["second"].weight]["momentum_buffer"]
    assert momentum.unique().tolist() == [2.0]


@pytest.mark.parametrize("late", ["second", "optimizer", "both"])
def test_a_model_that_is_tracked_late_changes_no_names(tmp_path, late):
    """The second model may be built, and tracked, only after the resume."""

    def new(seed):
        torch.manual_seed(seed)
        first, second = nn.Linear(2, 2), nn.Linear(3, 3)
        return first, second, torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)

    first, second, optimizer = new(1)
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with mp.Checkpointer(tmp_path, first=first, second=second, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live, live_second, live_optimizer = new(2)
    early = {"first": live, "second": live_second, "optimizer": live_optimizer}
    names = ["second", "optimizer"] if late == "both" else [late]
    delayed = {name: early.pop(name) for name in names}
    with mp.Checkpointer(tmp_path, **early) as run:
        run.track(**delayed)
        run.save("b", wait=True)
    assert_equal_states(live_optimizer.state_dict(), optimizer.state_dict())
    assert torch.equal(live_second.weight, second.weight)


def test_parameters_of_no_tracked_model_are_known_by_their_place(tmp_path):
    """There is no name to go by; the place in the group is what is left."""
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([loose], lr=0.1, momentum=0.9)
    loose.grad = torch.ones(2)
    optimizer.step()
    with mp.Checkpointer(tmp_path, optimizer=optimizer) as run:
        run.save("a", wait=True)
    other = nn.Parameter(torch.ones(2))
    live = torch.optim.SGD([other], lr=0.5, momentum=0.9)
    with mp.Checkpointer(tmp_path, optimizer=live):
        pass
    assert torch.equal(live.state[other]["momentum_buffer"], torch.ones(2))
    assert live.param_groups[0]["lr"] == 0.1


def test_schedulers_of_every_kind_go_on(tmp_path):
    """Nested ones too, and one that looks at a metric."""
    from torch.optim import lr_scheduler as s

    kinds = {
        "lambda": lambda o: s.LambdaLR(o, lambda epoch: 0.9**epoch),
        "step": lambda o: s.StepLR(o, 2),
        "cycle": lambda o: s.OneCycleLR(o, max_lr=0.1, total_steps=20),
        "cosine": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
        "sequence": lambda o: s.SequentialLR(
            o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)], milestones=[2]
        ),
        "chained": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1), s.ExponentialLR(o, 0.9)]),
        "plateau": lambda o: s.ReduceLROnPlateau(o, patience=0),
    }
    for name, make in kinds.items():

        def new(make=make):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, optimizer, make(optimizer)

        def step(optimizer, scheduler, number, name=name):
            optimizer.step()
            scheduler.step(1.0) if name == "plateau" else scheduler.step()
            return [group["lr"] for group in optimizer.param_groups]

        model, optimizer, scheduler = new()
        for number in range(4):
            step(optimizer, scheduler, number)
        with mp.Checkpointer(
            tmp_path / name, model=model, optimizer=optimizer, scheduler=scheduler
        ) as run:
            run.save("a", wait=True)
        live, live_optimizer, live_scheduler = new()
        with mp.Checkpointer(
            tmp_path / name, model=live, optimizer=live_optimizer, scheduler=live_scheduler
        ):
            pass
        rates = [step(optimizer, scheduler, n) for n in range(6)]
        assert [step(live_optimizer, live_scheduler, n) for n in range(6)] == rates, name
