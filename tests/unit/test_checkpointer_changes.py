"""What changed between two starts of a run is told or refused, and never passed over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import milepost as mp


def save_twice(folder: Path, save_format: str = "milepost") -> None:
    model = nn.Linear(2, 2)
    with mp.Checkpointer(folder, save_format=save_format, model=model) as run:
        for _ in range(2):
            run.step(num_samples=1)
            run.save(wait=True)


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_a_lost_run_record_makes_no_other_run(tmp_path: Path, save_format: str) -> None:
    """A fresh identity would leave every checkpoint behind, as one of another run."""
    save_twice(tmp_path, save_format)
    next(tmp_path.rglob("run.json")).unlink()
    with mp.Checkpointer(tmp_path, save_format=save_format, model=nn.Linear(2, 2)) as run:
        assert run.resumed_from == "ba2"
        run.step(num_samples=1)
        run.save(wait=True)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints()] == ["ba1", "ba2", "ba3"]


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_a_lost_run_record_does_not_change_the_layout(tmp_path: Path, save_format: str) -> None:
    """Folders would be mixed with single files, each with a lineage of its own."""
    save_twice(tmp_path, save_format)
    next(tmp_path.rglob("run.json")).unlink()
    other = {"milepost": "torch", "torch": "milepost"}[save_format]
    with pytest.raises(mp.UsageError, match=save_format):
        mp.Checkpointer(tmp_path, save_format=other, model=nn.Linear(2, 2)).open()


def test_checkpoints_beside_the_record_of_another_run_are_refused(tmp_path: Path) -> None:
    """A start from the beginning would waste what was trained, and nobody would look at the log."""
    save_twice(tmp_path / "a")
    save_twice(tmp_path / "b")
    shutil.copy(tmp_path / "b/run.json", tmp_path / "a/run.json")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with pytest.raises(mp.MismatchError, match="another run"):
        mp.Checkpointer(tmp_path / "a", model=nn.Linear(2, 2)).open()
    assert set(before) <= {path.name for path in (tmp_path / "a").iterdir()}


def test_a_checkpoint_that_was_copied_alone_is_not_passed_over(tmp_path: Path) -> None:
    """Readers see it, so a writer must not begin anew beside it."""
    save_twice(tmp_path / "a")
    shutil.copytree(tmp_path / "a/ba2", tmp_path / "b/ba2")
    with pytest.raises(mp.IncompleteError, match="sessions/"):
        mp.Checkpointer(tmp_path / "b", model=nn.Linear(2, 2)).open()


OPTIMIZERS = {
    "another kind of optimizer": (torch.optim.RAdam, StepLR),
    "one that keeps other things": (torch.optim.SGD, StepLR),
    "another kind of schedule": (torch.optim.AdamW, ExponentialLR),
}


@pytest.mark.parametrize(("optimizer", "schedule"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_objects_of_another_class_are_refused(
    tmp_path: Path, optimizer: Any, schedule: Any
) -> None:
    """Moments of one optimizer load into another, and mean something else there."""

    def start(optimizer: Any, schedule: Any, **options: Any) -> mp.Checkpointer:
        model = nn.Linear(2, 2)
        made = optimizer(model.parameters(), lr=0.1)
        args = {StepLR: (3,), ExponentialLR: (0.9,)}[schedule]
        scheduler = schedule(made, *args)
        group = {"first": scheduler}
        return mp.Checkpointer(tmp_path, model=model, optimizer=made, group=group, **options)

    with start(torch.optim.AdamW, StepLR) as run:
        run.save("first", wait=True)
    with pytest.raises(mp.MismatchError, match="class") as caught:
        start(optimizer, schedule).open()
    wanted = "optimizer" if optimizer is not torch.optim.AdamW else "group/first"
    assert f"{wanted} is of the class" in str(caught.value)
    with start(torch.optim.AdamW, StepLR) as run:
        assert run.resumed_from == "first"


def test_modes_and_frozen_parameters_come_back(tmp_path: Path) -> None:
    """A loop that freezes a layer in its third epoch does not do so again in the fourth."""

    def start() -> tuple[mp.Checkpointer, nn.Sequential]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
        model[0].weight.requires_grad_(False)
        return mp.Checkpointer(tmp_path, model=model), model

    checkpointer, model = start()
    with checkpointer as run:
        model[0].weight.requires_grad_(True)
        model[0].bias.requires_grad_(False)
        model[1][0].eval()
        run.save("changed", wait=True)
    checkpointer, model = start()
    with checkpointer as run:
        assert [module.training for module in model.modules()] == [True, True, True, False, True]
        assert [one.requires_grad for one in model.parameters()] == [True, False, True, True]
        assert run.load_report is not None
        told = " ".join(run.load_report.notes)
        assert "1.0" in told
        assert "0.weight is not frozen, 0.bias is frozen" in told
    checkpointer, model = start()
    model.eval()
    with checkpointer:
        assert [module.training for module in model.modules()] == [True, True, True, False, True]


def test_the_mode_of_a_whole_model_is_restored_in_silence(tmp_path: Path) -> None:
    """A checkpoint after a validation is one of a model in eval mode; loops change that anyway."""
    with mp.Checkpointer(tmp_path, model=nn.Linear(2, 2).eval()) as run:
        run.save("first", wait=True)
    model = nn.Linear(2, 2)
    with mp.Checkpointer(tmp_path, model=model) as run:
        assert not model.training
        assert run.load_report is not None
        assert run.load_report.notes == []


def test_two_entries_of_one_clean_name_are_refused(tmp_path: Path) -> None:
    """One of the two would be lost."""
    inner = nn.Module()
    inner.register_parameter("weight", nn.Parameter(torch.ones(1)))
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    model.layer.add_module("_orig_mod_", inner)
    model.layer._modules["_orig_mod"] = model.layer._modules.pop("_orig_mod_")
    with (
        mp.Checkpointer(tmp_path, model=model) as run,
        pytest.raises(mp.UnsupportedStateError, match="_orig_mod"),
    ):
        run.save("first", wait=True)
    assert mp.open_run(tmp_path).checkpoints() == []


def test_a_lost_session_record_does_not_stop_the_next_start(tmp_path: Path) -> None:
    """Its number is taken by the record that is left; nothing was published that could count."""
    mp.Checkpointer(tmp_path, model=nn.Linear(2, 2)).open().close()
    (tmp_path / "sessions/00000001.json").unlink()
    with mp.Checkpointer(tmp_path, model=nn.Linear(2, 2)) as run:
        run.step(num_samples=1)
        assert run.save(wait=True).wait().manifest.session == 2
    assert mp.open_run(tmp_path).latest().name == "ba1"
