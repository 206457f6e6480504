"""The leader's side of reports: every rank that waits is answered, whatever else goes wrong."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

import milepost as mp
from milepost.ranks.board import LocalBoard
from milepost.reporting.coordinator import Coordinator
from milepost.runs.publish import Claim

WAIT_S = 20.0
END = [{"kind": "end", "rank": rank, "is_well": True} for rank in range(2)]


class BatchBoard(LocalBoard):
    """Gives the leader of two ranks the messages of a test, batch by batch."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.batches: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        del timeout_s
        return self.batches.get(timeout=WAIT_S)

    def error_under(self, key: str) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at its text
            self.read(key, task=key, timeout_s=2)
        return str(caught.value)


class StuckCommitter:
    """Claims, and fails where it should clear up."""

    newest = None

    def default_name(self, number: int) -> str:
        return f"report-{number}"

    def claim(self, name: str) -> Claim:
        return Claim(name, session=1, attempt=1, write_id="0" * 32)

    def abandon(self, held: Claim, error: BaseException) -> None:
        del held, error
        raise RuntimeError("cannot clear up")


class NoHistory:
    """Forgets what it is told."""

    def add(self, number: int, metrics: Any) -> None:
        del number
        if "bad" in metrics:
            raise ValueError("not to be written")


def report(rank: int, number: int, **metrics: Any) -> dict[str, Any]:
    offer = {"mode": "upload", "files": [["a", 1]], "name": None}
    return {"kind": "report", "rank": rank, "n": number, "metrics": metrics, "offer": offer}


@pytest.fixture
def board() -> Iterator[BatchBoard]:
    """Return a board with a coordinator that listens to it."""
    board = BatchBoard()
    coordinator = Coordinator(
        board,
        StuckCommitter(),  # type: ignore[arg-type]
        NoHistory(),  # type: ignore[arg-type]
        config=mp.CheckpointConfig(),
        base_number=0,
    )
    coordinator.start()
    yield board
    board.batches.put(END)
    coordinator.join(WAIT_S)
    assert coordinator.error is not None


def test_a_message_that_makes_no_sense_drops_no_other(board):
    """The ranks whose messages came along with it would wait for their deadlines."""
    board.batches.put([{"kind": "report", "rank": 1}, report(0, 1), report(1, 1)])
    assert board.error_under("go/1") == "'n'"


def test_a_rank_whose_metrics_cannot_be_written_is_answered(board):
    """It has files, and waits."""
    board.batches.put([report(0, 1, bad=1)])
    assert board.error_under("go/1") == "not to be written"


def test_a_report_that_cannot_be_cleared_up_keeps_no_answer_back(board):
    """Not its own, not those of other reports, and not that of a rank that asks."""
    board.batches.put([report(0, 1), report(1, 1)])
    board.read("go/1", task="the claim", timeout_s=WAIT_S)
    ask = {"kind": "ask", "rank": 0, "key": "answer", "up_to": 2, "timeout_s": 600.0}
    board.batches.put([report(0, 2), {**ask, "is_validated": False}])
    board.batches.put([{"kind": "wrote", "rank": 1, "n": 1}])
    keys = ("settled/1", "go/2", "answer")
    assert [board.error_under(key) for key in keys] == ["'files'"] * 3
