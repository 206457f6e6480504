"""The checkpointer: errors of saves, signals, exceptions in the loop, late objects, options."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.stores import LocalStore
from milepost.testing.asserts import assert_equal_states


class Box:
    """One value that is saved."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def names(folder, **options):
    return [one.name for one in mp.open_run(folder).checkpoints(**options)]


@pytest.fixture
def failing(monkeypatch):
    """Make the saves of the given names fail."""
    bad = set()
    original = LocalStore.create_writer

    def create_writer(self, key, size_bytes):
        if key.partition("/")[0] in bad:
            raise mp.StorageError(f"boom at {key}")
        return original(self, key, size_bytes)

    monkeypatch.setattr(LocalStore, "create_writer", create_writer)
    return bad


# -- errors of saves ------------------------------------------------------------------------------


def test_a_failed_save_is_told_once_and_at_the_next_chance(tmp_path, failing):
    """By the handle, by the next save, by wait, or by close: whoever comes first."""
    failing.add("bad")
    run = mp.Checkpointer(tmp_path, box=Box()).open()
    pending = run.save("bad")
    assert isinstance(pending.exception(30), mp.StorageError)
    assert pending.done()
    run.save("good", wait=True)  # told already
    run.save("bad").check_done(30)
    with pytest.raises(mp.StorageError, match="boom"):
        run.save("next")
    run.save("bad")
    with pytest.raises(mp.StorageError, match="boom"):
        run.wait()
    run.save("bad")
    with pytest.raises(mp.StorageError, match="boom"):
        run.close()
    run.close()
    assert names(tmp_path) == ["good"]


@pytest.mark.parametrize("async_save", [True, False])
def test_with_warn_the_training_goes_on_until_too_many_have_failed(
    tmp_path, failing, caplog, async_save
):
    """In a row: one good save in between starts the count again."""
    failing.add("bad")
    with mp.Checkpointer(
        tmp_path, on_save_error="warn", max_failed_saves=2, async_save=async_save, box=Box()
    ) as run:
        for name in ("bad", "bad", "good", "bad", "bad"):
            run.save(name)
            run.wait()
        assert caplog.text.count("boom") == 4
        with pytest.raises(mp.SaveFailedError, match="3 saves in a row") as caught:
            save_and_wait(run, "bad")
        assert isinstance(caught.value.__cause__, mp.StorageError)
    assert names(tmp_path) == ["good"]


@pytest.mark.parametrize("ends", ["with", "close"])
def test_with_warn_a_run_does_not_end_well_without_its_newest_state(tmp_path, failing, ends):
    """A warning lets a training go on, and there is none left. It is told once."""
    failing.add("bad")
    run = mp.Checkpointer(tmp_path, on_save_error="warn", box=Box()).open()
    run.save("good")
    run.save("bad")
    with pytest.raises(mp.SaveFailedError, match="newest state is not saved: bad") as caught:
        if ends == "close":
            run.close()
        else:
            with run:
                run.wait()
    assert isinstance(caught.value.__cause__, mp.StorageError)
    run.close()
    assert names(tmp_path) == ["good"]


def save_and_wait(run, name):
    run.save(name)
    run.wait()


def test_waiting_for_one_save_tells_its_error_whatever_the_policy(tmp_path, failing):
    """Who asks for this checkpoint wants to know."""
    failing.add("bad")
    with mp.Checkpointer(tmp_path, on_save_error="warn", box=Box()) as run:
        with pytest.raises(mp.StorageError):
            run.save("bad", wait=True)
        with pytest.raises(mp.StorageError):
            run.save("bad").wait()


def test_a_synchronous_save_tells_its_error_at_once(tmp_path, failing):
    """There is no later chance to wait for."""
    failing.add("bad")
    with mp.Checkpointer(tmp_path, async_save=False, box=Box()) as run:
        assert run.save("good").done()
        with pytest.raises(mp.StorageError):
            run.save("bad")


def test_an_error_in_the_loop_is_not_hidden_by_one_of_a_save(tmp_path, failing, caplog):
    """The first error is the one to see; the other one is logged beside it."""
    failing.add("bad")

    def life():
        with mp.Checkpointer(tmp_path, box=Box()) as run:
            run.save("bad")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        life()
    assert "boom" in caplog.text


