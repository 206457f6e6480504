"""A checkpoint says why its state was copied before the save returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import milepost as mp
from milepost.runs.costs import together
from milepost.staging import BY_HAND, EAGER_ASKED, LAST_SAVE, NOTHING_LARGE

SIZE = 256  # 256 KiB a matrix


def test_a_save_says_why_it_was_copied_at_once(tmp_path: Path, caplog: Any) -> None:
    """One who waits for saves must be able to find out what to change."""
    small = nn.Linear(4, 4)
    cases = (
        ({}, {"is_step_next": True}, EAGER_ASKED),
        ({"staging": "auto"}, {}, BY_HAND),
        ({"staging": "auto"}, {"wait": True}, ""),
        ({"staging": "auto"}, {"is_step_next": True, "is_final": True}, LAST_SAVE),
        ({"staging": "overlap"}, {}, ""),
        ({"staging": "overlap", "model": small}, {}, NOTHING_LARGE),
    )
    caplog.set_level("INFO", logger="milepost")
    for number, (options, how, reason) in enumerate(cases):
        model = options.get("model") or nn.Linear(SIZE, SIZE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objects = {"model": model, "optimizer": optimizer, **options}
        with mp.Checkpointer(tmp_path / str(number), handle_signals=False, **objects) as run:
            for _ in range(1 + (reason == NOTHING_LARGE)):  # told once
                saved = run.save(**how).wait()
                assert saved.stats.get("eager_reason", "") == reason
                assert saved.manifest.stats.get("eager_reason", "") == reason
    told = [text for text in caplog.messages if "before the save returned" in text]
    assert told == [f"The whole state was copied before the save returned: {NOTHING_LARGE}."]


def test_a_save_says_what_of_the_state_is_never_copied_late(tmp_path: Path) -> None:
    """The rest of it is, and that it was not all is said too."""
    model = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)])
    model[1].share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.Checkpointer(
        tmp_path, staging="overlap", model=model, optimizer=optimizer, handle_signals=False
    ) as run:
        stats = run.save(wait=True).stats
        assert stats["late_bytes"] == 4 * SIZE * SIZE
        assert stats["eager_reason"] == "tensors in memory that other processes share"


def test_of_several_ranks_the_record_has_the_reason_of_the_first() -> None:
    """Words have no maximum."""
    ranks = [{"late_bytes": 1}, {"eager_reason": "b"}, {"eager_reason": "c", "late_bytes": 2}]
    assert together(ranks) == {"late_bytes": 3, "eager_reason": "b"}
