"""torch.distributed.checkpoint on real ranks, with Milepost as its storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import milepost as mp
from milepost.integrations.dcp import StorageReader
from milepost.testing.ranks import run_ranks

BUILD = """
    import warnings
    import milepost as mp
    import torch.distributed.checkpoint as dcp
    from milepost.integrations.dcp import StorageReader, StorageWriter, writer
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict, get_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return model, optimizer

    def state_of(model, optimizer):
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "own": {f"rank{rank}": torch.full((3,), float(rank))},
            "step": 7,
        }

    def digest(state):
        weights = {k: v.full_tensor().tolist() for k, v in state["model"].items()}
        moments = {k: v["exp_avg"].full_tensor().tolist()
                   for k, v in state["optimizer"]["state"].items()}
        return [weights, moments, state["step"]]

    def failure(call):
        try:
            call()
        except dcp.CheckpointException as error:
            return sorted([n, type(pair[0]).__name__] for n, pair in error.failures.items())
"""

LEAVE = """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_two_ranks_save_and_load_through_dcp(tmp_path: Path) -> None:
    """Sharded, replicated and a rank's own; sync and async; a failure on one rank; both ways."""
    body = f"""
    run_place = {str(tmp_path / "run")!r}
    saver = StorageWriter(run_place)
    model, optimizer = build(0)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id="a", storage_writer=saver)
    before = digest(state)

    kept = writer.write_boxes
    def stop(*arguments, **options):
        kept(*arguments, **options)
        raise OSError(28, "no space")
    if rank == 1:
        writer.write_boxes = stop
    failed = failure(lambda: dcp.save(state, checkpoint_id="b", storage_writer=saver))
    writer.write_boxes = kept
    left = os.path.exists(run_place + "/b/manifest.json")
    dcp.async_save(state, checkpoint_id="c", storage_writer=saver).result()

    other, its = build(1)
    target = {{**state_of(other, its), "step": 0}}
    target["own"] = {{"rank0": torch.zeros(3), "rank1": torch.zeros(3)}}
    dcp.load(target, storage_reader=StorageReader(run_place + "/a"))
    after = digest(target)
    own = [target["own"][name].tolist() for name in ("rank0", "rank1")]

    place = "/a" if rank == 0 else "/c"
    apart = failure(lambda: dcp.load(target, storage_reader=StorageReader(run_place + place)))
    elsewhere = failure(lambda: dcp.save(state, checkpoint_id="d", storage_writer=StorageWriter(
        run_place + (f"-{{rank}}"))))

    with mp.Checkpointer({str(tmp_path / "ours")!r}, model=model, optimizer=optimizer) as run:
        run.save("x", wait=True)
    again = {{"model": get_model_state_dict(other), "optimizer": target["optimizer"]}}
    for value in again["model"].values():
        value.to_local().zero_()
    dcp.load(again, storage_reader=StorageReader({str(tmp_path / "ours")!r}))
    give(before=before, after=after, own=own, failed=failed, left=left, apart=apart,
         elsewhere=elsewhere, again=digest({{**again, "step": 7}}))
    """
    given = run_ranks(BUILD + body + LEAVE, 2)
    for one in given:
        assert one["before"] == one["after"] == one["again"] == given[0]["before"]
        assert one["own"] == [[0.0] * 3, [1.0] * 3]
        assert one["failed"] == [[1, "OSError"]]
        assert one["left"] is False
        assert one["apart"] == [[0, "MismatchError"]]
        assert one["elsewhere"] == [[1, "UsageError"]]
    run = mp.open_run(tmp_path / "run")
    assert [one.name for one in run.checkpoints()] == ["a", "c"]
    assert not (tmp_path / "run" / "b").exists()
    assert run.get("a").verify().is_good
    assert run.get("a").manifest.world_size == 2
    weights, _, step = given[0]["before"]
    whole = run.get("a").load()["state"]
    assert whole["step"] == step
    assert {key: value.tolist() for key, value in whole["model"].items()} == weights
    assert whole["own"]["rank1"].tolist() == [1.0] * 3
    alone = {"model": {key: torch.zeros_like(value) for key, value in whole["model"].items()}}
    dcp.load(alone, storage_reader=StorageReader(tmp_path / "run" / "c"))
    assert {key: value.tolist() for key, value in alone["model"].items()} == weights
