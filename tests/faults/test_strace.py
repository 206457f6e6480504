"""The writer is killed, or lied to, at single system calls.

A first run under strace counts the calls that the program makes after its start; each test then
interferes with one of them. A few seeded points are run by default, all of them in a campaign
(``make campaign``).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from milepost.runs import (
    KeepLast,
    Level,
    Origin,
    decide,
    ensure_run,
    open_session,
    prune,
    record_origin,
    scan,
    sweep,
    this_process,
    verify,
)
from milepost.stores import LocalStore
from milepost.testing import save_files

WRITER = Path(__file__).with_name("strace_writer.py")
FILES = {"model.bin": b"M" * 70_001, "index.json": b"[]"}
KILLED_AT = (
    "openat",
    "pwrite64",
    "write",
    "fsync",
    "linkat",
    "rename",
    "renameat2",
    "unlink",
    "ftruncate",
    "fallocate",
)
FAILED_AT = ("pwrite64", "write", "fsync", "linkat", "fallocate", "ftruncate", "renameat2")
ERRORS = ("ENOSPC", "EIO", "EDQUOT")
SEED = 20
TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed, so no call can be interrupted"
)


def run_writer(folder: Path, *strace: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        ["strace", "-f", "-qq", *strace, sys.executable, str(WRITER), str(folder)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@cache
def count_calls(base: Path) -> dict[str, range]:
    """Return the numbers of the calls that the program itself makes, by system call."""
    log = base / "calls.log"
    names = ",".join(KILLED_AT)
    run_writer(base / "counting", "-o", str(log), "-e", f"trace=mkdir,{names}")
    before: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        name = line.split(maxsplit=1)[1].partition("(")[0]
        total[name] += 1
        if name == "mkdir" and "/begun" in line:
            before = Counter(total)
    return {name: range(before[name] + 1, total[name] + 1) for name in KILLED_AT}


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, range]:
    return count_calls(tmp_path_factory.mktemp("strace"))


def acked_in(folder: Path) -> list[str]:
    noted = [path for path in folder.iterdir() if path.name.startswith("acked-")]
    return [p.name.removeprefix("acked-") for p in sorted(noted, key=lambda p: p.name)]


def committed_in(folder: Path) -> set[str]:
    """Return what is committed, read with nothing but the file system and JSON."""
    found = set()
    for path in (folder / "run").glob("*/manifest.json"):
        if path.parent.is_symlink():
            continue
        if not (path.parent / "deleted.json").exists():
            json.loads(path.read_bytes())
            found.add(path.parent.name)
    return found


def check(folder: Path) -> None:
    """What was acknowledged is there and whole, and a new session leaves no trace of the old."""
    store = LocalStore(folder / "run")
    acked, committed = acked_in(folder), committed_in(folder)
    run = ensure_run(store)
    view = scan(store)
    assert {found.name for found in view.lineage()} == committed
    for name in committed:
        report = verify(store, name, Level.FULL)
        assert report.is_good, report
    latest = view.latest()
    if acked:
        assert latest is not None
        assert acked[-1] in committed
        assert latest.name >= acked[-1]
    me = replace(this_process(), machine_id="one")
    session = open_session(store, run, identity=me)
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    session = record_origin(store, session, origin)
    sweep(store, session, identity=me)
    taken = {name for name in (*acked, *committed) if len(name) == 3}
    wanted = next(name for name in ("ep1", "ep2", "ep3") if name not in taken)
    saved = save_files(store, session, name=wanted, attempt=1, files=FILES)
    assert saved.name == wanted
    assert not prune(store, decide(scan(store), [KeepLast(1)]), session=session).errors
    store.sweep_temporary(0)
    left = {
        str(path.relative_to(folder / "run"))
        for path in (folder / "run").rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    left = {name for name in left if not name.startswith("sessions/")}
    files = {*FILES, "attempt.json", "manifest.json"}
    assert left == {"run.json", *(f"{wanted}/{file}" for file in files)}
    assert {path.name for path in (folder / "run").iterdir()} == {
        "run.json",
        "sessions",
        "latest",
        wanted,
    }


def kill_at(folder: Path, name: str, number: int) -> None:
    options = ("-o", os.devnull, "-e", f"trace={name}")
    done = run_writer(folder, *options, "-e", f"inject={name}:signal=KILL:when={number}")
    assert not (folder / "over").exists(), "the call was not reached"
    assert done.returncode != 0
    check(folder)
    shutil.rmtree(folder)


def fail_at(folder: Path, name: str, number: int, error: str) -> None:
    options = ("-o", os.devnull, "-e", f"trace={name}")
    done = run_writer(folder, *options, "-e", f"inject={name}:error={error}:when={number}")
    assert done.returncode == 0, done.stderr
    assert (folder / "over").exists()
    acked = acked_in(folder)
    assert {text[:3] for text in acked} == {"ep1", "ep2"}
    for path in folder.glob("failed-*"):
        kind = path.name.split("-")[-1]
        # A call may be one whose error another call makes good, but never one of another kind.
        assert kind == ("storage" if error == "EIO" else "no_space")
    check(folder)
    shutil.rmtree(folder)


def points(calls: dict[str, range], names: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(name, number) for name in names for number in calls[name]]


def test_the_program_runs_through(calls, tmp_path):
    """The undisturbed run acknowledges both, and makes every kind of call that is disturbed."""
    assert all(calls.values()), calls
    run_writer(tmp_path, "-o", os.devnull, "-e", "trace=mkdir")
    assert acked_in(tmp_path) == ["ep1", "ep2"]
    assert committed_in(tmp_path) == {"ep2"}
    check(tmp_path)


def test_everything_is_synced_before_it_counts(tmp_path):
    """A power cut drops what was not synced: the order of the calls is the promise."""
    log, folder = tmp_path / "log", tmp_path / "folder"
    run_writer(
        folder, "-y", "-o", str(log), "-e", "trace=mkdir,pwrite64,write,ftruncate,fsync,linkat"
    )
    dirty: set[str] = set()
    num_commits = num_acked = 0
    for line in log.read_text().splitlines():
        name = line.split(maxsplit=1)[1].partition("(")[0]
        paths = [path for path in re.findall(r'[<"](/[^>"]*)[>"]', line) if str(folder) in path]
        if not paths:
            continue
        if name in ("pwrite64", "write", "ftruncate"):
            # A part has its name from the start, a temporary file gets its own with the link.
            dirty.add(paths[0])
            if "/.tmp-" not in paths[0]:
                dirty.add(str(Path(paths[0]).parent))
        elif name == "fsync":
            dirty.discard(paths[0])
        elif name == "linkat" and paths[-1].endswith("/manifest.json"):
            assert not dirty, dirty
            num_commits += 1
            dirty.add(str(Path(paths[-1]).parent))
        elif name == "linkat":
            dirty.add(str(Path(paths[-1]).parent))
        elif name == "mkdir" and "/acked-" in paths[0]:
            assert not dirty, dirty
            num_acked += 1
        elif name == "mkdir" and "/run" in paths[0]:
            dirty.add(str(Path(paths[0]).parent))
    assert (num_commits, num_acked) == (2, 2)


def test_a_kill_at_a_system_call_loses_nothing(calls, tmp_path):
    """SIGKILL leaves no time for clean-up: what is on the disk must speak for itself."""
    chosen = random.Random(SEED).sample(points(calls, KILLED_AT[1:]), 11)
    for name, number in [("openat", calls["openat"][40]), *chosen]:
        kill_at(tmp_path / f"{name}-{number}", name, number)


def test_an_error_of_a_system_call_is_typed_and_made_good(calls, tmp_path):
    """A full disk or a bad sector costs one try: the next one works, and nothing else is hurt."""
    rng = random.Random(SEED)
    for name, number in rng.sample(points(calls, FAILED_AT), 8):
        fail_at(tmp_path / f"{name}-{number}", name, number, rng.choice(ERRORS))


def test_a_write_that_never_happened_is_found(calls, tmp_path):
    """A device that says "written" and does not write is beyond repair, but not beyond notice."""
    number = calls["pwrite64"][len(calls["pwrite64"]) // 2]  # the first of the second save
    options = ("-o", os.devnull, "-e", "trace=pwrite64")
    run_writer(tmp_path, *options, "-e", f"inject=pwrite64:retval=4096:when={number}")
    assert acked_in(tmp_path) == ["ep1", "ep2"]
    report = verify(LocalStore(tmp_path / "run"), "ep2", Level.FULL)
    assert [(problem.path, problem.block) for problem in report.problems] == [("model.bin", 0)]


@pytest.mark.parametrize("name", ["write", "pwrite64"])
def test_a_write_of_nothing_does_not_loop(calls, tmp_path, name):
    """Zero bytes written, without an error, is an error too."""
    number = calls[name][len(calls[name]) // 2]
    options = ("-o", os.devnull, "-e", f"trace={name}")
    done = run_writer(tmp_path, *options, "-e", f"inject={name}:retval=0:when={number}")
    assert done.returncode == 0, done.stderr
    assert any(path.name.startswith("failed-") for path in tmp_path.iterdir())
    check(tmp_path)


def test_a_read_only_file_system_is_refused_access(calls, tmp_path):
    """Where nothing can be written the first call says so, and says why."""
    options = ("-o", os.devnull, "-e", "trace=mkdir,openat,linkat")
    first = calls["openat"][1]
    done = run_writer(tmp_path, *options, "-e", f"inject=openat:error=EROFS:when={first}+")
    assert done.returncode == 0, done.stderr
    assert {path.name.split("-")[-1] for path in tmp_path.glob("failed-*")} == {"access"}


@pytest.mark.campaign
def test_a_kill_at_every_system_call_loses_nothing(calls, tmp_path):
    """All the points of the seeded test above."""
    for name, number in points(calls, KILLED_AT):
        kill_at(tmp_path / f"{name}-{number}", name, number)


@pytest.mark.campaign
def test_every_error_at_every_system_call_is_made_good(calls, tmp_path):
    """All the points of the seeded test above, with each error."""
    for name, number in points(calls, FAILED_AT):
        for error in ERRORS:
            fail_at(tmp_path / f"{name}-{number}-{error}", name, number, error)
