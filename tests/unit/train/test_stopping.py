"""Signals, errors and NaN: what is saved, what comes out, what a resume does."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch

import milepost as mp
from milepost.errors import NonFiniteLossError, Preempted
from milepost.testing.asserts import assert_equal_states
from milepost.train import EMA, Callback, Event


def _kill(number: int = signal.SIGTERM):
    return lambda _state: os.kill(os.getpid(), number)


def _names(folder) -> list[str]:
    return [checkpoint.name for checkpoint in mp.open_run(folder).checkpoints()]


class Count(Callback):
    """Counts events; what a resume must neither lose nor repeat."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}

    def run_event(self, event, state) -> None:
        if event not in (Event.INIT, Event.FIT_START, Event.FIT_END):
            self.events[event.value] = self.events.get(event.value, 0) + 1

    def state_dict(self):
        return dict(self.events)

    def load_state_dict(self, state) -> None:
        self.events = dict(state)


@pytest.fixture
def dropout(make, loader_of):
    """Return a function that makes a trainer whose every random number matters."""

    def _make(**options):
        torch.manual_seed(2)
        kind = options.pop("kind", torch.nn.LayerNorm)
        model = torch.nn.Sequential(
            torch.nn.Linear(1, 8), kind(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        options.setdefault("train_dataloader", loader_of(40, 4, shuffle=True))
        options.setdefault("eval_dataloader", loader_of(12, 4))
        options.setdefault("eval_interval", ["4ba", "1ep"])
        options.setdefault("algorithms", EMA(0.5))
        return make(model=model, max_duration="2ep", **options)

    return _make


def _outcome(trainer):
    found = trainer.state.state_dict()
    del found["timer"]["wall_s"]
    return found


@pytest.mark.parametrize(
    ("event", "batch", "name"),
    [
        (Event.AFTER_FORWARD, 3, "ba4"),
        (Event.BATCH_END, 10, "ba10"),
        (Event.EPOCH_END, 10, "ep1"),
        (Event.EVAL_BATCH_START, 8, "ba8"),
        (Event.EVAL_BATCH_END, 10, "ep1"),
    ],
)
def test_h35_a_signal_leaves_a_state_to_go_on_from(
    dropout, tmp_path, at, event, batch, name
) -> None:
    """In a forward pass, in an evaluation, at an epoch's end: split equals straight."""
    straight = dropout(callbacks=Count())
    straight.fit()
    at_once = at(event, _kill(), when=lambda state: state.timer.batch == batch)
    trainer = dropout(
        callbacks=[Count(), at_once], save_folder=tmp_path, save_interval="99ep", resume="auto"
    )
    with pytest.raises(Preempted) as caught:
        trainer.fit()
    assert caught.value.code == 143
    assert caught.value.checkpoint == name
    assert _names(tmp_path) == [name]
    assert not trainer.state.algorithms[0].is_swapped
    resumed = dropout(callbacks=Count(), save_folder=tmp_path, resume="auto", seed=99)
    resumed.fit()
    assert_equal_states(
        {**_outcome(resumed), "rank_zero_seed": 1}, {**_outcome(straight), "rank_zero_seed": 1}
    )


def test_a_second_signal_in_the_same_evaluation(dropout, tmp_path, at) -> None:
    """Cut off again before it got anywhere: the same checkpoint still stands, nothing is lost."""
    straight = dropout(callbacks=Count())
    straight.fit()
    for _ in range(2):
        trainer = dropout(
            callbacks=[Count(), at(Event.EVAL_START, _kill(signal.SIGUSR1))],
            save_folder=tmp_path,
            save_interval="99ep",
            resume="auto",
        )
        with pytest.raises(Preempted) as caught:
            trainer.fit()
        assert (caught.value.code, caught.value.checkpoint) == (138, "ba4")
    resumed = dropout(callbacks=Count(), save_folder=tmp_path, resume="must")
    resumed.fit()
    assert_equal_states(_outcome(resumed), _outcome(straight))


def test_a_point_just_saved_is_not_saved_again(dropout, tmp_path, at) -> None:
    """The signal came during the save of this very point."""
    trainer = dropout(
        callbacks=at(Event.BATCH_CHECKPOINT, _kill(), when=lambda s: s.timer.batch == 4),
        save_folder=tmp_path,
        save_interval="4ba",
    )
    with pytest.raises(Preempted):
        trainer.fit()
    assert trainer.saved_checkpoints == ["ba4"]


def test_handlers_are_there_only_during_fit(make, tmp_path, at) -> None:
    """A library that keeps the process's handlers is a bad guest."""
    called, inside = [], []
    previous = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        watch = at(
            Event.BATCH_START, lambda _: inside.append(signal.getsignal(signal.SIGTERM) is mine)
        )
        trainer = make(save_folder=tmp_path, max_duration="1ba", callbacks=watch)
        assert signal.getsignal(signal.SIGTERM) is mine
        trainer.fit()
        assert inside == [False]
        assert signal.getsignal(signal.SIGTERM) is mine
        trainer.state.callbacks = [at(Event.BATCH_START, _kill())]
        with pytest.raises(Preempted):
            trainer.fit(duration="5ba")
        assert called == [1]
    finally:
        signal.signal(signal.SIGTERM, previous)


class _BoomError(Exception):
    pass


def _boom(_state) -> None:
    raise _BoomError


@pytest.mark.parametrize(
    "event",
    [Event.AFTER_DATALOADER, Event.AFTER_FORWARD, Event.AFTER_BACKWARD, Event.EVAL_BATCH_END],
)
def test_an_error_before_the_step_leaves_a_state_to_go_on_from(
    dropout, tmp_path, at, event
) -> None:
    """Weights, generators and position are those of the last finished batch."""
    straight = dropout()
    straight.fit()
    wrong = at(event, _boom, when=lambda state: state.timer.batch == 8)
    with pytest.raises(_BoomError):
        dropout(callbacks=wrong, save_folder=tmp_path, save_interval="99ep").fit()
    assert _names(tmp_path) == ["ba8"]
    resumed = dropout(save_folder=tmp_path, resume="must")
    resumed.fit()
    assert_equal_states(_outcome(resumed), _outcome(straight))


def test_the_same_trainer_can_go_on_after_an_error(dropout, tmp_path, at) -> None:
    """In a notebook one mends the cause and calls fit again."""
    straight = dropout()
    straight.fit()
    wrong = at(Event.AFTER_LOSS, _boom, when=lambda state: state.timer.batch == 5)
    trainer = dropout(callbacks=wrong, save_folder=tmp_path)
    with pytest.raises(_BoomError):
        trainer.fit()
    trainer.state.callbacks = []
    trainer.fit()
    assert_equal_states(_outcome(trainer), _outcome(straight))


@pytest.mark.parametrize("event", [Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EPOCH_END])
def test_an_error_after_the_step_leaves_only_a_diagnostic(dropout, tmp_path, at, event) -> None:
    """A state between two batches is to be looked at, never resumed from."""
    wrong = at(event, _boom, when=lambda state: state.timer.batch in (9, 10))
    with pytest.raises(_BoomError) as caught:
        dropout(callbacks=wrong, save_folder=tmp_path, save_interval="5ba").fit()
    assert _names(tmp_path)[-1] in ("ba5", "ba10")
    (failed,) = (tmp_path / "failed").iterdir()
    told = (
        f"'failed/{failed.name}', for a look only. A resume goes on from {_names(tmp_path)[-1]!r}."
    )
    assert any(told in note for note in getattr(caught.value, "__notes__", [told]))


@pytest.mark.parametrize(
    ("event", "name"),
    [(Event.AFTER_TRAIN_BATCH, "ba4"), (Event.BATCH_END, "ba3"), (Event.EPOCH_END, "ba10")],
)
def test_a_diagnostic_is_called_after_the_batch_that_failed(make, tmp_path, at, event, name):
    """The one in hand, counted from 1: the timer counts it only once it is done."""
    wrong = at(event, _boom, when=lambda state: state.timer.batch in (3, 10))
    with pytest.raises(_BoomError) as caught:
        make(callbacks=wrong, save_folder=tmp_path, save_interval="99ep").fit()
    assert [path.name for path in (tmp_path / "failed").iterdir()] == [name]
    told = "A resume begins anew: there is no checkpoint."
    assert any(told in note for note in getattr(caught.value, "__notes__", [told]))


def test_a_written_buffer_leaves_only_a_diagnostic(dropout, tmp_path, at) -> None:
    """Batch norm counted the batch already; training it again would count it twice."""
    wrong = at(Event.AFTER_LOSS, _boom, when=lambda state: state.timer.batch == 3)
    with pytest.raises(_BoomError):
        dropout(kind=torch.nn.BatchNorm1d, callbacks=wrong, save_folder=tmp_path).fit()
    assert _names(tmp_path) == []
    assert [path.name for path in (tmp_path / "failed").iterdir()] == ["ba4"]


def test_an_error_in_the_first_batch_leaves_nothing(make, tmp_path, at) -> None:
    """Or a mended script would be told that the run has begun already."""
    with pytest.raises(_BoomError):
        make(callbacks=at(Event.AFTER_FORWARD, _boom), save_folder=tmp_path).fit()
    make(save_folder=tmp_path, max_duration="1ba").fit()
    assert _names(tmp_path) == ["ba1"]


def test_a_failing_rescue_does_not_hide_the_error(make, tmp_path, at) -> None:
    """The state cannot be stored; the error of the training still comes out."""

    class Unsavable(Callback):
        def state_dict(self):
            return {"x": object()}

        def load_state_dict(self, state) -> None:
            pass

    wrong = at(Event.AFTER_FORWARD, _boom, when=lambda state: state.timer.batch == 2)
    with pytest.raises(_BoomError) as caught:
        make(save_folder=tmp_path, callbacks=[Unsavable(), wrong], save_interval="99ep").fit()
    notes = getattr(caught.value, "__notes__", ["could not be saved"])
    assert any("could not be saved" in note for note in notes)


class Explodes(torch.nn.Linear):
    """Its outputs become NaN or infinite."""

    def __init__(self, value: float, at_call: int) -> None:
        super().__init__(1, 1)
        self.value, self.calls, self.at_call = value, 0, at_call

    def forward(self, inputs):
        self.calls += 1
        outputs = super().forward(inputs)
        return outputs * self.value if self.calls == self.at_call else outputs


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(make, tmp_path, value) -> None:
    """State, batch and outputs are kept for a look, never as the newest checkpoint."""
    model = Explodes(value, 3)
    trainer = make(model=model, save_folder=tmp_path, save_interval="2ba")
    with pytest.raises(NonFiniteLossError, match="batch 3") as caught:
        trainer.fit()
    assert caught.value.facts["checkpoint"] == "nan/ba3"
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert _names(tmp_path) == ["ba2"]
    assert mp.open_run(tmp_path).latest().name == "ba2"
    stored = mp.Checkpoint.from_directory(tmp_path / "nan" / "ba3").load()["state"]
    assert stored["batch"][0].flatten().tolist() == [8.0, 9.0, 10.0, 11.0]
    assert not torch.isfinite(stored["outputs"]).any()


def test_a_loss_that_is_not_finite_without_a_folder(make) -> None:
    """Just the error."""
    with pytest.raises(NonFiniteLossError):
        make(model=Explodes(math.nan, 1)).fit()


@pytest.fixture
def failing_saves(monkeypatch):
    """Return a set of names whose saves fail in the background, once each."""
    from milepost.engine import commits
    from milepost.errors import NoSpaceError

    names: set[str] = set()
    publish = commits.publish

    def fail(store, session, manifest, *args, **kwargs):
        if manifest.name in names:
            names.discard(manifest.name)
            raise NoSpaceError(f"No room for {manifest.name}.")
        return publish(store, session, manifest, *args, **kwargs)

    monkeypatch.setattr(commits, "publish", fail)
    return names


def test_an_earlier_failed_save_does_not_prevent_the_last_one(
    make, tmp_path, at, failing_saves
) -> None:
    """The signal comes right after a save that fails; its point is saved again."""
    failing_saves.add("ba4")
    trainer = make(
        save_folder=tmp_path,
        save_interval="4ba",
        callbacks=at(Event.BATCH_CHECKPOINT, _kill(), when=lambda s: s.timer.batch == 4),
    )
    with pytest.raises(Preempted) as caught:
        trainer.fit()
    assert caught.value.checkpoint is not None
    assert _names(tmp_path) == [caught.value.checkpoint]
    assert trainer.saved_checkpoints == [caught.value.checkpoint]


def test_a_failed_save_stops_the_training_or_warns(make, tmp_path, failing_saves, caplog) -> None:
    """As on_save_error says; earlier checkpoints stay, and with a warning it trains on."""
    from milepost.errors import NoSpaceError

    failing_saves.add("ba4")
    with pytest.raises(NoSpaceError):
        make(save_folder=tmp_path / "a", save_interval="2ba").fit()
    assert _names(tmp_path / "a")[0] == "ba2"
    failing_saves.add("ba4")
    trainer = make(
        save_folder=tmp_path / "b", save_interval="2ba", max_duration="8ba", on_save_error="warn"
    )
    trainer.fit()
    assert _names(tmp_path / "b") == ["ba2", "ba6", "ba8"]
    assert trainer.saved_checkpoints == ["ba2", "ba6", "ba8"]


def test_a_training_does_not_end_well_without_its_last_state(make, tmp_path, failing_saves) -> None:
    """Nobody looks at a job that has ended well; and there is no training left to go on with."""
    from milepost.errors import SaveFailedError

    failing_saves.add("ba8")
    trainer = make(
        save_folder=tmp_path, save_interval="2ba", max_duration="8ba", on_save_error="warn"
    )
    with pytest.raises(SaveFailedError, match="newest state is not saved: ba8"):
        trainer.fit()
    trainer.close()
    assert _names(tmp_path) == ["ba2", "ba4", "ba6"]
