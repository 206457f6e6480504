"""Saves of several ranks that are written while they are copied, with a budget and without."""

from __future__ import annotations

from pathlib import Path

import pytest

import milepost as mp
from milepost.testing.ranks import run_ranks

PROGRAM = """
    import milepost as mp
    from torch import nn
    from milepost.engine import filling, streaming

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(10)])
    kinds = {"plain": {}, "waited": {}, "budget": {"staging_budget_bytes": 32 * 1024**2}}
    for kind, options in kinds.items():
        with mp.Checkpointer(
            f"{folder}/{kind}", model=model, handle_signals=False, **options
        ) as run:
            pending = run.save("a", wait=kind == "waited")
            pending.wait(60)
            assert ("streamed_bytes" in pending.stats) == (kind == "budget")
            if kind == "plain":
                continue
            module, name = (
                (streaming, "assemble") if kind == "budget" else (filling, "copy_bytes")
            )
            original, calls = getattr(module, name), []

            def broken(*given, **named):
                calls.append(None)
                if len(calls) == 4:
                    raise ValueError("a broken tensor")
                original(*given, **named)

            if rank == 1:
                setattr(module, name, broken)
                try:
                    run.save("torn", wait=True)
                    raise SystemExit("the save went well")
                except ValueError:
                    setattr(module, name, original)
            else:
                try:
                    run.save("torn", wait=True)
                    raise SystemExit("the save went well")
                except mp.RankFailedError as error:
                    assert "a broken tensor" in str(error), error
            run.save("b", wait=True)
"""


@pytest.mark.campaign
def test_ranks_write_while_they_copy(tmp_path: Path) -> None:
    """The bytes are those of a copy at once, and a copy that fails on one rank fails on all."""
    run_ranks(PROGRAM.replace("{folder}", str(tmp_path)), 2)
    plain = tmp_path / "plain" / "a"
    parts = sorted(path.name for path in plain.glob("*.safetensors"))
    assert len(parts) >= 2
    for kind in ("waited", "budget"):
        names = [one.name for one in mp.open_run(tmp_path / kind).checkpoints()]
        assert names == ["a", "b"]
        for name in names:
            assert mp.open_run(tmp_path / kind).get(name).verify().is_good
            for part in parts:
                if "rng" not in part:
                    there = tmp_path / kind / name / part
                    assert there.read_bytes() == (plain / part).read_bytes()
