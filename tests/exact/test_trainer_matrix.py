"""A resumed training equals an uninterrupted one bit for bit, wherever it was cut."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.runs import this_process
from milepost.testing.asserts import assert_equal_states

from ..places import Place, strays

_HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("trainer_cells", _HERE / "trainer_cells.py")
assert _spec is not None
cells = importlib.util.module_from_spec(_spec)
sys.modules["trainer_cells"] = cells
_spec.loader.exec_module(cells)

BATCH_POINTS = [f"ba{batch}" for batch in range(1, cells.EPOCHS * cells.BATCHES)]
EPOCH_POINTS = [f"ep{epoch}" for epoch in range(1, cells.EPOCHS)]
ALL_POINTS = [*BATCH_POINTS, *EPOCH_POINTS]
# Mid-epoch, on the last batch of an epoch, between two epochs, just after one, near the end.
SOME_POINTS = ["ba3", "ba10", "ep1", "ba11", "ba17", "ep2", "ba29"]

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Server:
    """Runs jobs one after the other, each in a fork of a clean process that has loaded torch."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(_HERE / "trainer_cells.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **job: Any) -> Any:
        code = self.start(**job)
        assert code == 0, f"{job} ended with {code}; see standard error"
        if "result" not in job:
            return None
        return torch.load(job["result"], weights_only=False)

    def start(self, **job: Any) -> int:
        """Run a job and return the exit code of its process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return int(answer["code"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny layers on several threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _as_dict(cell: Any) -> dict[str, Any]:
    return {
        "sampler": cell.sampler,
        "dropout": cell.dropout,
        "workers": cell.workers,
        "grad_accum": cell.grad_accum,
    }


def _check_points(cell: Any, folder: Path, points: list[str]) -> None:
    expected = cells.straight(cell)
    assert_equal_states(cells.straight(cell, str(folder)), expected, path="saved while training")
    for number, point in enumerate(points):
        found = cells.resume(cell, str(folder / point), scramble=number + 1)
        assert_equal_states(found, expected, path=f"resumed from {point}")


NORMAL_CELLS = [
    cells.Cell("plain", 0.5, 0, 2),
    cells.Cell("seeded", 0.5, 0, 1),
    cells.Cell("stateful", 0.5, 0, 1),
]


@pytest.mark.parametrize("cell", NORMAL_CELLS, ids=str)
def test_every_cut_point_resumes_to_the_same_bytes(cell: Any, tmp_path: Path) -> None:
    """Fresh objects, scrambled generators, every batch and every epoch as the last one."""
    _check_points(cell, tmp_path / "run", ALL_POINTS)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", cells.all_cells(), ids=str)
def test_every_cut_point_of_every_cell(cell: Any, tmp_path: Path) -> None:
    """The whole matrix."""
    _check_points(cell, tmp_path / "run", ALL_POINTS)


def _check_new_process(cell: Any, server: Server, place: Place, folder: Path) -> None:
    """Save in a process and resume in another, from two points."""
    index = cells.all_cells().index(cell)
    points = [SOME_POINTS[index % len(SOME_POINTS)], SOME_POINTS[(index + 3) % len(SOME_POINTS)]]
    job = {
        "cell": _as_dict(cell),
        "folder": place.run("run"),
        "points": points,
        "environment": dict(place.environment),
    }
    expected = server.run(kind="straight", result=str(folder / "straight"), **job)
    found = server.run(kind="resume", result=str(folder / "resumed"), **job)
    for point, outcome in zip(points, found, strict=True):
        assert_equal_states(outcome, expected, path=f"resumed from {point}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", cells.all_cells(), ids=str)
@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_new_process_resumes_to_the_same_bytes(
    cell: Any, server: Server, place: Place, tmp_path: Path
) -> None:
    """Save and resume share nothing but the disk, in each of the cells."""
    _check_new_process(cell, server, place, tmp_path)


@pytest.mark.cloud
@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", cells.all_cells(), ids=str)
@pytest.mark.parametrize("place", ["moto", "juicefs"], indirect=True)
def test_a_new_process_resumes_from_a_bucket_to_the_same_bytes(
    cell: Any, server: Server, place: Place, tmp_path: Path
) -> None:
    """They share nothing but the bucket."""
    _check_new_process(cell, server, place, tmp_path)


def _check_three_resumes(server: Server, place: Place, folder: Path) -> None:
    directory = folder / "directory"
    directory.mkdir()
    cell = cells.Cell("seeded", 0.5, 0, 2)
    expected = server.run(kind="straight", cell=_as_dict(cell), result=str(folder / "straight"))
    job = {
        "cell": _as_dict(cell),
        "folder": place.run("run"),
        "environment": dict(place.environment),
        "directory": str(directory),
    }
    for number, until in enumerate(("4ba", "13ba", "17ba")):
        scramble = number  # 0 seeds the run as the straight one
        server.run(kind="part", until=until, scramble=scramble, **job)
    (found,) = server.run(kind="resume", points=["ba17"], result=str(folder / "resumed"), **job)
    assert_equal_states(found, expected)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_three_resumes_in_a_row(server: Server, place: Place, tmp_path: Path) -> None:
    """What a resume restores must itself be saved right: mid-epoch, twice in one epoch, again."""
    _check_three_resumes(server, place, tmp_path)


@pytest.mark.cloud
@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_three_resumes_in_a_row_from_a_bucket(server: Server, place: Place, tmp_path: Path) -> None:
    """The same with a bucket between them, and nothing is left beside the run."""
    _check_three_resumes(server, place, tmp_path)
    assert strays(place.run("run")) == []


def _train_through_signals(
    server: Server, place: Place, folder: Path, *, number: int, seed: int, times: int
) -> list[int]:
    """Signal a training again and again, let it end, compare it, return the exit codes."""
    cell = cells.Cell("plain", 0.5, 0, 1)
    moments = random.Random(seed)
    expected = server.run(kind="straight", cell=_as_dict(cell), result=str(folder / "straight"))
    job = {
        "kind": "whole",
        "cell": _as_dict(cell),
        "folder": place.run("run"),
        "environment": dict(place.environment),
        "result": str(folder / "whole"),
    }
    codes = [
        server.start(
            **job,
            signal=number,
            num_events=moments.randrange(1, 60),
            after_s=moments.choice((0.0, moments.uniform(0.0, 0.1))),
        )
        for _ in range(times)
    ]
    assert_equal_states(server.run(**job), expected)
    if this_process().machine_id:  # or it cannot tell that a killed process has ended
        assert strays(place.run("run")) == []
    return codes


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_kills_at_random_moments_change_nothing(
    server: Server, place: Place, tmp_path: Path
) -> None:
    """Each start goes on from the newest checkpoint, and the end is that of the straight run."""
    codes = _train_through_signals(server, place, tmp_path, number=signal.SIGKILL, seed=1, times=6)
    assert -signal.SIGKILL in codes


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("place", ["disk", "moto", "juicefs"], indirect=True)
def test_many_kills_at_random_moments_change_nothing(
    server: Server, place: Place, tmp_path: Path, seed: int
) -> None:
    """The same with more of them, on a disk and in buckets."""
    _train_through_signals(server, place, tmp_path, number=signal.SIGKILL, seed=seed, times=15)


@pytest.mark.parametrize(
    "place", ["disk", pytest.param("moto", marks=pytest.mark.campaign)], indirect=True
)
def test_preemptions_at_random_moments_change_nothing(
    server: Server, place: Place, tmp_path: Path
) -> None:
    """SIGTERM is answered with a checkpoint and the documented exit code."""
    codes = _train_through_signals(server, place, tmp_path, number=signal.SIGTERM, seed=2, times=6)
    assert 128 + signal.SIGTERM in codes
    assert set(codes) <= {0, 128 + signal.SIGTERM, -signal.SIGTERM}


def test_the_comparison_sees_a_changed_order(tmp_path: Path) -> None:
    """The oracle must fail when a resume is not exact: another seed is another training."""
    cell = cells.Cell("plain", 0.0, 0, 1)
    expected = cells.straight(cell)
    trainer = cells.make_trainer(cell, scramble=0, seed=4)
    trainer.fit()
    with pytest.raises(AssertionError):
        assert_equal_states(cells.outcome(trainer), expected)
