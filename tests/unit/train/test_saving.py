"""When a training is saved, and what a resume from it does."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.errors import ExistsError, MismatchError, MissingError, UsageError
from milepost.testing.asserts import assert_equal_states
from milepost.train import EMA, Callback, Event


def _names(folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in mp.open_run(folder).checkpoints()]


@pytest.mark.parametrize(
    ("interval", "names"),
    [
        ("1ep", ["ep1", "ep2"]),
        (2, ["ep2"]),
        ("4ba", ["ba4", "ba8", "ba12", "ba16", "ep2"]),
        ("5ba", ["ba5", "ba10", "ba15", "ep2"]),
        (["1ep", "5ba"], ["ba5", "ep1", "ba15", "ep2"]),
        ("24sp", ["sp24", "sp48", "sp72", "ep2"]),
        ("0.25dur", ["ba5", "ba10", "ba15", "ep2"]),
        (lambda state, event: state.timer.batch == 3, ["ba3", "ep2"]),
        ("9ep", ["ep2"]),
    ],
)
def test_names_tell_what_was_due(make, tmp_path, interval, names) -> None:
    """One save for one point; the end is always saved and alone is final."""
    trainer = make(save_folder=tmp_path, save_interval=interval)
    trainer.fit()
    assert trainer.saved_checkpoints == names
    assert _names(tmp_path) == names
    finals = [c.is_final for c in mp.open_run(tmp_path).checkpoints()]
    assert finals == [False] * (len(names) - 1) + [True]


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_deleted_checkpoints_are_not_listed(make, tmp_path, save_format) -> None:
    """Whoever goes through the list wants to open what it names."""
    trainer = make(
        save_folder=tmp_path, save_interval="4ba", keep=mp.KeepLast(2), save_format=save_format
    )
    trainer.fit()
    assert trainer.saved_checkpoints == _names(tmp_path) == ["ba16", "ep2"]


def test_a_training_has_its_memory_before_its_first_batch_and_none_without_one(tmp_path) -> None:
    """A trainer that only evaluates takes none; one that trains may save in the first batch."""

    class Looking(Callback):
        found: bool | None = None

        def batch_start(self, state) -> None:
            if self.found is None:
                self.found = arena.join(60) and arena.capacity_bytes >= 3 * num_bytes

    model = torch.nn.Linear(600, 600)
    num_bytes = sum(one.nbytes for one in model.parameters())
    looking = Looking()
    trainer = mp.Trainer(
        model=model,
        train_dataloader=[(torch.ones(2, 600), torch.ones(2, 600))],
        optimizers=torch.optim.AdamW(model.parameters()),
        loss_fn=torch.nn.functional.mse_loss,
        max_duration="1ep",
        save_folder=tmp_path,
        callbacks=[looking],
        progress_bar=False,
    )
    arena = trainer._session.checkpointer._writer._saver._stager.arena
    assert arena.capacity_bytes == 0
    trainer.fit()
    assert looking.found
    assert arena.generation == 1
    trainer.close()


class _Bar:
    """Notes what is shown."""

    def __init__(self) -> None:
        self.first: tuple[float, str] | None = None
        self.texts: list[str] = []
        self.losses: list[str] = []

    def update(self, done, *, total=None, text="") -> None:
        words = text.split(", ")
        self.losses += [word for word in words if word.startswith("loss ")]
        self.texts.append(", ".join(word for word in words if not word.startswith("loss ")))


@pytest.fixture
def bar(monkeypatch) -> _Bar:
    shown = _Bar()

    def open_bar(*, done, text, **_):
        shown.first = (done, text)
        return contextlib.nullcontext(shown)

    monkeypatch.setattr("milepost.train.trainer.training_bar", open_bar)
    return shown


def test_the_bar_ends_with_the_newest_save(make, tmp_path, bar) -> None:
    """The last save of a training comes after the last batch."""
    make(save_folder=tmp_path, save_interval="5ba").fit()
    assert bar.texts[-1] == "epoch 2, saved ep2"


def test_the_bar_begins_where_a_resume_goes_on(make, tmp_path, bar) -> None:
    """A bar that begins at 0 looks as if the training had been lost; the loss is shown with it."""
    make(save_folder=tmp_path, save_interval="5ba", max_duration="1ep").fit()
    assert bar.first == (0, "epoch 0")
    assert bar.losses
    trainer = make(save_folder=tmp_path, save_interval="100ep", resume="auto")
    done = trainer.state.timer.batch
    assert done > 0
    trainer.fit()
    assert bar.first == (done, "epoch 1, resumed from ep1")


def test_the_bar_names_only_what_is_committed(make, tmp_path, bar, at) -> None:
    """A save on its way may fail yet."""
    from milepost.engine import commits

    gate, publish = threading.Event(), commits.publish

    def slow(*args, **kwargs):
        assert gate.wait(30)
        return publish(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commits, "publish", slow)
        make(
            save_folder=tmp_path,
            save_interval="2ba",
            max_duration="3ba",
            callbacks=at(Event.BATCH_END, lambda _: gate.set(), when=lambda s: s.timer.batch == 3),
        ).fit()
    assert bar.texts[1] == "epoch 0"
    assert bar.texts[-1] == "epoch 0, saved ba3"


def test_a_training_that_ends_in_an_epoch_is_saved_there(make, tmp_path) -> None:
    """The end of a training need not be the end of an epoch."""
    make(save_folder=tmp_path, max_duration="13ba").fit()
    assert _names(tmp_path) == ["ep1", "ba13"]


def test_single_files_show_nothing_else(make, tmp_path) -> None:
    """The folder looks as the guide shows it."""
    trainer = make(save_folder=tmp_path, save_format="torch")
    trainer.fit()
    shown = sorted(p.name for p in Path(trainer.checkpoint_saver.checkpoint_folder).iterdir())
    assert [name for name in shown if not name.startswith(".")] == ["ep1.pt", "ep2.pt"]
    loaded = torch.load(tmp_path / "ep1.pt", weights_only=True)
    assert {"state", "rng"} <= set(loaded)
    assert {"model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timer",
            "rank_zero_seed", "current_metrics"} <= set(loaded["state"])  # fmt: skip


def test_names_can_be_chosen(make, tmp_path) -> None:
    """With the counters filled in."""
    make(save_folder=tmp_path, save_name_format="e{epoch}-b{batch}").fit()
    assert _names(tmp_path) == ["e1-b10", "e2-b20"]


def test_relative_folders_lie_in_the_run_folder(make, tmp_path, monkeypatch) -> None:
    """As the guide says."""
    monkeypatch.chdir(tmp_path)
    trainer = make(save_folder="checkpoints", run_name="a", max_duration="1ba")
    trainer.fit()
    assert trainer.checkpoint_folder == str(tmp_path / "runs" / "a" / "rank_0" / "checkpoints")
    assert _names(Path(trainer.checkpoint_folder)) == ["ba1"]


def test_h01_counters_right_after_a_mid_epoch_resume(make, tmp_path, seen) -> None:
    """Off by one here trains a batch twice and misnames every later checkpoint."""
    make(save_folder=tmp_path, save_interval="3ba", max_duration="6ba").fit()
    trainer = make(save_folder=tmp_path, save_interval="3ba", resume="auto", callbacks=seen)
    trainer.fit()
    first = seen.counters[0]
    assert (first["epoch"], first["batch_in_epoch"], first["batch"], first["sample"]) == (
        0,
        6,
        6,
        24,
    )
    assert seen.ids[0] == [24, 25, 26, 27]
    assert len(seen.ids) == 14
    assert trainer.saved_checkpoints[0] == "ba9"


@pytest.mark.parametrize("point", ["ba8", "ep1"])
def test_h02_a_checkpoint_at_the_epochs_end(make, tmp_path, seen, loader_of, point) -> None:
    """Neither skips the next epoch, nor trains the finished one again."""

    def loader():
        return loader_of(32, 4, shuffle=True, generator=torch.Generator().manual_seed(5))

    whole = type(seen)()
    make(train_dataloader=loader(), max_duration="3ep", callbacks=whole).fit()
    make(
        train_dataloader=loader(),
        max_duration="3ep",
        save_folder=tmp_path,
        save_interval=lambda state, event: state.timer.batch == 8,
    ).fit()
    trainer = make(
        train_dataloader=loader(),
        max_duration="3ep",
        load_path_format=str(tmp_path / point),
        callbacks=seen,
    )
    trainer.fit()
    assert len(seen.ids) == 16
    assert seen.ids == whole.ids[8:]


def test_h03_learning_rate_goes_on(make, tmp_path) -> None:
    """Building a scheduler resets the rate; a resume must put the stored one back."""

    def trainer(**options):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return make(
            model=model,
            optimizers=optimizer,
            schedulers=schedule,
            train_dataloader=[(torch.zeros(1, 1), torch.zeros(1, 1))],
            **options,
        )

    trainer(max_duration="45ep", save_folder=tmp_path, save_interval="45ep").fit()
    resumed = trainer(max_duration="47ep", save_folder=tmp_path, resume="must")
    rates = []
    resumed.state.callbacks = [_Rates(rates)]
    assert resumed.state.optimizers[0].param_groups[0]["lr"] == 5.782172325201156e-4
    resumed.fit()
    assert rates == pytest.approx([5.782172325201156e-4, 5.626666167821523e-4], rel=1e-12)


class _Rates(Callback):
    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    def epoch_start(self, state) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def test_h05_shuffled_order_of_a_later_epoch(make, tmp_path, seen, loader_of) -> None:
    """The order is that of the epoch that was interrupted, not of the first."""
    whole = type(seen)()
    options = {"max_duration": "3ep"}
    make(train_dataloader=loader_of(10, 2, shuffle=True), callbacks=whole, **options).fit()
    make(
        train_dataloader=loader_of(10, 2, shuffle=True), save_folder=tmp_path, max_duration="8ba"
    ).fit()
    make(
        train_dataloader=loader_of(10, 2, shuffle=True),
        save_folder=tmp_path,
        resume="must",
        callbacks=seen,
        seed=77,
        **options,
    ).fit()
    assert seen.ids == whole.ids[8:]


@pytest.mark.parametrize("workers", [0, 2])
def test_h06_workers_that_run_ahead(make, tmp_path, seen, loader_of, workers) -> None:
    """The position is what was trained, not what was fetched."""
    first = loader_of(64, 4, num_workers=2, prefetch_factor=2)
    make(train_dataloader=first, save_folder=tmp_path, max_duration="5ba").fit()
    second = loader_of(64, 4, num_workers=workers)
    make(
        train_dataloader=second,
        save_folder=tmp_path,
        resume="must",
        max_duration="1ep",
        callbacks=seen,
    ).fit()
    assert [number for ids in seen.ids for number in ids] == list(range(20, 64))


def test_h16_scaler_goes_on(make, tmp_path) -> None:
    """A scaler that starts again skips steps that the straight run did not skip."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=4)

    make(save_folder=tmp_path, scaler=scaler(), max_duration="6ba").fit()
    resumed = make(
        save_folder=tmp_path,
        scaler=torch.amp.GradScaler("cpu"),
        max_duration="10ba",
        resume="must",
    )
    found = resumed.state.scaler.state_dict()
    assert (found["scale"], found["_growth_tracker"], found["growth_interval"]) == (2048.0, 2, 4)
    resumed.fit()
    assert resumed.state.scaler.get_scale() == 4096.0


