"""A small training on several ranks that tells what it does, to be killed at any moment.

    python training.py FOLDER EPOCHS PAUSE_S

Below FOLDER it leaves:

    pid-<attempt>-<rank>      at once
    from-<attempt>-<rank>     batch of the checkpoint that it goes on from; 0: none
    acknowledged              a line "<attempt> <batch>" for each acknowledged checkpoint, by rank 0
    end-<rank>                all that was trained, as text, once it is done
"""

import json
import os
import sys
import time
from pathlib import Path

folder, num_epochs, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), os.environ["MILEPOST_ATTEMPT"]


def leave(name: str, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)


leave(f"pid-{attempt}-{rank}", str(os.getpid()))

import torch  # noqa: E402 - whoever kills us may do so before that
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

import milepost as mp  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.arange(240.0).reshape(80, 3) / 100
loader = DataLoader(data, 2, sampler=DistributedSampler(data, seed=5))
saves: list[tuple[mp.PendingSave, int]] = []


def acknowledge(run: mp.Checkpointer) -> None:
    """Note what is safe now. A note may come late or not at all, and never too early."""
    if run.last_save is not None and run.last_save not in [one for one, _ in saves]:
        saves.append((run.last_save, run.timer.batch))
    for save, batch in saves:
        if rank == 0 and save.done() and save.exception() is None and (attempt, batch) not in told:
            told.add((attempt, batch))
            with (folder / "acknowledged").open("a") as file:
                file.write(f"{attempt} {batch}\n")


told: set[tuple[str, int]] = set()
with mp.Checkpointer(
    folder / "run",
    every="3ba",
    keep=mp.KeepLast(3),
    model=model,
    optimizer=optimizer,
    loader=loader,
    rank_timeout_s=30.0,
) as run:
    leave(f"from-{attempt}-{rank}", str(run.timer.batch))
    for _ in run.epochs(num_epochs):
        for x in run.batches(loader):
            acknowledge(run)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            time.sleep(pause_s)
state = [p.tolist() for p in model.parameters()]
state += [v.tolist() for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
state.append(torch.rand(3).tolist())
leave(f"end-{rank}", json.dumps(state))
dist.destroy_process_group()
