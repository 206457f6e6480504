"""Loops that do a part of the work themselves: what is not known of them is told or refused."""

from __future__ import annotations

import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import milepost as mp
from milepost.testing.forking import Forked, start_script

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def shuffled() -> DataLoader[int]:
    return DataLoader(range(10), 1, shuffle=True)  # type: ignore[arg-type]


def test_an_epoch_without_counted_batches_is_refused(tmp_path: Path) -> None:
    """No save would ever be due, and nobody would know until the first crash."""
    loader = shuffled()
    with (
        pytest.raises(mp.UsageError, match=r"run\.batches"),
        mp.Checkpointer(tmp_path, every="2ba", loader=loader) as run,
    ):
        for _ in run.epochs(2):
            for _ in loader:
                pass


@pytest.mark.parametrize("every", [None, "1ep", "30m"])
def test_saves_after_epochs_need_no_batches(tmp_path: Path, every: str | None) -> None:
    """A loop that saves after epochs only may iterate as it likes, and goes on exactly."""
    loader = shuffled()
    with mp.Checkpointer(tmp_path, every=every, loader=loader) as run:
        for _ in run.epochs(2):
            for _ in loader:
                pass
    latest = mp.open_run(tmp_path).latest()
    assert latest is not None
    assert latest.name == "ep2"
    assert latest.manifest.notes == ()


def test_steps_beside_a_tracked_loader_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the loader is cannot be seen, and the resumed loop would begin its epoch anew."""
    loader = shuffled()
    with mp.Checkpointer(tmp_path, every="1ba", loader=loader) as run:
        for _ in loader:
            run.step(num_samples=1)
    latest = mp.open_run(tmp_path).latest()
    assert latest is not None
    (note,) = latest.manifest.notes
    assert "run.batches" in note
    assert [record.message for record in caplog.records] == [note]


def test_a_stateful_loader_may_be_iterated_by_other_hands(tmp_path: Path) -> None:
    """It knows its own position; torchdata's own documentation iterates it like that."""

    def life(stop: int | None) -> list[int]:
        torch.manual_seed(0)
        loader, seen = StatefulDataLoader(range(10), 1, shuffle=True), []  # type: ignore[arg-type, var-annotated]
        with mp.Checkpointer(tmp_path, every="1ba", loader=loader) as run:
            for batch in loader:
                seen.append(int(batch))
                run.step(num_samples=1)
                if run.timer.batch == stop:
                    break
        return seen

    first = life(4)
    rest = life(None)
    assert sorted(first + rest) == list(range(10))
    latest = mp.open_run(tmp_path).latest()
    assert latest is not None
    assert latest.manifest.notes == ()


def test_something_wrapped_around_the_tracked_loader_is_named(tmp_path: Path) -> None:
    """A progress bar belongs around the batches that come out."""

    class Bar:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __iter__(self) -> object:
            return iter(self.inner)  # type: ignore[call-overload]

    loader = shuffled()
    with (
        mp.Checkpointer(tmp_path, loader=loader) as run,
        pytest.raises(mp.UsageError, match="Bar"),
    ):
        next(iter(run.batches(Bar(loader))))  # type: ignore[arg-type]


LOOP = """
    import signal, time, torch, milepost as mp
    model = torch.nn.Linear(2, 2)
    with mp.Checkpointer({folder!r}, model=model, grace_s={grace_s}) as run:
        print("go", flush=True)
        for number in range(2000):
            time.sleep(0.02)
            {body}
"""


def start(folder: Path, body: str, grace_s: float = 30.0) -> Forked:
    """Start a loop beside the test, and wait until it runs."""
    script, log = folder / "loop.py", folder / "loop.log"
    run = str(folder / "run")
    script.write_text(textwrap.dedent(LOOP).format(folder=run, body=body, grace_s=grace_s))
    child = start_script(script, log=log)
    deadline_s = time.monotonic() + 30
    while not log.exists() or "go\n" not in log.read_text():
        assert child.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return child


def test_a_loop_that_only_saves_ends_on_sigterm(tmp_path: Path) -> None:
    """There is no other moment at which it could."""
    child = start(tmp_path, "run.save()")
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM
    assert mp.open_run(tmp_path / "run").latest() is not None


