"""Which checkpoint is the best, which the newest, and what they are called."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

import milepost as mp
from milepost.runs.keep import Record, keep_any


class Box:
    """One value that is saved."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


NAN = math.nan


def names_in(folder):
    return [one.name for one in mp.open_run(folder).checkpoints()]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_h24_nan_is_never_the_best_and_never_beats_a_number(tmp_path, mode):
    """Every comparison with NaN is false: whoever came first would stay for ever."""
    scores = [NAN, 0.3, 0.9, NAN, 0.5]
    keep = [mp.KeepBest(2, "score", mode), mp.KeepLast(1)]
    with mp.Checkpointer(tmp_path, keep=keep, box=Box()) as run:
        for step, score in enumerate(scores, start=1):
            run.save(f"s{step}", metrics={"score": score}, wait=True)
    kept = {"max": ["s3", "s5"], "min": ["s2", "s5"]}[mode]
    assert names_in(tmp_path) == kept
    run = mp.open_run(tmp_path)
    assert run.best("score", mode).name == kept[0]
    assert run.latest().name == "s5"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_h24_the_order_of_the_scores_does_not_matter(mode):
    """All 120 orders of the five keep the same two."""
    wanted = {0.9, 0.5} if mode == "max" else {0.3, 0.5}
    for order in set(itertools.permutations(range(5))):
        scores = [[NAN, 0.3, 0.9, NAN, 0.5][place] for place in order]
        records = [
            Record(str(n), order=n, metrics={"score": score}) for n, score in enumerate(scores)
        ]
        kept = keep_any([mp.KeepBest(2, "score", mode)], records)
        assert {scores[int(name)] for name in kept} == wanted


def test_h24_with_nothing_but_nan_the_newest_stays(tmp_path):
    """There is no best then, and there is still something to go on from."""
    with mp.Checkpointer(tmp_path, keep=[mp.KeepBest(2, "score", "max")], box=Box()) as run:
        for step in range(3):
            run.save(f"s{step}", metrics={"score": NAN}, wait=True)
    assert names_in(tmp_path) == ["s2"]
    assert mp.open_run(tmp_path).best("score", "max") is None
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        assert run.resumed_from == "s2"


@pytest.mark.parametrize("lives", [[3, 2], [5]])
def test_h25_retention_and_best_go_on_after_a_resume(tmp_path, lives):
    """A list in memory would be empty then: old files leak, a worse score replaces the best."""
    scores = iter([0.9, 0.4, 0.5, 0.6, 0.7])
    number = 0
    keep = [mp.KeepLast(2), mp.KeepBest(1, "score", "max")]
    for count in lives:
        with mp.Checkpointer(tmp_path, keep=keep, box=Box()) as run:
            for _ in range(count):
                number += 1
                run.save(f"s{number}", metrics={"score": next(scores)}, wait=True)
    assert names_in(tmp_path) == ["s1", "s4", "s5"]
    best = mp.open_run(tmp_path).best("score", "max")
    assert (best.name, best.metrics["score"]) == ("s1", 0.9)


def test_h27_no_symlinks_are_no_error_and_the_newest_is_found_from_anywhere(tmp_path, monkeypatch):
    """Network drives refuse them; a link that is relative to the working folder dangles."""

    def refuse(*_args, **_options):
        raise OSError(95, "Operation not supported")

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", refuse)
        with mp.Checkpointer("runs/a", box=Box(1)) as run:
            run.save("one", wait=True)
            run.save("two", wait=True)
    assert (tmp_path / "runs/a/latest").read_text() == "two\n"
    monkeypatch.chdir("/")
    with mp.Checkpointer(tmp_path / "runs/a", box=Box()) as run:
        assert run.resumed_from == "two"


def test_h27_a_symlink_resolves_from_every_folder_and_after_a_move(tmp_path, monkeypatch):
    """The link is relative to the folder that it stands in."""
    monkeypatch.chdir(tmp_path)
    with mp.Checkpointer("runs/a", box=Box(1)) as run:
        run.save("one", wait=True)
        run.save("two", wait=True)
        monkeypatch.chdir(tmp_path / "runs")  # the run stays where it was opened
        run.save("three", wait=True)
    assert names_in(tmp_path / "runs/a") == ["one", "two", "three"]
    for place in ("runs/a/..", "/"):
        monkeypatch.chdir(tmp_path if place != "/" else place)
        assert (tmp_path / "runs/a/latest").resolve() == (tmp_path / "runs/a/three").resolve()
        assert mp.open_run(tmp_path / "runs/a").latest().name == "three"
    (tmp_path / "runs/a").rename(tmp_path / "b")
    assert (tmp_path / "b/latest/manifest.json").is_file()
    with mp.Checkpointer(tmp_path / "b", box=Box()) as run:
        assert run.resumed_from == "three"


