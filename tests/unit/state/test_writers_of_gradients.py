"""What a batch has changed is seen whoever changed it, and wherever in the loop it was done."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.testing.asserts import assert_equal_states


class StopHereError(Exception):
    """Ends a training where the test wants it."""


DATA = torch.arange(48.0).view(12, 4) / 50


def accumulate(model, optimizer, number):
    model(DATA[number % 12]).square().sum().backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


def delay(model, optimizer, number):
    """Step with the gradients of the batch before."""
    if number and number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    model(DATA[number % 12]).square().sum().backward()


def plain(model, optimizer, number):
    optimizer.zero_grad()
    model(DATA[number % 12]).square().sum().backward()
    optimizer.step()


def life(folder, body, *, how, until=None):
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(DATA, batch_size=1)
    objects = {"loader": loader} if how == "batches" else {}
    with mp.Checkpointer(folder, every="1ba", model=model, optimizer=optimizer, **objects) as run:
        if how == "step":
            while run.timer < "12ba":
                if run.timer.batch == until:
                    return None
                body(model, optimizer, run.timer.batch)
                run.step()
        else:
            for _ in run.epochs(1):
                for _ in run.batches(loader):
                    if run.timer.batch == until:
                        return None
                    body(model, optimizer, run.timer.batch)
    return dict(model.state_dict())


@pytest.mark.parametrize("how", ["step", "batches"])
@pytest.mark.parametrize("body", [accumulate, delay])
def test_gradients_that_a_later_batch_uses_go_on(tmp_path, body, how):
    """Whether a step came before them in the same batch, and who counts, makes no difference."""
    straight = life(tmp_path / "straight", body, how=how)
    life(tmp_path / "a", body, how=how, until=3)
    assert "gradients" in mp.open_run(tmp_path / "a").latest().manifest.items
    assert_equal_states(life(tmp_path / "a", body, how=how), straight)


def test_a_loop_of_ones_own_stores_no_gradients_that_a_step_left(tmp_path):
    """They are stale, and would double the file."""
    life(tmp_path, plain, how="step")
    for checkpoint in mp.open_run(tmp_path).checkpoints():
        assert "gradients" not in checkpoint.manifest.items


@pytest.mark.parametrize("change", ["exchanged", "appended"])
def test_gradients_of_parameters_that_come_within_a_group_go_on(tmp_path, change):
    """Pruning, growing and unfreezing do not add groups."""

    def changed(model, optimizer):
        parameters = optimizer.param_groups[0]["params"]
        if change == "exchanged":
            model[0].weight = nn.Parameter(torch.cat([model[0].weight.detach()] * 2)[:4] / 2)
            parameters[0] = model[0].weight
        else:
            parameters.extend(model[1].parameters())

    def train(folder, *, until=None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        is_changed = folder.exists()
        if is_changed:
            changed(model, optimizer)
        loader = DataLoader(DATA, batch_size=1)
        with mp.Checkpointer(
            folder, every="1ba", model=model, optimizer=optimizer, loader=loader
        ) as run:
            for _ in run.epochs(1):
                for batch in run.batches(loader):
                    if run.timer.batch == until:
                        return None
                    if run.timer.batch == 4 and not is_changed:
                        model.zero_grad()
                        changed(model, optimizer)
                    model(batch).square().sum().backward()
                    if run.timer.batch % 4 == 3:
                        optimizer.step()
                        model.zero_grad()
        return dict(model.state_dict())

    straight = train(tmp_path / "straight")
    train(tmp_path / "a", until=6)
    assert_equal_states(train(tmp_path / "a"), straight)


def by_hand(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    model.zero_grad()


def through_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad.data


def by_an_untracked_optimizer(model, optimizer):
    optimizer.step()


def by_another_weight(model, optimizer):
    model.weight = nn.Parameter(model.weight.detach() - 0.1 * model.weight.grad)
    model.zero_grad()


@pytest.mark.parametrize(
    "update", [by_hand, through_data, by_an_untracked_optimizer, by_another_weight]
)
@pytest.mark.parametrize("end", ["save", "error"])
def test_an_update_that_no_hook_tells_of_is_not_done_twice(tmp_path, update, end):
    """Not every update is the step of an optimizer that is tracked."""

    def train(folder, *, until=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(DATA, batch_size=2)
        with mp.Checkpointer(folder, every="2ba", model=model, loader=loader) as run:
            for _ in run.epochs(1):
                for batch in run.batches(loader):
                    model.zero_grad()
                    model(batch).square().sum().backward()
                    update(model, optimizer)
                    if run.timer.batch == until:
                        if end == "save":
                            run.save("cut", wait=True)
                            return None
                        raise StopHereError
        return dict(model.state_dict())

    straight = train(tmp_path / "straight")
    try:
        train(tmp_path / "a", until=3)
    except StopHereError:
        assert mp.open_run(tmp_path / "a").latest().name == "ba2"
    else:
        assert mp.open_run(tmp_path / "a").latest().time["batch"] == 4
    assert_equal_states(train(tmp_path / "a"), straight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_save_after_nothing_but_zero_grad_loses_no_batch(tmp_path, set_to_none):
    """Nothing was computed from the batch, so that it is trained after the resume."""

    def train(folder, *, until=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(DATA, batch_size=2)
        with mp.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader) as run:
            for _ in run.epochs(1):
                for batch in run.batches(loader):
                    optimizer.zero_grad(set_to_none=set_to_none)
                    if run.timer.batch == until:
                        run.save("cut", wait=True)
                        return None
                    model(batch).square().sum().backward()
                    optimizer.step()
        return dict(model.state_dict())

    straight = train(tmp_path / "straight")
    train(tmp_path / "a", until=3)
    saved = mp.open_run(tmp_path / "a").get("cut")
    assert saved.time["batch"] == 3
    assert "gradients" not in saved.manifest.items
    assert_equal_states(train(tmp_path / "a"), straight)


class Counting(nn.Module):
    """Has a buffer, or a module with one, only once it has seen a batch."""

    def __init__(self, late):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.late = late

    def forward(self, value):
        if self.late == "buffer" and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(()))
        if self.late == "module" and not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(4, affine=False)
        if self.late == "buffer":
            self.seen += 1
            return self.linear(value)
        return self.norm(self.linear(value))


@pytest.mark.parametrize("late", ["buffer", "module"])
@pytest.mark.parametrize("by", ["checkpointer", "trainer"])
def test_a_buffer_that_came_with_the_first_batch_is_watched(tmp_path, late, by):
    """An error after the forward pass leaves half a batch in it."""
    torch.manual_seed(1)
    model = Counting(late)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by == "checkpointer":
        loader = DataLoader(DATA, batch_size=2)
        with (
            pytest.raises(StopHereError),
            mp.Checkpointer(
                tmp_path, every="2ba", model=model, optimizer=optimizer, loader=loader
            ) as run,
        ):
            for _ in run.epochs(1):
                for batch in run.batches(loader):
                    loss = model(batch).square().mean()
                    if run.timer.batch == 3:
                        raise StopHereError
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    else:

        def loss_of(outputs, targets):
            if trainer.state.timer.batch == 3:
                raise StopHereError
            return (outputs - targets).square().mean()

        trainer = mp.Trainer(
            model=model,
            loss_fn=loss_of,
            optimizers=optimizer,
            train_dataloader=DataLoader(TensorDataset(DATA, DATA), batch_size=2),
            max_duration="1ep",
            save_folder=tmp_path,
            save_interval="2ba",
            progress_bar=False,
        )
        with pytest.raises(StopHereError):
            trainer.fit()
        trainer.close()
    assert mp.open_run(tmp_path).latest().name == "ba2"