class _Count(Callback):
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state) -> None:
        self.count = state["count"]


def test_two_callbacks_of_one_class_keep_their_own_state(make, tmp_path) -> None:
    """Composer gave both the second one's."""
    make(save_folder=tmp_path, max_duration="1ba", callbacks=[_Count(1), _Count(2)]).fit()
    callbacks = [_Count(0), _Count(0)]
    make(save_folder=tmp_path, resume="must", callbacks=callbacks)
    assert [one.count for one in callbacks] == [1, 2]


def test_callbacks_without_a_state_may_come_and_go(make, tmp_path, seen) -> None:
    """Watching a resumed training must not need the watcher of the first start."""
    make(save_folder=tmp_path, max_duration="1ba").fit()
    make(save_folder=tmp_path, max_duration="2ba", resume="must", callbacks=seen).fit()
    assert len(seen.ids) == 1


def test_a_finished_run_resumed_does_nothing(make, tmp_path, seen) -> None:
    """A script that is started until it is done must succeed at the end."""
    make(save_folder=tmp_path).fit()
    before = sorted(path.name for path in tmp_path.iterdir())
    trainer = make(save_folder=tmp_path, resume="auto", callbacks=seen)
    trainer.fit()
    assert seen.ids == []
    assert trainer.saved_checkpoints == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_longer_duration_goes_on_as_if_it_had_always_been(make, tmp_path) -> None:
    """max_duration is not restored, so that a training can be made longer."""
    straight = make(max_duration="3ep")
    straight.fit()
    make(save_folder=tmp_path).fit()
    resumed = make(save_folder=tmp_path, max_duration="3ep", resume="auto")
    resumed.fit()
    assert resumed.saved_checkpoints == ["ep3"]
    assert_equal_states(
        dict(resumed.state.model.state_dict()), dict(straight.state.model.state_dict())
    )


