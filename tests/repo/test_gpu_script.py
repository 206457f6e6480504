"""The script that checks and measures saves on a GPU works, as far as that can be seen without."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load the script, which finds its neighbours as when it is called."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("gpu")
    torch.set_num_threads(threads)
    for name in ("gpu", "figures"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore")  # what peers warn of
def test_everything_is_checked_and_measured_without_a_device_too(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time on a device is short: nothing of the script may fail there for reasons of its own."""
    answer = tmp_path / "found.json"
    place = tmp_path / "disk"
    place.mkdir()
    options = "--device cpu --parameters 2000000 --rounds 1"
    script.main([*options.split(), "--folder", str(place), "--json", str(answer)])
    found = json.loads(answer.read_text())
    assert found["saved what the step left"] is True
    assert found["loaded bit for bit"] is True
    assert abs(found["state_bytes"] - 20_000_000) < 2_000_000
    assert found["copied bytes/s"] > 0
    savers = found["savers"]
    assert list(savers) == ["milepost, eager", "milepost, overlap", "dcp.async_save"]
    assert savers["milepost, eager"]["facts"]["late_bytes"] == 0
    assert savers["milepost, overlap"]["facts"]["late_bytes"] == found["state_bytes"]
    assert all(0 < one["blocking_s"] <= one["durable_s"] for one in savers.values())
    shown = capsys.readouterr().out
    assert all(name in shown for name in savers)
    assert not list(place.iterdir())


def test_a_state_that_comes_back_changed_fails_the_script(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that cannot fail checks nothing."""
    loop = script.Loop(torch.device("cpu"), 20_000)
    loop.step()

    def broken(run: Any, name: str) -> None:
        with torch.no_grad():
            loop.model[0].weight.view(torch.int16)[0, 0] ^= 1

    for step in ("check_load", "check_producer"):
        found = getattr(script, step)(tmp_path / step, loop)
        assert all(one for one in found.values() if one is bool(one))
    restore = script.Checkpointer.restore
    monkeypatch.setattr(
        script.Checkpointer, "restore", lambda *args: (restore(*args), broken(*args))
    )
    for step in ("check_load", "check_producer"):
        found = getattr(script, step)(tmp_path / f"{step}-again", loop)
        assert not all(one for one in found.values() if one is bool(one))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(script: Any) -> None:
    """And measures nothing that could be taken for the figures of one."""
    with pytest.raises(SystemExit, match="There is no CUDA device here"):
        script.main([])
