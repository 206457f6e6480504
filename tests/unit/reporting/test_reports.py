"""Reports of one process: committed, kept, found again, and refused where they make no sense."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import milepost as mp
from milepost.cli.compare import compare
from milepost.cli.contents import read_contents
from milepost.stores.memory import MemoryStore
from milepost.testing import Fault, FaultStore

SYNC, ASYNC, NO_UPLOAD = mp.CheckpointUploadMode


def names(run: Path) -> list[str]:
    return [one.name for one in mp.open_run(run).checkpoints()]


def test_a_reported_checkpoint_is_an_ordinary_one(tmp_path, folder):
    """Every tool for runs must work on it: nothing is a special case."""
    run = tmp_path / "run"
    data = os.urandom(9_000_000)
    with mp.Reports(run):
        handle = mp.report(
            {"loss": 0.5, "val": {"acc": 1}}, folder(w_dot_bin=data, sub__x="deep", sub__y__z="")
        )
    assert handle.done()
    found = mp.open_run(run).latest()
    assert found.name == handle.name == "report-1"
    assert found.metrics == {"loss": 0.5, "val/acc": 1}
    assert found.verify("full").is_good
    assert found.manifest.layout == "files"
    assert [entry.path for entry in found.manifest.files] == ["sub/x", "sub/y/z", "w.bin"]
    with found.as_directory() as place:
        assert Path(place, "w.bin").read_bytes() == data
        assert Path(place, "sub/x").read_text() == "deep"
    copy = found.to_directory(tmp_path / "copy")
    assert Path(copy, "w.bin").read_bytes() == data
    assert mp.open_run(run).best("val/acc", "max").name == "report-1"
    assert (run / "latest").resolve() == run / "report-1"


def test_a_files_checkpoint_is_never_taken_for_a_state(tmp_path, folder):
    """A message about a missing index would send people looking for damage."""
    with mp.Reports(tmp_path / "run"):
        mp.report({}, folder(a="1"))
    with pytest.raises(mp.UsageError, match="as_directory"):
        mp.open_run(tmp_path / "run").latest().load()
    with pytest.raises(mp.UsageError, match="no state"):
        mp.Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1)).open()


def test_metrics_wait_for_nothing_and_all_are_kept(tmp_path):
    """People report each step: a store that hangs must not be felt by a thousand of them."""
    gate = threading.Event()
    gate.set()
    store = FaultStore(mp.open_store(tmp_path / "run"), before=lambda n, op: gate.wait(20))
    with mp.Reports(store) as reports:
        gate.clear()
        for number in range(1000):
            assert mp.report({"loss": number}) is None
        gate.set()
    assert reports.result().metrics == {"loss": 999}
    lines = (tmp_path / "run/events/reports-00000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines[1:]] == list(range(1, 1001))


def test_metrics_of_any_number_type_survive_a_restart(tmp_path, folder):
    """One float32 in a metric must neither end the run nor come back as null."""
    metrics = {
        "f32": np.float32(0.1),
        "i64": np.int64(7),
        "bool": np.bool_(True),
        "nan": float("nan"),
        "inf": -math.inf,
        "tensor": torch.tensor(2.5, requires_grad=True),
        "one": torch.ones(1, 1, dtype=torch.int32),
        "nested": {"deep": {"x": np.float64("nan")}},
        "text": "a",
        "none": None,
    }
    with mp.Reports(tmp_path / "run"):
        mp.report(metrics, folder(a="1"))
    with mp.Reports(tmp_path / "run", if_finished="continue"):
        (found,) = mp.get_all_reported_checkpoints()
        mp.report({"x": 1}, folder(a="2"))
    kept = dict(found.metrics)
    assert kept["f32"] == float(np.float32(0.1))
    assert [type(kept[key]) for key in ("i64", "bool", "one")] == [int, bool, int]
    assert math.isnan(kept["nan"])
    assert math.isnan(kept["nested"]["deep"]["x"])
    assert kept["inf"] == -math.inf
    assert (kept["tensor"], kept["text"], kept["none"]) == (2.5, "a", None)
    assert names(tmp_path / "run") == ["report-1", "report-2"]


@pytest.mark.parametrize(
    ("metrics", "key"),
    [
        ({"a": [1]}, "a"),
        ({"a": {"b": {1, 2}}}, "a/b"),
        ({"a": np.ones(3)}, "a"),
        ({"a": 1j}, "a"),
        ({"a/b": 1, "a": {"b": 2}}, "a/b"),
        ({3: 1}, "3"),
        ({"a": object()}, "a"),
    ],
)
def test_a_metric_that_is_none_is_refused_by_name(tmp_path, metrics, key):
    """At the call, where the loop can do something about it; the next report is as if nothing."""
    with mp.Reports(tmp_path / "run"):
        with pytest.raises(mp.UsageError) as caught:
            mp.report(metrics)
        assert caught.value.facts["name"] == key
        mp.report({"good": 1})
    assert mp.Result.from_path(tmp_path / "run").metrics == {"good": 1}


def test_reporting_nowhere_says_how(tmp_path, folder):
    """Called in a script that was started by hand, say."""
    for call in (lambda: mp.report({}), mp.get_checkpoint, mp.get_all_reported_checkpoints):
        with pytest.raises(mp.UsageError, match=r"milepost\.launch runs, or in a"):
            call()
    context = mp.get_context()
    assert (context.get_world_size(), context.get_world_rank(), context.run_path) == (1, 0, "")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"manifest_dot_json": "x"}, "manifest.json is one that Milepost uses"),
        ({"attempt_dot_json": "x"}, "attempt.json is one that Milepost uses"),
        ({"a b": "x"}, "cannot hold a file 'a b'"),
        ({".tmp-1-0": "x"}, "Milepost uses"),
        ({}, "holds no files"),
    ],
)
def test_files_that_no_checkpoint_can_hold_are_named(tmp_path, folder, files, match):
    """Nothing is written then, and the next report works."""
    with mp.Reports(tmp_path / "run"):
        with pytest.raises(mp.UsageError, match=match):
            mp.report({}, folder(**files))
        mp.report({}, folder(sub__manifest_dot_json="mine"))
    assert names(tmp_path / "run") == ["report-2"]
    assert not (tmp_path / "run/report-1").exists()


def test_links_are_followed_and_circles_refused(tmp_path, folder):
    """What a link leads to is what people mean; a folder within itself has no end."""
    real, linked = folder(a="1"), folder(b="2")
    with real.as_directory() as first, linked.as_directory() as second:
        Path(second, "file").symlink_to(Path(first, "a"))
        Path(second, "dir").symlink_to(first)
        with mp.Reports(tmp_path / "run"):
            mp.report({}, linked)
            Path(first, "circle").symlink_to(first)
            with pytest.raises(mp.UsageError, match="contains itself"):
                mp.report({}, real)
            Path(first, "circle").unlink()
            Path(first, "gone").symlink_to("/nowhere")
            with pytest.raises(mp.CheckpointError, match=f"{first}/gone"):
                mp.report({}, real)
    (found,) = mp.open_run(tmp_path / "run").checkpoints()
    assert [entry.path for entry in found.manifest.files] == ["b", "dir/a", "file"]


def test_a_name_that_is_taken_gets_a_suffix_and_nothing_mixes(tmp_path, folder):
    """Two reports of one name: the second must neither merge into the first nor replace it."""
    config = mp.CheckpointConfig(num_to_keep=1)
    with mp.Reports(tmp_path / "run"):
        mp.report({"n": 1}, folder(old="1"), checkpoint_dir_name="best")
        handle = mp.report({"n": 2}, folder(new="2"), checkpoint_dir_name="best")
    assert names(tmp_path / "run") == ["best", "best-s1"] == ["best", handle.name]
    with mp.Reports(tmp_path / "run", checkpoint_config=config, if_finished="continue"):
        assert names(tmp_path / "run") == ["best-s1"]
        mp.report({"n": 3}, folder(third="3"), checkpoint_dir_name="best")
    (left,) = mp.open_run(tmp_path / "run").checkpoints()
    assert [entry.path for entry in left.manifest.files] == ["third"]
    with mp.Reports(tmp_path / "run", if_finished="continue"):
        with pytest.raises(mp.UsageError, match="cannot name"):
            mp.report({}, folder(a="1"), checkpoint_dir_name="a/b")


def test_get_checkpoint_is_the_newest_committed_one(tmp_path, folder):
    """At the start the one to go on from; later the last report that worked."""
    run = tmp_path / "run"
    with mp.Reports(run) as reports:
        assert mp.get_checkpoint() is None
        mp.report({"n": 1}, folder(a="1"))
        assert mp.get_checkpoint().name == "report-1"
        mp.report({"n": 2})
        assert mp.get_checkpoint().name == "report-1"
        with pytest.raises(mp.UsageError):
            mp.report({"n": 3}, folder())
        assert mp.get_checkpoint().name == "report-1"
        mp.report({"n": 4}, folder(a="1"))
        assert reports.resumed_from is None
    with mp.Reports(run, if_finished="continue") as reports:
        assert mp.get_checkpoint().name == reports.resumed_from == "report-4"
        mp.report({"n": 5}, folder(a="1"))
        assert mp.get_checkpoint().name == "report-5"


def test_a_damaged_checkpoint_is_passed_over_at_the_start(tmp_path, folder):
    """As a resume does: the newest that is whole, said loudly; never a fresh start in silence."""
    run = tmp_path / "run"
    with mp.Reports(run):
        for number in range(3):
            mp.report({}, folder(a=str(number), b="b"))
    (run / "report-3/a").unlink()
    with mp.Reports(run, if_finished="continue"):
        assert mp.get_checkpoint().name == "report-2"
    (run / "report-2/b").write_text("longer")
    (run / "report-1/b").unlink()
    with pytest.raises(mp.DamagedError):
        mp.Reports(run, if_finished="continue").open()


def test_a_finished_run_is_not_begun_again_by_accident(tmp_path, folder):
    """Rerunning a script of yesterday must not add to what is done."""
    run = tmp_path / "run"
    with mp.Reports(run):
        mp.report({}, folder(a="1"))
    with pytest.raises(mp.ExistsError, match="finished"), mp.Reports(run):
        pass
    with pytest.raises(ZeroDivisionError), mp.Reports(run, if_finished="continue"):
        raise ZeroDivisionError
    with mp.Reports(run):
        assert mp.get_checkpoint().name == "report-1"


def test_an_asynchronous_report_returns_at_once_and_tells_later(tmp_path, folder):
    """The handle knows; the folder goes when its bytes are safe, and not before."""
    gate = threading.Event()
    store = FaultStore(MemoryStore(), before=lambda n, op: op.startswith("close") and gate.wait(20))
    with mp.Reports(store):
        checkpoint = folder(a="1" * 5000)
        with checkpoint.as_directory() as place:
            pass
        handle = mp.report({"n": 1}, checkpoint, checkpoint_upload_mode=ASYNC)
        assert not handle.done()
        with pytest.raises(mp.DeadlineError, match="was not committed within"):
            handle.wait(0.05)
        with pytest.raises(mp.DeadlineError, match="its upload"):
            mp.get_all_reported_checkpoints(timeout_s=0.05)
        mp.report({"n": 2})
        assert Path(place).exists()
        gate.set()
        assert handle.wait(20).name == "report-1"
        assert not Path(place).exists()
        kept = folder(a="1")
        mp.report(
            {}, kept, checkpoint_upload_mode=ASYNC, delete_local_checkpoint_after_upload=False
        ).wait(20)
        gone = folder(a="1")
        mp.report({}, gone, delete_local_checkpoint_after_upload=True)
    assert kept.url.removeprefix("file://") != gone.url
    assert Path(kept.url.removeprefix("file://"), "a").exists()
    assert not Path(gone.url.removeprefix("file://")).exists()


def test_one_upload_is_on_its_way_at_a_time(tmp_path, folder):
    """A slow place must slow the loop down, and not fill the disk with folders."""
    active, most = 0, 0

    def slow(checkpoint, name):
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.05)
        active -= 1
        target = tmp_path / "run" / name
        target.mkdir()
        (target / "a").write_text("x")
        return mp.Checkpoint.from_directory(target)

    with mp.Reports(tmp_path / "run"):
        handles = [
            mp.report({}, folder(a="1"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=slow)
            for _ in range(4)
        ]
        assert [handle.done() for handle in handles[:3]] == [True] * 3
    assert most == 1
    assert names(tmp_path / "run") == [f"report-{n}" for n in (1, 2, 3, 4)]


def full(checkpoint, name):
    raise OSError(28, "No space left on device")


def test_the_loop_can_catch_what_went_wrong_in_the_background(tmp_path, folder):
    """At the next report, at the handle, or at the end: once, and where code can act on it."""
    options = {"checkpoint_upload_mode": ASYNC, "checkpoint_upload_fn": full}
    with mp.Reports(tmp_path / "run"):
        mp.report({}, folder(a="1"), **options)._done.wait(20)
        with pytest.raises(OSError, match="No space"):
            mp.report({"n": 1})
        mp.report({"n": 2})
        handle = mp.report({}, folder(a="1"), **options)
        assert isinstance(handle.exception(20), OSError)
        mp.report({"n": 3}, folder(a="1"))
    with pytest.raises(OSError, match="No space"):
        with mp.Reports(tmp_path / "run", if_finished="continue"):
            mp.report({}, folder(a="1"), **options)
    assert names(tmp_path / "run") == ["report-5"]
    lines = (tmp_path / "run/events/reports-00000001.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["metrics"] for line in lines] == [{}, {"n": 1}, {"n": 2}, {}, {"n": 3}]


def test_an_upload_whose_thread_cannot_start_has_failed(tmp_path, folder, monkeypatch):
    """Nobody may wait for it: not the next report, not the leader, not the end of the run."""

    def start(self: threading.Thread) -> None:
        if self.name == "milepost-report":
            raise RuntimeError("can't start new thread")
        begin(self)

    begin = threading.Thread.start
    config = mp.CheckpointConfig(upload_timeout_s=5)
    with mp.Reports(tmp_path / "run", checkpoint_config=config):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                mp.report({}, folder(a="1"), checkpoint_upload_mode=ASYNC)
        assert mp.report({}, folder(a="1")).name == "report-2"
    assert names(tmp_path / "run") == ["report-2"]


def test_a_few_failures_may_be_lived_with(tmp_path, folder):
    """With "warn" a training survives a bad minute of its store, and not a bad day."""
    config = mp.CheckpointConfig(on_save_error="warn", max_failed_saves=2)
    with pytest.raises(mp.SaveFailedError, match="3 reports in a row"):
        with mp.Reports(tmp_path / "run", checkpoint_config=config):
            for _ in range(2):
                handle = mp.report({}, folder(a="1"), checkpoint_upload_fn=full)
                assert handle.has_failed
            mp.report({}, folder(a="1"))
            for _ in range(3):
                mp.report({}, folder(a="1"), checkpoint_upload_fn=full)
    assert names(tmp_path / "run") == ["report-3"]


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_run_whose_newest_report_failed_is_not_finished(tmp_path, folder, policy):
    """Or it would not be started again, though what it was to do is not there."""
    config = mp.CheckpointConfig(on_save_error=policy)
    with pytest.raises((OSError, mp.SaveFailedError)):
        with mp.Reports(tmp_path / "run", checkpoint_config=config):
            mp.report({}, folder(a="1"))
            mp.report(
                {},
                folder(a="2"),
                checkpoint_upload_mode=ASYNC,
                checkpoint_upload_fn=full,
                delete_local_checkpoint_after_upload=False,
            )
    with mp.Reports(tmp_path / "run"):
        assert mp.get_checkpoint().name == "report-1"


def test_an_error_of_the_store_fails_the_report_and_leaves_nothing(tmp_path, folder):
    """The next one works: what is there afterwards is as if the first had not been."""
    below = MemoryStore()
    probe = FaultStore(below)
    with mp.Reports(probe):
        mp.report({}, folder(a="1"))
    at = next(n for n, op in enumerate(probe.operations, 1) if op == "close report-1/a")
    below = MemoryStore()
    store = FaultStore(below, [Fault(at, error=mp.NoSpaceError("Full."))])
    with mp.Reports(store):
        with pytest.raises(mp.NoSpaceError, match="Full"):
            mp.report({}, folder(a="1"))
        mp.report({}, folder(a="2"))
    assert [one.name for one in mp.open_run(below).checkpoints()] == ["report-2"]
    assert not list(below.list("report-1"))


def test_a_file_that_changes_during_the_upload_fails_it(tmp_path, folder):
    """Half of the old and half of the new would be neither."""
    checkpoint = folder(a="1" * 100, b="2" * 100)
    with checkpoint.as_directory() as place:
        path = Path(place, "b")

    def change(number, operation):
        if operation == "close report-1/a":
            path.write_text("3" * 101)

    store = FaultStore(MemoryStore(), before=change)
    with mp.Reports(store), pytest.raises(mp.DamagedError, match="b was changed while"):
        mp.report({}, checkpoint)


def test_a_folder_in_the_run_is_committed_where_it_is(tmp_path, folder):
    """Written by another library, straight to its place: read, checksummed, made durable."""
    run = tmp_path / "run"
    with mp.Reports(run):
        place = Path(mp.get_context().get_run_path(), "mine")
        (place / "sub").mkdir(parents=True)
        (place / "sub/x").write_bytes(b"1" * 9_000_000)
        (place / "index.json").write_text("{}")
        handle = mp.report(
            {"n": 1},
            mp.Checkpoint.from_directory(place),
            checkpoint_upload_mode=NO_UPLOAD,
            delete_local_checkpoint_after_upload=True,
        )
        assert handle.name == "mine"
        with pytest.raises(mp.ExistsError, match="is a checkpoint already"):
            mp.report({}, handle.wait(), checkpoint_upload_mode=NO_UPLOAD)
    found = mp.open_run(run).latest()
    assert found.verify("full").is_good
    assert [entry.path for entry in found.manifest.files] == ["index.json", "sub/x"]


def test_what_cannot_be_committed_in_place_stays_as_it_was(tmp_path, folder):
    """The files are the user's: a refusal must not cost them."""
    run = tmp_path / "run"
    outside = folder(a="1")
    with mp.Reports(run):
        place = run / "mine"
        place.mkdir()
        (place / "a").write_text("1")
        (place / "link").symlink_to(place / "a")
        empty = run / "empty"
        empty.mkdir()
        nested = place / "sub"
        nested.mkdir()
        for one, match in (
            (outside, "not a folder right in the run"),
            (mp.Checkpoint.from_directory(nested), "not a folder right in the run"),
            (mp.Checkpoint.from_directory(run), "not a folder right in the run"),
            (mp.Checkpoint.from_directory(empty), "There are no files in empty"),
            (mp.Checkpoint.from_directory(place), "holds links"),
        ):
            with pytest.raises(mp.UsageError, match=match):
                mp.report({}, one, checkpoint_upload_mode=NO_UPLOAD)
    assert sorted(path.name for path in place.iterdir()) == ["a", "link", "sub"]
    assert (Path(outside.url.removeprefix("file://")) / "a").exists()
    assert names(run) == []


