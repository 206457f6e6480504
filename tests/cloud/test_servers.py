"""The same law on every service: runs that are saved, resumed, contended for, listed, cleaned."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.runs import (
    Origin,
    claim,
    open_session,
    read_run,
    record_origin,
    this_process,
)
from milepost.stores import open_store
from milepost.testing.asserts import assert_equal_states

from ..places import Place, strays

pytestmark = pytest.mark.cloud
SERVERS = ["moto", "juicefs", "azurite", "gcs"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory and a place for temporary files, both empty; they stay so."""
    folder = tmp_path / "here"
    for part in ("work", "temporary"):
        (folder / part).mkdir(parents=True)
    monkeypatch.chdir(folder / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    yield folder
    # torch makes a folder for compiled code, as soon as an optimizer steps.
    left = [path.name for path in folder.rglob("*") if not path.name.startswith("torchinductor")]
    assert sorted(left) == ["temporary", "work"]


class Training:
    """One start of a script: everything new."""

    def __init__(self, scramble: int) -> None:
        torch.manual_seed(scramble)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = torch.arange(320.0).reshape(40, 8)
        self.loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True)

    def live(self, run: str, until: int) -> str | None:
        """Train up to a batch, saving every second one; return what it went on from."""
        with mp.Checkpointer(
            run,
            every="2ba",
            keep=mp.KeepLast(2),
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
        ) as kept:
            for _ in kept.epochs(4):
                for (batch,) in kept.batches(self.loader):
                    self.model(batch / 320).square().mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if kept.timer.batch + 1 == until:
                        break
                else:
                    continue
                break
            kept.save(wait=True)
            return kept.resumed_from


@pytest.mark.parametrize(
    "place", [pytest.param("moto", marks=pytest.mark.campaign), *SERVERS[1:]], indirect=True
)
def test_three_starts_go_on_from_the_newest_and_leave_nothing_here(
    place: Place, here: Path
) -> None:
    """One working directory, a bucket: no folder named after the address, no copy that stays."""
    run = place.run("run")
    origins = [Training(seed).live(run, until) for seed, until in ((1, 5), (2, 9), (3, 14))]
    names = [one.name for one in mp.open_run(run).checkpoints()]
    assert origins[0] is None
    assert len(names) == 2
    straight = str(place.run("straight"))
    Training(1).live(straight, 14)
    # Each start went on from what the one before had saved last, and ends where it should.
    assert origins[1:] == ["ba5", "ba9"]
    found, expected = (open_checkpoint(one).load() for one in (run, straight))
    for state in (found, expected):
        state["state"]["timer"].pop("wall_s")
    assert_equal_states(found, expected)
    assert all(one.verify().is_good for one in mp.open_run(run).checkpoints())
    assert strays(run) == []


@pytest.mark.parametrize("place", ["moto"], indirect=True)
@pytest.mark.parametrize("save_format", ["milepost", "torch"])
def test_three_starts_of_a_trainer_leave_nothing_here_but_copies(
    place: Place, here: Path, tmp_path: Path, save_format: str
) -> None:
    """The copies are in the folder that was given for them, and of the newest two."""
    run, cache = place.run("run"), tmp_path / "cache"
    data = TensorDataset(torch.arange(96.0).reshape(12, 8), torch.ones(12, 1))
    for number in range(3):
        torch.manual_seed(number)
        model = torch.nn.Linear(8, 1)
        trainer = mp.Trainer(
            model=model,
            loss_fn=torch.nn.functional.mse_loss,
            train_dataloader=DataLoader(data, batch_size=4, shuffle=True),
            optimizers=torch.optim.AdamW(model.parameters()),
            max_duration=f"{number + 1}ep",
            save_folder=run,
            save_format=save_format,  # type: ignore[arg-type]
            local_cache=cache,
            resume="auto",
            progress_bar=False,
        )
        assert trainer.state.timer.epoch == number
        trainer.fit()
        trainer.close()
        assert model.weight.equal(mp.open_run(run).latest().load()["state"]["model"]["weight"])
    kept = sorted(path.name[:17] for path in cache.glob("milepost-cache-*/*/????????-*"))
    assert kept == ["00000002-00000001", "00000003-00000001"]  # session and attempt
    assert [one.name for one in mp.open_run(run).checkpoints()] == ["ep1", "ep2", "ep3"]


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_of_two_writers_the_older_is_told_to_stop(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the service can refuse, it is certain; where it cannot, there is a warning before."""
    assert place.server is not None
    run, model = place.run("run"), torch.nn.Linear(3, 2)
    with mp.Checkpointer(run, model=model) as first:
        first.save("a", wait=True)
        with mp.Checkpointer(run, model=model) as second:
            second.save("b", wait=True)
            with pytest.raises(mp.FencedError):
                first.save("c", wait=True)
            second.save("d", wait=True)
    assert [one.name for one in mp.open_run(run).checkpoints()] == ["a", "b", "d"]
    warned = [one for one in caplog.records if "safe for one writer only" in one.message]
    assert len(warned) == (0 if place.server.is_exclusive else 2)


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_what_is_cleaned_up_is_gone(place: Place) -> None:
    """Attempts of the dead, deleted checkpoints, and nothing else."""
    run, model = place.run("run"), torch.nn.Linear(3, 2)
    with mp.Checkpointer(run, model=model) as kept:
        for name in ("a", "b"):
            kept.save(name, wait=True)
    store = open_store(run)
    me = this_process()
    dead = replace(me, process_start=f"1@{me.process_start.partition('@')[2]}")
    session = open_session(store, read_run(store), identity=dead)
    session = record_origin(store, session, Origin("b", 1, 2))
    claim(store, session, "half", 1)
    store.put("half/model.safetensors", b"half")
    store.put("mine/notes.txt", b"keep this")
    with mp.Checkpointer(run, keep=mp.KeepLast(1), model=model) as kept:
        kept.save("c", wait=True)
    names = {entry.key.partition("/")[0] for entry in store.list()}
    assert names == {"c", "latest", "mine", "run.json", "sessions"}
    assert strays(run) == ["mine/notes.txt"]