def test_a_fenced_checkpointer_stops_even_if_it_was_only_to_warn(tmp_path):
    """Two processes that both write to one run lose each other's work."""
    first = mp.Checkpointer(tmp_path, on_save_error="warn", box=Box()).open()
    with mp.Checkpointer(tmp_path, box=Box()) as second:
        second.save("mine", wait=True)
    first.save("theirs").check_done(30)
    with pytest.raises(mp.FencedError):
        first.save("again")
    first.close()
    assert names(tmp_path) == ["mine"]


# -- signals --------------------------------------------------------------------------------------


def loop(folder, *, at, do, every=None, epochs=1):
    """Count batches of a small loop, and do something within one of them."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 1)
    seen = []
    run = mp.Checkpointer(folder, every=every, loader=loader, box=Box())
    with run:
        for _ in run.epochs(epochs):
            for (value,) in run.batches(loader):
                seen.append(int(value))
                if run.timer.batch == at:
                    do(run)
    return run, seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_loop_after_the_batch_with_a_checkpoint(tmp_path, number, caplog):
    """The exit code tells which signal it was; the rest of the loop is not run."""
    caplog.set_level(logging.INFO, logger="milepost")
    previous = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(mp.Preempted) as caught:
        loop(tmp_path, at=2, do=lambda _: os.kill(os.getpid(), number))
    assert caught.value.code == 128 + number
    assert (caught.value.signal_number, caught.value.checkpoint) == (number, "ba3")
    assert isinstance(caught.value, SystemExit)
    assert names(tmp_path) == ["ba3"]
    assert mp.open_run(tmp_path).latest().manifest.reason == "signal"
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == previous
    _, seen = loop(tmp_path, at=None, do=None)
    assert seen == [3, 4, 5]
    assert f"Asked to end by {signal.Signals(number).name}; saved as ba3." in caplog.messages
    assert "Going on from ba3 (epoch 0, batch 3)." in caplog.messages


def test_a_point_that_was_just_saved_is_not_saved_again(tmp_path):
    """The save of the interval is waited for instead."""
    with pytest.raises(mp.Preempted) as caught:
        loop(tmp_path, at=2, every="3ba", do=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert caught.value.checkpoint == "ba3"
    assert names(tmp_path, all=True) == ["ba3"]


def test_a_point_whose_save_failed_is_saved_again(tmp_path, failing, caplog):
    """The last chance must not be lost to an error that may be over."""
    failing.add("mine")

    def save_badly(run):
        run.save("mine")
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(mp.Preempted) as caught:
        loop(tmp_path, at=2, do=save_badly)
    assert names(tmp_path) == [caught.value.checkpoint]
    assert mp.open_run(tmp_path).latest().time["batch"] == 3
    assert "boom" in caplog.text


def test_an_older_failure_is_not_in_the_way_of_the_last_save(tmp_path, failing, caplog):
    """Its error is logged; the state of now is what counts."""
    failing.add("ba2")

    def both(run):
        run.last_save.check_done(30)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(mp.Preempted) as caught:
        loop(tmp_path, at=2, every="2ba", do=both)
    assert caught.value.checkpoint == "ba3"
    assert "boom" in caplog.text


def test_a_save_that_fails_in_the_grace_period_leaves_no_name(tmp_path, failing):
    """The exit code is the same: the process was asked to go."""
    failing.add("ba3")
    with pytest.raises(mp.Preempted) as caught:
        loop(tmp_path, at=2, do=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert caught.value.checkpoint is None
    assert caught.value.code == 143


def test_an_earlier_handler_is_called_and_put_back(tmp_path):
    """Somebody else may count on the signal too."""
    calls = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: calls.append("mine"))
    try:
        with pytest.raises(mp.Preempted):
            loop(tmp_path, at=1, do=lambda _: os.kill(os.getpid(), signal.SIGUSR1))
        assert calls == ["mine"]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == ["mine", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_handler_that_came_later_stays(tmp_path):
    """What somebody installs while the run is open is not ours to undo."""
    previous = signal.getsignal(signal.SIGUSR1)
    later = lambda *_: None  # noqa: E731
    try:
        with mp.Checkpointer(tmp_path, box=Box()):
            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_without_signal_handling_nothing_is_installed(tmp_path):
    """An application with its own idea of signals keeps it."""
    before = signal.getsignal(signal.SIGTERM)
    with mp.Checkpointer(tmp_path, handle_signals=False, box=Box()) as run:
        assert signal.getsignal(signal.SIGTERM) is before
        assert run.stop_signal is None
        assert run.grace_left_s == float("inf")


# -- exceptions in the loop -----------------------------------------------------------------------


def train(folder, *, fail_at=None, where=None, seed=1, epochs=2, every=None):
    """Train with dropout and batch norm; break in one batch, at one place within it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    norm = nn.BatchNorm1d(1)
    optimizer = torch.optim.Adam([*model.parameters(), *norm.parameters()], lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(12.0)), 2, shuffle=True)
    ids = []

    def reach(place, number):
        if number == fail_at and place == where:
            raise RuntimeError(place)

    with mp.Checkpointer(
        folder, every=every, model=model, norm=norm, optimizer=optimizer, loader=loader
    ) as run:
        for _ in run.epochs(epochs):
            for (values,) in run.batches(loader):
                number = run.timer.batch
                reach("begin", number)
                optimizer.zero_grad()
                loss = model(values.unsqueeze(1) / 12)
                reach("forward", number)
                loss = norm(loss).square().mean() + loss.mean()
                reach("buffers", number)
                loss.backward()
                reach("backward", number)
                optimizer.step()
                reach("step", number)
                ids.append(values.tolist())
    return ids, dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("where", ["begin", "forward"])
