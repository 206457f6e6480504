"""Compressed parts: the same state comes back, whatever is in it and wherever it lies."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import safetensors
import torch
from torch import nn
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import app
from milepost.cli.probes import probe_run
from milepost.format.digest import BLOCK_BYTES, block_crcs
from milepost.format.manifest import Manifest
from milepost.frames import codec
from milepost.stores.local import LocalStore
from milepost.testing.asserts import assert_equal_states

METHODS = ["zstd", "lz4"]


class Box:
    """Anything with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trained(num_values, seed=0):
    """Numbers as those of trained weights: of a narrow range, with random last digits."""
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed)) * 0.02


def odd_state():
    """One of every kind that may be stored otherwise than float32 in large pieces."""
    noise = torch.randint(0, 256, (9_000_000,), generator=torch.Generator().manual_seed(1))
    return {
        "large": trained(5_000_001),
        "noise": noise.to(torch.uint8),
        "bf16": trained(700_000).to(torch.bfloat16),
        "half": trained(3).half(),
        "double": trained(300_000).double(),
        "complex": torch.complex(trained(1_000), trained(1_000)).to(torch.complex128),
        "bool": trained(70_001) > 0,
        "float8": trained(5_000).to(torch.float8_e4m3fn),
        "int": torch.arange(400_000),
        "zeros": torch.zeros(3_000_000),
        "nan": torch.full((70_000,), float("nan")),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7.5),
        "text": "as it is",
    }


def manifest_of(folder, name="a"):
    return Manifest.from_bytes((folder / name / "manifest.json").read_bytes(), where=name)


@pytest.mark.parametrize("method", METHODS)
def test_any_state_comes_back_bit_for_bit(tmp_path, method):
    """Compression is of no use if one bit of any dtype may differ."""
    state = {**odd_state(), "many": {str(n): trained(5, n) for n in range(2_000)}}
    with mp.Checkpointer(tmp_path, save_compression=method, box=Box(state)) as run:
        run.save("a", wait=True)
    back = Box(None)
    with mp.Checkpointer(tmp_path, box=back) as run:
        run.restore("a")
    assert_equal_states(back.state, state)
    manifest = manifest_of(tmp_path)
    entry = manifest.file("box.safetensors")
    assert entry.frames is not None
    assert entry.size_bytes < entry.frames.size_bytes
    assert mp.open_run(tmp_path).get("a").verify(level="full").is_good
    assert manifest.stats["compressed_from_bytes"] == entry.frames.size_bytes
    assert manifest.stats["compressed_to_bytes"] == entry.size_bytes


def test_the_manifest_says_that_older_readers_cannot_read_it(tmp_path):
    """They would call the parts damaged; a manifest without frames stays readable for them."""
    for name, method in (("a", "zstd"), ("b", None)):
        with mp.Checkpointer(tmp_path / name, save_compression=method, box=Box(odd_state())) as run:
            run.save("a", wait=True)
    formats = [
        json.loads((tmp_path / name / "a/manifest.json").read_bytes())["format"] for name in "ab"
    ]
    assert formats == [2, 1]


def test_a_plain_reader_does_not_mistake_a_compressed_part(tmp_path):
    """The file keeps its name, so whoever opens it as it is must get an error, and no tensors."""
    noise = torch.randint(0, 256, (20_000_000,), generator=torch.Generator().manual_seed(1))
    for name, first in (("raw", noise), ("framed", trained(3_000_000))):
        model = Box({"first": first.to(torch.float64), "then": trained(3_000_000)})
        with mp.Checkpointer(tmp_path / name, save_compression="zstd", box=model) as run:
            run.save("a", wait=True)
        path = tmp_path / name / "a/box.safetensors"
        assert manifest_of(tmp_path / name).file("box.safetensors").frames is not None
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, "pt")


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path):
    """Other programs can then open it, and it costs nothing to read."""
    noise = torch.randint(
        0, 256, (2 * BLOCK_BYTES + 5,), generator=torch.Generator().manual_seed(1)
    )
    noise = noise.to(torch.uint8)
    with mp.Checkpointer(tmp_path, save_compression="lz4", box=Box({"noise": noise})) as run:
        run.save("a", wait=True)
    data = (tmp_path / "a/box.safetensors").read_bytes()
    entry = manifest_of(tmp_path).file("box.safetensors")
    # The header alone may shrink the first block; the others are there as they were.
    if entry.frames is None:
        with safetensors.safe_open(tmp_path / "a/box.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("noise"), noise)
    else:
        assert entry.frames.lengths[1] == BLOCK_BYTES
        assert noise.numpy().tobytes()[BLOCK_BYTES : BLOCK_BYTES + 100_000] in data
    assert tuple(block_crcs(data)) == entry.crcs


def test_frozen_parts_are_compressed_once_and_shared_then(tmp_path):
    """A link to a compressed file needs the frames of it."""
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with mp.Checkpointer(
        tmp_path, save_compression="zstd", model=model, optimizer=optimizer
    ) as run:
        for name in "ab":
            run.save(name, wait=True)
            with torch.no_grad():
                model[1].weight.add_(1)
    first, second = (manifest_of(tmp_path, n).file("model-frozen.safetensors") for n in "ab")
    assert second.linked_from == "a"
    assert second.frames is not None
    assert second.frames == first.frames
    path = "model-frozen.safetensors"
    assert (tmp_path / "a" / path).stat().st_ino == (tmp_path / "b" / path).stat().st_ino
    other = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))
    mp.open_run(tmp_path).get("b").load_weights(other)
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_file_takes_no_more_room_than_it_has_bytes(tmp_path):
    """Room is reserved for the plain bytes, and what is not needed must go back."""
    with mp.Checkpointer(
        tmp_path, save_compression="zstd", box=Box({"zeros": torch.zeros(5_000_000)})
    ) as run:
        run.save("a", wait=True)
    path = tmp_path / "a/box.safetensors"
    assert path.stat().st_size < 100_000
    assert path.stat().st_blocks * 512 < 1_000_000
    assert LocalStore(tmp_path).head("a/box.safetensors").size_bytes == path.stat().st_size


