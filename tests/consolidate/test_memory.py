"""Memory is bounded, whatever the size of the state, and nothing is read more often than needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1024 * 1024

WORK = """
import json, pathlib, sys
import torch
import milepost as mp
import milepost.consolidating

def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024

run, to, memory = sys.argv[1:]
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
before = status("VmRSS")
read = {}
for form in ("milepost", "safetensors", "torch"):
    sizes, place = [], f"{to}/{form}"
    mp.consolidate(run, place, format=form, memory_bytes=int(memory), progress=sizes.append)
    read[form] = sum(sizes)
print(json.dumps({"grown": status("VmHWM") - before, "read": read}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 256 MiB, two ranks, some of it cut across."""
    import torch

    from milepost.stores import LocalStore
    from milepost.tensors.pack import pack_item

    from ..property.simulated_ranks import Spec, as_held
    from .saving_ranks import save_on_ranks

    folder = tmp_path_factory.mktemp("large")
    rows, columns = 4096, 2048
    specs = [Spec((rows, columns), torch.float32, (n % 2,)) for n in range(8)]
    wholes = [
        torch.arange(rows * columns, dtype=torch.int32).view(torch.float32).view(rows, columns)
        for _ in specs
    ]
    states = []
    for rank in range(2):
        held = {
            f"t{n}": as_held(whole, spec, (2,), rank)
            for n, (whole, spec) in enumerate(zip(wholes, specs, strict=True))
        }
        states.append([pack_item("model", held)])
    save_on_ranks(LocalStore(folder), states, name="a")
    return folder


def test_memory_is_bounded_by_the_budget(large: Path, tmp_path: Path):
    """Four times less than the state. Each block is read once, or by two threads a little more."""
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(large / "a"), str(tmp_path), str(64 * MIB)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    state_bytes = sum(path.stat().st_size for path in (large / "a").glob("model-*"))
    assert state_bytes > 4 * 64 * MIB
    assert found["grown"] < 64 * MIB
    assert found["read"]["safetensors"] < 1.05 * state_bytes
    assert found["read"]["torch"] < 1.05 * state_bytes
    assert found["read"]["milepost"] < 1.5 * state_bytes