@pytest.mark.parametrize("fail_at", [0, 1, 5, 6, 8])
def test_an_error_before_anything_changed_loses_nothing(tmp_path, where, fail_at):
    """The batch is trained again, with the random numbers that it had: the end is the same."""
    straight = train(tmp_path / "straight")
    with pytest.raises(RuntimeError, match=where):
        train(tmp_path / "a", fail_at=fail_at, where=where)
    run = mp.open_run(tmp_path / "a")
    assert run.latest().manifest.reason == "exception"
    assert run.latest().time["batch"] == fail_at
    ids, *rest = train(tmp_path / "a", seed=9)
    assert ids == straight[0][fail_at:]
    assert_equal_states(rest, list(straight[1:]))


@pytest.mark.parametrize("where", ["buffers", "backward", "step"])
def test_an_error_after_a_change_is_kept_for_a_look_and_never_resumed_from(tmp_path, where):
    """Between two steps there is no state that a training could go on from."""
    with pytest.raises(RuntimeError, match=where):
        train(tmp_path, fail_at=3, where=where, every="2ba")
    assert names(tmp_path) == ["ba2"]
    found = mp.open_run(tmp_path).get("failed/ba4")
    assert found.load()["state"]["timer"]["batch"] == 3
    assert found.verify().is_good
    straight = train(tmp_path / "straight")
    ids, *rest = train(tmp_path, seed=9)
    assert ids == straight[0][2:]
    assert_equal_states(rest, list(straight[1:]))


def test_an_earlier_failure_is_not_in_the_way_of_the_look(tmp_path, failing, caplog):
    """What went wrong before does not keep us from seeing what went wrong now."""
    failing.add("ba2")
    with pytest.raises(RuntimeError, match="step"):
        train(tmp_path, fail_at=2, where="step", every="2ba")
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["failed/ba3"]
    assert "boom" in caplog.text


