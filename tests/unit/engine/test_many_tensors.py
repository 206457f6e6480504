"""What saves and loads do for each tensor, counted: nothing that 100,000 would make slow."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import contextmanager

import torch
from torch import nn

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.engine.plan import make_plan
from milepost.engine.read import CheckpointSource
from milepost.state.tracked import Tracked


@contextmanager
def counting():
    """Count calls of Python functions, and calls from Python to others, in this thread.

    The collector is off meanwhile: finalizers of what earlier tests have left are not counted.
    """
    calls = Counter()

    def note(frame, event, arg):
        calls[event] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def new_tracked(num_layers):
    """Layers of two tensors, and an optimizer that keeps three for each of them."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    return tracked, 8 * num_layers


def calls_of_again(num_layers):
    tracked, _ = new_tracked(num_layers)
    plan = make_plan(tracked.capture())
    assert make_plan(tracked.capture(), plan) is plan
    with counting() as calls:
        assert make_plan(tracked.capture(), plan) is plan
    return calls


def test_a_structure_that_stays_costs_no_call_of_ours_a_tensor():
    """Neither a module nor a parameter nor what is kept for it: all are passed over together."""
    few, many = calls_of_again(50), calls_of_again(250)
    added = 8 * 200
    assert many["call"] - few["call"] <= 0.05 * added
    assert many["c_call"] - few["c_call"] <= 0.25 * added


def test_to_find_what_is_owned_costs_no_call_of_ours_a_tensor():
    """It is asked in each save that returns before it is copied."""

    def calls(num_layers):
        tracked, _ = new_tracked(num_layers)
        tracked.owned(with_embeddings=True)
        with counting() as found:
            assert not tracked.owned(with_embeddings=True).num_bytes
        return found

    few, many = calls(50), calls(250)
    added = 8 * 200
    assert many["call"] - few["call"] <= 0.5 * added
    assert many["c_call"] - few["c_call"] <= 1.0 * added


def test_a_table_of_tensors_costs_no_call_a_tensor():
    """As that of an average, or of weights that are kept by hand."""

    def calls(num_tensors):
        state = {f"t{n}": torch.ones(2) for n in range(num_tensors)}
        tracked = Tracked()
        tracked.add("average", mp.Value(lambda: state, lambda value: None))
        plan = make_plan(tracked.capture())
        with counting() as found:
            assert make_plan(tracked.capture(), plan) is plan
        return found

    few, many = calls(100), calls(1_100)
    assert many["call"] - few["call"] <= 10
    assert many["c_call"] - few["c_call"] <= 10


def calls_of_load(folder, num_layers, *, has_optimizer=False):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    objects = {"model": model}
    if has_optimizer:
        objects["optimizer"] = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        objects["optimizer"].step()
    with mp.Checkpointer(folder, handle_signals=False, **objects) as run:
        run.save("a", wait=True)
        with counting() as found:
            run.restore("a", items=list(objects))
    return found


def test_a_load_of_a_plain_module_costs_no_call_of_ours_a_tensor(tmp_path):
    """Its entries are looked at together, and so is what they are read to."""
    few, many = (calls_of_load(tmp_path / str(num), num) for num in (1_000, 1_500))
    added = 500 * 2  # beside tables that are large already: small ones are read in another way
    assert many["call"] - few["call"] <= 0.1 * added
    assert many["c_call"] - few["c_call"] <= 1 * added


def test_a_load_of_an_optimizer_costs_a_few_calls_a_tensor(tmp_path):
    """What it keeps is made anew, and each goes to its parameter."""
    few, many = (calls_of_load(tmp_path / str(num), num, has_optimizer=True) for num in (50, 250))
    added = 200 * 8
    per_tensor = {event: (many[event] - few[event]) / added for event in ("call", "c_call")}
    assert per_tensor["call"] <= 25, per_tensor
    assert per_tensor["c_call"] <= 45, per_tensor


def test_what_was_frozen_and_trained_in_turns_is_planned_anew():
    """And then the new plan is used again."""
    tracked, _ = new_tracked(3)
    plan = make_plan(tracked.capture())
    parameter = next(iter(tracked.models()["model"].parameters()))
    parameter.requires_grad_(False)
    frozen = make_plan(tracked.capture(), plan)
    assert frozen is not plan
    assert {part.is_frozen for part in frozen.parts} == {True, False}
    assert make_plan(tracked.capture(), frozen) is frozen


def test_a_resume_reads_the_tables_of_what_it_compares_once(tmp_path, monkeypatch):
    """It compares before a session is opened, and restores afterwards."""
    model = nn.Linear(2, 2)
    with mp.Checkpointer(tmp_path, model=model, handle_signals=False) as run:
        run.save("a", wait=True)
    read = []
    find = CheckpointSource._table_of_parts
    monkeypatch.setattr(
        CheckpointSource,
        "_table_of_parts",
        lambda self, item: read.append(item) or find(self, item),
    )
    live = nn.Linear(2, 2)
    with mp.Checkpointer(tmp_path, model=live, handle_signals=False) as run:
        assert run.resumed_from == "a"
    assert read.count("model") == 1
    assert torch.equal(live.weight, model.weight)


def test_what_was_compared_is_not_what_is_restored_if_another_took_its_place(tmp_path):
    """A checkpoint is known by its commit, and not by its name."""
    models = [nn.Linear(2, 2) for _ in range(2)]
    for number, model in enumerate(models):
        with mp.Checkpointer(tmp_path / str(number), model=model, handle_signals=False) as run:
            run.save("a", wait=True)
    live = nn.Linear(2, 2)
    resumption = mp.Checkpointer(tmp_path / "live", model=live, handle_signals=False)._resumption
    resumption.check(open_checkpoint(tmp_path / "0" / "a"))
    (tmp_path / "0" / "a").rename(tmp_path / "old")
    (tmp_path / "1" / "a").rename(tmp_path / "0" / "a")
    resumption.resume(open_checkpoint(tmp_path / "0" / "a"))
    assert torch.equal(live.weight, models[1].weight)
