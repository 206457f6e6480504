"""Trainings of several ranks that tests run: Python source, to be followed by a test's own."""

from __future__ import annotations

__all__ = ["TRAINING"]

TRAINING = """
import hashlib, os, pathlib, signal, sys, time
import milepost as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from milepost.train import EMA, Callback, Event

NUM_SAMPLES = 45  # of 2 ranks in batches of 6 each: 4 batches, the last one of 5 and 4 samples
drawn = torch.Generator().manual_seed(5)
inputs = torch.randn(NUM_SAMPLES, 6, generator=drawn)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Count(Metric):
    "How many samples were seen, and the sum of their inputs."

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("right", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.seen += len(targets)
        self.right += (outputs.argmax(1) == targets).sum()

    def compute(self):
        return self.seen * 1000 + self.right


class Losses(Callback):
    "Keeps the losses of this rank's own samples."

    def __init__(self):
        self.losses = []

    def after_loss(self, state):
        self.losses.append(float(state.loss))

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])


class Noted(Losses):
    name = "noted"


class At(Callback):
    def __init__(self, event, call, ranks=(0, 1), when=lambda state: True):
        self.event, self.call, self.ranks, self.when = event, call, ranks, when

    def run_event(self, event, state):
        if event is self.event and rank in self.ranks and self.when(state):
            self.call(state)


def kill(number):
    return lambda _state: os.kill(os.getpid(), number)


def net():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    )


def make(folder=None, *, wrap=lambda model: model, **options):
    torch.manual_seed(100 + rank)  # no rank begins with the weights of another
    model = wrap(net())
    evaluator = mp.Evaluator("all", DataLoader(data, 4), metrics=Count(), eval_interval="3ba")
    return mp.Trainer(**{
        "model": model,
        "loss_fn": nn.functional.cross_entropy,
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "train_dataloader": DataLoader(data, 6, shuffle=True),
        "eval_dataloader": evaluator,
        "max_duration": "2ep",
        "seed": 3,
        "progress_bar": False,
        "save_folder": folder,
        "save_interval": "2ba",
        "grad_accum": 2,
        "algorithms": EMA(0.9),
        "compute_training_metrics": True,
        "train_metrics": Count(),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        "callbacks": [Losses(), mp.PerRank(Noted())],
        **options,
    })


def digest(tensors):
    whole = hashlib.sha256()
    for one in tensors:
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        whole.update(one.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def outcome(trainer):
    state = trainer.state
    moments = [v for one in state.optimizers[0].state.values() for _, v in sorted(one.items())]
    ema = state.algorithms[0].average.values() if state.algorithms else []
    return {
        "weights": digest([*state.bare_model.parameters(), *moments, *ema]),
        "buffers": digest(state.bare_model.buffers()),
        "rng": digest([torch.get_rng_state()]),
        "noted": state.callbacks[1].losses,
        "losses": state.callbacks[0].losses,
        "metric": int(state.current_metrics["all"]["Count"]),
        "trained": int(state.current_metrics["train"]["Count"]),
        "timer": {k: v for k, v in state.timer.state_dict().items() if k != "wall_s"},
        "wall_s": state.timer.wall_s,
        "scaler": state.scaler.state_dict() if state.scaler else None,
    }
"""
