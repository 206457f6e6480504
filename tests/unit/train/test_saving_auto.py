"""``save_interval="auto"``: the Trainer finds out how often to save."""

from __future__ import annotations

import pytest
import torch

import milepost as mp
from milepost.errors import UsageError
from milepost.progress.timer import Timer
from milepost.stores import LocalStore
from milepost.train import Callback, Evaluator

from .conftest import numbers


class Slow(Callback):
    """Batches take a second, and collecting the state takes two."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def init(self, state) -> None:
        state.timer = Timer()

    def batch_start(self, state) -> None:
        self.now_s += 1.0

    def save_started(self, state, pending) -> None:
        pending.wait()  # so that only this clock matters

    def state_dict(self):
        self.now_s += 2.0
        return {"now_s": 0.0}

    def load_state_dict(self, state) -> None:
        pass


def fit(make, folder, *, end="2ep", **options):
    slow = Slow()
    trainer = make(
        train_dataloader=numbers(400, 4, shuffle=True),
        callbacks=[slow],
        save_folder=folder,
        max_duration=end,
        **options,
    )
    trainer.state.timer._clock = lambda: slow.now_s
    trainer.fit()
    trainer.close()
    return trainer


def test_saves_take_their_share_and_a_resume_knows_what_was_learned(make, tmp_path) -> None:
    """And the weights at the end are those of a training that saved at other times."""
    auto = {"save_interval": "auto", "overhead_budget": 0.1}
    fit(make, tmp_path / "a", end="90ba", **auto)
    found = [one.time["batch"] for one in mp.open_run(tmp_path / "a").checkpoints()]
    # After 10 batches, after a tenth of 20 s, then every 20 s with the saves; and the end.
    assert found == [10, 11, 28, 46, 64, 82, 90]
    whole = fit(make, tmp_path / "a", resume="must", **auto)
    more = [one.time["batch"] for one in mp.open_run(tmp_path / "a").checkpoints()][len(found) :]
    assert more[:3] == [110, 128, 146]
    record = mp.open_run(tmp_path / "a").latest().manifest.interval
    assert (record["interval_s"], record["stall_s"]) == pytest.approx((20.0, 2.0))
    other = fit(make, tmp_path / "b", save_interval="1ep")
    assert torch.equal(whole.state.model.weight, other.state.model.weight)


def test_a_save_of_the_epoch_is_not_followed_by_another_at_once(make, tmp_path) -> None:
    """Both intervals may be given; they count from the last save of any kind."""
    options = {"save_interval": ["auto", "1ep"], "overhead_budget": 0.1}
    names = fit(make, tmp_path, **options).saved_checkpoints
    assert names == ["ba10", "ba11", "ba28", "ba46", "ba64", "ba82", "ep1"] + [
        f"ba{batch}" for batch in (118, 136, 154, 172, 190)
    ] + ["ep2"]


def test_ranks_that_have_not_trained_yet_do_not_save(make, tmp_path) -> None:
    """An evaluation that was cut off comes before the first batch, in which rank 0 would say so."""
    trainer = make(save_folder=tmp_path, save_interval="auto")
    saving = trainer.checkpoint_saver
    now = [0.0]
    trainer.state.timer._clock = lambda: now[0]
    trainer.state.timer.start()
    for is_alone in (True, False):
        saving._pacing.learn({"stall_s": 1.0})
        saving._is_alone = is_alone
        saving.start()
        now[0] += 1000.0
        assert saving._pacing.is_due() is is_alone
    trainer.close()


class Logged(Callback):
    """Notes what each save has cost."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, bool]] = []

    def save_ended(self, state, pending) -> None:
        assert pending.done()
        self.told.append((pending.name, pending.stats.get("written_bytes", 0), pending.has_failed))


def test_callbacks_are_told_once_of_every_save_that_has_ended(make, tmp_path, monkeypatch) -> None:
    """Whoever logs the cost of saves needs it when it is known, and in the training thread."""
    logged = Logged()
    options = {"save_folder": tmp_path, "save_interval": "1ba", "on_save_error": "warn"}
    trainer = make(callbacks=[logged], max_duration="6ba", **options)
    create_writer = LocalStore.create_writer

    def broken(self, key, size_bytes):
        if key.startswith("ba3/"):
            raise mp.StorageError("boom")
        return create_writer(self, key, size_bytes)

    monkeypatch.setattr(LocalStore, "create_writer", broken)
    trainer.fit()
    trainer.close()
    assert [(name, failed) for name, _, failed in logged.told] == [
        (f"ba{batch}", batch == 3) for batch in range(1, 7)
    ]
    sizes = {one.name: one.manifest.size_bytes for one in mp.open_run(tmp_path).checkpoints()}
    assert {name: size for name, size, failed in logged.told if not failed} == sizes


@pytest.mark.parametrize(
    "options",
    [
        {"overhead_budget": 0.1},
        {"save_interval": "auto", "overhead_budget": 1.5},
        {"save_interval": ["1ep", "auto"], "mean_time_between_failures": "10ba"},
        {"eval_dataloader": Evaluator("a", numbers(), eval_interval="1ep"), "save_interval": "oto"},
        {"eval_dataloader": numbers(), "eval_interval": "auto"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(make, tmp_path, options) -> None:
    """Before anything is trained."""
    with pytest.raises(UsageError):
        make(save_folder=tmp_path, **options)
