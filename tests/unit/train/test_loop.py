"""The loop: what happens, in which order, how often."""

from __future__ import annotations

import copy

import pytest
import torch

from milepost.errors import DuplicateNameError, UsageError
from milepost.train import Evaluator, Event, Time

TRAIN = [
    "after_dataloader", "batch_start", "before_train_batch",
    "before_forward", "after_forward", "before_loss", "after_loss",
    "before_backward", "after_backward",
    "after_train_batch", "batch_end", "batch_checkpoint",
]  # fmt: skip
EVAL = [
    "eval_start", "eval_batch_start", "eval_before_forward", "eval_after_forward",
    "eval_batch_end", "eval_end",
]  # fmt: skip


def test_events_come_in_the_documented_order(make, seen, loader_of) -> None:
    """Callbacks rely on it; the checkpoint events come after the evaluation."""
    trainer = make(
        train_dataloader=loader_of(8),
        eval_dataloader=loader_of(4),
        max_duration="1ep",
        callbacks=seen,
    )
    trainer.fit()
    expected = [
        "init", "fit_start", "epoch_start", *TRAIN, *TRAIN,
        "epoch_end", *EVAL, "epoch_checkpoint", "fit_end",
    ]  # fmt: skip
    assert [event.value for event in seen.events] == expected


def test_forward_and_backward_run_for_each_microbatch(make, seen, loader_of) -> None:
    """One optimizer step, several microbatches."""
    make(train_dataloader=loader_of(4), max_duration="1ep", grad_accum=2, callbacks=seen).fit()
    assert seen.events.count(Event.BEFORE_FORWARD) == 2
    assert seen.events.count(Event.BEFORE_TRAIN_BATCH) == 1


def test_accumulation_weighs_unequal_microbatches_by_size(make, loader_of) -> None:
    """Three samples in parts of two and one must give the mean over three."""
    model = torch.nn.Linear(1, 1)
    twin = copy.deepcopy(model)
    inputs = torch.arange(3, dtype=torch.float32).reshape(-1, 1)
    torch.nn.functional.mse_loss(twin(inputs), 2 * inputs).backward()
    with torch.no_grad():
        expected = [p - 0.01 * p.grad for p in twin.parameters()]
    make(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataloader=loader_of(3, 3),
        max_duration="1ba",
        grad_accum=2,
    ).fit()
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-7)


def test_algorithms_come_before_callbacks(make, at, loader_of) -> None:
    """A callback sees what the algorithm made of the batch."""
    from milepost.train import Algorithm

    order: list[str] = []

    class Note(Algorithm):
        def match(self, event, state) -> bool:
            return event is Event.BATCH_START

        def apply(self, event, state) -> None:
            order.append("algorithm")

    make(
        train_dataloader=loader_of(4),
        max_duration="1ba",
        algorithms=Note(),
        callbacks=at(Event.BATCH_START, lambda _: order.append("callback")),
    ).fit()
    assert order == ["algorithm", "callback"]


@pytest.mark.parametrize(
    ("duration", "batches"), [("2ep", 20), (2, 20), ("7ba", 7), ("50sp", 13), (Time(3, "ba"), 3)]
)
def test_durations_end_at_the_first_point_that_reaches_them(make, duration, batches) -> None:
    """A batch is never cut in two."""
    trainer = make(max_duration=duration)
    trainer.fit()
    assert trainer.state.timer.batch == batches


def test_steps_per_epoch_makes_shorter_epochs(make) -> None:
    """Epochs end after so many batches, and the loader begins anew."""
    trainer = make(steps_per_epoch=3)
    trainer.fit()
    assert (trainer.state.timer.epoch, trainer.state.timer.batch) == (2, 6)


def test_fit_takes_up_where_it_stopped(make, seen) -> None:
    """Two fits in the middle of an epoch see each sample once."""
    trainer = make(max_duration="4ba", callbacks=seen)
    trainer.fit()
    trainer.fit(duration="6ba")
    assert sorted(number for ids in seen.ids for number in ids) == list(range(40))
    assert trainer.state.timer.epoch == 1


def test_stop_training_finishes_the_batch(make, at) -> None:
    """Its events still run, and nothing after."""
    stop = at(
        Event.AFTER_LOSS, lambda state: state.stop_training(), when=lambda s: s.timer.batch == 2
    )
    trainer = make(callbacks=stop)
    trainer.fit()
    assert trainer.state.timer.batch == 3


