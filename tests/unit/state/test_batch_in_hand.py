"""Saving within a batch, and between accumulated ones: state and progress always agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.testing.asserts import assert_equal_states


def new(seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    return model, DataLoader(TensorDataset(torch.arange(1.0, 13.0)), 1, shuffle=True)


def items(folder):
    return {one.name: set(one.manifest.items) for one in mp.open_run(folder).checkpoints()}


def test_a_plain_loop_stores_no_gradients(tmp_path):
    """They are stale after the step, wherever zero_grad stands, and would double the file."""
    for kind in ("before", "after", "to zero"):
        model, loader = new()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with mp.Checkpointer(
            tmp_path / kind, every="1ba", model=model, optimizer=optimizer, loader=loader
        ) as run:
            for (value,) in run.batches(loader):
                if kind != "after":
                    optimizer.zero_grad(set_to_none=kind == "before")
                model(value).sum().backward()
                optimizer.step()
                if kind == "after":
                    optimizer.zero_grad()
        assert all("gradients" not in one for one in items(tmp_path / kind).values())


@pytest.mark.parametrize("by", [2, 3])
@pytest.mark.parametrize("cut", [1, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_go_on(tmp_path, by, cut, set_to_none):
    """Half of a step is state too."""

    def life(folder, *, seed, until=None):
        model, loader = new(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with mp.Checkpointer(
            folder, every=f"{cut}ba", model=model, optimizer=optimizer, loader=loader
        ) as run:
            for _ in run.epochs(1):
                for (value,) in run.batches(loader):
                    if run.timer.batch == until:
                        return None
                    model(value).square().sum().backward()
                    if (run.timer.batch + 1) % by == 0:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=set_to_none)
        return dict(model.state_dict()), optimizer.state_dict()

    straight = life(tmp_path / "straight", seed=1)
    life(tmp_path / "a", seed=1, until=cut)
    assert ("gradients" in items(tmp_path / "a")[f"ba{cut}"]) or cut % by == 0
    resumed = life(tmp_path / "a", seed=8)
    assert_equal_states(resumed, straight)


@pytest.mark.parametrize("cut", [1, 2])
def test_two_optimizers_with_rhythms_of_their_own_go_on(tmp_path, cut):
    """One steps on every batch, the other collects gradients over three."""

    def life(folder, *, seed, until=None):
        model, loader = new(seed)
        often = torch.optim.SGD(model[0].parameters(), lr=0.01)
        seldom = torch.optim.SGD(model[1].parameters(), lr=0.01)
        with mp.Checkpointer(
            folder, every=f"{cut}ba", model=model, often=often, seldom=seldom, loader=loader
        ) as run:
            for _ in run.epochs(1):
                for (value,) in run.batches(loader):
                    if run.timer.batch == until:
                        return None
                    often.zero_grad()
                    model(value).square().sum().backward()
                    often.step()
                    if (run.timer.batch + 1) % 3 == 0:
                        seldom.step()
                        seldom.zero_grad()
        return dict(model.state_dict())

    straight = life(tmp_path / "straight", seed=1)
    life(tmp_path / "a", seed=1, until=cut)
    assert_equal_states(life(tmp_path / "a", seed=8), straight)


@pytest.mark.parametrize("place", ["begin", "end"])
@pytest.mark.parametrize("kind", ["indexed", "list"])
def test_a_save_in_the_body_is_exact_at_its_begin_and_at_its_end(tmp_path, place, kind):
    """Before anything was computed it is the state of the batch before; after the step, of this."""

    def life(folder, *, seed, until=None):
        model, loader = new(seed)
        if kind == "list":
            loader = [(torch.full((1, 1), float(n)),) for n in range(12)]
        model = nn.Sequential(model, nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = []
        with mp.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader) as run:
            for _ in run.epochs(1):
                for (value,) in run.batches(loader):
                    if place == "begin" and run.timer.batch == until:
                        run.save("cut", wait=True)
                        return seen, None
                    seen.append(value.tolist())
                    optimizer.zero_grad()
                    model(value).square().sum().backward()
                    optimizer.step()
                    if place == "end" and run.timer.batch + 1 == until:
                        run.save("cut", wait=True)
                        return seen, None
        return seen, dict(model.state_dict())

    straight = life(tmp_path / "straight", seed=1)
    first, _ = life(tmp_path / "a", seed=1, until=5)
    saved = mp.open_run(tmp_path / "a").get("cut")
    assert saved.time["batch"] == len(first) == 5
    rest, end = life(tmp_path / "a", seed=8)
    assert first + rest == straight[0]
    assert_equal_states(end, straight[1])


def test_a_loop_that_goes_on_after_a_save_in_its_body_counts_as_before(tmp_path):
    """Saving is no step of the training."""
    model, loader = new()
    counts = []
    with mp.Checkpointer(tmp_path, every="2ba", model=model, loader=loader) as run:
        for _ in run.epochs(1):
            for _ in run.batches(loader):
                run.save(f"in{run.timer.batch}")
                counts.append(run.timer.batch)
    assert counts == list(range(12))
    assert mp.open_run(tmp_path).latest().time["batch"] == 12
    assert run.timer.sample == 12


def test_leaving_the_loop_early_ends_the_epoch(tmp_path):
    """Limits on the batches of an epoch are a common thing."""

    def life(folder, *, seed, until=None):
        model, loader = new(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        with mp.Checkpointer(
            folder, every="1ep", model=model, optimizer=optimizer, loader=loader
        ) as run:
            for epoch in run.epochs(3):
                if epoch == until:
                    return seen, None
                for number, (value,) in enumerate(run.batches(loader)):
                    if number == 4:
                        break
                    seen.append(int(value))
                    optimizer.zero_grad()
                    model(value).square().sum().backward()
                    optimizer.step()
        return seen, dict(model.state_dict())

    straight = life(tmp_path / "straight", seed=1)
    assert len(straight[0]) == 12
    first, _ = life(tmp_path / "a", seed=1, until=1)
    assert mp.open_run(tmp_path / "a").latest().time["batch"] == 4
    rest, end = life(tmp_path / "a", seed=8)
    assert first + rest == straight[0]
    assert_equal_states(end, straight[1])
