"""Late copies on several ranks: the bytes of copies at once, in any layout, or no checkpoint."""

from __future__ import annotations

from pathlib import Path

import milepost as mp
from milepost.testing.ranks import run_ranks

PROGRAM = """
    import time
    import milepost as mp
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from milepost.engine.copying import Copy

    original = Copy._copy

    def slow(copy, one):
        time.sleep(0.02)
        original(copy, one)

    Copy._copy = slow

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()

    for layout in ("ddp", "fsdp"):
        for staging in ("eager", "overlap"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
            if layout == "ddp":
                trained = DistributedDataParallel(model)
            else:
                for layer in (model[0], model[2]):
                    fully_shard(layer)
                fully_shard(model)
                trained = model
            optimizer = torch.optim.AdamW(trained.parameters())
            torch.manual_seed(7)
            step(trained, optimizer)
            place = f"{folder}/{layout}-{staging}"
            with mp.Checkpointer(
                place, staging=staging, model=model, optimizer=optimizer, handle_signals=False
            ) as run:
                run.prepare()  # each rank its share, which is half of it in either layout
                arena = run._writer._saver._stager.arena
                assert 3 * 2**20 <= arena._prepared_bytes <= 4 * 2**20, arena._prepared_bytes
                for _ in range(2):
                    pending = run.save()
                    step(trained, optimizer)
                    run.step()
                    pending.wait(60)
                    assert (pending.stats["late_bytes"] > 0) == (staging == "overlap")
                assert arena.generation == 1
                if staging == "overlap":
                    pending = run.save("torn")
                    if rank == 1:
                        for value in optimizer.state.values():
                            for name in ("exp_avg", "exp_avg_sq"):  # rank 0 may write the other
                                getattr(value[name], "_local_tensor", value[name]).mul_(2)
                    error = pending.exception(60)
                    assert isinstance(error, mp.RankFailedError | mp.StateChangedError), error
"""


def test_late_copies_of_ranks_have_the_bytes_of_copies_at_once(tmp_path: Path) -> None:
    """And a rank on which something else wrote fails the save of all."""
    run_ranks(PROGRAM.replace("{folder}", str(tmp_path)), 2)
    for layout in ("ddp", "fsdp"):
        eager, late = (tmp_path / f"{layout}-{how}" for how in ("eager", "overlap"))
        names = [one.name for one in mp.open_run(eager).checkpoints()]
        assert names == [one.name for one in mp.open_run(late).checkpoints()]
        assert len(names) == 2
        for name in names:
            parts = sorted(path.name for path in (eager / name).glob("*.safetensors"))
            assert len(parts) >= 4
            for part in parts:
                assert (eager / name / part).read_bytes() == (late / name / part).read_bytes()