def folders_in(path):
    """Folders of checkpoints: what is not one of the run's own."""
    own = {"sessions", "pins", "latest", "run.json"}
    return sorted(one.name for one in path.iterdir() if one.name not in own)


def test_h28_a_slash_in_a_metric_makes_no_folder(tmp_path):
    """One folder for each checkpoint, right in the run, and nothing is left after retention."""
    pattern = "{epoch}-{val/loss:.3f}"
    with mp.Checkpointer(
        tmp_path, save_name_format=pattern, keep=[mp.KeepLast(1)], box=Box()
    ) as run:
        run.log_metrics({"val/loss": 0.25})
        assert run.save().wait().name == "0-0.250"
        run.log_metrics({"val/loss": 0.5})
        run.save(wait=True)
    assert folders_in(tmp_path) == ["0-0.500"]


@pytest.mark.parametrize(
    ("pattern", "metrics", "name"),
    [
        ("{val/loss}", {"val/loss": 0.25}, "0.25"),
        ("a/{val/loss}", {"val/loss": 0.25}, "a_0.25"),
        ("{acc:top 1}", {"acc:top 1": 0.5}, "0.5"),
        ("x{acc:top 1:.2f}", {"acc:top 1": 0.5}, "x0.50"),
        ("{v.loss:.1f}", {"v.loss": 0.25}, "0.2"),
        ("{a[0]}", {"a[0]": 3}, "3"),
        ("{tiny}", {"tiny": 1e-7}, "1e-07"),
        ("{name}:{tiny:.3f}", {"tiny": 1e-7}, "ba0_0.000"),
        ("{batch:04d}", {}, "0000"),
        ("x{never logged:04d}", {}, "xnan"),
    ],
)
def test_h28_any_name_of_a_metric_may_stand_in_the_pattern(tmp_path, pattern, metrics, name):
    """Colons, dots, brackets and spaces are part of a name; what a place may refuse becomes _."""
    with mp.Checkpointer(tmp_path, save_name_format=pattern, box=Box()) as run:
        run.log_metrics(metrics)
        assert run.save().wait().name == name
        assert run.save().wait().name != name
    assert len(folders_in(tmp_path)) == 2


def test_h28_an_over_long_name_is_shortened_and_stays_apart(tmp_path):
    """File systems allow 255 bytes; two long names that differ at the end must not meet."""
    long = "r" * 300
    names = []
    for tail in "ab":
        pattern = f"{long}{tail}-{{batch}}"
        with mp.Checkpointer(tmp_path / tail, save_name_format=pattern, box=Box()) as run:
            names.append(run.save().wait().name)
            names.append(run.save().wait().name)
    assert len(set(names)) == 4
    assert all(len(name) <= 128 for name in names)


@pytest.mark.parametrize(
    "pattern",
    ["plain", "{batch", "{}", "{0}", "{:d}", "{0:d}", "{!r}", "{epoch!r}", "{batch:zz}",
     "{name:d}", "{batch:{loss}}", 5],
)  # fmt: skip
def test_h28_a_pattern_that_cannot_work_is_refused_at_the_start(tmp_path, pattern):
    """Not at the first save, hours later."""
    with pytest.raises(mp.UsageError):
        mp.Checkpointer(tmp_path, save_name_format=pattern, box=Box())


def test_a_metric_that_no_float_comes_close_to_is_refused(tmp_path):
    """Comparing it with others would end in an error after the commit."""
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        with pytest.raises(mp.UsageError, match=r"'huge'.*larger"):
            run.save("a", metrics={"huge": 10**400})
        run.save("a", metrics={"large": 10**300}, wait=True)


def test_metrics_that_are_no_numbers_are_named(tmp_path):
    """A tensor of several elements has no one value to rank by."""
    with mp.Checkpointer(tmp_path, box=Box()) as run:
        run.log(one=torch.tensor([0.5]), two=torch.ones(2))
        with pytest.raises(mp.UsageError, match=r"'two'.*2 elements"):
            run.save("a")
        run.log(two=1)
        assert run.save("a").wait().metrics == {"one": 0.5, "two": 1}
