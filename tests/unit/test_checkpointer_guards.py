"""What must not go wrong around a save, a resume and the end: each law was broken once."""

from __future__ import annotations

import shutil
import signal
import textwrap
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import milepost as mp
from milepost.engine import filling
from milepost.runs import State
from milepost.testing.asserts import assert_equal_states
from milepost.testing.forking import start_script

publish_module = import_module("milepost.runs.publish")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs://bucket/run", "az://c/run"])
def test_an_address_is_never_taken_for_a_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints in a local folder called s3: would be lost with the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert mp.Checkpointer(place).folder == place
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_ones_own_stores_the_present_random_state_after_a_resume(tmp_path: Path) -> None:
    """The state that was resumed is right for the first checkpoint only if nothing was drawn."""

    def go(folder: str, lives: list[int]) -> dict[str, Any]:
        for batches in lives:
            model, optimizer = model_and_optimizer()
            torch.manual_seed(99)
            with mp.Checkpointer(tmp_path / folder, model=model, optimizer=optimizer) as run:
                if not run.is_resumed:
                    torch.manual_seed(3)
                for _ in range(batches):
                    train_step(model, optimizer)
                    run.step()
                    run.save(wait=True)
        return model.state_dict()

    assert_equal_states(go("straight", [9]), go("broken", [3, 3, 3]))


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_after_an_interrupted_copy_holds_the_present_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """A frozen part that was copied before the interruption is not that of the last checkpoint."""
    teacher, student = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    run = mp.Checkpointer(tmp_path, teacher=teacher, student=student).open()
    run.save(wait=True)
    teacher.weight.data.fill_(7.0)
    copy_rest = filling._copy_rest

    def interrupted(fill: Any, *more: Any) -> Any:
        if fill.part.item == "student":
            raise KeyboardInterrupt
        return copy_rest(fill, *more)

    monkeypatch.setattr(filling, "_copy_rest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.save(wait=wait)
    monkeypatch.undo()
    checkpoint = run.save("after").wait()
    run.close()
    assert checkpoint.load()["state"]["teacher"]["weight"].tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_retention_leaves_files_of_others_alone(tmp_path: Path) -> None:
    """A file that bears the visible name of a checkpoint may be the user's own."""
    (tmp_path / "ba1.pt").write_bytes(b"mine")
    (tmp_path / "ba2.pt.gz").write_bytes(b"mine too")
    model, optimizer = model_and_optimizer()
    with mp.Checkpointer(
        tmp_path, save_format="torch", keep=[mp.KeepLast(1)], model=model, optimizer=optimizer
    ) as run:
        for _ in range(4):
            train_step(model, optimizer)
            run.step()
            run.save()
    assert (tmp_path / "ba1.pt").read_bytes() == b"mine"
    assert (tmp_path / "ba2.pt.gz").read_bytes() == b"mine too"
    visible = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert visible == ["ba1.pt", "ba2.pt.gz", "ba4.pt"]


def test_a_file_put_in_place_of_a_visible_one_is_what_is_loaded(tmp_path: Path) -> None:
    """Naming a path means that file, not what once was there."""
    model, _ = model_and_optimizer()
    with mp.Checkpointer(tmp_path, save_format="torch", model=model) as run:
        run.save("one")
    edited = tmp_path / "edited.pt"
    weights = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    torch.save({"state": {"model": weights}, "rng": []}, edited)
    edited.replace(tmp_path / "one.pt")
    with mp.Checkpointer(tmp_path / "other", model=model) as run:
        run.load_weights(tmp_path / "one.pt", model)
    assert all(bool((value == 7.0).all()) for value in model.state_dict().values())


def test_a_model_with_a_child_called_module_resumes_from_a_single_file(tmp_path: Path) -> None:
    """Our own files need none of the guesses that foreign ones need."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    for _ in range(2):
        model = Wrapped()
        with mp.Checkpointer(tmp_path, save_format="torch", model=model, _best=ValueOf(3)) as run:
            resumed = run.is_resumed
            run.save()
    assert resumed


def ValueOf(number: int) -> mp.Value:  # noqa: N802 - reads like the class it makes
    return mp.Value(lambda: number, lambda _: None)


def test_must_resume_refuses_a_run_of_orphans_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting at zero beside whole checkpoints is what resume="must" is there to prevent."""
    model, _ = model_and_optimizer()
    run = mp.Checkpointer(tmp_path, model=model).open()
    mp.Checkpointer(tmp_path, model=model).open().close()
    looks: list[object] = []
    real = publish_module.check_not_fenced

    def look(*args: object) -> None:
        looks.append(args)
        if len(looks) > 1:  # the first look came just before the newer session was opened
            real(*args)

    monkeypatch.setattr(publish_module, "check_not_fenced", look)
    with pytest.raises(mp.FencedError):
        run.save("late", wait=True)
    run.close()
    assert [f.state for f in mp.open_run(tmp_path).view.found] == [State.ORPHANED]
    with pytest.raises(mp.MissingError, match="late"):
        mp.Checkpointer(tmp_path, resume="must", model=model).open()


def test_a_thread_that_cannot_start_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next wait would otherwise wait for a save that nobody makes."""
    model, _ = model_and_optimizer()
    run = mp.Checkpointer(tmp_path, model=model).open()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "milepost-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        run.save()
    monkeypatch.undo()
    assert run.save(wait=True).wait().verify().is_good
    run.close()


class Flaky(torch.utils.data.Dataset[torch.Tensor]):
    """Draws random numbers, and fails at one sample as long as it is told to."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        value = torch.rand(2)
        if index == self.bad:
            raise OSError("the data went away")
        return value


def test_an_error_while_fetching_is_resumed_from_exactly(tmp_path: Path) -> None:
    """What the loader drew before it failed is drawn again."""

    def go(folder: str, bad: int | None) -> dict[str, Any]:
        model, optimizer = model_and_optimizer()
        loader = torch.utils.data.DataLoader(Flaky(bad), batch_size=2)
        with mp.Checkpointer(
            tmp_path / folder, model=model, optimizer=optimizer, loader=loader
        ) as run:
            for _ in run.epochs(2):
                for inputs in run.batches(loader):
                    optimizer.zero_grad()
                    model(inputs).sum().backward()
                    optimizer.step()
        return model.state_dict()

    with pytest.raises(OSError, match="went away"):
        go("broken", 7)
    assert_equal_states(go("straight", None), go("broken", None))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_error_while_a_stateful_loader_fetches_is_for_a_look_only(tmp_path: Path) -> None:
    """It has moved on by itself, and a resume would leave out the batch."""
    model, _ = model_and_optimizer()
    loader = StatefulDataLoader(Flaky(7), batch_size=2)
    run = mp.Checkpointer(tmp_path, model=model, loader=loader)
    with pytest.raises(OSError, match="went away"), run:
        for _ in run.batches(loader):
            continue
    assert [found.name for found in mp.open_run(tmp_path).view.found] == ["failed/ba4"]


def test_a_rollback_in_the_loop_trains_the_batches_again(tmp_path: Path) -> None:
    """The loader goes back together with the timer and the weights."""
    model, optimizer = model_and_optimizer()
    loader = torch.utils.data.DataLoader(torch.arange(16.0).reshape(8, 2), batch_size=1)
    seen: list[float] = []
    rolled_back = False
    with mp.Checkpointer(
        tmp_path, every="2ba", model=model, optimizer=optimizer, loader=loader
    ) as run:
        for _ in run.epochs(1):
            for inputs in run.batches(loader):
                seen.append(float(inputs[0, 0]))
                if run.timer.batch == 5 and not rolled_back:
                    rolled_back = True
                    run.restore("ba2")
                    continue
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
        assert run.timer.batch == 8
        assert run.timer.epoch == 1
    assert seen == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]


