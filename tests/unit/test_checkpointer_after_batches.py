"""What a loop does between the last batch of an epoch and the next one, and small things that it
changes before it has computed anything: after a resume nothing of it counts twice in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import milepost as mp
from milepost.testing.asserts import assert_equal_states

Tail = Callable[["Loop"], None]


class Loop:
    """A training as tutorials have it: a scheduler, a counter, and a validation per epoch."""

    def __init__(self, folder: Path, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.folder, self.options = folder, options
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.seen: dict[str, Any] = {"samples": 0, "rates": []}
        self.loader = DataLoader(torch.arange(16.0).reshape(8, 2) / 16, 2, shuffle=True)
        self.epoch, self.run = (
            0,
            mp.Checkpointer(
                folder,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                loader=self.loader,
                seen=mp.Value(lambda: self.seen, self.seen.update),
                **options,
            ),
        )

    def train(
        self,
        *,
        early: Tail = lambda loop: None,
        before: Tail = lambda loop: None,
        after: Tail = lambda loop: None,
    ) -> dict[str, Any]:
        """Train three epochs; call in each body, before and after the scheduler's step."""
        with self.run as run:
            for self.epoch in run.epochs(3):
                for inputs in run.batches(self.loader):
                    early(self)
                    loss = self.model(inputs).square().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                torch.rand(3)  # as a validation draws
                before(self)
                self.scheduler.step()
                self.seen["rates"].append(self.scheduler.get_last_lr()[0])
                after(self)
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "seen": dict(self.seen),
            "rng": torch.get_rng_state(),
        }


def in_epoch(number: int, work: Tail) -> Tail:
    return lambda loop: work(loop) if loop.epoch == number else None


def fail(loop: Loop) -> None:
    raise RuntimeError("the validation")


def interrupt(loop: Loop) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [fail, interrupt])
@pytest.mark.parametrize("every", ["1ep", "3ba"])
def test_an_error_after_the_scheduler_was_stepped_is_for_a_look_only(
    tmp_path: Path, stop: Tail, every: str
) -> None:
    """A resume would step it once more for the same epoch."""
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        Loop(tmp_path / "a", every=every).train(after=in_epoch(1, stop))
    run = mp.open_run(tmp_path / "a")
    assert [one.name for one in run.checkpoints(all=True) if "/" in one.name] == ["failed/ba8"]
    latest = run.latest()
    assert latest is not None
    assert latest.name == ("ep1" if every == "1ep" else "ba6")
    straight = Loop(tmp_path / "straight").train()
    assert_equal_states(Loop(tmp_path / "a", seed=9).train(), straight)


def test_an_error_before_anything_changed_after_the_batches_loses_nothing(tmp_path: Path) -> None:
    """What comes after the batches is done again with the random numbers that it had."""
    with pytest.raises(RuntimeError, match="validation"):
        Loop(tmp_path / "a").train(before=in_epoch(1, fail))
    latest = mp.open_run(tmp_path / "a").latest()
    assert latest is not None
    assert latest.time["batch"] == 8
    assert latest.manifest.reason == "exception"
    straight = Loop(tmp_path / "straight").train()
    assert_equal_states(Loop(tmp_path / "a", seed=9).train(), straight)


