"""What the trainer takes for each argument, and what it says to all else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchmetrics import MeanSquaredError

import milepost as mp
from milepost.errors import MissingError, UsageError
from milepost.train import EMA, EarlyStop, Evaluator


@pytest.mark.parametrize("name", ["callbacks", "algorithms", "schedulers", "keep"])
@pytest.mark.parametrize("form", ["one", "list", "tuple", "iterator", "none"])
def test_one_several_or_none_will_do(make, tmp_path, loader_of, name, form) -> None:
    """Nobody remembers which of the arguments wants a list."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    one = {
        "callbacks": EarlyStop("Loss", mode="min"),
        "algorithms": EMA(0.5),
        "schedulers": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "keep": mp.KeepLast(1),
    }[name]
    given = {"one": one, "list": [one], "tuple": (one,), "iterator": iter([one]), "none": None}
    trainer = make(
        model=model,
        optimizers=optimizer,
        save_folder=tmp_path,
        eval_dataloader=loader_of(4),
        **{name: given[form]},
    )
    trainer.fit()
    held = ["ep2"] if form != "none" else ["ep1", "ep2"]
    if name == "keep":
        assert [c.name for c in mp.open_run(tmp_path).checkpoints()] == held
    else:
        assert getattr(trainer.state, name) == ([] if form == "none" else [one])


@pytest.mark.parametrize("name", ["callbacks", "algorithms", "schedulers", "keep", "optimizers"])
@pytest.mark.parametrize("value", [3, "text", {"a": 1}, {1}, [3], int, [EarlyStop]])
def test_what_cannot_do_its_part_is_named(make, tmp_path, name, value) -> None:
    """An attribute error from within would not say which argument was meant."""
    with pytest.raises(UsageError, match=name):
        make(save_folder=tmp_path, **{name: value})


def test_a_list_that_is_set_later_is_looked_at_too(make) -> None:
    """A callback may put one there."""
    trainer = make()
    with pytest.raises(UsageError, match="EarlyStop"):
        trainer.state.callbacks = EarlyStop


@pytest.mark.parametrize("value", [3, {"loader": []}, {"dataloader": [], "samples": 1}])
def test_what_is_no_loader_is_refused_at_the_start(make, value) -> None:
    """Not at the first evaluation, an epoch later."""
    with pytest.raises(UsageError, match=r"dataloader|loader"):
        make(eval_dataloader=value)
    with pytest.raises(UsageError, match=r"dataloader|loader"):
        make(train_dataloader=value)


@pytest.mark.parametrize("as_set", [False, True])
def test_several_loaders_need_labels(make, loader_of, as_set) -> None:
    """A list of loaders would be taken for batches."""
    given = {Evaluator("a", loader_of(4))} if as_set else [loader_of(4), loader_of(4)]
    with pytest.raises(UsageError):
        make(eval_dataloader=given)


@pytest.mark.parametrize("metrics", [3, MeanSquaredError, "mse"])
def test_what_is_no_metric_is_named(make, loader_of, metrics) -> None:
    """As for everything else."""
    with pytest.raises(UsageError, match="torchmetrics"):
        make(eval_dataloader=loader_of(4), eval_metrics=metrics)


def test_bytes_are_no_interval(make, tmp_path) -> None:
    """They were taken for a list of numbers of epochs."""
    with pytest.raises(UsageError, match="not a time"):
        make(save_folder=tmp_path, save_interval=b"1ep")


