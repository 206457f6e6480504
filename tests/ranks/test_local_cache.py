"""Ranks of one machine share the folder of their copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

REMOTE = Path(__file__).parents[1] / "unit" / "copies" / "remote.py"

BODY = """
import os, runpy, sys
from pathlib import Path
import milepost as mp

folder = Path(os.environ["FOLDER"])
RemoteStore = runpy.run_path(os.environ["REMOTE"])["RemoteStore"]
read = []
store = RemoteStore(folder / "far", before_read=read.append)

def life(value, *names):
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    read.clear()
    own = mp.PerRank(mp.Value(lambda: rank, lambda found: setattr(model, "own", found)))
    with mp.Checkpointer(store, local_cache=folder / "cache", model=model, own=own) as run:
        # Rank 0 looks at the headers in the store; blocks of tensors nobody asks for.
        count = len([key for key in read if "safetensors" in key])
        found = [run.resumed_from, float(model[3].weight.detach()[-1, -1]), count]
        for name in names:
            run.save(name, wait=True)
    return found + [getattr(model, "own", None)]

life(1.0, "a", "b", "c")
dist.barrier()
names = sorted(p.name[:17] for p in folder.glob("cache/*/*/0*"))
files = sorted(p.name for p in folder.glob("cache/*/*/00000001-00000003-*/*"))
parts = [p.name for p in folder.glob("cache/*/part-*")]
dist.barrier()
again = life(2.0)
dist.barrier()
if rank == 0:  # what another machine has written is not here
    for path in folder.glob("cache/*/*/00000001-00000003-*/*-r00001*"):
        path.unlink()
dist.barrier()
partly = life(3.0)
give(names=names, files=files, parts=parts, again=again, partly=partly)
"""


def test_ranks_of_a_machine_share_their_copies(tmp_path: Path) -> None:
    """Each keeps what it wrote and finds what all wrote; the rest comes from the store."""
    found = run_ranks(BODY, 2, env={"FOLDER": str(tmp_path), "REMOTE": str(REMOTE)})
    for rank, one in enumerate(found):
        assert one["names"] == ["00000001-00000002", "00000001-00000003"]
        assert one["parts"] == []
        committed = {p.name for p in (tmp_path / "far" / "c").iterdir()}
        assert set(one["files"]) == committed - {"attempt.json", "manifest.json"}
        name, value, num_reads, own = one["again"]
        assert (name, value, own) == ("c", 1.0, rank)
        assert num_reads <= (2 * len(one["files"]) if rank == 0 else 0)
        name, value, num_reads, own = one["partly"]
        assert (name, value, own) == ("c", 1.0, rank)
        assert num_reads > 0
