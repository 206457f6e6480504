"""Cases about several ranks: shares that are empty or tiny, and other numbers of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
import torch._dynamo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import milepost as mp
import milepost.checkpointer, milepost.engine.read
from milepost.launch.environment import HeldPort

folder = Path(sys.argv[1])
WHOLE = {
    "six": torch.arange(6.0),
    "one": torch.tensor([7.0]),
    "row": torch.arange(8.0).reshape(1, 8),
    "scalar": torch.tensor(3.0),
}

def cut(whole, mesh):
    return distribute_tensor(whole, mesh, [Shard(0) if whole.dim() else Replicate()])

class Model(nn.Module):
    def __init__(self, mesh, factor):
        super().__init__()
        for name, whole in WHOLE.items():
            setattr(self, name, nn.Parameter(cut(whole * factor, mesh)))

def step(model, optimizer, mesh, factor):
    for name, whole in WHOLE.items():
        getattr(model, name).grad = cut((whole + 1.0) * factor, mesh)
    optimizer.step()

def state_of(model, optimizer):
    found = []
    for p in model.parameters():
        moments = [optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")]
        found += [one.full_tensor().detach().numpy().tobytes().hex() for one in (p, *moments)]
    return found

def give(name, **values):
    if dist.get_rank() == 0:
        (folder / name).write_text(json.dumps(values))

def built(factor):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model(mesh, factor)
    return mesh, model, torch.optim.Adam(model.parameters(), lr=0.1)

def save():
    mesh, model, optimizer = built(1.0)
    with mp.Checkpointer(folder / "run", model=model, optimizer=optimizer) as run:
        step(model, optimizer, mesh, 1.0)
        run.step()
        run.save(wait=True)
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, [p.to_local().numel() for p in model.parameters()])
        state = state_of(model, optimizer)
        step(model, optimizer, mesh, 2.0)
        give("saved", shares=shares, state=state, after=state_of(model, optimizer))

def load():
    mesh, model, optimizer = built(0.0)
    with mp.Checkpointer(folder / "run", resume="must", model=model, optimizer=optimizer):
        state = state_of(model, optimizer)
        step(model, optimizer, mesh, 2.0)
        give(f"loaded-{dist.get_world_size()}", state=state, after=state_of(model, optimizer))

def in_ranks(num_ranks, work):
    port, pids = HeldPort(), []
    for rank in range(num_ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num_ranks)}
                dist.init_process_group(
                    "gloo", f"tcp://127.0.0.1:{port.number}", rank=rank, world_size=num_ranks
                )
                work()
                dist.barrier()
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    port.close()
    assert not any(codes), codes

in_ranks(4, save)
for num_ranks in (4, 2, 3, 1, 8):
    in_ranks(num_ranks, load)
"""


@pytest.mark.timeout(240)
def test_h19_shares_that_are_empty_or_tiny_go_on_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Of 4 ranks the last one holds nothing of six rows; of 8 most of them hold nothing at all."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=False,
        timeout=220,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "saved").read_text())
    assert saved["shares"] == [[2, 1, 8, 1], [2, 0, 0, 1], [2, 0, 0, 1], [0, 0, 0, 1]]
    for num_ranks in (4, 2, 3, 1, 8):
        loaded = json.loads((tmp_path / f"loaded-{num_ranks}").read_text())
        assert loaded["state"] == saved["state"], num_ranks
        assert loaded["after"] == saved["after"], num_ranks