def test_the_loops_own_error_comes_out_when_the_rescue_fails_too(tmp_path: Path) -> None:
    """Handlers, hooks and memory are given back, and the error to look at is the first one."""
    model, optimizer = model_and_optimizer()
    before = signal.getsignal(signal.SIGTERM)
    broken = mp.Value(lambda: 1 / 0, lambda _: None)
    run = mp.Checkpointer(tmp_path, model=model, optimizer=optimizer, broken=broken)
    with pytest.raises(ValueError, match="the loop"), run:
        raise ValueError("the loop's own")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_start_that_does_not_fit_leaves_the_running_one_alone(tmp_path: Path) -> None:
    """A wrong model is noticed before a session is opened, which would fence the other."""
    model, _ = model_and_optimizer()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("one", wait=True)
        with pytest.raises(mp.MismatchError):
            mp.Checkpointer(tmp_path, model=nn.Linear(3, 3)).open()
        assert run.save("two", wait=True).wait().name == "two"


def test_one_of_several_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that write to one run would fence each other without a word of why."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mp.UsageError, match="workers"):
        mp.Checkpointer(tmp_path, model=nn.Linear(1, 1)).open()
    assert list(tmp_path.iterdir()) == []


def test_a_crash_loop_leaves_only_the_newest_diagnostics(tmp_path: Path) -> None:
    """Each failed start leaves a whole state; they must not fill the disk."""
    for _ in range(5):
        model, optimizer = model_and_optimizer()
        loader = torch.utils.data.DataLoader(torch.ones(4, 2))
        run = mp.Checkpointer(tmp_path, model=model, optimizer=optimizer)
        with pytest.raises(RuntimeError, match="again"), run:
            for inputs in run.batches(loader):
                model(inputs).sum().backward()
                optimizer.step()
                raise RuntimeError("again")
    view = mp.open_run(tmp_path).view
    assert len([found for found in view.found if found.state is State.DIAGNOSTIC]) == 3


