"""Saves whose interval is found out, on several ranks: rank 0 decides for all."""

from __future__ import annotations

from pathlib import Path

import milepost as mp
from milepost.testing.ranks import run_ranks

BODY = """
import time
import milepost as mp
from milepost.train import Callback, Trainer

FOLDER = {folder!r}
torch.manual_seed(rank)
data = torch.utils.data.TensorDataset(torch.randn(160, 2), torch.randn(160, 1))

class Slow(Callback):
    # Rank 0 has the clock that counts; by that of rank 1 every batch would be due.
    now_s = 0.0
    def batch_start(self, state):
        self.now_s += 1.0 if rank == 0 else 1000.0
    def save_started(self, state, pending):
        pending.wait()
    def state_dict(self):
        self.now_s += 1.0
        return {{}}

def train(end, **options):
    torch.manual_seed(5)
    model = torch.nn.Linear(2, 1)
    slow = Slow()
    trainer = Trainer(
        model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2, shuffle=True),
        loss_fn=torch.nn.functional.mse_loss, callbacks=slow, seed=1, progress_bar=False,
        save_folder=FOLDER, max_duration=end, save_interval="auto", overhead_budget=0.1, **options,
    )
    trainer.state.timer._clock = lambda: slow.now_s
    trainer.fit()
    names = trainer.saved_checkpoints
    trainer.close()
    return names

first = train("38ba")
second = train("60ba", resume="must")

now_s = [0.0]
torch.manual_seed(5)
model = torch.nn.Linear(1, 1)
options = {{"every": "auto", "overhead_budget": 0.1, "async_save": False}}
with mp.Checkpointer(FOLDER + "-loop", model=model, **options) as run:
    run.timer._clock = lambda: now_s[0]
    for _ in range(60):
        now_s[0] += 1.0 if rank == 0 else 1000.0
        time.sleep(0.02)
        dist.barrier()  # as any batch of ranks that train one model
        run.step()
    run.wait()
    loop = [one.name for one in run.run.checkpoints()]
give(first=first, second=second, loop=loop)
"""


def test_rank_0_decides_for_all_when_to_save(tmp_path: Path) -> None:
    """A rank that saved at another batch would wait for the others in the middle of theirs."""
    given = run_ranks(BODY.format(folder=str(tmp_path / "run")), 2)
    assert given[0] == given[1]
    # It is asked during a batch, so that a save comes a batch after it was due: by its clock after
    # 10 batches, a tenth of 10 s later, then every 10 s with the save itself.
    assert given[0]["first"] == ["ba11", "ba12", "ba20", "ba29", "ba38"]
    assert given[0]["second"][0] == "ba48"
    assert len(given[0]["loop"]) >= 2
    assert int(given[0]["loop"][0].removeprefix("ba")) >= 10
    manifest = mp.open_run(tmp_path / "run").get("ba38").manifest
    assert manifest.interval["interval_s"] >= 10.0
    assert manifest.stats["blocking_s"] > 0.0
