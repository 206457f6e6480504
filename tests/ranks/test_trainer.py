"""The Trainer on several ranks: one training, exact where it goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import milepost as mp
from milepost.testing.ranks import Ranks, run_ranks

_SPEC = importlib.util.spec_from_file_location(
    "trainings", Path(__file__).with_name("trainings.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
trainings = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(trainings)
TRAINING: str = trainings.TRAINING

STRAIGHT = """
trainer = make(FOLDER + "/straight")
assert trainer.state.is_model_ddp and not trainer.state.is_model_deepspeed
trainer.fit()
give(straight=outcome(trainer), saved=trainer.saved_checkpoints, place=trainer.checkpoint_folder)
trainer.close()
def die(state):
    trainer.checkpoint_saver.wait()  # for ba6
    os.kill(os.getpid(), signal.SIGKILL)
dies = At(Event.AFTER_FORWARD, die, [1], lambda state: state.timer.batch == 7)
trainer = make(FOLDER + "/split", callbacks=[Losses(), mp.PerRank(Noted()), dies], rank_timeout_s=4)
trainer.fit()
"""

RESUMED = """
dist.destroy_process_group()  # the Trainer makes its own
trainer = make(FOLDER + "/split", resume="must", seed=3)
assert dist.is_initialized()
batch = trainer.state.timer.batch
trainer.fit()
give(resumed=outcome(trainer), batch=batch, seed=trainer.state.seed)
trainer.close()
assert not dist.is_initialized()
os._exit(0)
"""


def test_h04_a_training_killed_within_an_epoch_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """Each rank's dropout, uneven last batches, accumulation, averages and evaluations included."""
    body = f"FOLDER = {str(tmp_path)!r}\n" + TRAINING
    before = Ranks(body + STRAIGHT, 2).wait()
    assert before[1].code == -9, before[1].output
    assert before[0].code == 1, before[0].output
    after = run_ranks(body + RESUMED, 2)
    straight = [one.given["straight"] for one in before]
    for rank in range(2):
        resumed = after[rank]["resumed"]
        assert after[rank]["batch"] == 6
        assert after[rank]["seed"] == 3 + rank
        for name in ("weights", "rng", "noted", "metric", "timer"):
            assert resumed[name] == straight[rank][name], (rank, name)
    assert after[0]["resumed"]["buffers"] == straight[0]["buffers"]
    assert straight[0]["weights"] == straight[1]["weights"]
    assert straight[0]["rng"] != straight[1]["rng"]
    assert straight[0]["noted"] != straight[1]["noted"]
    # All samples of all ranks are counted, and every sample is evaluated once.
    assert straight[0]["timer"]["sample"] == 90
    assert straight[0]["wall_s"] == straight[1]["wall_s"] > 0
    assert straight[0]["metric"] // 1000 == 45
    assert straight[0]["metric"] == straight[1]["metric"]
    assert [one.given["saved"] for one in before] == [["ba2", "ba4", "ba6", "ep2"]] * 2
    # What rank 0's callbacks know is the training's: 12 microbatches in the 6 batches before.
    first, second = (one["losses"] for one in straight)
    assert [after[rank]["resumed"]["losses"] for rank in range(2)] == [
        first,
        [*first[:12], *second[12:]],
    ]
    stored = mp.open_run(tmp_path / "split").latest().load(["callbacks"])["state"]["callbacks"]
    assert stored["Losses"]["losses"] == straight[0]["losses"]