def test_adopted_files_survive_a_stop_before_their_commit(tmp_path, folder):
    """The sweep of the next session removes the claim, and not what it did not write."""
    run = tmp_path / "run"
    script = f"""
import os, pathlib
import milepost as mp
from milepost.cli.compare import compare
from milepost.cli.contents import read_contents
from milepost.reporting import commit
commit.publish = lambda *args: os._exit(9)
with mp.Reports({str(run)!r}):
    place = pathlib.Path({str(run)!r}, "mine")
    place.mkdir()
    (place / "index.json").write_text("precious")
    mp.report({{}}, mp.Checkpoint.from_directory(place),
              checkpoint_upload_mode=mp.CheckpointUploadMode.NO_UPLOAD)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 9
    assert sorted(one.name for one in (run / "mine").iterdir()) == ["attempt.json", "index.json"]
    with mp.Reports(run):
        assert [one.name for one in (run / "mine").iterdir()] == ["index.json"]
        place = mp.Checkpoint.from_directory(run / "mine")
        mp.report({}, place, checkpoint_upload_mode=NO_UPLOAD)
    assert (run / "mine/index.json").read_text() == "precious"
    assert names(run) == ["mine"]


def test_an_upload_function_is_held_to_its_word(tmp_path, folder):
    """It says where it has put the files; only a folder of the run can be committed."""
    run = tmp_path / "run"

    def good(checkpoint, name):
        target = run / name
        target.mkdir()
        with checkpoint.as_directory() as source:
            (target / "copied").write_bytes(Path(source, "a").read_bytes())
        return mp.Checkpoint.from_directory(target)

    with mp.Reports(run):
        handle = mp.report({}, folder(a="1"), checkpoint_upload_fn=good, checkpoint_dir_name="here")
        assert handle.name == "here"
        handle = mp.report({}, folder(a="1"), checkpoint_upload_fn=good, checkpoint_dir_name="here")
        assert handle.name == "here-s1"
        for bad, match in (
            (lambda checkpoint, name: None, "returned a NoneType"),
            (lambda checkpoint, name: checkpoint, "not a folder right in the run"),
        ):
            with pytest.raises(mp.UsageError, match=match):
                mp.report({}, folder(a="1"), checkpoint_upload_fn=bad)
        with pytest.raises(mp.UsageError, match="would not be called"):
            mp.report(
                {}, folder(a="1"), checkpoint_upload_fn=good, checkpoint_upload_mode=NO_UPLOAD
            )
    assert names(run) == ["here", "here-s1"]


def test_the_run_is_never_deleted_as_a_local_folder(tmp_path, folder):
    """Reporting the folder above the run with ASYNC would delete both."""
    run = tmp_path / "above" / "run"
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "a").write_text("1")
    with mp.Reports(run):
        for place in (tmp_path / "above", run):
            with pytest.raises(mp.UsageError, match="would be deleted"):
                mp.report({}, mp.Checkpoint.from_directory(place), checkpoint_upload_mode=ASYNC)
    assert (tmp_path / "above" / "a").exists()


def test_a_newer_session_takes_the_run_over(tmp_path, folder):
    """The older writer learns of it at its next checkpoint, and deletes nothing."""
    config = mp.CheckpointConfig(num_to_keep=1)
    old = mp.Reports(tmp_path / "run", checkpoint_config=config).open()
    old.report({}, folder(a="1"))
    with mp.Reports(tmp_path / "run"):
        mp.report({}, folder(a="2"))
        with pytest.raises(mp.FencedError):
            old.report({}, folder(a="3"))
        with pytest.raises(mp.FencedError):
            old.report({}, folder(a="3"))
        old.close(is_well=False)
    assert names(tmp_path / "run") == ["report-1", "report-2"]


def test_a_forked_child_cannot_report(tmp_path):
    """It would share the numbers of its parent, and the server's connections."""
    with mp.Reports(tmp_path / "run"):
        pid = os.fork()
        if pid == 0:
            try:
                mp.report({})
            except mp.UsageError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_torn_line_of_metrics_hides_no_other(tmp_path):
    """A power cut may leave half of the last one."""
    with mp.Reports(tmp_path / "run"):
        for number in range(3):
            mp.report({"n": number})
    path = tmp_path / "run/events/reports-00000001.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with mp.Reports(tmp_path / "run", if_finished="continue"):
        mp.report({"n": 9})
    result = mp.Result.from_path(tmp_path / "run")
    assert result.metrics == {"n": 9}


