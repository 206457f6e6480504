"""The Trainer on several ranks: one training, exact where it goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

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
trainer = make(FOLDER + "/split", resume="must", seed=99)
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
        for name in ("weights", "rng", "noted", "metric", "trained", "timer", "scaler"):
            assert resumed[name] == straight[rank][name], (rank, name)
    assert after[0]["resumed"]["buffers"] == straight[0]["buffers"]
    assert straight[0]["weights"] == straight[1]["weights"]
    assert straight[0]["scaler"] == straight[1]["scaler"]
    assert straight[0]["scaler"]["scale"] > 1024
    assert straight[0]["rng"] != straight[1]["rng"]
    assert straight[0]["noted"] != straight[1]["noted"]
    # All samples of all ranks are counted, and every sample is evaluated once.
    assert straight[0]["timer"]["sample"] == 90
    assert straight[0]["wall_s"] == straight[1]["wall_s"] > 0
    assert straight[0]["metric"] // 1000 == 45
    assert straight[0]["metric"] == straight[1]["metric"]
    assert straight[0]["trained"] // 1000 == 45
    assert straight[0]["trained"] == straight[1]["trained"]
    assert [one.given["saved"] for one in before] == [["ba2", "ba4", "ba6", "ep2"]] * 2
    # What rank 0's callbacks know is the training's: 12 microbatches in the 6 batches before.
    first, second = (one["losses"] for one in straight)
    assert [after[rank]["resumed"]["losses"] for rank in range(2)] == [
        first,
        [*first[:12], *second[12:]],
    ]
    stored = mp.open_run(tmp_path / "split").latest().load(["callbacks"])["state"]["callbacks"]
    assert stored["Losses"]["losses"] == straight[0]["losses"]


AGREED = """
import math, warnings
from torch.utils.data import DistributedSampler, WeightedRandomSampler

straight = make(FOLDER + "/straight")
straight.fit()
straight = outcome(straight)


def ended(trainer, kind):
    try:
        trainer.fit()
    except kind as error:
        return error
    raise AssertionError("it went well")


def spoil(state):
    state.loss = state.loss * float("nan")


# A loss that is no number, on one rank only.
trainer = make(FOLDER + "/nan", callbacks=[Losses(), Noted(),
    At(Event.AFTER_LOSS, spoil, [1], lambda state: state.timer.batch == 4)])
error = ended(trainer, mp.NonFiniteLossError)
run = mp.open_run(FOLDER + "/nan")
diagnostic = run.get("nan/ba5")
model = dict(trainer.state.bare_model.named_parameters())
stored = diagnostic.load(["model"])["state"]["model"]
give(nan=str(error), latest=run.latest().name,
     finite=all(bool(p.isfinite().all()) for p in model.values()),
     same=digest(stored[name] for name in model) == digest(model.values()))
trainer.close()

# Asked to end: one rank in a forward pass, and both while they save; then one in an evaluation.
again = At(Event.BATCH_CHECKPOINT, kill(signal.SIGTERM), when=lambda state: state.timer.batch >= 5)
asked = At(Event.AFTER_FORWARD, kill(signal.SIGTERM), [1], lambda state: state.timer.batch == 4)
trainer = make(FOLDER + "/stopped", callbacks=[Losses(), mp.PerRank(Noted()), asked, again])
error = ended(trainer, mp.Preempted)
codes = [[error.code, error.checkpoint]]
trainer.close()
asked = At(Event.EVAL_BATCH_START, kill(signal.SIGUSR1), [0], lambda state: state.timer.batch == 6)
trainer = make(FOLDER + "/stopped", resume="must",
               callbacks=[Losses(), mp.PerRank(Noted()), asked])
error = ended(trainer, mp.Preempted)
codes.append([error.code, error.checkpoint])
trainer.close()
trainer = make(FOLDER + "/stopped", resume="must")
is_pending = trainer.state.pending_eval is not None
trainer.fit()
trainer.close()
give(codes=codes, is_pending=is_pending, straight=straight, stopped=outcome(trainer))
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)

# From a checkpoint named by its path each rank goes on with its own random numbers.
trainer = make(load_path_format=FOLDER + "/straight/ba4")
trainer.fit()
give(named=outcome(trainer))
trainer.close()

# A loader that would give all ranks the same data, or samples of their own choice.
def refused(**options):
    try:
        make(**options)
    except mp.UsageError as error:
        return str(error)
weighted = DataLoader(data, 6, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES))
misplaced = DataLoader(data, 6, sampler=DistributedSampler(data, 2, 0))
give(refused=[refused(train_dataloader=one) for one in (weighted, misplaced)],
     parallel=refused(parallel="fsdp"))

