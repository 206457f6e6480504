"""What is copied while training goes on is the state at the moment of the save, or no checkpoint.

``Held`` holds the copy back until a test lets it go, so that what comes between is certain.
"""

from __future__ import annotations

import copy as copies
import logging
import os
import pickle
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine.barrier import wait_for_copies
from milepost.engine.copying import Copy
from milepost.runs import State, scan
from milepost.stores import LocalStore
from milepost.testing.forking import start_script

SIZE = 256  # 256 KiB a matrix


class Held:
    """Holds copies back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        original = Copy._copy

        def held(copy: Copy, one: Any) -> None:
            self.begun.set()
            assert self.go.wait(30)
            original(copy, one)

        monkeypatch.setattr(Copy, "_copy", held)

    def let_go_soon(self) -> None:
        """Let go from another thread, once somebody else waits."""
        threading.Timer(0.05, self.go.set).start()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Copies that wait until the test lets them go."""
    one = Held(monkeypatch)
    yield one
    one.go.set()


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, SIZE)).square().mean().backward()
    optimizer.step()


def trained(
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = new_model()
    optimizer = make(model.parameters())
    train_step(model, optimizer)
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_saved(checkpoint: mp.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    found = checkpoint.load()["state"]["model"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_steps_only_when_the_copy_is_done(
    tmp_path: Path, held: Held, kind: str
) -> None:
    """Whatever its kernels: some of them move no version counter, so that nothing would show it."""
    model, optimizer = trained(OPTIMIZERS[kind])
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        moments = copies.deepcopy(optimizer.state_dict())
        pending = run.save("a")
        assert held.begun.wait(30)
        held.let_go_soon()
        train_step(model, optimizer)
        assert held.go.is_set()
        checkpoint = pending.wait(30)
        assert pending.stats["late_bytes"] >= 2 * 4 * SIZE * SIZE
        assert {"copy_s", "barrier_s"} <= set(pending.stats)
        assert_saved(checkpoint, before)
        stored = checkpoint.load()["state"]["optimizer"]["state"]
        for index, name in ((0, "0.weight"), (4, "2.weight")):
            for key, value in moments["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(stored[name][key], value)
        again = run.save("b", wait=True)
        assert_saved(again.wait(), values(model))


def test_an_optimizer_that_nobody_tracks_waits_too(tmp_path: Path, held: Held) -> None:
    """Two optimizers may train one parameter, and one may be built when the save is on its way."""
    model, optimizer = trained()
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        pending = run.save("a")
        held.let_go_soon()
        train_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert held.go.is_set()
        assert_saved(pending.wait(30), before)


WRITERS: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: model[0].weight.detach().mul_(2),
    "one element": lambda model: model[2].weight.detach()[3, 3].fill_(7),
    "around the counter": lambda model: model[0].weight.data.mul_(2),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_who_else_writes_is_found_and_nothing_is_committed(
    tmp_path: Path, held: Held, writer: str
) -> None:
    """A checkpoint of two moments would be worse than none."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    pending = run.save("a")
    WRITERS[writer](model)
    held.go.set()
    with pytest.raises(mp.StateChangedError, match=r"model/[02]\.weight") as caught:
        pending.wait(30)
    assert caught.value.facts["names"] in (["model/0.weight"], ["model/2.weight"])
    assert scan(LocalStore(tmp_path)).found == ()
    checkpoint = run.save("b").wait(30)
    assert_saved(checkpoint, values(model))
    run.close()


def test_who_writes_after_the_copy_is_found_too(tmp_path: Path) -> None:
    """What is found must not depend on which thread was faster: it would come and go."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    for moment in range(3):
        pending = run.save(f"a{moment}")
        pending._copy.require()  # type: ignore[union-attr]
        is_early = not pending.done()
        model[0].weight.detach().mul_(2)
        pending._copy.settle()  # type: ignore[union-attr]
        # Unless the save had been through with it before.
        assert (
            isinstance(pending.exception(30), mp.StateChangedError)
            or not is_early
            or (pending.exception() is None)
        )
    run.close()


@pytest.mark.parametrize("check", ["full", "sample", "none"])
def test_one_byte_written_around_the_counter_is_found_by_the_full_check(
    tmp_path: Path, held: Held, check: Any
) -> None:
    """Samples find what changes a tensor everywhere; all bytes are compared on demand."""
    model, optimizer = trained()
    run = mp.Checkpointer(
        tmp_path, staging="overlap", copy_check=check, model=model, optimizer=optimizer
    ).open()
    pending = run.save("a")
    model[0].weight.data.view(-1)[12_345] += 1
    held.go.set()
    error = pending.exception(30)
    assert isinstance(error, mp.StateChangedError) if check == "full" else error is None
    run.close()


def test_loading_waits_for_the_copy(tmp_path: Path, held: Held) -> None:
    """Into the module, by its own method, and through the run."""
    model, optimizer = trained()
    other = {name: value + 1 for name, value in values(model).items()}
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        pending = run.save("a")
        held.let_go_soon()
        model.load_state_dict(other)
        assert held.go.is_set()
        checkpoint = pending.wait(30)
        assert_saved(checkpoint, before)
        for load in (
            lambda: run.restore("a"),
            lambda: run.load_weights("a", model),
            lambda: run.last_save.wait_until_copied() or model.load_state_dict(before),
        ):
            held.go.clear()
            model.load_state_dict(other)
            pending = run.save("b")
            held.let_go_soon()
            load()
            assert_saved(pending.wait(30), other)
        again = pickle.loads(pickle.dumps(model))
        assert copies.deepcopy(model).state_dict().keys() == again.state_dict().keys()
    assert not model._load_state_dict_pre_hooks
    from torch.optim import optimizer as hooks

    assert not hooks._global_optimizer_pre_hooks


def test_a_second_save_and_the_end_wait_for_the_copy(tmp_path: Path, held: Held) -> None:
    """There is one arena, and an end must not leave anything half copied."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    before = values(model)
    first = run.save("a")
    held.let_go_soon()
    run.save("b", wait=True)
    assert held.go.is_set()
    assert first.done()
    held.go.clear()
    last = run.save("c")
    held.let_go_soon()
    run.close()
    assert held.go.is_set()
    assert last.done()
    for name in "abc":
        assert_saved(mp.open_run(tmp_path).get(name), before)


def test_what_a_forward_pass_writes_is_copied_at_once(tmp_path: Path, held: Held) -> None:
    """Running means, and embeddings that are renormalized where they are looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(SIZE, SIZE, max_norm=0.5), nn.BatchNorm1d(SIZE))
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1, momentum=0.9)
    model(torch.arange(SIZE)).sum().backward()
    optimizer.step()
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        pending = run.save("a")
        model(torch.arange(SIZE)).sum().backward()
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        held.go.set()
        assert_saved(pending.wait(30), before)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_was_compiled_waits_or_is_found(tmp_path: Path, held: Held) -> None:
    """A compiler may leave out hooks."""
    model, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1))
    step = torch.compile(optimizer.step, backend="eager")
    step()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    before = values(model)
    pending = run.save("a")
    held.let_go_soon()
    step()

    held.go.set()
    error = pending.exception(30)

    if error is None:
        assert_saved(pending.wait(), before)
    else:
        assert isinstance(error, mp.StateChangedError)
    run.close()


