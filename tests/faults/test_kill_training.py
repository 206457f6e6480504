"""A training process killed at random moments loses nothing that was acknowledged.

Each life of the process is killed after a random while; a reader looks at the run; the next life
goes on. At the end the weights and the losses are those of a training that nobody disturbed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.checkpoint import run_store
from milepost.runs import Level, State, this_process
from milepost.testing.asserts import assert_equal_states
from milepost.testing.forking import Forked, start_script

from ..places import Place, open_uploads, strays

Straight = Callable[[int], dict[str, Any]]
SCRIPT = Path(__file__).with_name("kill_script.py")
LIFE_S = 60.0


@dataclass(frozen=True)
class Job:
    """A training to be killed.

    Attributes:
        place: Where its run is.
        folder: Where it leaves what it has to say.
        keep: How many checkpoints it keeps, 0 for all.
        bulk: How many numbers it saves beside its weights.
    """

    place: Place
    folder: Path
    keep: int = 0
    bulk: int = 0

    @property
    def run(self) -> str:
        return self.place.run("run")

    @property
    def acknowledged(self) -> list[str]:
        told = self.folder / "acked.log"
        return told.read_text().split() if told.exists() else []

    def start(self) -> Forked:
        where = [self.run, str(self.folder / "acked.log"), str(self.folder / "result.pt")]
        return start_script(
            SCRIPT,
            *(*where, str(self.keep), str(self.bulk)),
            log=self.folder / "output.log",
            env={**self.place.environment, "OMP_NUM_THREADS": "1"},
        )

    def end(self) -> None:
        """Start a life that nobody disturbs."""
        code = self.start().wait(LIFE_S)
        assert code == 0, (self.folder / "output.log").read_text()

    def result(self) -> dict[str, Any]:
        return torch.load(self.folder / "result.pt", weights_only=True)


def check_run(job: Job) -> None:
    """Require that every acknowledged checkpoint counts and is whole, and nothing torn does."""
    if run_store(job.run) is None:
        assert job.acknowledged == []
        return
    run = mp.open_run(job.run)
    counted = {found.name for found in run.view.lineage()}
    acknowledged = job.acknowledged[-1:] if job.keep else job.acknowledged
    assert set(acknowledged) <= counted
    for checkpoint in run.checkpoints():
        report = checkpoint.verify(Level.FULL)
        assert report.is_good, report
    latest = run.latest()
    if latest is not None:
        assert all(latest.time["batch"] >= int(name[2:]) for name in job.acknowledged)


def check_newest(job: Job) -> None:
    """Require the same of the newest alone, while the training goes on."""
    if run_store(job.run) is None:
        return
    acknowledged = job.acknowledged
    try:
        latest = mp.open_run(job.run).latest()
    except mp.MissingError:
        assert acknowledged == []
        return
    if latest is None:
        assert acknowledged == []
        return
    assert all(latest.time["batch"] >= int(name[2:]) for name in acknowledged)
    report = latest.verify(Level.QUICK)
    # Retention may delete it under our hands, its commit first.
    assert report.is_good or not latest.is_committed, report


def kill_somewhere(job: Job, rng: random.Random) -> bool:
    """Start a life and kill it some moments after its first checkpoint, or before it.

    Returns:
        Whether it was killed, and has not come to its end before.
    """
    process, before = job.start(), len(job.acknowledged)
    after_s = rng.random() * (0.25 if job.place.server is None else 0.6)
    try:
        while process.poll() is None and len(job.acknowledged) == before:
            if job.place.server is not None:
                check_newest(job)
            with suppress(mp.DeadlineError):
                process.wait(0.002)
        deadline_s = time.monotonic() + after_s
        while job.place.server is not None and time.monotonic() < deadline_s - 0.1:
            check_newest(job)
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except mp.DeadlineError:
        return True
    finally:
        process.kill()
    assert process.wait(0) == 0, (job.folder / "output.log").read_text()
    return False


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The end of the training that nobody disturbed: on the disk, whatever the place."""
    ends: dict[int, dict[str, Any]] = {}

    def end(bulk: int) -> dict[str, Any]:
        if bulk not in ends:
            folder = tmp_path_factory.mktemp("straight")
            job = Job(Place(str(folder)), folder, bulk=bulk)
            job.end()
            ends[bulk] = job.result()
        return ends[bulk]

    return end


def run_with_kills(job: Job, expected: dict[str, Any], *, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    kills = 0
    while kills < num_kills:
        was_killed = kill_somewhere(job, rng)
        check_run(job)
        kills += was_killed
        if not was_killed:
            break
    assert kills > 0
    job.end()
    check_run(job)
    view = mp.open_run(job.run).view
    left = [f.name for f in view.found if f.state in (State.INCOMPLETE, State.DELETING)]
    # A machine that does not know itself cannot tell that the killed process has ended.
    if this_process().machine_id:
        assert not left
        assert strays(job.run) == []
        assert open_uploads(job.place) == []
    if job.keep:
        assert len(view.lineage()) == job.keep
    assert len(expected["losses"]) == 100
    assert_equal_states(job.result(), expected)


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_killed_training_goes_on_exactly(place: Place, tmp_path: Path, straight: Straight) -> None:
    """Three kills at seeded moments: nothing acknowledged is lost, and the end is bit-equal."""
    run_with_kills(Job(place, tmp_path), straight(0), num_kills=3, seed=20)


@pytest.mark.cloud
@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_killed_training_goes_on_exactly_in_a_bucket(
    place: Place, tmp_path: Path, straight: Straight
) -> None:
    """In the middle of uploads and deletions, while somebody looks at the run all the time."""
    run_with_kills(Job(place, tmp_path, keep=2), straight(0), num_kills=2, seed=21)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("place", ["disk", "moto", "juicefs"], indirect=True)
def test_killed_training_goes_on_exactly_many_times(
    place: Place, tmp_path: Path, straight: Straight, seed: int
) -> None:
    """Up to 50 kills in ten trainings, each at other moments, with retention and without.

    Half of them send their parts in several pieces.
    """
    keep, bulk = (0, 0) if seed % 2 else (2, 2_300_000)
    job = Job(place, tmp_path, keep=keep, bulk=bulk)
    run_with_kills(job, straight(bulk), num_kills=5, seed=seed)
