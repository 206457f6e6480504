"""The batch in hand: whose gradients are a part of the state, and what may be repeated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import milepost as mp
from milepost.state.batch_in_hand import BatchInHand
from milepost.state.loader import ResumableLoader
from milepost.state.names import ParameterNames

DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))


class BoomError(Exception):
    """What goes wrong in a loop's body."""


def frozen_in_front(num_layers):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(num_layers)]
    return nn.Sequential(*layers, nn.Linear(4, 1))


def accumulate(folder, *, num_frozen, fail_at=None, where="before the step"):
    """Train with gradients of two batches; return the weights."""
    model = frozen_in_front(num_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=4)
    with mp.Checkpointer(
        folder, model=model, optimizer=optimizer, loader=loader, handle_signals=False
    ) as run:
        for _ in run.epochs(1):
            for index, inputs in enumerate(run.batches(loader), run.timer.batch_in_epoch):
                if index == fail_at and where == "at the top":
                    raise BoomError
                (model(inputs).square().mean() / 2).backward()
                if index == fail_at and where == "before the step":
                    raise BoomError
                if index % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("num_frozen", [0, 9])
@pytest.mark.parametrize("fail_at", [2, 3])
@pytest.mark.parametrize("where", ["at the top", "before the step"])
def test_no_gradient_is_counted_twice_after_an_error(tmp_path, num_frozen, fail_at, where):
    """However many frozen parameters, which have no gradients, come before the trained ones."""
    whole = accumulate(tmp_path / "whole", num_frozen=num_frozen)
    with pytest.raises(BoomError):
        accumulate(tmp_path / "cut", num_frozen=num_frozen, fail_at=fail_at, where=where)
    names = [found.name for found in mp.open_run(tmp_path / "cut").checkpoints(all=True)]
    can_be_repeated = where == "at the top" or fail_at == 2
    assert names == ([f"ba{fail_at}"] if can_be_repeated else [f"failed/ba{fail_at + 1}"])
    again = accumulate(tmp_path / "cut", num_frozen=num_frozen)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def duel(folder, *, stop_at=None, fail_at=None, steps_first="judge"):
    """One model steps in every batch, the other gathers gradients of two."""
    torch.manual_seed(0)
    models = {"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}
    sgd = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    loader = DataLoader(DATA, batch_size=4)

    def train_judge(inputs):
        sgd["judge"].zero_grad()
        models["judge"](models["maker"](inputs).detach()).square().mean().backward()
        sgd["judge"].step()

    def train_maker(inputs, index):
        (models["maker"](inputs) - inputs).square().mean().backward()
        if index % 2:
            sgd["maker"].step()
            sgd["maker"].zero_grad()

    options = {"every": "1ba", "handle_signals": False, "loader": loader, "sgd": sgd}
    with mp.Checkpointer(folder, **options, **models) as run:
        for _ in run.epochs(1):
            for index, inputs in enumerate(run.batches(loader), run.timer.batch_in_epoch):
                if index == stop_at:
                    return None
                if steps_first == "judge":
                    train_judge(inputs)
                if index == fail_at:
                    raise BoomError
                train_maker(inputs, index)
                if steps_first == "maker":
                    train_judge(inputs)
    return [p.detach().clone() for m in models.values() for p in m.parameters()]


@pytest.mark.parametrize("stop_at", [1, 2, 3, 6])
@pytest.mark.parametrize("steps_first", ["judge", "maker"])
def test_each_optimizer_gathers_gradients_by_itself(tmp_path, stop_at, steps_first):
    """A step of one says nothing about the gradients of the other."""
    whole = duel(tmp_path / "whole", steps_first=steps_first)
    duel(tmp_path / "cut", stop_at=stop_at, steps_first=steps_first)
    state = mp.open_run(tmp_path / "cut").latest().load()["state"]
    gathered = {"maker/weight", "maker/bias"} if stop_at % 2 else set()
    assert set(state.get("gradients", {})) == gathered
    again = duel(tmp_path / "cut", steps_first=steps_first)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_step_of_any_optimizer_cannot_be_repeated(tmp_path):
    """The other optimizer's half of the batch is missing, and the first one's must not be lost."""
    whole = duel(tmp_path / "whole")
    with pytest.raises(BoomError):
        duel(tmp_path / "cut", fail_at=3)
    names = {found.name for found in mp.open_run(tmp_path / "cut").checkpoints(all=True)}
    assert names == {"ba1", "ba2", "ba3", "failed/ba4"}
    again = duel(tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


class Counting(nn.Module):
    """Puts a new buffer in place of the old one in every forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs):
        self.count = self.count + 1
        return self.linear(inputs) * self.count


def held(model, *optimizers):
    """Return a watch on a model, with the first batch of an epoch in hand."""
    hand, loader = BatchInHand(), ResumableLoader(DataLoader(DATA, batch_size=4))
    hand.watch(optimizers=optimizers, models=[model])
    batches = loader.iterate()
    hand.take(loader, len(next(batches)))
    return hand, loader, batches


def take_next(hand, loader, batches):
    hand.put_down()
    hand.take(loader, len(next(batches)))


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_a_buffer_that_is_replaced_counts_as_written(num_passes):
    """Its version counter begins anew, and its place in memory may be that of the old one."""
    model = Counting()
    hand, _, _ = held(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert hand.is_untouched
    assert hand.is_undone_by_repeating
    for _ in range(num_passes):
        with torch.no_grad():
            model(DATA)
    assert not hand.is_untouched
    assert not hand.is_undone_by_repeating


def test_a_parameter_that_is_trained_only_later_is_looked_at_too():
    """Layers are unfrozen in the middle of a run, in a group of their own or not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    names = ParameterNames({"model": model})
    hand, loader, batches = held(model, optimizer)
    optimizer.step()
    take_next(hand, loader, batches)
    model[0].requires_grad_()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    take_next(hand, loader, batches)
    model(DATA).sum().backward()
    take_next(hand, loader, batches)
    assert set(hand.gradients(names)) == {f"{i}.{kind}" for i in range(3) for kind in WHAT}
    for changed in (model[0].weight, model[2].bias):
        take_next(hand, loader, batches)
        assert hand.is_undone_by_repeating
        changed.grad += 1
        assert not hand.is_undone_by_repeating


WHAT = ("weight", "bias")


def test_a_step_at_the_end_of_the_epoch_uses_the_gradients_up():
    """What is left of an accumulation is often trained on after the last batch."""
    model = nn.Linear(4, 1)
    names = ParameterNames({"model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hand, _, _ = held(model, optimizer)
    model(DATA).sum().backward()
    hand.put_down()
    assert set(hand.gradients(names)) == set(WHAT)
    optimizer.step()
    assert hand.gradients(names) == {}


def test_a_restore_takes_away_gradients_that_are_not_stored(tmp_path):
    """They belong to a batch that was never counted."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer, handle_signals=False) as run:
        run.save("clean", wait=True)
        model(torch.ones(1, 2)).sum().backward()
        run.restore("clean")
        assert [p.grad for p in model.parameters()] == [None, None]


def test_a_damaged_checkpoint_leaves_no_gradients_behind(tmp_path):
    """They were put in place before the damage came to light."""

    def open_run():
        model = frozen_in_front(0)
        loader = DataLoader(DATA, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return (
            model,
            loader,
            mp.Checkpointer(tmp_path, every="1ba", model=model, optimizer=optimizer, loader=loader),
        )

    model, loader, run = open_run()
    with run:
        for index, inputs in enumerate(run.batches(loader)):
            if index == 0:
                run.save("clean")
            if index == 1:
                break
            model(inputs).sum().backward()
    assert "gradients" in mp.open_run(tmp_path).get("ba1").load()["state"]
    (part,) = (tmp_path / "ba1").rglob("rng*.safetensors")
    content = bytearray(part.read_bytes())
    content[-100] ^= 1
    part.write_bytes(content)
    model, _, run = open_run()
    with run:
        assert run.resumed_from == "clean"
        assert [p.grad for p in model.parameters()] == [None, None]


def test_stored_gradients_are_taken_only_where_they_fit(caplog):
    """A lenient restore may go into a model of another shape; a stranger may store anything."""
    model = nn.Linear(4, 1)
    names = ParameterNames({"model": model})
    hand = BatchInHand()
    hand.watch(optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], models=[model])
    stored = {"weight": torch.ones(2, 4), "bias": torch.ones(1), "foreign": torch.ones(1)}
    hand.restore_gradients(stored, names)
    assert model.weight.grad is None
    assert torch.equal(model.bias.grad, torch.ones(1))
    assert "gradient of weight" in caplog.text
    assert "left behind: foreign" in caplog.text
    for malformed in ({"weight": 5}, [torch.ones(1)]):
        with pytest.raises(mp.FormatError):
            hand.restore_gradients(malformed, names)
    assert torch.equal(model.bias.grad, torch.ones(1))
