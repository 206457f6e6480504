"""With ``copy_check="full"`` a write around the version counter ends in no checkpoint, at any time.

The committed bytes are those at the moment of the save, or the save fails and names the tensor.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine.copying import Copy

BLOCK = 8 * 1024 * 1024
WIDTH = 2400  # 22 MiB: pieces that end where blocks do, three or four


class Loop:
    """A model of one large weight, and a run that copies it late."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bytes = self.model.weight.data.view(torch.uint8).view(-1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = mp.Checkpointer(
            folder,
            staging="overlap",
            copy_check="full",
            on_save_error="warn",
            max_failed_saves=100,
            handle_signals=False,
            model=self.model,
            optimizer=self.optimizer,
        )

    def write(self, offset: int) -> None:
        """Change one byte around the version counter."""
        version = self.model.weight._version
        self.bytes[offset] += 1
        assert self.model.weight._version == version

    def save_and_step(self, *, meanwhile: Callable[[], None]) -> bool:
        """Save and step; return whether the save was committed, after a look at what it holds."""
        before = self.model.weight.detach().clone()
        pending = self.run.save()
        meanwhile()
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()
        assert pending.stats.get("late_bytes", 1)
        error = pending.exception(60)
        if error is not None:
            assert isinstance(error, mp.StateChangedError)
            assert "model/weight" in str(error)
            return False
        saved = pending.wait().load(["model"])["state"]["model"]["weight"]
        assert torch.equal(saved.view(torch.uint8), before.view(torch.uint8))
        return True


@pytest.mark.parametrize(
    ("moment", "offset", "is_harmless"),
    [
        (0, 5, False),
        (0, -1, False),
        (1, -1, False),
        (1, 5, True),
        (2, 5, True),
        (2, -1, False),
        (3, 5, True),
        (4, 5, True),
        (4, -1, True),
    ],
)
def test_a_write_is_found_until_its_piece_was_copied_and_harmless_from_then_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: int,
    offset: int,
    *,
    is_harmless: bool,
) -> None:
    """Moments: 0 before the first piece, then after each piece, 4 when nobody copies any more."""
    reach, copied, go = Copy._reach, [0], threading.Event()
    loop = Loop(tmp_path)

    def stepping(copy: Copy, stop_bytes: int) -> None:
        copied[0] += 1
        if copied[0] == moment:
            loop.write(offset)
        reach(copy, stop_bytes)

    def held(copy: Copy) -> None:
        assert go.wait(30)
        run(copy)

    def meanwhile() -> None:
        if moment == 0:
            loop.write(offset)
        go.set()
        if moment == 4:
            loop.run.last_save._copy.require()
            loop.write(offset)

    run = Copy._run
    monkeypatch.setattr(Copy, "_reach", stepping)
    monkeypatch.setattr(Copy, "_run", held)
    with loop.run:
        assert loop.save_and_step(meanwhile=meanwhile) == is_harmless
        assert copied[0] == 3 or not is_harmless
        copied[0] = 100
        assert loop.save_and_step(meanwhile=lambda: None)


def test_a_write_at_any_time_ends_in_the_bytes_at_the_save_or_in_none(tmp_path: Path) -> None:
    """Also one that comes while its very piece is being copied."""
    chance, loop = random.Random(7), Loop(tmp_path)
    with loop.run:
        for _ in range(8):
            delay_s, offset = chance.uniform(0, 0.015), chance.randrange(loop.bytes.numel())

            def write(delay_s: float = delay_s, offset: int = offset) -> None:
                time.sleep(delay_s)
                loop.write(offset)

            writer = threading.Thread(target=write)

            def meanwhile(writer: threading.Thread = writer) -> None:
                writer.start()
                writer.join()  # before the step, which may change anything

            loop.save_and_step(meanwhile=meanwhile)  # which looks at what was committed
        assert loop.save_and_step(meanwhile=lambda: None)
