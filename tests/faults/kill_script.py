"""A training to be killed: says aloud which checkpoints were acknowledged, and goes on.

python kill_script.py RUN ACKNOWLEDGED RESULT KEEP BULK

KEEP is how many checkpoints are kept, 0 for all. BULK is how many numbers the model holds beside
its weights, which change with every batch: for parts that are sent in several pieces.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp

EPOCHS = 4
BATCHES = 25


def build(
    bulk: int,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, 4)
    )
    if bulk:
        model.register_buffer("bulk", torch.zeros(bulk))
    inputs = torch.randn(BATCHES * 8, 16)
    targets = torch.randint(0, 4, (BATCHES * 8,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader


def main(folder: str, acknowledged: str, result: str, keep: str, bulk: str) -> None:
    torch.set_num_threads(1)
    model, optimizer, loader = build(int(bulk))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
    losses: list[float] = []
    with (
        Path(acknowledged).open("a") as log,
        mp.Checkpointer(
            folder,
            keep=[mp.KeepLast(int(keep))] if int(keep) else [],
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            losses=mp.Value(lambda: list(losses), losses.extend),
        ) as run,
    ):
        for _ in run.epochs(EPOCHS):
            for inputs, targets in run.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                if int(bulk):
                    model.bulk += loss.detach()
                losses.append(loss.item())
                if run.timer.batch % 3 == 1:
                    name = run.save().wait().name
                    log.write(f"{name}\n")
                    log.flush()
                    os.fsync(log.fileno())
    torch.save({"model": model.state_dict(), "losses": losses}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
