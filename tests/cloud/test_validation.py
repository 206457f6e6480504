"""Reports to a bucket: validated by processes that download what they read, once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import milepost as mp

from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud

VALIDATOR = """
import pathlib

def validate(checkpoint):
    with checkpoint.as_directory() as folder, checkpoint.as_directory() as again:
        data = pathlib.Path(folder, "weights").read_bytes()
        return {"size": len(data), "sum": sum(data[::4096]), "is_one": folder == again}
"""


def test_a_bucket_is_validated_from_one_copy_that_goes(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process opens the run by its address; nothing of the copy is left on this machine."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("MILEPOST_CACHE_DIR", str(tmp_path / "cache"))
    place = f"s3://runs/{tmp_path.name}-validated"
    (tmp_path / "validator_of_test.py").write_text(VALIDATOR)
    validation = mp.ValidationConfig(
        "validator_of_test:validate", sys_path=(str(tmp_path), *sys.path)
    )
    data = bytes(range(256)) * 40_000  # two blocks
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "weights").write_bytes(data)
    with mp.Reports(place, validation=validation):
        mp.report({"n": 1}, mp.Checkpoint.from_directory(tmp_path / "local"), validation=True)
        (reported,) = mp.get_all_reported_checkpoints(timeout_s=60)
        assert reported.status is mp.ReportedCheckpointStatus.VALIDATED
    found = mp.open_run(place).latest()
    assert found is not None
    expected = {"n": 1, "size": len(data), "sum": sum(data[::4096]), "is_one": True}
    assert found.metrics == expected
    copies = tmp_path / "cache" / f"milepost-copies-{os.getuid()}"
    assert list(copies.iterdir()) == []
    copy = Path(found.to_directory(tmp_path / "copy"))
    assert (copy / "weights").read_bytes() == data