def test_a_forked_child_does_not_wait(tmp_path: Path, held: Held) -> None:
    """The thread that copies exists in the parent only."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    pending = run.save("a")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        wait_for_copies()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held.go.set()
    pending.wait(30)
    run.close()


def loop(
    folder: Path,
    body: Callable[[nn.Module], object] = lambda model: None,
    *,
    staging: Any = "auto",
    **options: Any,
) -> tuple[mp.Checkpointer, list[Any]]:
    """Train four batches and save after each; return the run and its saves."""
    model, optimizer = trained()
    loader = torch.utils.data.DataLoader(torch.randn(16, SIZE), batch_size=4)
    saves: list[Any] = []
    with mp.Checkpointer(
        folder,
        every="1ba",
        staging=staging,
        model=model,
        optimizer=optimizer,
        loader=loader,
        **options,
    ) as run:
        for _ in run.epochs(1):
            for x in run.batches(loader):
                saves.append(run.last_save)
                if run.last_save is not None:
                    body(model)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return run, [one for one in saves if one is not None]


def test_late_copies_have_the_bytes_of_copies_at_once(tmp_path: Path) -> None:
    """File by file: what differs is when the bytes were taken, and never which."""
    for staging in ("eager", "auto", "overlap"):
        _, saves = loop(tmp_path / staging, staging=staging)
        late = [one.stats["late_bytes"] > 0 for one in saves]
        assert all(late) if staging != "eager" else not any(late)
    names = [one.name for one in mp.open_run(tmp_path / "eager").checkpoints()]
    assert len(names) == 4
    for name in names:
        for part in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
            found = {
                (tmp_path / s / name / part).read_bytes() for s in ("eager", "auto", "overlap")
            }
            assert len(found) == 1, (name, part)


def test_auto_copies_at_once_what_one_asks_for(tmp_path: Path, held: Held) -> None:
    """Who calls save may write to anything right after it."""
    model, optimizer = trained()
    with mp.Checkpointer(
        tmp_path, every="1ba", staging="auto", model=model, optimizer=optimizer
    ) as run:
        before = values(model)
        pending = run.save("a")
        model[0].weight.detach().zero_()
        assert_saved(pending.wait(30), before)
        run.step()  # and so may whoever counts batches
        model[0].weight.detach().fill_(1)
        pending = run.last_save
        assert pending is not None
        assert pending.wait(30).load()["state"]["model"]["0.weight"].abs().max() == 0
    held.go.set()


def test_auto_becomes_wary_and_loses_one_save(
    tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """We chose to overlap; that somebody writes in his loop is no reason to end his training."""

    def clip(model: nn.Module) -> None:
        """Write, and only then let the copy of the save before go on."""
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
        held.go.set()

    with caplog.at_level(logging.WARNING):
        run, saves = loop(tmp_path, clip)
    errors = [one.exception() for one in saves]
    assert isinstance(errors[0], mp.StateChangedError)
    assert errors.count(None) >= len(errors) - 2
    assert "from now on the whole state is copied" in caplog.text
    assert run.run.latest() is not None
    held.go.clear()
    held.begun.clear()
    with pytest.raises(mp.StateChangedError):
        loop(tmp_path / "asked", clip, staging="overlap")


def test_leaving_the_loop_waits_for_the_copy(tmp_path: Path, held: Held) -> None:
    """What follows a loop may write to anything: an evaluation with other weights."""
    model, optimizer = trained()
    loader = torch.utils.data.DataLoader(torch.randn(32, SIZE), batch_size=4)
    run = mp.Checkpointer(
        tmp_path, every="1ba", staging="auto", model=model, optimizer=optimizer, loader=loader
    ).open()
    for number, x in enumerate(run.batches(loader)):
        if number == 1:
            held.let_go_soon()
            break
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        before = values(model)
    assert held.go.is_set()
    pending = run.last_save
    model[0].weight.detach().zero_()
    assert pending is not None
    assert_saved(pending.wait(30), before)
    run.close()


def test_a_process_killed_in_the_copy_leaves_no_checkpoint(tmp_path: Path) -> None:
    """And one that ends by itself waits for the copy and the commit."""
    program = textwrap.dedent(
        """
        import os, signal, sys, threading, time
        import torch
        from torch import nn
        import milepost as mp
        from milepost.engine.copying import Copy

        model = nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = mp.Checkpointer(sys.argv[1], staging="overlap", model=model, optimizer=optimizer)
        run.open()
        original = Copy._copy

        def slow(copy, one):
            if sys.argv[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            original(copy, one)

        Copy._copy = slow
        run.save("a")
        """
    )
    script, log = tmp_path / "script.py", tmp_path / "script.log"
    script.write_text(program)
    for how, code in (("kill", -signal.SIGKILL), ("end", 0)):
        assert start_script(script, str(tmp_path / how), how, log=log).wait(60) == code
    states = {one.state for one in scan(LocalStore(tmp_path / "kill")).found}
    assert states <= {State.INCOMPLETE}
    assert mp.open_run(tmp_path / "end").get("a").verify().is_good


@pytest.mark.parametrize("staging", ["auto", "overlap", "eager"])
def test_a_save_that_is_waited_for_is_written_as_it_is_copied(tmp_path: Path, staging: Any) -> None:
    """Only what optimizers own, and not with "eager": another thread may write to all else."""
    model, optimizer = trained()
    table = torch.zeros(SIZE, SIZE)
    with mp.Checkpointer(
        tmp_path,
        staging=staging,
        model=model,
        optimizer=optimizer,
        table=mp.Value(lambda: table, lambda value: None),
        async_save=False,
    ) as run:
        for name in "ab":
            before = values(model)
            pending = run.save(name, wait=name == "b")
            late_bytes = 0 if staging == "eager" else 6 * 4 * SIZE * SIZE
            assert pending.stats["late_bytes"] == late_bytes
            train_step(model, optimizer)
            assert_saved(pending.wait(), before)
    assert mp.open_run(tmp_path).get("b").verify().is_good


@pytest.mark.parametrize("staging", ["auto", "overlap"])
def test_the_last_saves_of_a_training_are_copied_at_once(
    tmp_path: Path, held: Held, staging: Any
) -> None:
    """No other follows if something writes in between and they fail."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging=staging, model=model, optimizer=optimizer).open()
    before = values(model)
    for options in ({"reason": "exception"}, {"reason": "signal"}, {"is_final": True}):
        pending = run.save(**options, wait=True, is_step_next=True)
        assert pending.stats["late_bytes"] == 0
        assert_saved(pending.wait(), before)
    assert not held.begun.is_set()
    run.close()


def test_a_loop_that_says_nothing_is_copied_at_once(tmp_path: Path, held: Held) -> None:
    """It may write to a few rows through ``.data``, which neither counters nor samples show."""
    model, optimizer = trained()
    loader = torch.utils.data.DataLoader(torch.randn(16, SIZE), batch_size=4)
    with mp.Checkpointer(
        tmp_path, every="1ba", model=model, optimizer=optimizer, loader=loader
    ) as run:
        for _ in run.epochs(1):
            for x in run.batches(loader):
                before = values(model)
                if run.last_save is not None:
                    model[0].weight.data[3, 5:9] += 1  # undone before the step
                    model(x).square().mean().backward()
                    assert_saved(run.last_save.wait(30), before)
                    model[0].weight.data[3, 5:9] -= 1
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    assert not held.begun.is_set()


def test_an_interrupt_of_a_wait_comes_out_when_the_copy_is_done(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the next cell may write to anything."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    before = values(model)

    def interrupted(pending: Any, timeout_s: float | None = None) -> Any:
        held.let_go_soon()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(run.save("warm")), "wait", interrupted)
        held.go.set()
        with pytest.raises(KeyboardInterrupt):
            run.save("a", wait=True)
    assert run.last_save is not None
    assert run.last_save._copy._is_over  # type: ignore[union-attr]
    model[0].weight.data.zero_()
    assert_saved(run.last_save.wait(30), before)
    run.close()


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_auto_becomes_wary_before_the_next_copy_whoever_looks(
    tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture, *, is_looked_at: bool
) -> None:
    """A callback that asks how a save has ended must not be why each of them fails."""
    model, optimizer = trained()
    run = mp.Checkpointer(
        tmp_path, every="1ba", staging="auto", model=model, optimizer=optimizer
    ).open()
    with caplog.at_level(logging.WARNING):
        first = run.save("a", is_step_next=True)
        model[0].weight.detach().mul_(2)
        if is_looked_at:
            held.go.set()
            assert isinstance(first.exception(30), mp.StateChangedError)
        else:
            held.let_go_soon()  # the next save waits for this one, and learns only then
        second = run.save("b", is_step_next=True)
        model[0].weight.detach().mul_(2)
        assert second.exception(30) is None
        assert second.stats["late_bytes"] == 0
        assert "something wrote to the state" in second.stats["eager_reason"]
        run.save("c", wait=True)
    run.close()
    assert caplog.text.count("from now on the whole state is copied") == 1
    assert "Saves succeed again" not in caplog.text
