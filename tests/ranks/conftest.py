"""Trainings on several workers that are killed at moments nobody chose, and come back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import milepost as mp
from milepost.launch import FailureConfig, LaunchResult, RunConfig, ScalingConfig, launch

TRAINING = Path(__file__).with_name("training.py")
_WAIT_S = 90.0


class Killer:
    """Kills workers of a training, one or all of them, until there is no kill left.

    A moment is drawn either from the start of an attempt (imports, rendezvous, restore) or from the
    training after its first batch.

    Args:
        folder: Folder of the training.
        num_ranks: How many workers it has.
        num_kills: How many attempts to end.
        seed: Decides about moments and victims.
        train_s: The latest moment after the first batch, in seconds.
    """

    def __init__(
        self, folder: Path, num_ranks: int, num_kills: int, *, seed: int, train_s: float
    ) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._num_kills = num_kills
        self._random = random.Random(seed)
        self._train_s = train_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.told: list[str] = []

    def __enter__(self) -> Killer:  # noqa: PYI034 - Self is younger than 3.10
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for attempt in range(1, self._num_kills + 1):
            ranks = range(self._num_ranks)
            files = [self._folder / f"pid-{attempt}-{rank}" for rank in ranks]
            if not self._come(lambda files=files: all(file.exists() for file in files)):
                return
            is_early = self._random.random() < 0.3
            if not is_early:
                start = self._folder / f"from-{attempt}-0"
                if not self._come(start.exists):
                    return
            delay_s = self._random.uniform(0.0, 2.5 if is_early else self._train_s)
            victims = list(ranks) if self._random.random() < 0.3 else [self._random.choice(ranks)]
            if self._is_over.wait(delay_s):
                return
            self.told.append(f"{attempt}: {victims} after {delay_s:.2f} s, early={is_early}")
            for victim in victims:
                kill(int(files[victim].read_text()))

    def _come(self, condition: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + _WAIT_S
        while not condition():
            if self._is_over.wait(0.01) or time.monotonic() > deadline_s:
                return False
        return True


def kill(pid: int) -> None:
    """Kill a process that may be gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Training:
    """One training in a folder.

    Args:
        folder: The folder.
        num_ranks: How many workers.
        num_epochs: How long it is.
        pause_s: Seconds that a batch takes at least.
    """

    def __init__(self, folder: Path, num_ranks: int, num_epochs: int, pause_s: float) -> None:
        folder.mkdir()
        self.folder = folder
        self.num_ranks = num_ranks
        self._arguments = [str(folder), str(num_epochs), str(pause_s)]

    def run(self, **options: object) -> LaunchResult:
        """Launch it, to come back as often as it takes."""
        policy = FailureConfig(
            max_failures=-1,
            max_attempts_without_progress=1000,
            backoff_s=0.0,
            start_timeout_s=60.0,
            hang_timeout_s=60.0,
        )
        return launch(
            str(TRAINING),
            self._arguments,
            scaling=ScalingConfig(num_workers=self.num_ranks),
            run=RunConfig(storage_path=self.folder, name="launched", failure_config=policy),
            **options,
        )

    def ends(self) -> list[str]:
        """Return what each rank has trained."""
        return [(self.folder / f"end-{rank}").read_text() for rank in range(self.num_ranks)]

    def check_resumes(self, num_attempts: int) -> list[int]:
        """Require that each attempt went on from the newest acknowledged checkpoint.

        Or from a newer one: a checkpoint is safe a moment before anybody can note it.

        Returns:
            Batches that the attempts went on from.
        """
        notes = self.folder / "acknowledged"
        lines = notes.read_text().splitlines() if notes.exists() else []
        acknowledged = [tuple(map(int, line.split())) for line in lines]
        found = []
        for attempt in range(1, num_attempts + 1):
            files = [self.folder / f"from-{attempt}-{rank}" for rank in range(self.num_ranks)]
            begun = {int(file.read_text()) for file in files if file.exists()}
            if not begun:
                continue  # killed before it had resumed
            assert len(begun) == 1, f"attempt {attempt}: the ranks began at {begun}"
            (batch,) = begun
            newest = max((at for one, at in acknowledged if one < attempt), default=0)
            assert batch >= newest, f"attempt {attempt} began at {batch}, and {newest} was safe"
            found.append(batch)
        assert found == sorted(found)
        return found


@pytest.fixture
def trainings(tmp_path: Path) -> Callable[..., Training]:
    """Make trainings below the test's folder."""

    def make(
        name: str, *, num_ranks: int = 2, num_epochs: int = 2, pause_s: float = 0.0
    ) -> Training:
        return Training(tmp_path / name, num_ranks, num_epochs, pause_s)

    return make


@pytest.fixture(scope="session")
def straight_ends(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two workers have trained in two epochs that nobody disturbed."""
    straight = Training(tmp_path_factory.mktemp("straight") / "run", 2, 2, 0.0)
    straight.run()
    return straight.ends()


@pytest.fixture
def killers() -> Callable[..., Killer]:
    """Make killers of trainings."""

    def make(training: Training, num_kills: int, *, seed: int, train_s: float = 1.0) -> Killer:
        return Killer(training.folder, training.num_ranks, num_kills, seed=seed, train_s=train_s)

    return make


def latest_of(training: Training) -> str | None:
    """Return the name of the newest checkpoint of a training."""
    found = mp.open_run(training.folder / "run").latest()
    return None if found is None else found.name