def test_the_grace_period_over_the_next_signal_ends_the_process(tmp_path: Path) -> None:
    """A loop that never comes to a save must not become immune."""
    child = start(tmp_path, "pass", grace_s=0.2)
    child.send_signal(signal.SIGTERM)
    with pytest.raises(mp.DeadlineError):
        child.wait(1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == -signal.SIGTERM


def test_a_second_signal_within_the_grace_period_changes_nothing(tmp_path: Path) -> None:
    """Launchers often send two, and the first save must not be cut off by it."""
    body = "number == 3 and [signal.raise_signal(signal.SIGTERM) for _ in 'ab']; run.step()"
    child = start(tmp_path, body)
    assert child.wait(30) == 128 + signal.SIGTERM
    latest = mp.open_run(tmp_path / "run").latest()
    assert latest is not None
    assert latest.manifest.reason == "signal"


def test_a_loop_that_looks_at_the_signal_acts_by_itself(tmp_path: Path) -> None:
    """It has its own way out, and a save on that way must not end it."""
    body = "run.stop_signal and (run.save('own', wait=True), run.close(), exit(7))"
    child = start(tmp_path, body)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 7
    assert [one.name for one in mp.open_run(tmp_path / "run").checkpoints()] == ["own"]


def test_a_mistyped_option_is_named(tmp_path: Path) -> None:
    """Anything else that is given by keyword is an object to track."""
    with pytest.raises(mp.UsageError, match="every="):
        mp.Checkpointer(tmp_path, evry="1ep", model=nn.Linear(1, 1))


@pytest.mark.parametrize("keep", [3, [3], "KeepLast", None])
def test_what_is_no_policy_is_named(tmp_path: Path, keep: object) -> None:
    """At once, and not when the first checkpoint is due to go."""
    with pytest.raises(mp.UsageError, match="KeepLast"):
        mp.Checkpointer(tmp_path, keep=keep, model=nn.Linear(1, 1))  # type: ignore[arg-type]


def test_names_are_refused_when_the_save_is_asked_for(tmp_path: Path) -> None:
    """Not in the background, where the state is gone by the time anyone hears of it."""
    with mp.Checkpointer(tmp_path, model=nn.Linear(1, 1)) as run:
        with pytest.raises(mp.UsageError, match="a/b"):
            run.save("a/b")
        with pytest.raises(mp.UsageError, match="model-x"):
            run.save_diagnostic("nan", "ba1", extra={"model-x": 1})
    assert mp.open_run(tmp_path).checkpoints() == []


class Counting(nn.Module):
    """Counts its calls where no state dict looks, beside a table that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layer(x) * self.table
        return result


def test_buffers_that_are_not_saved_and_change_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They begin anew after a resume; one that stays as it was is nobody's concern."""
    model = Counting()
    with mp.Checkpointer(tmp_path, model=model) as run:
        assert run.save("before").wait().manifest.notes == ()
        model(torch.ones(1, 2))
        (note,) = run.save("after").wait().manifest.notes
        run.save("again")
    assert "model: calls" in note
    assert "table" not in note
    assert [record.message for record in caplog.records] == [note]


class Descent:
    """A training whose loop the tests write."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(torch.ones(4, 1), 1)

    def open(self, folder: Path, every: str) -> mp.Checkpointer:
        return mp.Checkpointer(
            folder, every=every, model=self.model, optimizer=self.optimizer, loader=self.loader
        )

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()


@pytest.mark.parametrize("every", ["1ep", "2ba", "30m"])
def test_a_loop_that_counts_nothing_does_not_end_well(tmp_path: Path, every: str) -> None:
    """It saved nothing, and an exit code of 0 would say that all is safe."""
    training = Descent()
    with pytest.raises(mp.UsageError, match=r"run\.epochs"), training.open(tmp_path, every):
        for _ in range(2):
            for x in training.loader:
                training.step(x)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["failed/ba0"]


def test_epochs_that_are_not_counted_are_refused_as_soon_as_that_is_certain(tmp_path: Path) -> None:
    """No save is ever due, however long it trains."""
    training, num_passes = Descent(), 0
    with (
        pytest.raises(mp.UsageError, match=r"run\.epochs"),
        training.open(tmp_path, "1ep") as run,
    ):
        for _ in range(3):
            for x in run.batches(training.loader):
                training.step(x)
            num_passes += 1
    assert num_passes == 1
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["failed/ba4"]


@pytest.mark.parametrize("by", ["step", "batches"])
def test_one_pass_whose_epoch_is_not_counted_does_not_end_well(tmp_path: Path, by: str) -> None:
    """Only batches were, and saves are due after epochs."""
    training = Descent()
    with pytest.raises(mp.UsageError, match="only batches"), training.open(tmp_path, "1ep") as run:
        for x in run.batches(training.loader) if by == "batches" else training.loader:
            training.step(x)
            if by == "step":
                run.step()


def test_saves_between_batches_of_epochs_that_are_not_counted_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop begins at its first epoch again after a resume."""
    training = Descent()
    with training.open(tmp_path, "3ba") as run:
        for _ in range(3):
            for x in run.batches(training.loader):
                training.step(x)
    notes = {one.name: one.manifest.notes for one in mp.open_run(tmp_path).checkpoints()}
    (note,) = notes["ba9"]
    assert "run.epochs" in note
    assert notes["ba3"] == ()
    assert [record.message for record in caplog.records] == [note]


def test_a_loop_that_trains_nothing_or_saves_by_itself_ends_well(tmp_path: Path) -> None:
    """A look at a run, the end of a training that was over, and saves that were asked for."""
    training = Descent()
    with training.open(tmp_path / "a", "1ep"):
        pass
    with training.open(tmp_path / "a", "1ep") as run:
        for _ in run.epochs(1):
            for x in run.batches(training.loader):
                training.step(x)
    with training.open(tmp_path / "a", "1ep") as run:
        assert list(run.epochs(1)) == []
        training.step(torch.ones(1, 1))
    with training.open(tmp_path / "b", "1ep") as run:
        training.step(torch.ones(1, 1))
        run.save("mine")
