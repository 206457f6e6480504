"""What compressing parts is worth: how small a trained state becomes, how fast, and when auto does.

The state is that of a model of bytes that has learned for a while, with the moments of AdamW: what
random numbers become says little about what trained ones do. It reads this repository's own text.
The slow place is the disk made slower.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from figures import Figures
from intervals import SlowStore
from torch import nn

from milepost import Checkpointer
from milepost.stores import LocalStore

__all__ = ["METHODS", "SLOW_BYTES_S", "compression_of_a_trained_state"]

METHODS = ("zstd", "lz4")
SLOW_BYTES_S = 150e6
_CONTEXT, _WIDTH, _NUM_SAMPLES, _NUM_STEPS = 16, 1536, 128, 120
_NUM_SAVES = 5
"""How many saves are one figure: a single one takes hundredths of a second."""
_NUM_WARM = 3
"""Saves without which auto knows nothing."""

_ROOT = Path(__file__).parents[1]


class _Bytes(nn.Module):
    """Guesses a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.layers = nn.Sequential(
            nn.Linear(_CONTEXT * 64, _WIDTH),
            nn.GELU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.GELU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.GELU(),
            nn.Linear(_WIDTH, 256),
        )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        guess: torch.Tensor = self.layers(self.embedding(context).flatten(1))
        return guess


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that has learned for a while, and its optimizer."""
    torch.manual_seed(0)
    paths = sorted([*_ROOT.glob("docs/**/*.md"), *_ROOT.glob("src/**/*.py")])
    text = torch.tensor(list(b"".join(path.read_bytes() for path in paths)[:2_000_000]))
    model = _Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_NUM_STEPS):
        at = torch.randint(0, len(text) - _CONTEXT - 1, (_NUM_SAMPLES,))
        context = torch.stack([text[one : one + _CONTEXT] for one in at])
        nn.functional.cross_entropy(model(context), text[at + _CONTEXT]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def compression_of_a_trained_state(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure compressed saves.

    Returns:
        ``zstd ratio`` and ``zstd rate`` (bytes a second of two threads) and so on; and for the
        disk and the slow place the seconds of a save with each setting, ``auto, slow`` and so on.
    """
    model, optimizer = trained()
    figures = Figures()
    runs: dict[str, Checkpointer] = {}
    for place in ("disk", "slow"):
        for setting in ("off", "auto", *METHODS):
            name = f"{setting}, {place}"
            store: Any = LocalStore(folder / name)
            store = SlowStore(store, SLOW_BYTES_S) if place == "slow" else store
            runs[name] = Checkpointer(
                store,
                save_compression="" if setting == "off" else setting,
                model=model,
                optimizer=optimizer,
                handle_signals=False,
            ).open()
    try:
        for index in range(-1, rounds):
            took_s = dict.fromkeys(runs, 0.0)
            for count in range(_NUM_WARM if index < 0 else _NUM_SAVES):
                for name, run in runs.items():
                    took_s[name] += _save(run, f"save{index}.{count}") / _NUM_SAVES
                    _keep_one(folder / name, f"save{index}.{count}")
                with torch.no_grad():  # the next ones differ
                    for parameter in model.parameters():
                        parameter.mul_(1 + 1e-4)
            if index >= 0:
                figures.add_round(took_s)
                _add_codecs(figures, runs)
    finally:
        for run in runs.values():
            run.close()
    return figures, _stats(runs["off, disk"])["state_bytes"]


def _save(run: Checkpointer, name: str) -> float:
    """Return how long a save took until it was committed."""
    started_s = time.perf_counter()
    run.save(name).wait()
    return time.perf_counter() - started_s


def _keep_one(folder: Path, name: str) -> None:
    """Remove all checkpoints of a run but one."""
    for old in folder.glob("save*"):
        if old.name != name:
            shutil.rmtree(old)


def _stats(run: Checkpointer) -> Any:
    assert run.last_save is not None
    return run.last_save.stats


def _add_codecs(figures: Figures, runs: Mapping[str, Checkpointer]) -> None:
    """Add how small the last saves became, and how fast."""
    for setting in METHODS:
        for place in ("disk", "slow"):
            stats = _stats(runs[f"{setting}, {place}"])
            plain_bytes = stats["compressed_from_bytes"]
            figures.add(f"{setting} ratio", stats["compressed_to_bytes"] / plain_bytes)
            figures.add(f"{setting} rate", 2 * plain_bytes / stats["compress_s"])