def test_an_error_between_two_batches_saves_the_last_one(tmp_path):
    """In an evaluation, say: everything that was trained is whole."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 1)

    def life():
        with mp.Checkpointer(tmp_path, loader=loader, box=Box()) as run:
            for _ in run.epochs(2):
                for _ in run.batches(loader):
                    pass
                raise RuntimeError("evaluation")

    with pytest.raises(RuntimeError, match="evaluation"):
        life()
    assert mp.open_run(tmp_path).latest().time["batch"] == 6


def test_an_interrupt_and_an_exit_are_no_different(tmp_path):
    """Ctrl-C must not cost the last hour either."""
    for error in (KeyboardInterrupt, SystemExit):
        folder = tmp_path / error.__name__

        def stop(_, error=error):
            raise error

        with pytest.raises(error):
            loop(folder, at=2, do=stop)
        assert mp.open_run(folder).latest().time["batch"] == 2


def test_an_optimizer_that_was_tracked_late_is_watched_too(tmp_path):
    """Its step is a change like any other."""
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 1)

    def life():
        with mp.Checkpointer(tmp_path, loader=loader, model=model) as run:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(optimizer=optimizer)
            for (value,) in run.batches(loader):
                model(value.unsqueeze(1)).sum().backward()
                optimizer.step()
                raise RuntimeError("after the step")

    with pytest.raises(RuntimeError, match="after the step"):
        life()
    assert names(tmp_path) == []
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["failed/ba1"]


# -- late objects ---------------------------------------------------------------------------------


def test_state_that_nobody_asks_for_is_an_error_before_the_first_batch(tmp_path):
    """A training that goes on without its scheduler would not say so."""
    with mp.Checkpointer(tmp_path, box=Box(1), other=Box(2)) as run:
        run.save("a", wait=True)
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        for act in (lambda: run.save("b"), lambda: next(run.epochs(1))):
            with pytest.raises(mp.MismatchError, match="also holds other"):
                act()
        late = Box()
        run.track(other=late)
        assert late.value == 2
        run.save("b", wait=True)
    with mp.Checkpointer(tmp_path, strict=False, box=Box()) as run:
        run.save("c", wait=True)


def test_an_object_that_the_checkpoint_lacks_is_an_error_when_it_is_tracked(tmp_path):
    """It would begin anew in the middle of a training."""
    with mp.Checkpointer(tmp_path, box=Box(1)) as run:
        run.save("a", wait=True)
    run = mp.Checkpointer(tmp_path, box=Box()).open()
    with pytest.raises(mp.MismatchError, match="holds no 'new'"):
        run.track(new=Box())
    run.close()
    with pytest.raises(mp.MismatchError, match="1 missing in the checkpoint: new"):
        mp.Checkpointer(tmp_path, box=Box(), new=Box()).open()
    with mp.Checkpointer(tmp_path, strict=False, box=Box()) as run:
        run.track(new=Box())
        assert run.load_report.loaded == ["timer", "box"]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 1),
        lambda o: CosineAnnealingLR(o, 9),
        lambda o: OneCycleLR(o, 0.3, total_steps=9, cycle_momentum=False),
    ],
    ids=["step", "cosine", "cycle"],
)
def test_a_scheduler_that_is_built_late_does_not_move_the_rate(tmp_path, make):
    """Building it on a restored optimizer puts the base rate back; that is undone."""

    def new():
        model = nn.Linear(1, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    model, optimizer = new()
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler) as run:
        run.save("a", wait=True)
    rate = optimizer.param_groups[0]["lr"]
    live, live_optimizer = new()
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer) as run:
        assert live_optimizer.param_groups[0]["lr"] == rate
        late = make(live_optimizer)
        run.track(scheduler=late)
        assert live_optimizer.param_groups[0]["lr"] == rate
    scheduler.step()
    late.step()
    assert live_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert late.state_dict() == scheduler.state_dict()


def test_a_loader_may_be_known_only_from_its_first_batches(tmp_path):
    """As in the shortest loop; its position is stored and found again."""

    def life(stop_at):
        loader = DataLoader(TensorDataset(torch.arange(6.0)), 1)
        seen = []
        with mp.Checkpointer(tmp_path, every="2ba", box=Box()) as run:
            for _ in run.epochs(1):
                for (value,) in run.batches(loader):
                    if run.timer.batch == stop_at:
                        return seen
                    seen.append(int(value))
        return seen

    assert life(4) == [0, 1, 2, 3]
    assert life(None) == [4, 5]


# -- the loop and its options ---------------------------------------------------------------------


def test_a_finished_run_yields_nothing_and_a_longer_one_goes_on(tmp_path):
    """Starting it again by mistake changes nothing; more epochs continue it."""
    _, seen = loop(tmp_path, at=None, do=None, epochs=2)
    assert len(seen) == 12
    assert mp.open_run(tmp_path).latest().is_final
    again, seen = loop(tmp_path, at=None, do=None, epochs=2)
    assert seen == []
    assert again.resumed_is_final
    assert names(tmp_path) == ["ep2"]
    _, seen = loop(tmp_path, at=None, do=None, epochs=3)
    assert len(seen) == 6
    assert names(tmp_path) == ["ep2", "ep3"]


def test_another_tracked_loader_does_not_move_the_saves(tmp_path):
    """A loader for evaluation may be as long as the place where a save is due."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 1)
    other = DataLoader(TensorDataset(torch.arange(2.0)), 1)
    with mp.Checkpointer(tmp_path, every=["2ba", "1ep"], loader=loader, other=other) as run:
        for _ in run.epochs(1):
            for _ in run.batches(loader):
                pass
    assert names(tmp_path) == ["ba2", "ba4", "ep1"]