def run_script(folder: Path, body: str) -> tuple[int, str]:
    """Return the exit code and the output, errors included."""
    script, log = folder / "script.py", folder / "script.log"
    script.write_text(textwrap.dedent(body))
    code = start_script(script, log=log).wait(60)
    return code, log.read_text()


def test_a_save_that_fails_after_an_impatient_close_fails_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close that gave up waiting has not seen the end, so the end of the process looks."""
    monkeypatch.chdir(tmp_path)
    code, said = run_script(
        tmp_path,
        """
        import threading, milepost as mp, torch
        from milepost.engine import commits
        gate = threading.Event()
        def publish(*_):
            gate.wait(30)
            raise OSError("boom")
        commits.publish = publish
        run = mp.Checkpointer("run", model=torch.nn.Linear(1, 1)).open()
        run.save()
        try:
            run.close(timeout_s=0.1)
        except mp.DeadlineError:
            print("gave up")
        gate.set()
        """,
    )
    assert "gave up\n" in said
    assert "boom" in said
    assert code == 1


def test_a_signal_after_the_last_batch_still_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent it waits for the process to end, and the script would go on."""
    monkeypatch.chdir(tmp_path)
    code, said = run_script(
        tmp_path,
        """
        import os, signal, milepost as mp, torch
        with mp.Checkpointer("run", model=torch.nn.Linear(1, 1)) as run:
            run.save("last")
            os.kill(os.getpid(), signal.SIGTERM)
        print("went on")
        """,
    )
    assert code == 143
    assert "went on" not in said
    assert [c.name for c in mp.open_run(tmp_path / "run").checkpoints()] == ["last"]


def test_a_forked_child_ends_on_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has inherited a handler that only takes a note, which nobody there would read."""
    monkeypatch.chdir(tmp_path)
    _, said = run_script(
        tmp_path,
        """
        import os, signal, time, milepost as mp, torch
        with mp.Checkpointer("run", model=torch.nn.Linear(1, 1)) as run:
            ready, tell = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(tell, b"x")  # Python forgets signals that come while it forks
                for _ in range(3000):
                    time.sleep(0.01)
                os._exit(0)
            os.read(ready, 1)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            print(os.WTERMSIG(status))
        """,
    )
    assert said == f"{int(signal.SIGTERM)}\n"


def test_gradients_of_an_optimizer_tracked_late_are_restored(tmp_path: Path) -> None:
    """They wait, like every stored state, until what they belong to is tracked."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    loader = [torch.ones(1, 2), torch.ones(1, 2)]
    with mp.Checkpointer(tmp_path, every="1ba", model=model, optimizer=optimizer) as run:
        for inputs in first(run.batches(loader)):
            model(inputs).sum().backward()
    model, optimizer = build()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.track(optimizer=optimizer, loader=loader)
        for _ in run.batches(loader):
            break
        weight = model.weight.grad
        assert weight is not None
        assert weight.tolist() == [[1.0, 1.0]]