def test_people_are_told_what_became_of_it(tmp_path):
    """Whether compression is worth it is seen by the sizes before and after."""
    with mp.Checkpointer(
        tmp_path, save_compression="zstd", box=Box({"zeros": torch.zeros(2_000_000)})
    ) as run:
        run.save("a", wait=True)
    shown = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert "compressed from 7." in shown.output
    assert "compressed to 0." in shown.output
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--json"])
    assert json.loads(shown.output)["plain_bytes"] > 8_000_000


def test_damage_in_a_compressed_part_names_the_tensors_that_it_hit(tmp_path):
    """Whoever has to decide what to do needs to know what is lost."""
    model = nn.Sequential(nn.Linear(1_500, 1_500), nn.Linear(1_500, 1_500))
    with mp.Checkpointer(tmp_path, save_compression="zstd", model=model) as run:
        run.save("a", wait=True)
    path = tmp_path / "a/model.safetensors"
    frames = manifest_of(tmp_path).file("model.safetensors").frames
    assert len(frames.lengths) == 3
    data = bytearray(path.read_bytes())
    data[frames.starts()[2] + 1_000] ^= 1
    path.write_bytes(data)
    found = mp.open_run(tmp_path).get("a")
    with pytest.raises(mp.DamagedError, match=r"Frame 2 .* holds 1\.weight") as caught:
        found.load_weights(model)
    assert caught.value.facts["tensors"] == ("1.weight",)
    assert found.verify(level="quick").is_good
    (problem,) = found.verify(level="full").problems
    assert "1.weight" in problem.tensors
    assert "0.bias" not in problem.tensors


def test_what_was_altered_before_it_was_written_is_found_by_a_full_look(tmp_path, monkeypatch):
    """Its blocks match the checksums that were taken of them; it can be loaded all the same not."""
    model = nn.Sequential(nn.Linear(3000, 1000), nn.Linear(1000, 5000))
    with mp.Checkpointer(tmp_path, save_compression="zstd", model=model) as run:
        run.save("a", wait=True)
    manifest = tmp_path / "a" / "manifest.json"
    record = Manifest.from_bytes(manifest.read_bytes(), where="a")
    path, entry = tmp_path / "a" / "model.safetensors", record.file("model.safetensors")
    frames, data = entry.frames, bytearray(path.read_bytes())
    starts = frames.starts()
    assert starts[1] < BLOCK_BYTES < starts[1] + frames.lengths[1]
    for at in (BLOCK_BYTES - 1, BLOCK_BYTES):  # in the two blocks that the frame lies in
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        altered = replace(entry, crcs=tuple(block_crcs(bytes(damaged))))
        files = tuple(altered if one is entry else one for one in record.files)
        manifest.write_bytes(replace(record, files=files).to_bytes())
        found = mp.open_run(tmp_path).get("a")
        (problem,) = found.verify(level="full").problems
        assert (problem.block, problem.expected) == (0, f"{frames.frame_crcs[1]:08x}")
        assert "Frame 1 of model.safetensors" in problem.text
        assert problem.tensors
        with pytest.raises(mp.DamagedError, match="Frame 1"):
            found.load_weights(nn.Sequential(nn.Linear(3000, 1000), nn.Linear(1000, 5000)))


def test_doctor_tells_what_cannot_be_read_for_want_of_the_library(tmp_path, monkeypatch):
    """The first load would be too late to find that out."""
    with mp.Checkpointer(
        tmp_path, save_compression="zstd", box=Box({"zeros": torch.zeros(2_000_000)})
    ) as run:
        run.save("a", wait=True)
    assert all(check.name != "compression" for check in probe_run(tmp_path))
    for error, why in (
        (ModuleNotFoundError(name="blosc2"), "not installed"),
        (OSError("libblosc2.so.7"), "does not load"),
    ):
        monkeypatch.setattr(codec, "_library", Mock(side_effect=error))
        (check,) = [check for check in probe_run(tmp_path) if check.name == "compression"]
        assert check.status == "fail"
        assert why in check.text
        assert "milepost[compression]" in check.hint
        assert mp.open_run(tmp_path).get("a").verify(level="quick").is_good


def test_a_state_that_goes_through_a_budget_is_compressed_as_well(tmp_path):
    """Its blocks are there one after the other only, and those that do not shrink are lent."""
    numbers, noise = trained(12_000_000), torch.arange(3_000_000) * 0x9E3779B97F4A7C15
    model = Box({"numbers": numbers, "noise": noise})
    with mp.Checkpointer(
        tmp_path, staging_budget_bytes=2**25, save_compression="zstd", box=model
    ) as run:
        pending = run.save("a")
        pending.wait()
    entry = manifest_of(tmp_path).file("box.safetensors")
    assert pending.stats["compressed_to_bytes"] == entry.size_bytes < entry.frames.size_bytes
    back = Box(None)
    with mp.Checkpointer(tmp_path, box=back) as run:
        run.restore("a")
    assert_equal_states(back.state, model.state)