def swap_by_data(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.data.mul_(0.5)  # moves no version counter


def swap_by_copy(loop: Loop) -> None:
    loop.model.load_state_dict({k: v * 0.5 for k, v in loop.model.state_dict().items()})


def count(loop: Loop) -> None:
    loop.seen["rates"].append(None)


def slow_down(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def step(loop: Loop) -> None:
    loop.optimizer.step()


@pytest.mark.parametrize("change", [swap_by_data, swap_by_copy, count, slow_down, step])
def test_whatever_changed_after_the_batches_keeps_an_error_from_being_resumed(
    tmp_path: Path, change: Tail
) -> None:
    """Weights of an average that are put in for the validation are none to go on from."""

    def break_down(loop: Loop) -> None:
        change(loop)
        fail(loop)

    with pytest.raises(RuntimeError, match="validation"):
        Loop(tmp_path).train(before=break_down)
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["failed/ba4"]


def test_a_save_that_has_what_will_be_done_again_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log, with what to do instead; and in each such checkpoint."""
    Loop(tmp_path, every="1ep").train(after=lambda loop: loop.run.save(f"best{loop.epoch}"))
    notes = {one.name: one.manifest.notes for one in mp.open_run(tmp_path).checkpoints()}
    assert notes["ep1"] == notes["ep2"] == notes["ep3"] == ()
    (note,) = notes["best0"]
    assert "scheduler, seen" in note
    assert "KeepBest" in note
    assert notes["best2"] == (note,)
    assert [record.message for record in caplog.records] == [note]


def test_a_save_after_the_batches_is_exact_if_nothing_was_changed_by_then(tmp_path: Path) -> None:
    """The validation is done again, and draws the same random numbers."""
    straight = Loop(tmp_path / "straight").train()

    def save_and_leave(loop: Loop) -> None:
        loop.run.save("best", wait=True)
        loop.seen["rates"].append(None)  # the error below is for a look only
        fail(loop)

    with pytest.raises(RuntimeError, match="validation"):
        Loop(tmp_path / "a").train(before=in_epoch(1, save_and_leave))
    latest = mp.open_run(tmp_path / "a").latest()
    assert latest is not None
    assert latest.name == "best"
    assert latest.manifest.notes == ()
    assert_equal_states(Loop(tmp_path / "a", seed=9).train(), straight)


def test_what_is_logged_after_the_batches_is_in_the_checkpoint_of_the_epoch(tmp_path: Path) -> None:
    """This is how the best is kept."""
    values = [0.3, 0.1, 0.2]
    keep = [mp.KeepLast(1), mp.KeepBest(1, "val")]
    Loop(tmp_path, every="1ep", keep=keep).train(
        after=lambda loop: loop.run.log(val=values[loop.epoch])
    )
    found = {one.name: one.manifest.metrics for one in mp.open_run(tmp_path).checkpoints()}
    assert found == {"ep2": {"val": 0.1}, "ep3": {"val": 0.2}}


# -- within a batch -------------------------------------------------------------------------------


def in_batch(number: int, *work: Tail) -> Tail:
    def do(loop: Loop) -> None:
        for one in work if loop.run.timer.batch == number else ():
            one(loop)

    return do


def see(loop: Loop) -> None:
    loop.seen["samples"] += 2


def warm_up(loop: Loop) -> None:
    loop.scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("change", [see, warm_up])
def test_a_value_that_was_changed_before_the_error_does_not_count_twice(
    tmp_path: Path, change: Tail
) -> None:
    """The batch is trained again, so its state is for a look only."""

    def early(*then: Tail) -> Tail:
        return lambda loop: [change(loop), in_batch(5, *then)(loop)]  # type: ignore[return-value, func-returns-value]

    with pytest.raises(RuntimeError, match="validation"):
        Loop(tmp_path / "a", every="2ba").train(early=early(fail))
    checkpoints = mp.open_run(tmp_path / "a").checkpoints(all=True)
    assert sorted(one.name for one in checkpoints) == ["ba2", "ba4", "failed/ba6"]
    straight = Loop(tmp_path / "straight").train(early=early())
    assert_equal_states(Loop(tmp_path / "a", seed=9).train(early=early()), straight)


def test_a_value_that_did_not_change_does_not_cost_the_batch(tmp_path: Path) -> None:
    """Most errors come before anything was changed, and must lose nothing."""
    with pytest.raises(RuntimeError, match="validation"):
        Loop(tmp_path / "a").train(early=in_batch(5, fail))
    latest = mp.open_run(tmp_path / "a").latest()
    assert latest is not None
    assert latest.time["batch"] == 5
    straight = Loop(tmp_path / "straight").train()
    assert_equal_states(Loop(tmp_path / "a", seed=9).train(), straight)


def test_a_save_before_the_batch_with_a_value_of_after_it_says_so(tmp_path: Path) -> None:
    """The batch is trained again after a resume, and the value counts it twice."""
    save = in_batch(2, see, lambda loop: loop.run.save("early", wait=True))
    Loop(tmp_path).train(early=save)
    (note,) = mp.open_run(tmp_path).get("early").manifest.notes
    assert "changed seen" in note
