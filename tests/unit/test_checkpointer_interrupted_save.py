"""An interrupt at any line of a save: nothing waits for ever for what it has left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import Self

import milepost as mp
from milepost.engine import filled, save
from milepost.engine.save import Saver

MIB = 1024 * 1024
CODES: tuple[CodeType, ...] = (Saver.save.__code__, Saver._begin.__code__)
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "at once": ({}, False),
    "waited for": ({}, True),
    "late": ({"staging": "overlap"}, False),
    "streamed": ({"staging_budget_bytes": 32 * MIB}, False),
}


class Interrupt:
    """Interrupts this thread the first time that it comes to a line of a save.

    Args:
        line: Of which function, and its number; ``None`` only notes which lines it comes to.
    """

    def __init__(self, line: tuple[CodeType, int] | None) -> None:
        self.line = line
        self.seen: list[tuple[CodeType, int]] = []

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in CODES:
            return None
        here = (frame.f_code, frame.f_lineno)
        if event == "line":
            self.seen.append(here)
            if here == self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_any_line_of_a_save_leaves_the_next_one_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The process goes on for a last save, and must neither wait for ever nor lose it."""
    monkeypatch.setattr(save, "_LONGEST_SAVE_S", 5.0)
    monkeypatch.setattr(filled, "_STALLED_S", 5.0)
    options, wait = MODES[mode]
    width = 3000 if mode == "streamed" else 200
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, handle_signals=False, **options
    ) as run:
        run.save("first", wait=True)
        with Interrupt(None) as looked:
            run.save("second", wait=wait)
        run.wait()
        lines = list(dict.fromkeys(looked.seen))
        assert {code for code, _ in lines} == set(CODES)
        for number, line in enumerate(lines):
            with pytest.raises(KeyboardInterrupt), Interrupt(line):
                run.save(f"cut{number}", wait=wait)
            with torch.no_grad():
                model[1].weight.fill_(float(number))
            last = run.save(f"next{number}", wait=True).wait()
            assert torch.equal(last.load({"model"})["state"]["model"]["1.weight"], model[1].weight)