def test_a_training_stopped_early_stays_stopped(make, tmp_path, at, seen) -> None:
    """Started again with the same duration it is finished; with a longer one it goes on."""
    stop = at(Event.BATCH_END, lambda s: s.stop_training(), when=lambda s: s.timer.batch == 4)
    make(save_folder=tmp_path, callbacks=stop).fit()
    assert _names(tmp_path) == ["ba4"]
    make(save_folder=tmp_path, resume="must", callbacks=seen).fit()
    assert seen.ids == []
    make(save_folder=tmp_path, resume="must", max_duration="5ba", callbacks=seen).fit()
    assert len(seen.ids) == 1


def test_never_refuses_a_folder_with_checkpoints(make, tmp_path) -> None:
    """Before the first batch, and nothing is touched."""
    make(save_folder=tmp_path, max_duration="1ba").fit()
    with pytest.raises(ExistsError, match="ba1"):
        make(save_folder=tmp_path)


def test_must_refuses_an_empty_folder(make, tmp_path) -> None:
    """A lost checkpoint must not look like a first start."""
    with pytest.raises(MissingError):
        make(save_folder=tmp_path, resume="must")


def test_naming_a_checkpoint_of_the_same_run_goes_on_from_it(make, tmp_path) -> None:
    """A deliberate step back: what came after is off the lineage."""
    make(save_folder=tmp_path, save_interval="5ba").fit()
    trainer = make(
        save_folder=tmp_path, save_interval="1ep", load_path_format=str(tmp_path / "ba5")
    )
    assert trainer.state.timer.batch == 5
    trainer.fit()
    assert _names(tmp_path)[0] == "ba5"
    assert "ba15" not in _names(tmp_path)


