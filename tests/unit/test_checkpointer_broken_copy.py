"""A late copy whose save fails, is interrupted or dropped: it harms no other save and no step."""

from __future__ import annotations

import copy as copies
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import milepost as mp
from milepost.collecting import no_collecting
from milepost.engine import barrier, commits, filled
from milepost.engine.copying import Copy, LateTensor
from milepost.engine.sums import Sums

SIZE = 256  # 256 KiB a matrix


class Held:
    """Holds copies back.

    Attributes:
        go: Lets them go.
        begun: Whether one has begun.
        names: The tensors that were copied.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.names: list[str] = []
        original = Copy._copy

        def held(copy: Copy, one: LateTensor) -> None:
            self.begun.set()
            assert self.go.wait(30)
            self.names.append(one.name)
            original(copy, one)

        monkeypatch.setattr(Copy, "_copy", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Copies that wait until the test lets them go."""
    one = Held(monkeypatch)
    yield one
    one.go.set()


class Buffer:
    """A state of any size, which stands before the model in the arena."""

    def __init__(self) -> None:
        self.values = torch.zeros(100_000)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def opened(folder: Path) -> tuple[mp.Checkpointer, nn.Module, torch.optim.Optimizer, Buffer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = Buffer()
    run = mp.Checkpointer(
        folder,
        staging="overlap",
        on_save_error="warn",
        handle_signals=False,
        buffer=buffer,
        model=model,
        optimizer=optimizer,
    )
    return run.open(), model, optimizer, buffer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, SIZE)).square().mean().backward()
    optimizer.step()


def assert_saves_rightly(run: mp.Checkpointer, model: nn.Module, buffer: Buffer, name: str) -> None:
    """Save in another layout than before, and compare."""
    buffer.values = torch.zeros(90_000)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    found = run.save(name).wait(30).load()["state"]["model"]
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_save_that_fails_is_over_when_its_copy_is(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save takes the arena then; what was still copied would end in its checkpoint."""
    original, failed = commits.claim, threading.Event()

    def refused(store: Any, session: Any, name: str, attempt: int) -> Any:
        if name == "a":
            failed.set()
            raise mp.StorageError("the place answers 503")
        return original(store, session, name, attempt)

    monkeypatch.setattr(commits, "claim", refused)
    run, model, _, buffer = opened(tmp_path)
    pending = run.save("a")
    assert held.begun.wait(30)
    assert failed.wait(30)
    with pytest.raises(mp.DeadlineError):
        pending.exception(0.3)
    held.go.set()
    assert isinstance(pending.exception(30), mp.StorageError)
    assert len(held.names) == 1  # it was stopped between two pieces
    assert_saves_rightly(run, model, buffer, "b")
    run.close()


def interrupt_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(module: nn.Module) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(barrier, "_hook_load", hook)


def interrupt_start(name: str, *, is_begun: bool) -> Callable[[pytest.MonkeyPatch], None]:
    def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
        original = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name != name or is_begun:
                original(thread)
            if thread.name == name:
                raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", start)

    return interrupt


INTERRUPTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the copy": interrupt_hook,
    "no copy": interrupt_start("milepost-copy", is_begun=False),
    "in the copy": interrupt_start("milepost-copy", is_begun=True),
    "no save": interrupt_start("milepost-save", is_begun=False),
    "in the save": interrupt_start("milepost-save", is_begun=True),
}


@pytest.mark.parametrize("moment", INTERRUPTS)
def test_after_an_interrupt_in_a_save_steps_and_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whoever waits for a copy that nobody makes would wait for ever."""
    run, model, optimizer, buffer = opened(tmp_path)
    with monkeypatch.context() as patched:
        INTERRUPTS[moment](patched)
        with pytest.raises(KeyboardInterrupt):
            run.save("a")
    step = threading.Thread(target=train_step, args=(model, optimizer), daemon=True)
    step.start()
    step.join(20)
    assert not step.is_alive()
    for name in ("b", "c"):
        assert_saves_rightly(run, model, buffer, name)
        train_step(model, optimizer)
    run.close()
    assert not barrier._held


def new_copy() -> Copy:
    place = torch.zeros(100_000, dtype=torch.uint8).numpy()
    live = torch.ones(100_000, dtype=torch.uint8)
    one = LateTensor.of("w", live, place=place, start_bytes=0, check="sample", shift=0)
    sums = Sums([(0, place.nbytes)], lambda start, stop: place.data[start:stop])
    return Copy([one], end_bytes=place.nbytes, sums=sums)


def test_who_waits_for_a_copy_is_told_that_it_goes_on_no_more(
    monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    """A training that hangs in the step of an optimizer tells nobody why."""
    monkeypatch.setattr(filled, "_SLICE_S", 0.01)
    monkeypatch.setattr(filled, "_STALLED_S", 0.05)
    lost = new_copy()
    lost._thread = threading.Thread(target=str)
    lost._thread.start()
    lost._thread.join()
    lost.settle()
    with pytest.raises(mp.CheckpointError, match="ended before the state was copied"):
        lost.confirm()
    stuck = new_copy()
    stuck.start()
    for wait in (stuck.settle, stuck.require, stuck.confirm):
        with pytest.raises(mp.DeadlineError, match="nothing more of it"):
            wait()
    held.go.set()
    stuck._thread.join(30)  # type: ignore[union-attr]
    stuck.confirm()


def test_a_model_that_is_copied_or_pickled_meanwhile_takes_nothing_of_ours(
    tmp_path: Path, held: Held
) -> None:
    """It is opened where there is no Milepost, and must not wait for copies of another."""
    run, model, _, _ = opened(tmp_path)
    run.save("a")
    assert held.begun.wait(30)
    data = pickle.dumps(model)
    assert b"milepost" not in data
    for other in (pickle.loads(data), copies.deepcopy(model)):
        other.load_state_dict(model.state_dict())  # without a wait
        assert not held.go.is_set()
    held.go.set()
    for name in "bc":
        run.save(name).wait(30)
    assert len(model._load_state_dict_pre_hooks) == 1
    run.close()
    assert not model._load_state_dict_pre_hooks


def test_a_run_that_is_dropped_without_an_end_keeps_no_hook_alive(tmp_path: Path) -> None:
    """In a notebook cells are run again and again."""
    for number in range(2):
        run, *_ = opened(tmp_path / str(number))
        run.save("a").wait(30)
        del run, _
        gc.collect()
    run, *_ = opened(tmp_path / "last")
    run.save("a").wait(30)
    assert len(barrier._users) == 1
    run.close()
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not barrier._held
    assert not barrier._load_hooks


def test_a_child_that_is_forked_meanwhile_collects_garbage() -> None:
    """The thread that would begin again is not in it."""
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        with no_collecting():
            inside.set()
            assert go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        is_on = gc.isenabled()
        with no_collecting():
            is_on = is_on and not gc.isenabled()
        os._exit(0 if is_on and gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not gc.isenabled()
    go.set()
    thread.join(30)
    assert gc.isenabled()
