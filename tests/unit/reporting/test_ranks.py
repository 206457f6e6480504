"""Reports of several ranks: one checkpoint or one error on all of them, and nobody hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import milepost as mp
from milepost.reporting import coordinator

from .conftest import report_on_ranks

ASYNC, NO_UPLOAD = mp.CheckpointUploadMode.ASYNC, mp.CheckpointUploadMode.NO_UPLOAD


def names(run: Path) -> list[str]:
    return [one.name for one in mp.open_run(run).checkpoints()]


def test_files_of_all_ranks_lie_in_one_checkpoint(tmp_path, folder):
    """Each rank writes its own; what two ranks have alike is written once."""

    def body(reports):
        rank = reports.test_board.rank
        handle = reports.report(
            {"rank": rank},
            folder(**{f"model-{rank}": str(rank), "config": "same" * 1000}),
            checkpoint_dir_name=f"of-{rank}",
        )
        reports.report({"n": 1})
        return handle.name, reports.get_checkpoint().name

    assert report_on_ranks(tmp_path / "run", body, body, body) == [("of-0", "of-0")] * 3
    found = mp.open_run(tmp_path / "run").latest()
    paths = [entry.path for entry in found.manifest.files]
    assert paths == ["config", "model-0", "model-1", "model-2"]
    assert found.manifest.world_size == 3
    assert found.metrics == {"rank": 0}
    assert found.verify("full").is_good
    with pytest.raises(mp.ExistsError, match="finished"):
        mp.Reports(tmp_path / "run").open()


@pytest.mark.parametrize("contents", [("aaaa", "bbbb"), ("a", "bb")])
def test_files_of_one_name_and_different_bytes_are_refused(tmp_path, folder, contents):
    """One of them would be lost, and nobody would know which. The next report works."""

    def body(reports):
        rank = reports.test_board.rank
        with pytest.raises(mp.MismatchError) as caught:
            reports.report({}, folder(same=contents[rank], own="x"))
        assert str(caught.value).startswith("Rank 0 and rank 1 both have a file same")
        return reports.report({}, folder(**{f"f{rank}": "1"})).name

    assert report_on_ranks(tmp_path / "run", body, body) == ["report-2"] * 2
    assert names(tmp_path / "run") == ["report-2"]
    assert not (tmp_path / "run/report-1").exists()


def test_one_rank_with_files_is_enough_and_metrics_wait_for_nobody(tmp_path, folder):
    """The others say that they have none, and go on at once; rank 0's metrics are kept."""
    arrived = threading.Event()

    def first(reports):
        for number in range(200):
            reports.report({"early": number})
        arrived.wait(20)
        reports.report({"rank": 0})
        return reports.get_checkpoint().name

    def second(reports):
        for _ in range(200):
            reports.report({})
        arrived.set()
        return reports.report({"rank": 1}, folder(a="1")).name

    assert report_on_ranks(tmp_path / "run", first, second) == ["report-201"] * 2
    assert mp.open_run(tmp_path / "run").latest().metrics == {"rank": 0}


def test_every_rank_goes_on_from_the_same_checkpoint(tmp_path, folder):
    """Also one that is late, and also after reports that some ranks made with files."""

    def body(reports):
        rank = reports.test_board.rank
        seen = [None if (c := reports.get_checkpoint()) is None else c.name]
        for number in range(6):
            has = number % 3 == rank or number == 5
            checkpoint = folder(**{f"r{rank}": "1"}) if has else None
            reports.report({}, checkpoint, checkpoint_upload_mode=ASYNC)
            seen.append(reports.get_checkpoint().name)
        return seen

    first = report_on_ranks(tmp_path / "run", body, body, body)
    assert first == [[None, *(f"report-{n}" for n in range(1, 7))]] * 3
    again = report_on_ranks(tmp_path / "run", body, body, if_finished="continue")
    assert again[0] == again[1]
    assert again[0][0] == "report-6"


