"""Runs that are reported to: by this process alone, or by ranks that are threads of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import milepost as mp
from milepost.ranks.server import Server, ServerBoard
from milepost.reporting.session import Reports

Body = Callable[[Reports], Any]


class RankReports(Reports):
    """A rank that is a thread: it has a board of its own on the server of the test."""

    def __init__(self, folder: Any, board: ServerBoard, **options: Any) -> None:
        super().__init__(folder, **options)
        self.test_board = board

    def _join(self) -> ServerBoard:
        return self.test_board


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., mp.Checkpoint]:
    """Return a maker of folders with files, which returns them as checkpoints."""
    made = iter(range(10_000))

    def make(**files: str | bytes) -> mp.Checkpoint:
        place = tmp_path / f"local-{next(made)}"
        place.mkdir()
        for name, content in files.items():
            path = place / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content
            path.write_bytes(data)
        return mp.Checkpoint.from_directory(place)

    return make


def report_on_ranks(place: Any, *bodies: Body, **options: Any) -> list[Any]:
    """Run each body as a rank in a thread; return what it returned or raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended: list[Any] = [None] * len(bodies)
    options.setdefault("checkpoint_config", mp.CheckpointConfig(report_timeout_s=20))

    def run(rank: int) -> None:
        server = Server("127.0.0.1", store.port, store)
        board = ServerBoard(server, rank, len(bodies), "reports")
        reports = RankReports(place, board, **options)
        is_well = False
        try:
            reports.open()
            ended[rank] = bodies[rank](reports)
            is_well = True
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended[rank] = error
        finally:
            try:
                reports.close(is_well=is_well)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                ended[rank] = ended[rank] if isinstance(ended[rank], Exception) else error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    return ended