def test_h36_a_restart_prefers_its_own_newest_over_the_first_start(make, tmp_path) -> None:
    """Going back to the pretrained weights at each crash would never end."""
    make(save_folder=tmp_path / "old", max_duration="2ba").fit()
    options = {
        "save_folder": tmp_path / "new",
        "load_path_format": str(tmp_path / "old"),
        "resume": "auto",
    }
    first = make(max_duration="6ba", **options)
    assert first.state.timer.batch == 2
    first.fit()
    assert make(**options).state.timer.batch == 6


def test_weights_only_begins_a_new_training(make, tmp_path) -> None:
    """Fine-tuning: the timer, the optimizer and the random numbers are new."""
    make(save_folder=tmp_path, max_duration="3ba").fit()
    weights = mp.open_run(tmp_path).latest().load(["model"])["state"]["model"]
    trainer = make(load_path_format=str(tmp_path / "ba3"), load_weights_only=True)
    assert trainer.state.timer.batch == 0
    assert not trainer.is_resumed
    assert_equal_states(dict(trainer.state.model.state_dict()), weights)


def test_weights_only_is_as_strict_as_asked(make, tmp_path) -> None:
    """Another head is fine when lenient, an error when strict."""
    make(save_folder=tmp_path, max_duration="1ba").fit()

    class Wider(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.head = torch.nn.Linear(1, 1)

    options = {"load_path_format": str(tmp_path / "ba1"), "load_weights_only": True}
    make(model=Wider(), **options)
    with pytest.raises(MismatchError, match="head"):
        make(model=Wider(), load_strict=True, **options)


def test_a_checkpoint_that_does_not_fit_is_one_error(make, tmp_path) -> None:
    """Everything that does not fit is listed, and nothing was changed."""
    make(save_folder=tmp_path, max_duration="1ba").fit()
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"0\.weight"):
        make(model=model, save_folder=tmp_path, resume="must")
    assert_equal_states(dict(model.state_dict()), before)


def test_a_pt_file_is_gone_on_from(make, tmp_path) -> None:
    """The file of a single-file run, in a training that saves elsewhere."""
    straight = make()
    straight.fit()
    make(save_folder=tmp_path / "a", save_format="torch", max_duration="1ep").fit()
    trainer = make(
        load_path_format=str(tmp_path / "a" / "ep{RANK}1.pt").replace("{RANK}1", "1"),
        save_folder=tmp_path / "b",
    )
    trainer.fit()
    assert trainer.saved_checkpoints == ["ep2"]
    assert_equal_states(
        dict(trainer.state.model.state_dict()), dict(straight.state.model.state_dict())
    )


def test_removed_attributes_are_not_saved(make, tmp_path, at) -> None:
    """serialized_attributes is the user's to change."""
    remove = at(Event.INIT, lambda s: s.serialized_attributes.remove("current_metrics"))
    make(save_folder=tmp_path, max_duration="1ba", callbacks=remove).fit()
    assert "current_metrics" not in mp.open_run(tmp_path).latest().load()["state"]


def test_manual_saves_are_refused_in_the_middle_of_a_batch(make, tmp_path, at) -> None:
    """Such a checkpoint could not be resumed from."""
    holder = []
    trainer = make(
        save_folder=tmp_path,
        max_duration="1ba",
        callbacks=at(Event.AFTER_FORWARD, lambda _: holder[0].save_checkpoint()),
    )
    holder.append(trainer)
    with pytest.raises(UsageError, match="middle of a batch"):
        trainer.fit()


