"""What ``doctor`` tries and tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milepost.cli import probes


def statuses(found):
    return {check["check"]: check["status"] for check in found["checks"]}


def test_doctor_of_a_run_in_order(milepost, run):
    """Every probe has an answer, and nothing of them is left behind."""
    before = sorted(run.folder.rglob("*"))
    found = milepost.json("doctor", run.folder)
    assert sorted(run.folder.rglob("*")) == before
    assert {
        *("versions", "writable", "exclusive create", "hard links", "symlinks", "direct i/o"),
        *("fsync", "clock", "space", "newest", "session"),
    } <= set(statuses(found))
    assert set(statuses(found).values()) <= {"ok", "warn"}


def test_doctor_of_a_place_that_is_not_there_yet(milepost, tmp_path):
    """The folder above is tried, and nothing is created."""
    found = milepost.json("doctor", tmp_path / "new" / "run")
    assert statuses(found)["writable"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_where_nothing_can_be_written(milepost):
    """The process table is a folder that refuses files from everybody."""
    result = milepost("doctor", "/proc", code=4)
    assert "fail writable" in result.stdout


def test_doctor_tells_attempts_of_a_living_job(milepost, run):
    """Our own process holds the session, so its attempt may be a save that is going on."""
    run.claim("ep9")
    (attempts,) = (
        c for c in milepost.json("doctor", run.folder)["checks"] if c["check"] == "attempts"
    )
    assert attempts["status"] == "warn"
    assert "ep9" in attempts["text"]
    assert "may be" in attempts["hint"]


def test_doctor_fails_on_a_damaged_newest(milepost, run):
    """A job would silently go on from an older one; somebody should know."""
    part = run.folder / "ep3" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    result = milepost("doctor", run.folder, code=6)
    assert "fail newest" in result.stdout


def test_doctor_warns_before_the_disk_is_full(run, monkeypatch):
    """Room for one more checkpoint is a warning, for none a failure."""
    newest_bytes = sum(
        (run.folder / "ep3" / name).stat().st_size for name in ("model.safetensors", "index.json")
    )

    def space(free_bytes):
        usage = type("usage", (), {"free": free_bytes})
        monkeypatch.setattr(probes.shutil, "disk_usage", lambda folder: usage)
        return next(c.status for c in probes.probe_run(run.folder) if c.name == "space")

    assert space(2 * newest_bytes) == "ok"
    assert space(newest_bytes) == "warn"
    assert space(newest_bytes - 1) == "fail"


def test_doctor_tells_what_is_refused(tmp_path, monkeypatch):
    """A place without links works, and what follows is said."""

    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(probes.os, "link", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    checks = {check.name: check for check in probes.probe_folder(tmp_path)}
    assert checks["hard links"].status == checks["symlinks"].status == "warn"
    assert "written again" in checks["hard links"].hint


def test_doctor_tells_a_clock_that_is_off(tmp_path, monkeypatch):
    """Ages compare the clock of the writer with that of the file system."""
    now_s = probes.time.time()
    monkeypatch.setattr(probes.time, "time", lambda: now_s + 100)
    (clock,) = (check for check in probes.probe_folder(tmp_path) if check.name == "clock")
    assert clock.status == "warn"
    assert clock.text.startswith(("99 s", "100 s"))


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is known to Linux only")
def test_doctor_tells_whether_blocks_bypass_the_cache(tmp_path):
    """Either way the probe has an answer; which, depends on the file system."""
    (direct,) = (check for check in probes.probe_folder(tmp_path) if check.name == "direct i/o")
    assert direct.status in ("ok", "warn")
    assert bool(direct.hint) == (direct.status == "warn")


def test_doctor_of_a_service_that_does_not_answer(milepost, monkeypatch):
    """It is told soon, and not after as many tries as a save makes."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    result = milepost("doctor", "s3://bucket/run", code=4)
    assert "fail writable: Nothing can be saved there." in result.stdout