def test_a_result_tells_what_is_kept_and_what_was_best(tmp_path, folder):
    """Also from the path alone, with an old folder gone, and from the worst to the best."""
    run = tmp_path / "run"
    config = mp.CheckpointConfig(
        num_to_keep=3, checkpoint_score_attribute="val/loss", checkpoint_score_order="min"
    )
    with mp.Reports(run, checkpoint_config=config):
        for loss in (0.5, 0.2, float("nan"), 0.4, 0.9):
            mp.report({"val": {"loss": loss}, "n": -loss}, folder(a=str(loss)))
    result = mp.Result.from_path(run)
    assert result.checkpoint.name == "report-5"
    assert [one.name for one, _ in result.best_checkpoints] == [
        "report-5",
        "report-1",
        "report-4",
        "report-2",
    ]
    assert result.best_checkpoints[-1][1]["val"] == {"loss": 0.2}
    assert result.get_best_checkpoint("n", "max").name == "report-2"
    assert result.get_best_checkpoint("nothing", "max") is None
    assert result.metrics == {"val": {"loss": 0.9}, "n": -0.9}
    assert (result.path, result.error, result.return_value) == (str(run), None, None)
    with pytest.raises(mp.MissingError):
        mp.Result.from_path(tmp_path / "nowhere")
    with pytest.raises(mp.UsageError, match="pandas"):
        result.metrics_dataframe  # noqa: B018