import logging
told = []
class Tell(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("milepost").addHandler(Tell())

# Loaders that only yield, of two lengths that nobody can ask for.
class Yields:
    def __iter__(self):
        for number in range(5 - 2 * rank):
            yield [one[: 4 + rank] for one in data[number * 6 : number * 6 + 6]]
trainer = make(train_dataloader=Yields(), eval_dataloader=None, max_duration="2ep", grad_accum=1)
trainer.fit()
give(yielded={k: v for k, v in trainer.state.timer.state_dict().items() if k != "wall_s"})
trainer.close()

same = make(train_dataloader=[[one[:4] for one in data[:8]]], eval_dataloader=None,
            max_duration="1ba", grad_accum=1)
same.fit()
give(told=told)
# By the clock all ranks stop and save at the same batch.
trainer = make(FOLDER + "/clock", save_interval="1sec", max_duration="2sec")
trainer.fit()
give(clock=trainer.state.timer.state_dict(), saved=trainer.saved_checkpoints)
trainer.close()

# A save on one rank only.
trainer = make(FOLDER + "/alone", rank_timeout_s=1.5, max_duration="3ba", eval_dataloader=None)
trainer.fit()
said = ""
if rank == 0:
    try:
        trainer.save_checkpoint("mine").wait()
    except mp.DeadlineError as error:
        said = str(error)
one = torch.ones(1)
dist.all_reduce(one)
give(alone=said, sum=int(one))
sys.stdout.flush()
os._exit(0)
"""


def test_h18_h35_ranks_stop_fail_and_refuse_together(tmp_path: Path) -> None:
    """H18, H35 and a NaN on one rank: the same on all of them, at one batch, and nobody hangs."""
    ranks = run_ranks(f"FOLDER = {str(tmp_path)!r}\n" + TRAINING + AGREED, 2)
    first, second = ranks
    assert first["nan"] == second["nan"]
    assert "batch 5 is nan on rank 1" in first["nan"]
    assert "nan/ba5" in first["nan"]
    for one in ranks:
        assert (one["latest"], one["finite"], one["same"]) == ("ba4", True, True)
        assert one["codes"] == [[143, "ba5"], [138, "ba6"]]
        assert one["is_pending"]
        for name in ("weights", "rng", "noted", "metric", "trained", "timer"):
            assert one["stopped"][name] == one["straight"][name], name
        for name in ("weights", "rng", "metric", "timer"):
            assert one["named"][name] == one["straight"][name], name
        assert "WeightedRandomSampler" in one["refused"][0]
        assert "0 of 2, 0 of 2" in one["refused"][1]
        assert "parallel" in one["parallel"]
        # 3 batches of 4 and 5 samples, twice
        assert one["yielded"]["batch"] == 6
        assert one["yielded"]["sample"] == 54
    # Those that yield the same are told of, once.
    assert sum("the same first batch" in text for text in first["told"]) == 1
    assert first["clock"] == second["clock"]
    assert first["saved"] == second["saved"]
    assert first["clock"]["wall_s"] >= 2
    # H18: the rank that saves alone is told so, and later collectives are right.
    assert "Rank 1 did not come" in first["alone"]
    assert [one["sum"] for one in ranks] == [2, 2]


FAILING = """
class Spoilt(Callback):
    "Keeps something that no checkpoint can hold, from some batch on."

    def state_dict(self):
        return {"kept": object() if trainer.state.timer.batch >= 6 else None}


class Torn(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if trainer.state.timer.batch == 5 and rank == 1 and WHERE == "loader":
            raise OSError("a file is gone")
        return data[index]


callbacks = [Losses(), mp.PerRank(Noted()), mp.PerRank(Spoilt() if BAD == rank else Callback())]
if WHERE == "callback":
    callbacks.append(At(Event.BATCH_END, lambda _: 1 / 0, [BAD], lambda s: s.timer.batch == 6))
trainer = make(FOLDER, callbacks=callbacks, resume="auto", rank_timeout_s=20, algorithms=(),
               train_dataloader=DataLoader(Torn(), 6, shuffle=True))
give(came=trainer.state.timer.batch)
started = time.monotonic()
try:
    trainer.fit()
finally:
    give(lasted=time.monotonic() - started)
"""


@pytest.mark.parametrize(
    ("where", "bad", "said"),
    [
        pytest.param("callback", 1, "ZeroDivisionError", marks=pytest.mark.campaign),
        ("save", 0, "UnsupportedStateError"),
        pytest.param("loader", 1, "OSError", marks=pytest.mark.campaign),
    ],
)
def test_a_rank_that_fails_is_named_on_every_rank(
    tmp_path: Path, where: str, bad: int, said: str
) -> None:
    """The others wait for it in a step, or in a save; nothing of what it left is committed."""
    body = f"FOLDER, WHERE, BAD = {str(tmp_path)!r}, {where!r}, {bad}\n" + TRAINING + FAILING
    ended = Ranks(body, 2).wait()
    assert [one.code for one in ended] == [1, 1], ended
    assert said in ended[bad].output
    assert f"RankFailedError: Rank {bad} failed first: {said}" in ended[1 - bad].output
    # The one does not wait for the other as if that were only late.
    assert all(one.given["lasted"] < 15 for one in ended)
    run = mp.open_run(tmp_path)
    assert [one.name for one in run.checkpoints()] == ["ba2", "ba4"]
    assert run.latest().verify().is_good


SHARDED = """
from torch.distributed.fsdp import FSDPModule, fully_shard

def sharded(model):
    fully_shard(model[0])
    return fully_shard(model)

def make_sharded(folder, **options):
    trainer = make(folder, wrap=sharded, scaler=None, **options)
    assert isinstance(trainer.state.model, FSDPModule) and not trainer.state.is_model_ddp
    return trainer

trainer = make_sharded(FOLDER + "/straight")
trainer.fit()
give(straight=outcome(trainer))
trainer.close()
trainer = make_sharded(FOLDER + "/split", resume="auto")
trainer.fit("6ba")
trainer.close()
trainer = make_sharded(FOLDER + "/split", resume="must")
trainer.fit()
give(split=outcome(trainer))
trainer.close()
sys.stdout.flush()
os._exit(0)
"""


def test_a_sharded_model_goes_on_exactly(tmp_path: Path) -> None:
    """FSDP2 with an average of the weights, and shares of an evaluation that are not alike."""
    ranks = run_ranks(f"FOLDER = {str(tmp_path)!r}\n" + TRAINING + SHARDED, 2)
    for one in ranks:
        for name in ("weights", "rng", "noted", "metric", "trained", "timer"):
            assert one["split"][name] == one["straight"][name], name
        assert one["straight"]["metric"] // 1000 == 45
        assert one["straight"]["timer"]["sample"] == 90


THREE = """
trainer = make(FOLDER + "/straight", train_dataloader=DataLoader(data, 4), grad_accum=1)
trainer.fit()
give(straight=outcome(trainer))
trainer.close()
for more in ("2ba", "1ba", "2ba"):
    trainer = make(FOLDER + "/split", train_dataloader=DataLoader(data, 4), grad_accum=1,
                   resume="auto")
    trainer.fit(more)
    trainer.close()
trainer = make(FOLDER + "/split", train_dataloader=DataLoader(data, 4), grad_accum=1, resume="auto")
trainer.fit()
give(split=outcome(trainer))
trainer.close()
"""


@pytest.mark.campaign
def test_three_ranks_sum_gradients_in_one_order(tmp_path: Path) -> None:
    """More than two can be added up in several orders, and a resumed process must not choose."""
    for one in run_ranks(f"FOLDER = {str(tmp_path)!r}\n" + TRAINING + THREE, 3):
        for name in ("weights", "rng", "noted", "metric", "trained", "timer"):
            assert one["split"][name] == one["straight"][name], name


MORE = """
asked = At(Event.EVAL_BATCH_START, kill(signal.SIGUSR1), [1], lambda state: world_size == 2)
trainer = make(FOLDER, resume="auto", grad_accum=1, save_interval="99ep",
               eval_dataloader=mp.Evaluator("all", DataLoader(data, 4), metrics=Count(),
                                            eval_interval=["1ba", "1ep"]),
               callbacks=[Losses(), mp.PerRank(Noted()), asked])
give(came=[trainer.state.timer.batch, trainer.state.timer.sample])
trainer.fit()
give(ended=outcome(trainer))
trainer.close()
"""


@pytest.mark.campaign
def test_a_training_cut_off_in_an_evaluation_goes_on_on_more_ranks(tmp_path: Path) -> None:
    """Within an epoch: the evaluation is done over, and every sample is trained on once."""
    body = f"FOLDER = {str(tmp_path)!r}\n" + TRAINING + MORE
    run_ranks(body, 2, codes=[138, 138])
    found = run_ranks(body, 3)
    for one in found:
        assert one["came"] == [1, 12]
        assert one["ended"]["timer"]["sample"] == 90
        assert one["ended"]["metric"] // 1000 == 45
        assert one["ended"]["weights"] == found[0]["ended"]["weights"]
    assert len({one["ended"]["rng"] for one in found}) == 3
