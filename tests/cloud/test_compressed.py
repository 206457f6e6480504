"""Compressed parts in a bucket, through everything that reads, copies and joins them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import app

from .conftest import KEY, SECRET


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a folder of its own; credentials are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://runs/{tmp_path.name}"


def milepost(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.cloud
def test_a_compressed_run_in_a_bucket_is_as_good_as_any(bucket, tmp_path):
    """Sizes are known only at the end of an upload, and frames come as a stream."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(900, 1_300), nn.Linear(1_300, 60))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    for parameter in model[0].parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    cache, options = tmp_path / "cache", {"model": model, "optimizer": optimizer}
    with mp.Checkpointer(
        f"{bucket}/run", save_compression="zstd", local_cache=str(cache), **options
    ) as run:
        for name in "ab":
            run.save(name, wait=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    moments = {
        key: {name: one.clone() for name, one in value.items()}
        for key, value in optimizer.state_dict()["state"].items()
    }
    found = mp.open_run(f"{bucket}/run").get("b")
    assert found.manifest.is_compressed
    assert found.manifest.file("model-frozen.safetensors").linked_from == "a"
    assert found.verify(level="full").is_good

    def check(place: str, **cached: str) -> None:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        with mp.Checkpointer(place, **options, **cached) as run:
            run.restore("b")
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        for key, state in optimizer.state_dict()["state"].items():
            for name, one in state.items():
                assert torch.equal(one, moments[key][name])

    check(f"{bucket}/run")
    check(f"{bucket}/run", local_cache=str(cache))
    milepost("export", f"{bucket}/run/b", tmp_path / "plain.safetensors", "--to", "safetensors")
    exported = load_file(tmp_path / "plain.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[key], before[key]) for key in before)
