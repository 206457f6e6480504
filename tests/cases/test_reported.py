"""Cases of rotation and scores that went wrong elsewhere, for checkpoints that are reported."""

from __future__ import annotations

import itertools
import math
import os
import time

import pytest

import milepost as mp
from milepost.reporting.config import KeepReported
from milepost.runs import Record


@pytest.fixture
def files(tmp_path):
    place = tmp_path / "local"
    place.mkdir()
    (place / "weights").write_text("1")
    return mp.Checkpoint.from_directory(place)


def names(run):
    return [one.name for one in mp.open_run(run).checkpoints()]


@pytest.mark.parametrize("trouble", ["", "clock", "strangers"])
def test_h23_rotation_of_reports_goes_by_order_and_not_by_names_or_clocks(tmp_path, files, trouble):
    """Names sort as text and times of files are moved by copies: neither may decide."""
    run = tmp_path / "run"
    with mp.Reports(run, checkpoint_config=mp.CheckpointConfig(num_to_keep=3)):
        for step in (8000, 9000, 10000, 11000):
            if step == 11000 and trouble == "clock":
                later = time.time() + 3600
                for path in (run / "step-8000").rglob("*"):
                    os.utime(path, (later, later))
            if step == 11000 and trouble == "strangers":
                (run / "checkpoint-old").mkdir()
                (run / "checkpoint-old/x").write_text("mine")
                (run / "checkpoint-12x").write_text("mine")
            mp.report({"step": step}, files, checkpoint_dir_name=f"step-{step}")
    assert names(run) == ["step-9000", "step-10000", "step-11000"]
    if trouble == "strangers":
        assert (run / "checkpoint-old/x").read_text() == "mine"
        assert (run / "checkpoint-12x").read_text() == "mine"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_h24_nan_scores_of_reports_never_take_a_place(tmp_path, files, mode):
    """Comparisons with NaN are false both ways; one that came first must not win for ever."""
    sign = 1 if mode == "max" else -1
    given = [math.nan, 0.3 * sign, 0.9 * sign, math.nan, 0.5 * sign]
    config = mp.CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order=mode
    )
    with mp.Reports(tmp_path / "run", checkpoint_config=config) as reports:
        for score in given:
            mp.report({"score": score}, files)
        result = reports.result()
    assert names(tmp_path / "run") == ["report-3", "report-5"]
    assert result.get_best_checkpoint("score", mode).name == "report-3"
    for order in itertools.permutations(given):
        records = [Record(str(n), n, metrics={"score": s}) for n, s in enumerate(order)]
        kept = KeepReported(2, "score", mode).keep(records)
        assert {abs(order[int(name)]) for name in kept} == {0.9, 0.5}


def test_h24_with_nothing_but_nan_the_newest_reports_stay(tmp_path, files):
    """Nothing crashes, training goes on from the newest, and there is no best."""
    config = mp.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    with mp.Reports(tmp_path / "run", checkpoint_config=config) as reports:
        for _ in range(4):
            mp.report({"score": math.nan}, files)
        assert mp.get_checkpoint().name == "report-4"
        assert reports.result().get_best_checkpoint("score", "max") is None
    assert names(tmp_path / "run") == ["report-3", "report-4"]


@pytest.mark.parametrize("lives", [[3, 2], [5], [1, 1, 1, 1, 1]])
def test_h25_what_is_the_best_of_the_reports_outlives_the_process(tmp_path, files, lives):
    """It is derived from the run and kept by no process: so nothing leaks, and nothing is lost."""
    scores = iter([0.9, 0.4, 0.5, 0.6, 0.7])
    config = mp.CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    for number in lives:
        with mp.Reports(tmp_path / "run", checkpoint_config=config, if_finished="continue"):
            for _ in range(number):
                mp.report({"score": next(scores)}, files)
    assert names(tmp_path / "run") == ["report-1", "report-5"]
    result = mp.Result.from_path(tmp_path / "run")
    assert [one.name for one, _ in result.best_checkpoints] == ["report-5", "report-1"]
