"""Checkpoints that are downloaded first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import milepost as mp


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


def test_what_does_not_fit_names_what_a_trainer_can_do(make, tmp_path) -> None:
    """A Trainer has no strict=, and nothing was tried that could be counted."""
    make(save_folder=tmp_path, max_duration="3ba").fit()
    for options, way in (
        ({"save_folder": tmp_path, "resume": "auto"}, "load_weights_only=True"),
        ({"load_path_format": tmp_path}, "load_weights_only=True"),
        (
            {"load_path_format": tmp_path, "load_weights_only": True, "load_strict": True},
            "load_strict=False",
        ),
    ):
        with pytest.raises(mp.MismatchError) as caught:
            make(model=torch.nn.Linear(1, 1, bias=False), **options)
        assert way in str(caught.value)
        assert " strict=False" not in str(caught.value)
        assert "0 of" not in str(caught.value)
        assert "model: bias" in str(caught.value)


def test_a_position_that_does_not_fit_is_not_promised_to_a_lenient_load(tmp_path) -> None:
    """A load with strict=False refuses it as well."""
    loader = torch.utils.data.DataLoader(range(12), 2)
    with mp.Checkpointer(tmp_path, every="2ba", loader=loader, handle_signals=False) as run:
        for _ in run.epochs(1):
            for _ in run.batches(loader):
                if run.timer.batch == 2:
                    break
            break
        run.save(wait=True)
    other = torch.utils.data.DataLoader(range(12), 3)
    for strict in (True, False):
        with (
            pytest.raises(mp.MismatchError, match="end of an epoch") as caught,
            mp.Checkpointer(tmp_path, loader=other, strict=strict, handle_signals=False),
        ):
            pass
        assert "strict=False" not in str(caught.value)