def first(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield one batch, and go on until the next one would come."""
    yield next(batches)
    next(batches)


@pytest.mark.parametrize(
    "value", [[torch.zeros(2)], torch.zeros(3), {1, 2}, (nn.Linear(1, 1), nn.Linear(1, 1))]
)
def test_values_are_not_taken_for_loaders_or_pairs(tmp_path: Path, value: object) -> None:
    """They would be saved as a position in data, and their values lost."""
    with pytest.raises(mp.UsageError, match="Value"):
        mp.Checkpointer(tmp_path, ema=value)


@pytest.mark.parametrize("change", ["moved", "deleted", "replaced"])
def test_a_run_that_is_gone_is_not_saved_to(tmp_path: Path, change: str) -> None:
    """An acknowledged checkpoint in a folder without its records would never be found again."""
    model, _ = model_and_optimizer()
    run = mp.Checkpointer(tmp_path / "run", model=model).open()
    run.save("one", wait=True)
    if change == "deleted":
        shutil.rmtree(tmp_path / "run")
    else:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    if change == "replaced":
        with mp.Checkpointer(tmp_path / "run", model=model) as other:
            other.save("other")
    with pytest.raises(mp.IncompleteError, match="no longer"):
        run.save("two", wait=True)
    run.close()
    if change != "replaced":
        assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_buffer_is_restored(tmp_path: Path) -> None:
    """It is taken apart when it is saved, and cannot be read straight into its place."""
    values = torch.tensor([0.5, -1.0, 2.0])

    def build(source: torch.Tensor) -> nn.Module:
        model = nn.Linear(3, 1)
        model.register_buffer("q", torch.quantize_per_tensor(source, 0.1, 0, torch.qint8))
        return model

    with mp.Checkpointer(tmp_path, model=build(values)) as run:
        run.save("one")
    model = build(torch.zeros(3))
    with mp.Checkpointer(tmp_path, model=model):
        assert torch.equal(model.q.int_repr(), torch.tensor([5, -10, 20], dtype=torch.int8))


def test_a_default_device_changes_nothing_of_a_resume(tmp_path: Path) -> None:
    """Memory to read into is host memory, whatever new tensors are made on."""
    model, optimizer = model_and_optimizer()
    train_step(model, optimizer)
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        run.save("one")
    other, other_optimizer = model_and_optimizer()
    with torch.device("meta"), mp.Checkpointer(tmp_path, model=other, optimizer=other_optimizer):
        assert_equal_states(model.state_dict(), other.state_dict())


def test_a_metric_name_that_nobody_logs_deletes_nothing(tmp_path: Path) -> None:
    """A typo in a policy must not cost checkpoints."""
    model, _ = model_and_optimizer()
    with mp.Checkpointer(tmp_path, keep=mp.KeepBest(1, "acuracy", "max"), model=model) as run:
        for number in range(3):
            run.log(accuracy=number)
            run.step()
            run.save()
    assert len(mp.open_run(tmp_path).checkpoints()) == 3


def test_a_buffer_made_in_inference_mode_does_not_stop_the_training(tmp_path: Path) -> None:
    """It has no version counter to look at."""
    model, optimizer = model_and_optimizer()
    with torch.inference_mode():
        model.register_buffer("cache", torch.ones(2))
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        for inputs in run.batches(loader):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        assert run.timer.batch == 4


def test_parameters_of_no_tracked_model_are_told_of(tmp_path: Path) -> None:
    """Their moments are saved and their values are not: a resume cannot be exact."""
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    with mp.Checkpointer(tmp_path, decoder=decoder, optimizer=optimizer) as run:
        notes = run.save("one").wait().manifest.notes
    assert any("2 parameters" in note for note in notes)