@pytest.mark.parametrize("options", [{"save_folder": 3}, {"save_folder": "a", "run_name": 3}])
def test_folders_and_names_are_text(make, options) -> None:
    """Numbers are a slip."""
    with pytest.raises(UsageError, match="3"):
        make(**options)


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("form", ["path", "checkpoint", "run"])
def test_paths_and_handles_name_what_to_load(
    make, tmp_path, save_format, weights_only, form
) -> None:
    """What open_run returns is a checkpoint as good as its path."""
    first = make(save_folder=tmp_path / "a", save_format=save_format, max_duration="3ba")
    first.fit()
    run = mp.open_run(tmp_path / "a")
    place = {"path": tmp_path / "a" / "ba3", "checkpoint": run.get("ba3"), "run": run}[form]
    trainer = make(load_path_format=place, load_weights_only=weights_only)
    assert trainer.state.timer.batch == (0 if weights_only else 3)
    assert torch.equal(trainer.state.model.weight, first.state.model.weight)


@pytest.mark.parametrize("form", ["checkpoint", "run"])
def test_a_handle_on_the_same_run_goes_on_from_it(make, tmp_path, form) -> None:
    """As its path does: what came after is off the lineage."""
    make(save_folder=tmp_path, save_interval="5ba", max_duration="10ba").fit()
    run = mp.open_run(tmp_path)
    place = {"checkpoint": run.get("ba5"), "run": run}[form]
    trainer = make(save_folder=tmp_path, load_path_format=place, max_duration="11ba")
    assert trainer.state.timer.batch == {"checkpoint": 5, "run": 10}[form]
    trainer.fit()
    names = [checkpoint.name for checkpoint in mp.open_run(tmp_path).checkpoints()]
    assert names == ["ba5", {"checkpoint": "ep1-s2", "run": "ep1"}[form], "ba11"]


@pytest.mark.parametrize("value", [3, b"/a", object, ["a"]])
def test_what_names_no_checkpoint_is_refused(make, value) -> None:
    """With what would do."""
    with pytest.raises(UsageError, match=r"load_path_format.*Path"):
        make(load_path_format=value)


def test_an_empty_run_has_nothing_to_load(make, tmp_path) -> None:
    """The message names the run."""
    make(save_folder=tmp_path).close()
    with pytest.raises(MissingError, match=str(tmp_path)):
        make(load_path_format=mp.open_run(tmp_path))


def test_a_handle_is_not_downloaded(make, tmp_path) -> None:
    """It is no name of an object."""
    make(save_folder=tmp_path, max_duration="1ba").fit()
    with pytest.raises(UsageError, match="load_object_store"):
        make(load_path_format=mp.open_run(tmp_path), load_object_store=object())


@pytest.mark.parametrize("pattern", ["{nope}", "{eval/nope:.3f}", "{MeanSquaredError:.3f}"])
def test_a_name_that_no_checkpoint_can_have_is_refused(make, tmp_path, loader_of, pattern) -> None:
    """Which metrics there are is known when the trainer is made."""
    options = {"save_folder": tmp_path, "eval_dataloader": loader_of(4)}
    with pytest.raises(UsageError, match=r"batch, .*loss, Loss, eval/Loss"):
        make(save_name_format=pattern, **options)
    assert not any(Path(tmp_path).iterdir())


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{name}-{loss:.0f}", "ba2-"),
        ("{eval/MeanSquaredError:.0f}-{batch}", "-2"),
        ("{MeanSquaredError:.0f}-{batch}", "-2"),
    ],
)
def test_metrics_of_the_training_may_stand_in_names(
    make, tmp_path, loader_of, pattern, name
) -> None:
    """Those of the loss, and those of evaluators with and without the label."""
    trainer = make(
        save_folder=tmp_path,
        save_name_format=pattern,
        eval_dataloader=loader_of(4),
        eval_metrics=MeanSquaredError(),
        eval_interval="2ba",
        max_duration="2ba",
    )
    trainer.fit()
    (saved,) = trainer.saved_checkpoints
    assert name in saved
    assert "nan" not in saved


def test_an_optimizer_that_computes_the_loss_itself_is_refused_at_the_start(make) -> None:
    """And not by a TypeError in the first step."""
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="step of LBFGS needs a closure"):
        make(model=model, optimizers=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="needs an optimizer"):
        make(model=model, optimizers=[])
