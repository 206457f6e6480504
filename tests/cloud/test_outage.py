"""A bucket that cannot be reached for a while: training goes on, and catches up afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.stores.cloud import CloudStore
from milepost.testing.proxy import (
    Answer,
    FaultProxy,
    Forward,
    Request,
    fault_proxy,
    hang_up,
    pass_on,
)

from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as found:
        yield found


@pytest.fixture
def store(proxy: FaultProxy, tmp_path: Path) -> CloudStore:
    """A run of its own, and a client that loses patience quickly."""
    return CloudStore(
        f"s3://runs/{tmp_path.name}",
        config={
            "endpoint": proxy.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        },
        retry_timeout_s=0.3,
        max_retries=1,
    )


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(1500, 1500)


def train(run: mp.Checkpointer, model: torch.nn.Module, up_to: int) -> None:
    """Train some batches, and see how the save of each ends before the next."""
    while run.timer.batch < up_to:
        torch.nn.init.constant_(model.weight, run.timer.batch + 1.0)  # type: ignore[arg-type]
        run.step(num_samples=1)
        assert run.last_save is not None
        run.last_save.check_done(60)


def down_after(text: str, proxy: FaultProxy):
    """Return a rule: from the first request with this text in its path on, nobody answers."""

    def rule(request: Request, forward: Forward) -> Answer:
        if text in request.path:
            proxy.rule = hang_up
        return proxy.rule(request, forward) if proxy.rule is hang_up else forward(request)

    return rule


def folders(store: CloudStore) -> set[str]:
    return {entry.key.partition("/")[0] for entry in store.list() if "/" in entry.key}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("begins", ["between two saves", "ba3/model", "ba3/manifest"])
def test_a_training_lives_through_an_outage_and_catches_up(
    store: CloudStore,
    proxy: FaultProxy,
    tmp_path: Path,
    begins: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever it begins: the next save after it commits, and nothing else is left of it."""
    model = new_model()
    with mp.Checkpointer(
        store,
        every="1ba",
        keep=mp.KeepLast(2),
        on_save_error="warn",
        local_cache=tmp_path / "cache",
        model=model,
    ) as run:
        train(run, model, 2)
        caplog.clear()
        proxy.rule = hang_up if begins.startswith("between") else down_after(begins, proxy)
        train(run, model, 5)
        assert proxy.rule is hang_up
        proxy.rule = pass_on
        train(run, model, 6)
        run.wait()
        told = warnings(caplog)
        assert sum("The save of ba" in text for text in told) == 3
        assert told[-1] == "Saves succeed again; 3 in a row had failed."
        # A manifest whose answer was lost may be there: then it counts, though nobody was told.
        before = [one.name for one in mp.open_run(store).checkpoints()]
        assert before[-1] == "ba6"
        assert set(before) <= {"ba2", "ba3", "ba6"}
        assert folders(store) == {*before, "sessions"}
        train(run, model, 7)
    view = mp.open_run(store)
    assert [one.name for one in view.checkpoints()] == ["ba6", "ba7"]
    assert view.get("ba6").manifest.parent == "ba2"
    assert store.get("latest") == b"ba7\n"
    assert folders(store) == {"ba6", "ba7", "sessions"}
    assert all(one.verify().is_good for one in view.checkpoints(all=True))
    assert len(list((tmp_path / "cache").glob("*/*/0*"))) == 2

    other = new_model()
    with mp.Checkpointer(store, local_cache=tmp_path / "cache", model=other) as run:
        assert run.resumed_from == "ba7"
    assert other.weight.equal(model.weight)  # type: ignore[operator]


def test_a_training_that_ends_in_an_outage_does_not_end_well(
    store: CloudStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """What is not in the bucket is not saved; copies on the disk do not make up for it."""
    model = new_model()
    options = {"on_save_error": "warn", "local_cache": tmp_path / "cache", "model": model}
    with pytest.raises(mp.SaveFailedError, match="newest state is not saved: ba3") as caught:
        with mp.Checkpointer(store, every="1ba", **options) as run:
            train(run, model, 2)
            proxy.rule = hang_up
            train(run, model, 3)
    assert isinstance(caught.value.__cause__, mp.StorageError)
    with pytest.raises(mp.StorageError):
        mp.Checkpointer(store, **options).open()
    proxy.rule = pass_on
    with mp.Checkpointer(store, **options) as run:
        assert run.resumed_from == "ba2"
        assert float(model.weight.detach()[0, 0]) == 2.0  # type: ignore[index, operator]


def test_an_outage_beyond_the_limit_ends_the_training(store: CloudStore, proxy: FaultProxy) -> None:
    """More work than the user has said may be lost must not be lost."""
    model = new_model()
    with pytest.raises(mp.SaveFailedError, match="3 saves in a row"):
        with mp.Checkpointer(
            store, every="1ba", on_save_error="warn", max_failed_saves=2, model=model
        ) as run:
            train(run, model, 1)
            proxy.rule = hang_up
            train(run, model, 9)
    assert run.timer.batch == 5


def test_reports_live_through_an_outage_too(
    store: CloudStore, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a run whose newest report failed is not finished."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(9_000_000))
    config = mp.CheckpointConfig(on_save_error="warn", num_to_keep=1)

    def report(number: int) -> None:
        mp.report({"n": number}, mp.Checkpoint.from_directory(folder))

    with pytest.raises(mp.SaveFailedError, match="newest checkpoint is not committed"):
        with mp.Reports(store, checkpoint_config=config):
            report(1)
            proxy.rule = down_after("report-2/weights", proxy)
            report(2)
            report(3)
            proxy.rule = pass_on
            report(4)
            assert {one for one in folders(store) if "report" in one} == {"report-4"}
            proxy.rule = down_after("report-5/", proxy)
            report(5)
            proxy.rule = pass_on
    assert caplog.text.count("Reports succeed again; 2 in a row had failed.") == 1
    with mp.Reports(store, checkpoint_config=config):  # or it would be refused
        found = mp.get_checkpoint()
        assert found is not None
        assert found.name == "report-4"