def test_resume_may_be_demanded_or_refused(tmp_path):
    """A job that must go on must not begin anew, and one that begins must not go on."""
    with pytest.raises(mp.MissingError, match="nothing to resume"):
        mp.Checkpointer(tmp_path, resume="must", box=Box()).open()
    assert not (tmp_path / "run.json").exists()
    with mp.Checkpointer(tmp_path, resume="never", box=Box()) as run:
        run.save("a", wait=True)
    with pytest.raises(mp.ExistsError, match="a"):
        mp.Checkpointer(tmp_path, resume="never", box=Box()).open()
    with mp.Checkpointer(tmp_path, resume="must", box=Box()) as run:
        assert run.is_resumed


@pytest.mark.parametrize(
    "options",
    [
        {"resume": "maybe"},
        {"on_save_error": "ignore"},
        {"save_format": "pickle"},
        {"max_failed_saves": 0},
        {"every": "5dur"},
        {"every": "0ba"},
        {"every": "soon"},
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(tmp_path, options):
    """Not at the first save, hours later."""
    with pytest.raises(mp.UsageError):
        mp.Checkpointer(tmp_path, box=Box(), **options)


def test_nothing_works_on_a_closed_checkpointer(tmp_path):
    """The message says what to do."""
    run = mp.Checkpointer(tmp_path, box=Box())
    for act in (lambda: run.save("a"), lambda: next(run.epochs(1)), lambda: next(run.batches([]))):
        with pytest.raises(mp.UsageError, match="with block"):
            act()
    run.close()


def test_restore_goes_back_to_any_checkpoint_and_takes_what_it_is_told(tmp_path):
    """By name, by path, by handle; the whole, or some items."""
    box, other = Box(1), Box("x")
    with mp.Checkpointer(tmp_path, box=box, other=other) as run:
        first = run.save("first").wait()
        box.value, other.value = 2, "y"
        torch.manual_seed(3)
        expected = torch.get_rng_state()
        run.save("second", wait=True)
        box.value, other.value = 3, "z"
        torch.rand(5)
        run.restore("first", items=["box"])
        assert (box.value, other.value) == (1, "z")
        run.restore()
        assert (box.value, other.value) == (2, "y")
        assert torch.equal(torch.get_rng_state(), expected)
        run.restore(first)
        assert (box.value, other.value) == (1, "x")
        run.restore(tmp_path / "second")
        assert box.value == 2
        with pytest.raises(mp.MissingError, match="third"):
            run.restore("third")


def test_metrics_notes_and_reasons_are_in_the_checkpoint(tmp_path):
    """What a checkpoint is, it says itself."""
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        run.log(loss=torch.tensor(0.5, requires_grad=True))
        run.log_metrics({"val/acc": 0.25, "nan": float("nan")})
        manifest = run.save("a", metrics={"extra": 1}, notes=["by hand"]).wait().manifest
    assert manifest.metrics["loss"] == 0.5
    assert manifest.metrics["val/acc"] == 0.25
    assert manifest.metrics["extra"] == 1
    assert manifest.metrics["nan"] != manifest.metrics["nan"]
    assert manifest.reason == "manual"
    assert manifest.notes == ("by hand",)
    assert manifest.items == ("timer", "box", "setup", "rng")


class Unknown:
    """A sampler of another maker."""

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(range(6))


def test_what_a_resume_cannot_repeat_is_in_the_notes(tmp_path, caplog):
    """Said beforehand, and again when it matters."""
    caplog.set_level(logging.INFO)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 1, sampler=Unknown())
    with mp.Checkpointer(tmp_path, loader=loader) as run:
        manifest = run.save("a").wait().manifest
    assert "Unknown" in manifest.notes[0]


def test_a_diagnostic_checkpoint_is_beside_the_run(tmp_path):
    """For a look at what went wrong: never the newest, with whatever belongs to it."""
    with mp.Checkpointer(tmp_path, box=Box(5)) as run:
        run.save("a", wait=True)
        run.save_diagnostic("nan", "ba7", extra={"batch": torch.arange(3)})
        run.save("b", wait=True)
    assert names(tmp_path) == ["a", "b"]
    found = mp.open_run(tmp_path).get("nan/ba7").load()["state"]
    assert found["batch"].tolist() == [0, 1, 2]
    assert found["box"] == {"value": 5}
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        assert run.resumed_from == "b"