def test_a_rank_that_does_not_report_is_named_with_its_count(tmp_path, folder):
    """An error after the deadline, on every rank that waits; and the run goes on."""
    config = mp.CheckpointConfig(report_timeout_s=0.4)
    late = threading.Event()

    def begin(reports):
        reports.report({})
        reports.get_all_reported_checkpoints(timeout_s=30)  # all ranks are here, and connected

    def prompt(reports):
        begin(reports)
        with pytest.raises(mp.DeadlineError) as caught:
            reports.report({}, folder(a="1"))
        late.set()
        assert "Rank 2 did not come to report 2 within 0.4 s" in str(caught.value)
        assert "rank 0 2, rank 1 2, rank 2 1." in str(caught.value)
        return reports.report({}, folder(**{f"r{reports.test_board.rank}": "1"})).name

    def slow(reports):
        begin(reports)
        late.wait(20)
        with pytest.raises(mp.DeadlineError, match="Rank 2 did not come"):
            reports.report({}, folder(a="1"))
        return reports.report({}).__class__.__name__

    ended = report_on_ranks(tmp_path / "run", prompt, prompt, slow, checkpoint_config=config)
    assert ended == ["report-3", "report-3", "NoneType"]
    assert names(tmp_path / "run") == ["report-3"]


def test_a_rank_that_ended_is_waited_for_by_nobody(tmp_path, folder):
    """It has made fewer reports; the others learn of it at once, and not at a deadline."""

    def short(reports):
        reports.report({})

    def long(reports):
        reports.report({})
        with pytest.raises(mp.RankFailedError, match="Rank 1 ended before report 2"):
            reports.report({}, folder(a="1"))
        with pytest.raises(mp.DeadlineError, match="waits for rank 1"):
            reports.get_all_reported_checkpoints(timeout_s=0.2)
        return "told"

    assert report_on_ranks(tmp_path / "run", long, short) == ["told", None]


def test_an_error_on_one_rank_fails_the_report_on_all(tmp_path, folder):
    """Each raises the same, the one that failed with its own as the cause; then all go on."""

    def good(reports):
        with pytest.raises(mp.RankFailedError) as caught:
            reports.report({}, folder(**{f"r{reports.test_board.rank}": "1"}))
        reports.report({}, folder(**{f"r{reports.test_board.rank}": "1"}))
        return str(caught.value)

    def bad(reports):
        with pytest.raises(mp.UsageError, match="cannot hold a file"):
            reports.report({}, folder(**{"a b": "1"}))
        reports.report({})

    def failing(reports):
        def upload(checkpoint, name):
            raise ZeroDivisionError("by hand")

        with pytest.raises(mp.RankFailedError) as caught:
            reports.report({}, folder(a="1"), checkpoint_upload_fn=upload)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        return str(caught.value)

    def working(reports):
        def upload(checkpoint, name):
            place = tmp_path / "other" / name
            place.mkdir()
            return mp.Checkpoint.from_directory(place)

        with pytest.raises(mp.RankFailedError) as caught:
            reports.report({}, folder(a="1"), checkpoint_upload_fn=upload)
        return str(caught.value)

    first, second, third = report_on_ranks(tmp_path / "run", good, good, bad)
    assert first == second
    assert "1 of 3 ranks failed to make report 1:\n  rank 2: UsageError" in first
    assert third is None
    assert names(tmp_path / "run") == ["report-2"]
    first, second = report_on_ranks(tmp_path / "other", failing, working)
    assert "rank 0: ZeroDivisionError: by hand" in first
    assert names(tmp_path / "other") == []