def test_options_that_make_no_sense_are_refused(tmp_path, folder):
    """Before anything is touched or counted."""
    for options in (
        {"num_to_keep": 0},
        {"num_to_keep": 1.5},
        {"checkpoint_score_order": "up"},
        {"checkpoint_score_attribute": ""},
        {"report_timeout_s": 0},
    ):
        with pytest.raises(mp.UsageError):
            mp.CheckpointConfig(**options)
    with mp.Reports(tmp_path / "run"):
        with pytest.raises(mp.UsageError, match="from_directory"):
            mp.report({}, "folder")
        with pytest.raises(mp.UsageError, match="no checkpoint to validate"):
            mp.report({}, validation=True)
        with pytest.raises(mp.UsageError, match="ValidationConfig"):
            mp.report({}, folder(a="1"), validation=True)


def test_reports_load_no_torch(tmp_path):
    """A training without it starts as fast as before."""
    script = f"""
import sys
import milepost as mp
from milepost.cli.compare import compare
from milepost.cli.contents import read_contents
with mp.Reports({str(tmp_path / "run")!r}):
    mp.report({{"n": 1}}, mp.Checkpoint.from_directory({str(Path(__file__).parent)!r}))
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_files_of_two_checkpoints_are_compared(tmp_path, folder):
    """`milepost diff` must not call checkpoints equal whose tensors it does not know."""
    with mp.Reports(tmp_path / "run"):
        one = mp.report({}, folder(a="1", b="2", c="3")).wait()
        other = mp.report({}, folder(a="1", b="3", d="3")).wait()
    changes = compare(read_contents(one), read_contents(other)).others
    assert [(one.path, one.kind) for one in changes] == [
        ("files['b']", "changed"),
        ("files['c']", "removed"),
        ("files['d']", "added"),
    ]


def test_several_workers_without_a_way_to_meet_are_refused(tmp_path, monkeypatch):
    """Each would open the run for itself, and take it from the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mp.UsageError, match="init_process_group"):
        mp.Reports(tmp_path / "run").open()
    assert not (tmp_path / "run").exists()
