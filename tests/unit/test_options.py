"""Numbers that users give: refused at the start, and never found out by a thread that computes."""

from __future__ import annotations

import math
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import milepost as mp
from milepost.engine.pending import PendingSave
from milepost.launch import FailureConfig, RunConfig
from milepost.reporting.config import CheckpointConfig
from milepost.train import Trainer
from milepost.validation.config import ValidationConfig, ValidationTaskConfig

NO_SECONDS = ("x", math.nan, -1, True, [1])
NO_COUNTS = ("x", math.nan, math.inf, 40e6, True, -2)

SECONDS = [
    *((mp.Checkpointer, name) for name in ("grace_s", "rank_timeout_s", "share_timeout_s")),
    *((Trainer, name) for name in ("grace_s", "rank_timeout_s", "group_timeout_s")),
    (CheckpointConfig, "report_timeout_s"),
    (CheckpointConfig, "upload_timeout_s"),
    (CheckpointConfig, "validation_timeout_s"),
    (RunConfig, "grace_s"),
    (FailureConfig, "window_s"),
    (FailureConfig, "backoff_s"),
    (FailureConfig, "max_backoff_s"),
    (FailureConfig, "grace_s"),
    (FailureConfig, "hang_timeout_s"),
    (FailureConfig, "start_timeout_s"),
    (ValidationConfig, "grace_s"),
    (ValidationTaskConfig, "timeout_s"),
]
COUNTS = [
    *((mp.Checkpointer, name) for name in ("staging_budget_bytes", "max_failed_saves")),
    (mp.Checkpointer, "load_chunk_bytes"),
    *((Trainer, name) for name in ("staging_budget_bytes", "max_failed_saves", "load_chunk_size")),
    (CheckpointConfig, "max_failed_saves"),
    (CheckpointConfig, "num_to_keep"),
    (FailureConfig, "max_failures"),
    (FailureConfig, "max_attempts_without_progress"),
    (ValidationConfig, "max_concurrent"),
    (ValidationConfig, "max_retries"),
]


def make(kind, folder, **options):
    """Make one of the things that take options, with all else as it should be."""
    if kind is mp.Checkpointer:
        return mp.Checkpointer(folder, model=torch.nn.Linear(1, 1), **options)
    if kind is Trainer:
        model = torch.nn.Linear(1, 1)
        return Trainer(
            model=model,
            train_dataloader=torch.utils.data.DataLoader(torch.ones(2, 1)),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=torch.nn.functional.mse_loss,
            max_duration="1ba",
            save_folder=str(folder),
            **options,
        )
    if kind is ValidationConfig:
        return ValidationConfig("json:dumps", **options)
    return kind(**options)


@pytest.mark.parametrize(("kind", "name"), SECONDS)
def test_what_is_no_number_of_seconds_is_refused_at_the_start(tmp_path, kind, name):
    """Text and NaN used to be found out when somebody waited, hours later."""
    for value in NO_SECONDS:
        with pytest.raises(mp.UsageError, match=name):
            make(kind, tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "name"), COUNTS)
def test_what_is_no_whole_number_is_refused_at_the_start(tmp_path, kind, name):
    """A budget of 40e6 bytes ended a training at its first larger save."""
    for value in NO_COUNTS:
        with pytest.raises(mp.UsageError):
            make(kind, tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    """Sizes and times often come out of an array."""
    run = make(
        mp.Checkpointer,
        tmp_path / "run",
        staging_budget_bytes=np.int64(40_000_000),
        grace_s=np.float32(5),
        max_failed_saves=np.int32(2),
    )
    with run:
        assert run.save("a", wait=True).name == "a"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 1e300, 10**20])
def test_no_limit_may_be_written_as_infinity(timeout_s):
    """What is longer than the system can wait for is as long as it takes."""
    pending = PendingSave("a")
    pending.succeed(1)
    assert pending.wait(timeout_s=timeout_s) == 1
    assert pending.exception(timeout_s=timeout_s) is None


@pytest.mark.parametrize("timeout_s", ["1", math.nan, True])
def test_a_wait_for_no_number_is_wrong_usage(timeout_s):
    """Not the error of a lock."""
    with pytest.raises(mp.UsageError, match="timeout_s"):
        PendingSave("a").wait(timeout_s=timeout_s)


_TRAINING = """
import os, signal, sys
import torch
import milepost as mp
far = float("inf")
options = {"rank_timeout_s": far, "share_timeout_s": far, "grace_s": far}
with mp.Checkpointer(sys.argv[1], every="100ba", model=torch.nn.Linear(2, 2), **options) as run:
    for batch in range(4):
        run.step()
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_training_without_limits_in_time_is_safe_after_sigterm(tmp_path):
    """It ended with an OverflowError and the code of a failure, and nothing was saved."""
    done = subprocess.run(
        [sys.executable, "-c", _TRAINING, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert mp.open_run(tmp_path / "run").latest().verify("full").is_good


@pytest.mark.parametrize("keep", [mp.KeepLast, [mp.KeepLast], [mp.KeepLast(1), mp.KeepAll], [3], 3])
def test_a_class_is_no_policy(tmp_path, keep):
    """It has the methods of one, and cannot be called: that was found out after a save."""
    with pytest.raises(mp.UsageError, match="keep"):
        mp.Checkpointer(tmp_path / "run", keep=keep, model=torch.nn.Linear(1, 1))
