"""Reports of real processes in a process group: together, and with one that is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import milepost as mp
from milepost.testing.ranks import run_ranks

BODY = """
import os, pathlib, signal, sys, tempfile
import milepost as mp
from milepost.reporting import files as parts

place = {place!r}
config = mp.CheckpointConfig(num_to_keep=2, report_timeout_s=30, upload_timeout_s=2)

def save(metrics, **files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            pathlib.Path(folder, name).write_text(text)
        return mp.report(metrics, mp.Checkpoint.from_directory(folder) if files else None)

def train(config):
    seen = [str(mp.get_checkpoint() and mp.get_checkpoint().name)]
    for step in range(3):
        save({{"loss": torch.tensor(1.0 / (step + 1)), "rank": rank}}, **{{f"rank{{rank}}": "x"}})
        seen.append(mp.get_checkpoint().name)
        for _ in range(100):
            mp.report({{"step": step}})
    save({{"loss": 0.0}}, **({{"only": "1"}} if rank == 1 else {{}}))
    seen.append(mp.get_checkpoint().name)
    context = mp.get_context()
    return [*seen, context.get_world_rank(), context.get_world_size()]

result = mp.launch(train, scaling=mp.ScalingConfig(num_workers=0), run=mp.RunConfig(
    storage_path=place, name="a", checkpoint_config=config))
give(seen=result.return_value, kept=[one.name for one, _ in result.best_checkpoints])
dist.barrier()

with mp.Reports(pathlib.Path(place, "b"), checkpoint_config=config):
    save({{}}, **{{f"rank{{rank}}": "x"}})
    if rank == 1:
        whole = parts.write_files
        def die(*arguments):
            whole(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        parts.write_files = die
    try:
        save({{}}, **{{f"rank{{rank}}": "y" * 100_000}})
    except mp.DeadlineError as error:
        give(error=str(error), ranks=error.facts.get("ranks"))
    give(newest=mp.get_checkpoint().name)
    os._exit(0)  # the group is broken: leaving it would wait for rank 1
"""


def test_processes_report_together_and_one_that_dies_costs_one_report(tmp_path: Path) -> None:
    """In the launcher's own processes under torchrun, and in a block; nothing hangs."""
    first, second = run_ranks(BODY.format(place=str(tmp_path)), 2, codes=[0, -9])
    expected = ["None", "report-1", "report-102", "report-203", "report-304"]
    assert first["seen"] == [*expected, 0, 2]
    assert second["seen"] == [*expected, 1, 2]
    assert first["kept"] == ["report-203", "report-304"]
    found = mp.open_run(tmp_path / "a").checkpoints()
    assert [[entry.path for entry in one.manifest.files] for one in found] == [
        ["rank0", "rank1"],
        ["only"],
    ]
    assert found[0].metrics == {"loss": float(np.float32(1 / 3)), "rank": 0}
    assert "Rank 1 did not write its files for report 2 within 2 s" in first["error"]
    assert first["newest"] == "report-1"
    assert [one.name for one in mp.open_run(tmp_path / "b").checkpoints()] == ["report-1"]
    with mp.Reports(tmp_path / "b") as reports:
        assert reports.resumed_from == "report-1"
        assert not (tmp_path / "b/report-2").exists()