def test_manual_saves_have_the_name_asked_for(make, tmp_path, at) -> None:
    """Or the natural one."""
    holder = []

    def save(_state) -> None:
        holder[0].save_checkpoint("mine")
        holder[0].save_checkpoint()

    trainer = make(
        save_folder=tmp_path,
        max_duration="2ba",
        callbacks=at(Event.BATCH_END, save, when=lambda s: s.timer.batch == 1),
    )
    holder.append(trainer)
    trainer.fit()
    assert _names(tmp_path) == ["mine", "ba1", "ba2"]


def test_metrics_of_a_checkpoint_are_those_of_its_weights(make, tmp_path, loader_of) -> None:
    """A stale metric would make a worse checkpoint the best one."""
    make(
        save_folder=tmp_path,
        save_interval=["1ep", "4ba"],
        max_duration="1ep",
        eval_dataloader=loader_of(4),
        eval_interval="4ba",
    ).fit()
    found = {c.name: c.metrics for c in mp.open_run(tmp_path).checkpoints()}
    assert set(found["ba4"]) == {"loss", "Loss", "eval/Loss"}
    assert set(found["ep1"]) == {"loss"}


def test_h17_a_checkpoint_from_within_an_evaluation(make, tmp_path, at, loader_of) -> None:
    """While the average is in the model; a resume trains on from the raw weights."""

    class Walk(torch.nn.Module):
        """One weight that is k after step k."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, batch):
            return self.weight

        def loss(self, outputs, batch):
            return -outputs

    def trainer(**options):
        model = Walk()
        return make(
            model=model,
            loss_fn=None,
            optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
            algorithms=EMA(0.9),
            **options,
        )

    holder = []
    first = trainer(
        save_folder=tmp_path,
        save_interval="99ep",
        max_duration="3ba",
        eval_dataloader=loader_of(4),
        eval_interval="3ba",
        callbacks=at(Event.EVAL_BATCH_END, lambda _: holder[0].save_checkpoint("inside")),
    )
    holder.append(first)
    first.fit()
    stored = mp.open_run(tmp_path).get("inside").load()["state"]["model"]["weight"]
    assert stored.item() == pytest.approx(0.561)
    resumed = trainer(load_path_format=str(tmp_path / "inside"), max_duration="4ba")
    (average,) = resumed.state.algorithms
    assert resumed.state.model.weight.item() == 3.0
    assert average.average["weight"].item() == pytest.approx(0.561)
    resumed.fit()
    assert resumed.state.model.weight.item() == 4.0
    assert average.average["weight"].item() == pytest.approx(0.9049)


@pytest.mark.parametrize("is_same_run", [True, False])
def test_removed_attributes_are_not_restored(make, tmp_path, at, is_same_run) -> None:
    """Also where the checkpoint holds them; what is left goes on."""
    make(save_folder=tmp_path, max_duration="1ba", seed=5).fit()
    remove = at(Event.INIT, lambda s: s.serialized_attributes.remove("rank_zero_seed"))
    source = {"save_folder": tmp_path, "resume": "must"}
    if not is_same_run:
        source = {"load_path_format": str(tmp_path)}
    trainer = make(max_duration="2ba", seed=6, callbacks=remove, **source)
    assert (trainer.state.rank_zero_seed, trainer.state.timer.batch) == (6, 1)
    trainer.fit()
    assert trainer.state.timer.batch == 2


@pytest.mark.parametrize(
    ("metric", "is_evaluated", "told"),
    [
        ("loss", True, ["name it: Loss, eval/Loss."]),
        ("los", True, ["Was 'loss' meant?"]),
        ("Loss", True, []),
        ("eval/Loss", True, []),
        ("loss", False, []),
    ],
)
def test_ranking_by_what_few_can_mean_is_told_of(
    make, tmp_path, caplog, metric, is_evaluated, told
) -> None:
    """The loss of one batch and that of the evaluation differ by a capital only."""
    data = DataLoader(TensorDataset(torch.ones(4, 4), torch.zeros(4, 1)))
    make(
        save_folder=tmp_path,
        keep=[mp.KeepLast(1), mp.KeepBest(1, metric, "min")],
        eval_dataloader=data if is_evaluated else None,
    )
    said = [one for one in caplog.messages if "keep= ranks" in one]
    assert len(said) == len(told)
    assert all(text in one for text, one in zip(told, said, strict=True))
