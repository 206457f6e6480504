"""Several ranks compress what each of them writes, and any layout reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.testing.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.campaign]

BODY = """
import os
import milepost as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 401), nn.Linear(401, 300))
    fully_shard(model)
    return model

def whole(model):
    return [p.full_tensor().sum().item() for p in model.parameters()]

folder, found = os.environ["FOLDER"], {}
for sharding in ("auto", "consolidated"):
    model = build()
    own = mp.PerRank(mp.Value(lambda: torch.full((50_000,), float(rank)), lambda one: None))
    with mp.Checkpointer(
        f"{folder}/{sharding}", sharding=sharding, save_compression="zstd", model=model, own=own
    ) as run:
        run.save("a", wait=True)
    before = whole(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    got = []
    own = mp.PerRank(mp.Value(lambda: None, got.append))
    with mp.Checkpointer(f"{folder}/{sharding}", sharding=sharding, model=model, own=own) as run:
        run.restore("a")
        files = [e.path for e in mp.open_run(f"{folder}/{sharding}").get("a").manifest.files
                 if e.frames is not None]
    found[sharding] = [before == whole(model), float(got[0].mean()), files]
give(**found)
"""


def test_ranks_compress_what_they_write(tmp_path: Path) -> None:
    """Pieces of shards, what is a rank's own, and whole tensors that one rank puts together."""
    found = run_ranks(BODY, 2, env={"FOLDER": str(tmp_path)})
    own = {f"own-r{rank:05d}.safetensors" for rank in (0, 1)}
    for rank, one in enumerate(found):
        for sharding, shared in (
            ("auto", {f"model-r{rank:05d}.safetensors" for rank in (0, 1)}),
            ("consolidated", {"model.safetensors"}),
        ):
            is_same, mean, files = one[sharding]
            assert is_same
            assert mean == rank
            assert set(files) == own | shared