@pytest.mark.parametrize(("every", "rate"), [("batch", 1e-5 * 0.5**20), ("epoch", 1e-5 * 0.5**2)])
def test_schedulers_step_after_batches_or_epochs(make, every, rate) -> None:
    """Twenty batches, two epochs."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    make(model=model, optimizers=optimizer, schedulers=scheduler, step_schedulers_every=every).fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_evaluation_changes_nothing_of_the_training(make, loader_of) -> None:
    """Dropout, batch norm and a shuffled loader in an evaluation must leave no trace."""

    def train(**options):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(1, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Dropout(),
            torch.nn.Linear(4, 1),
        )
        trainer = make(
            model=model,
            train_dataloader=loader_of(40, 4, shuffle=True),
            max_duration="1ep",
            **options,
        )
        trainer.fit()
        return list(model.state_dict().values())

    alone = train()
    evaluated = train(eval_dataloader=loader_of(8, 2, shuffle=True), eval_interval="2ba")
    assert all(torch.equal(one, other) for one, other in zip(alone, evaluated, strict=True))


def test_evaluation_without_metrics_gives_the_mean_loss(make, loader_of) -> None:
    """Weighted by samples: batches of 4 and 2."""
    model = torch.nn.Linear(1, 1)
    trainer = make(model=model, eval_dataloader=loader_of(6, 4))
    found = trainer.eval()
    inputs = torch.arange(6, dtype=torch.float32).reshape(-1, 1)
    with torch.no_grad():
        wanted = torch.nn.functional.mse_loss(model(inputs), 2 * inputs)
    torch.testing.assert_close(found["eval"]["Loss"], wanted)


def test_evaluators_keep_their_labels_metrics_and_cadence(make, loader_of, seen) -> None:
    """Each has its own copy of the metric and its own interval."""
    from torchmetrics import MeanSquaredError

    metric = MeanSquaredError()
    trainer = make(
        eval_dataloader=[
            Evaluator("a", loader_of(4), metrics=metric, eval_interval="5ba"),
            Evaluator("b", loader_of(8), metrics=metric, eval_interval="1ep"),
        ],
        callbacks=seen,
        compute_training_metrics=True,
        train_metrics=metric,
    )
    trainer.fit()
    assert set(trainer.state.current_metrics) == {"train", "a", "b"}
    assert seen.events.count(Event.EVAL_START) == 4 + 2
    assert metric.update_count == 0


def test_subset_of_an_evaluators_batches(make, loader_of, seen) -> None:
    """A long evaluation can be cut short on purpose."""
    make(
        eval_dataloader=Evaluator("a", loader_of(40, 4), subset_num_batches=2),
        max_duration="1ep",
        callbacks=seen,
    ).fit()
    assert seen.events.count(Event.EVAL_BATCH_START) == 2


def test_two_evaluators_with_one_label_are_refused(make, loader_of) -> None:
    """One would overwrite the other's metrics."""
    with pytest.raises(DuplicateNameError, match="'a'"):
        make(eval_dataloader=[Evaluator("a", loader_of(4)), Evaluator("a", loader_of(4))])


def test_an_empty_loader_is_an_error(make) -> None:
    """A training that can make no progress must not spin for ever, nor look like success."""
    with pytest.raises(UsageError, match="no batch"):
        make(train_dataloader=[], max_duration="3ba").fit()


def test_close_reaches_everything_and_the_first_error_comes_out(make, at) -> None:
    """An error while closing is not swallowed, and does not keep others from closing."""
    from milepost.train import Callback

    closed: list[str] = []

    class Bad(Callback):
        def close(self) -> None:
            raise RuntimeError("cannot close")

        def post_close(self) -> None:
            closed.append("bad")

    class Good(Callback):
        def close(self) -> None:
            closed.append("good")

        def post_close(self) -> None:
            closed.append("good post")

    with pytest.raises(RuntimeError, match="cannot close"):
        make(max_duration="1ba", callbacks=[Bad(), Good()]).fit()
    assert closed == ["good", "good post"]


def test_a_closing_error_does_not_hide_the_first_one(make, at) -> None:
    """The error of the training is the one to see."""
    from milepost.train import Callback

    class Bad(Callback):
        def batch_start(self, state) -> None:
            raise KeyError("the real one")

        def close(self) -> None:
            raise RuntimeError("cannot close")

    with pytest.raises(KeyError, match="the real one"):
        make(callbacks=Bad()).fit()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_fn": None}, "loss"),
        ({"precision": "amp"}, "accelerator"),
        ({"optimizers": []}, "optimizer"),
        ({"max_duration": "1dur"}, "fraction"),
        ({"step_schedulers_every": "step"}, "step_schedulers_every"),
        ({"compute_training_metrics": True}, "there are none"),
        ({"seed": -1}, "seed"),
        ({"save_folder": "x", "resume": "auto"}, "run_name"),
        ({"resume": "must"}, "save_folder"),
        ({"load_path_format": "/x/{world}"}, "world"),
        ({"load_object_store": object()}, "load_path_format"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, options, text) -> None:
    """Before the first batch, and with words that help."""
    with pytest.raises(UsageError, match=text):
        make(**options)


def test_models_with_their_own_loss_take_any_batch(make) -> None:
    """forward(batch) and loss(outputs, batch) are all a model needs."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, batch):
            return self.layer(batch["x"])

        def loss(self, outputs, batch):
            return outputs.square().mean(), outputs.abs().mean()

    trainer = make(
        model=Own(), loss_fn=None, train_dataloader=[{"x": torch.ones(4, 2)}] * 3, grad_accum=2
    )
    trainer.fit()
    assert trainer.state.timer.sample == 24


def test_seeds_differ_by_rank(make, monkeypatch) -> None:
    """Dropout and augmentation must not be the same on all ranks."""
    assert make(seed=5).state.seed == 5
    monkeypatch.setenv("RANK", "3")
    assert make(seed=5).state.seed == 8
