"""Optimizers, scalers and averages: state of the right parameter, in the right dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.train.algorithms.ema import EMA


def square_pair():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})


@pytest.mark.parametrize("in_groups", [False, True])
def test_h13_state_follows_the_name_and_not_the_position(tmp_path, in_groups):
    """Two parameters of one shape would swap their momenta without any error."""

    def optimizer_over(model, order):
        parameters = [model[name].weight for name in order]
        if in_groups:
            parameters = [
                {"params": [one], "lr": 0.1 if n == "a" else 0.2}
                for n, one in zip(order, parameters, strict=True)
            ]
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    model = square_pair()
    optimizer = optimizer_over(model, "ab")
    model["a"].weight.grad = torch.ones(4, 4)
    model["b"].weight.grad = torch.full((4, 4), 2.0)
    optimizer.step()
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live = square_pair()
    live_optimizer = optimizer_over(live, "ba")
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer):
        pass
    momenta = {n: live_optimizer.state[live[n].weight]["momentum_buffer"] for n in "ab"}
    assert torch.equal(momenta["a"], torch.ones(4, 4))
    assert torch.equal(momenta["b"], torch.full((4, 4), 2.0))
    if in_groups:
        assert [group["lr"] for group in live_optimizer.param_groups] == [0.2, 0.1]


def test_h14_parameters_without_state_yet_are_no_error_and_get_none(tmp_path, scramble):
    """Invented zeros would change the bias correction of the steps to come."""

    def life(folder, *, steps, freeze, unfreeze_at, save_at=None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].requires_grad_(not freeze)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with mp.Checkpointer(folder, model=model, optimizer=optimizer) as run:
            while run.timer.batch < steps:
                if run.timer.batch == save_at:
                    run.save("cut", wait=True)
                    return None
                if run.timer.batch == unfreeze_at:
                    model[1].requires_grad_(True)
                optimizer.zero_grad()
                model(torch.full((3, 2), float(run.timer.batch))).square().sum().backward()
                optimizer.step()
                run.step()
        steps_done = [int(optimizer.state[p]["step"]) for p in model.parameters()]
        return steps_done, dict(model.state_dict())

    straight = life(tmp_path / "straight", steps=10, freeze=True, unfreeze_at=5)
    life(tmp_path / "a", steps=10, freeze=True, unfreeze_at=5, save_at=5)
    scramble()
    resumed = life(tmp_path / "a", steps=10, freeze=True, unfreeze_at=5)
    assert resumed[0] == straight[0] == [10, 10, 5, 5]
    assert_equal_states(resumed[1], straight[1])

    straight = life(tmp_path / "straight2", steps=3, freeze=False, unfreeze_at=None)
    life(tmp_path / "b", steps=3, freeze=False, unfreeze_at=None, save_at=0)
    scramble()
    resumed = life(tmp_path / "b", steps=3, freeze=False, unfreeze_at=None)
    assert resumed[0] == straight[0] == [3, 3, 3, 3]
    assert_equal_states(resumed[1], straight[1])


class WideMoments(torch.optim.Optimizer):
    """Keeps its average of the gradients in float32, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"beta": 0.9})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros(parameter.shape, dtype=torch.float32)
                    state["step"] = torch.tensor(297.0)
                state["m"] = 0.9 * state["m"] + 0.1 * parameter.grad.float()
                state["step"] += 1


def test_h15_wide_moments_of_narrow_weights_are_not_rounded(tmp_path):
    """Torch converts them to the dtype of the parameter when it loads; 16 bits are lost."""
    parameter = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))})
    optimizer = WideMoments(parameter.parameters())
    for _ in range(3):
        parameter["w"].grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    with mp.Checkpointer(tmp_path, model=parameter, optimizer=optimizer) as run:
        run.save("a", wait=True)
    live = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))})
    live_optimizer = WideMoments(live.parameters())
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer):
        pass
    state = live_optimizer.state[live["w"]]
    assert state["m"].dtype is torch.float32
    assert torch.equal(state["m"], optimizer.state[parameter["w"]]["m"])
    assert state["m"][0].item() == 0.2709999978542328
    assert state["step"].item() == 300.0
    assert (state["step"].dtype, state["step"].device.type) == (torch.float32, "cpu")


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_h16_the_gradient_scaler_goes_on(tmp_path, scramble):
    """A scale that starts again skips steps that the straight run did not skip."""

    def life(folder, *, until, **options):
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", **options)
        scales = []
        with mp.Checkpointer(
            folder, model=nn.ParameterDict({"w": parameter}), optimizer=optimizer, scaler=scaler
        ) as run:
            begun_with = (scaler.get_scale(), scaler._growth_tracker, scaler._growth_interval)
            if run.is_resumed:
                tracker = scaler.state_dict()["_growth_tracker"]
                begun_with = (scaler.get_scale(), tracker, scaler.get_growth_interval())
            while run.timer.batch < until:
                optimizer.zero_grad()
                scaler.scale(parameter.square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                run.step()
                scales.append(scaler.get_scale())
            run.save("cut", wait=True)
        return begun_with, scales

    options = {"init_scale": 1024.0, "growth_interval": 4}
    _, straight = life(tmp_path / "straight", until=10, **options)
    assert straight == [1024.0] * 3 + [2048.0] * 4 + [4096.0] * 3
    _, first = life(tmp_path / "a", until=6, **options)
    begun_with, rest = life(tmp_path / "a", until=10)
    assert begun_with == (2048.0, 2, 4)
    assert first + rest == straight


class OneWeight:
    """What an average needs of a training."""

    def __init__(self):
        self.bare_model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})
        self.timer = mp.Timer()


def test_h17_weights_saved_while_the_average_was_swapped_in(tmp_path):
    """A checkpoint of an evaluation holds both; the raw weights train on, and the average goes on.

    The average starts at 0 with a decay of 0.9: 0.1, 0.29, 0.561, 0.9049 after steps 1 to 4.
    """

    def new():
        state, ema = OneWeight(), EMA(0.9)
        ema.apply(mp.Event.INIT, state)
        return state, ema

    def train_step(state, ema, number):
        with torch.no_grad():
            state.bare_model["w"].fill_(float(number))
        ema.apply(mp.Event.BATCH_END, state)

    state, ema = new()
    for number in (1, 2, 3):
        train_step(state, ema, number)
    ema.apply(mp.Event.EVAL_START, state)
    assert state.bare_model["w"].item() == pytest.approx(0.561)
    with mp.Checkpointer(tmp_path, model=state.bare_model, ema=ema) as run:
        saved = run.save("a").wait()
    ema.apply(mp.Event.EVAL_END, state)
    assert state.bare_model["w"].item() == 3.0

    state, ema = new()
    with mp.Checkpointer(tmp_path, model=state.bare_model, ema=ema):
        ema.after_load(state)
    assert state.bare_model["w"].item() == 3.0
    assert ema.average["w"].item() == pytest.approx(0.561)
    train_step(state, ema, 4)
    assert state.bare_model["w"].item() == 4.0
    assert ema.average["w"].item() == pytest.approx(0.9049)
    stored = saved.load()["state"]
    assert stored["ema"]["weights"]["w"].item() == 3.0
    assert stored["model"]["w"].item() == pytest.approx(0.561)
