"""What the Trainer copies late is what it would have copied at once, also beside an average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine.barrier import wait_for_copies
from milepost.engine.copying import Copy
from milepost.train import EMA, Algorithm, Event

SIZE = 160  # 100 KiB a matrix


def fit(folder: Path, **options: Any) -> list[Any]:
    """Train five batches of two epochs, saved after each, evaluated with an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE))
    data = [(torch.randn(4, SIZE), torch.randn(4, SIZE)) for _ in range(3)]
    saves: list[Any] = []

    class Noting(mp.Callback):
        def save_started(self, state: Any, pending: Any) -> None:
            saves.append(pending)

    options = {"algorithms": [EMA(0.5)], "callbacks": [Noting()], **options}
    trainer = mp.Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=data,
        eval_interval="1ba",
        optimizers=torch.optim.AdamW(model.parameters()),
        loss_fn=nn.functional.mse_loss,
        max_duration="2ep",
        save_folder=folder,
        save_interval="1ba",
        progress_bar=False,
        seed=3,
        **options,
    )
    trainer.fit()
    trainer.close()
    return saves


def test_late_copies_of_a_trainer_have_the_bytes_of_copies_at_once(tmp_path: Path) -> None:
    """File by file, with an average that is swapped in and out between the saves."""
    for staging in ("eager", "auto"):
        saves = fit(tmp_path / staging, staging=staging)
        late = [one.stats["late_bytes"] > 0 for one in saves]
        assert any(late) == (staging == "auto")
        assert not late[-1]  # the last one is followed by anything
    names = [one.name for one in mp.open_run(tmp_path / "eager").checkpoints()]
    assert len(names) == len(saves) == 6
    for name in names:
        for part in ("model", "optimizers", "algorithms", "rng"):
            file = f"{name}/{part}.safetensors"
            assert (tmp_path / "eager" / file).read_bytes() == (
                tmp_path / "auto" / file
            ).read_bytes(), file


def test_an_algorithm_waits_for_the_copy_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to weights at any event, around every counter."""
    held: list[Copy] = []
    original = Copy.start

    def start(copy: Copy) -> None:
        if copy.is_late:
            held.append(copy)
        original(copy)

    monkeypatch.setattr(Copy, "start", start)

    class Clip(Algorithm):
        def match(self, event: Event, state: Any) -> bool:
            return event is Event.BATCH_START

        def apply(self, event: Event, state: Any) -> None:
            assert all(copy._is_over for copy in held)
            for parameter in state.model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

    saves = fit(tmp_path, algorithms=[Clip()])
    assert held
    assert [one.exception() for one in saves] == [None] * 6
    wait_for_copies()