def test_a_report_that_raises_counts(tmp_path, folder):
    """Rank 0 learns of its failed upload one report later; rank 1 has nothing to complain of.

    Were that report not counted, all later ones would be paired with the wrong ones.
    """

    def upload(checkpoint, name):
        raise OSError(28, "No space left on device")

    def first(reports):
        handle = reports.report(
            {"n": 1}, folder(a="1"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload
        )
        handle._done.wait(20)
        with pytest.raises(mp.RankFailedError, match="No space"):
            reports.report({"n": 2})
        return reports.report({"n": 3}, folder(a="1")).name

    def second(reports):
        for _ in range(2):
            reports.report({})
        return reports.report({}, folder(b="1")).name

    assert report_on_ranks(tmp_path / "run", first, second) == ["report-3"] * 2
    found = mp.open_run(tmp_path / "run").latest()
    assert found.metrics == {"n": 3}
    assert [entry.path for entry in found.manifest.files] == ["a", "b"]


def test_ranks_share_the_work_on_a_folder_in_the_run(tmp_path, folder):
    """All name the place; each reads a part of the files, and the folder is one checkpoint."""
    run = tmp_path / "run"
    met = threading.Barrier(2)

    def body(reports):
        rank = reports.test_board.rank
        place = run / "mine"
        place.mkdir(exist_ok=True)
        (place / f"shard-{rank}").write_text(str(rank))
        (place / f"more-{rank}").write_text(str(rank))
        met.wait(20)
        name = reports.report(
            {}, mp.Checkpoint.from_directory(place), checkpoint_upload_mode=NO_UPLOAD
        ).name
        other = run / f"place-{rank}"
        other.mkdir()
        (other / "a").write_text("1")
        with pytest.raises(mp.MismatchError, match="name different places: place-0 on rank 0"):
            reports.report(
                {}, mp.Checkpoint.from_directory(other), checkpoint_upload_mode=NO_UPLOAD
            )
        with pytest.raises(mp.MismatchError, match="in different ways: place, upload"):
            if rank:
                reports.report({}, folder(a="1"))
            else:
                reports.report(
                    {}, mp.Checkpoint.from_directory(other), checkpoint_upload_mode=NO_UPLOAD
                )
        return name

    assert report_on_ranks(run, body, body) == ["mine", "mine"]
    found = mp.open_run(run).latest()
    assert [entry.path for entry in found.manifest.files] == [
        "more-0",
        "more-1",
        "shard-0",
        "shard-1",
    ]
    assert found.verify("full").is_good
    assert (run / "place-1/a").exists()


def test_a_report_that_cannot_be_sent_fails_on_all_ranks(tmp_path, folder):
    """The others would wait for the deadline; and the rank itself goes on after it."""

    def body(reports):
        rank = reports.test_board.rank
        name = object() if rank else "mine"
        with pytest.raises(mp.CheckpointError, match="which cannot be stored"):
            reports.report({}, folder(**{f"a{rank}": "1"}), checkpoint_dir_name=name)
        return reports.report({}, folder(**{f"a{rank}": "1"})).name

    assert report_on_ranks(tmp_path / "run", body, body) == ["report-2"] * 2


def test_a_report_that_has_failed_is_not_opened_again(tmp_path, folder, monkeypatch):
    """However late a rank comes to it, and however many were settled since."""
    monkeypatch.setattr(coordinator, "_KEPT_ANSWERS", 4)
    arrived = threading.Event()

    def hasty(reports):
        for _ in range(12):
            with pytest.raises(mp.UsageError):
                reports.report({"loss": object()})
        reports.test_board.flush(20)
        arrived.set()
        return reports.report({}, folder(b="1")).name

    def late(reports):
        arrived.wait(20)
        for _ in range(12):
            with pytest.raises(mp.CheckpointError, match="ank 1"):
                reports.report({}, folder(a="1"))
        return reports.report({}, folder(a="1")).name

    assert report_on_ranks(tmp_path / "run", late, hasty) == ["report-13"] * 2
    assert names(tmp_path / "run") == ["report-13"]


def test_a_run_that_cannot_be_opened_is_opened_by_no_rank(tmp_path, folder):
    """All ranks raise the error of rank 0, and none waits for the deadline."""
    run = tmp_path / "run"
    with mp.Reports(run):
        mp.report({}, folder(a="1"))
    for ended in report_on_ranks(run, lambda r: None, lambda r: None):
        assert type(ended) is mp.ExistsError
        assert "is finished" in str(ended)


def test_a_rank_that_sees_another_place_says_so(tmp_path):
    """Node-local folders of one name are the classic way to lose half of a checkpoint."""
    from milepost.stores.memory import MemoryStore  # one for each thread: not the same place

    places = iter([MemoryStore(), MemoryStore()])

    from milepost.reporting import session

    original = session.open_store
    session.open_store = lambda place: next(places)
    try:
        ended = report_on_ranks(tmp_path / "run", lambda r: "fine", lambda r: None)
    finally:
        session.open_store = original
    assert ended[0] == "fine"
    assert type(ended[1]) is mp.UsageError
    assert "not the same place on every rank" in str(ended[1])
