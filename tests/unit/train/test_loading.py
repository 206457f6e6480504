"""Checkpoints that are downloaded first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


class Bucket:
    """An object store with one file, which counts the pieces it gave out."""

    def __init__(self, path: Path) -> None:
        self.data, self.pieces = path.read_bytes(), 0

    def get_object_size(self, object_name: str) -> int:
        return len(self.data)

    def download_object_as_stream(self, object_name: str, chunk_size: int) -> Iterator[bytes]:
        for start in range(0, len(self.data), chunk_size):
            self.pieces += 1
            yield self.data[start : start + chunk_size]


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_downloaded_file_is_gone_on_from(make, tmp_path, weights_only) -> None:
    """In pieces of the size asked for, to a place of its own."""
    make(save_folder=tmp_path, save_format="torch", max_duration="3ba").fit()
    bucket = Bucket(tmp_path / "ba3.pt")
    trainer = make(
        load_path_format="run/ba3.pt",
        load_object_store=bucket,
        load_chunk_size=1000,
        load_weights_only=weights_only,
    )
    assert trainer.state.timer.batch == (0 if weights_only else 3)
    assert bucket.pieces == -(-len(bucket.data) // 1000)
    stored = torch.load(tmp_path / "ba3.pt", weights_only=True)["state"]["model"]
    assert torch.equal(trainer.state.model.weight, stored["weight"])
