"""Tensors over the pages of a file: what they hold, what they leave alone, and what is refused."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from milepost import Checkpointer
from milepost.checkpoint import Checkpoint, open_run
from milepost.engine import mapped
from milepost.engine.mapped import map_item
from milepost.engine.pieces import Piece, StoredWhole
from milepost.errors import DamagedError, MissingError, UsageError
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import LocalStore, MemoryStore, posix
from milepost.tensors.boxes import Box

FILE = "a/model.safetensors"


@pytest.fixture
def state() -> dict[str, Any]:
    """Every size of element, dtypes the container does not have, nothing, and one value twice."""
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(300, 7, generator=generator)
    return {
        "large": torch.randn(5 * BLOCK_BYTES // 8, 2, generator=generator),
        "tied.0": tied,
        "tied.1": tied,
        "bf16": torch.randn(33, generator=generator).bfloat16(),
        "fp8": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, 3, dtype=torch.complex128, generator=generator),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "nothing": torch.zeros(0, 4),
        "transposed": torch.randn(20, 30, generator=generator).t(),
    }


@pytest.fixture
def saved(new_lab, tmp_path, state) -> Checkpoint:
    return new_lab(LocalStore(tmp_path)).save("a", {"model": state})


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and (raw(left) == raw(right) if left.numel() else True)


@pytest.mark.parametrize("verify", [False, True])
def test_mapped_weights_are_those_that_were_saved(saved, state, verify):
    """Bit for bit, with the dtypes and shapes; what was one tensor still is one."""
    found = saved.map_weights(verify=verify)
    assert list(found) == list(state)
    assert all(is_same(found[name], value) for name, value in state.items())
    assert found["tied.0"].data_ptr() == found["tied.1"].data_ptr()


def test_what_is_written_to_mapped_weights_stays_with_them(saved, state, tmp_path):
    """The file is that of a commit, and another reader is another process or another call."""
    before = (tmp_path / FILE).read_bytes()
    first, second = saved.map_weights(), saved.map_weights()
    for name in ("large", "scalar", "bool"):
        first[name].zero_()
    assert not first["large"].any()
    assert is_same(second["large"], state["large"])
    assert is_same(saved.map_weights(verify=True)["large"], state["large"])
    assert (tmp_path / FILE).read_bytes() == before


def test_mapped_weights_outlive_their_checkpoint(saved, state, tmp_path):
    """Retention may delete what somebody still computes with; also what nobody has looked at."""
    found = saved.map_weights()
    shutil.rmtree(tmp_path)
    assert all(is_same(found[name], value) for name, value in state.items())


def test_a_module_on_no_device_takes_mapped_weights_as_its_own(new_lab, tmp_path):
    """So a model is there at once, without memory for a copy."""
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    saved = new_lab(LocalStore(tmp_path)).save("a", {"model": model.state_dict()})
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    weights = saved.map_weights()
    other.load_state_dict(weights, assign=True)
    assert other[0].weight.data_ptr() == weights["0.weight"].data_ptr()
    inputs = torch.ones(2, 64)
    assert is_same(other.eval()(inputs), model.eval()(inputs))


def test_nothing_is_read_before_it_is_used(new_lab, state, tmp_path):
    """But the block that the header is in, which is read past the cache."""
    saved = new_lab(LocalStore(tmp_path)).save("a", {"model": {"large": state["large"]}})
    descriptor = os.open(tmp_path / FILE, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    with closing(LocalStore(tmp_path).open_reader(FILE)) as reader:

        def num_cached() -> int:
            # The last bytes, less than a page, are not looked at.
            blocks = range(reader.size_bytes // BLOCK_BYTES)
            return sum(reader.is_cached(block * BLOCK_BYTES, BLOCK_BYTES) for block in blocks)

        if num_cached():
            pytest.skip("this file system does not let go of what it has cached")
        found = saved.map_weights()
        assert num_cached() == 0
        found["large"].sum()
        assert num_cached() >= 4


def test_damage_is_found_when_it_is_asked_for(saved, state, tmp_path):
    """And named. Without that nothing but the header is compared, and what is there is shown."""
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(3 * BLOCK_BYTES + 8)
        file.write(b"\x55\xaa")
    assert not is_same(saved.map_weights()["large"], state["large"])
    with pytest.raises(DamagedError, match=r"Block 3 of a/model\.safetensors") as caught:
        saved.map_weights(verify=True)
    assert caught.value.facts["tensors"] == ("large",)


def test_a_file_that_was_cut_short_is_refused_and_not_mapped(saved, tmp_path):
    """To use what it lacks would end the process."""
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(2 * BLOCK_BYTES)
    for verify in (False, True):
        with pytest.raises(DamagedError, match="bytes"):
            saved.map_weights(verify=verify)


def test_a_file_that_is_cut_short_while_it_is_mapped_is_refused(saved, tmp_path, monkeypatch):
    """It is looked at by another handle before, and may change in between."""
    open_file = posix.open_file

    def cut_and_open(path):
        os.truncate(path, BLOCK_BYTES)
        return open_file(path)

    monkeypatch.setattr(mapped, "posix", SimpleNamespace(open_file=cut_and_open))
    with pytest.raises(DamagedError, match="ends before byte") as caught:
        saved.map_weights()
    assert caught.value.facts["expected"] > BLOCK_BYTES


def test_what_cannot_be_mapped_is_refused(new_lab, saved, tmp_path, state):
    """A service has no files, several ranks wrote pieces, and an item may not be there."""
    with pytest.raises(UsageError, match="keeps no files"):
        new_lab(MemoryStore()).save("a", {"model": state}).map_weights()
    with pytest.raises(MissingError, match="no item 'other'"):
        saved.map_weights("other")
    rows = [Piece(FILE, Box((at, 0), (1, 2)), 8 * at, 8 * at + 8) for at in (0, 1)]
    source: Any = SimpleNamespace(
        name="a",
        trees={"model": {"w": {"$": "tensor", "key": "w"}}},
        wholes=lambda _: {"w": StoredWhole("F32", (2, 2), rows)},
    )
    store = LocalStore(tmp_path)
    with pytest.raises(UsageError, match="model/w of a is stored in 2 pieces"):
        map_item(source, "model", store=store, folder="a", verify=False)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"save_format": "torch"}, "single file"), ({"save_compression": "zstd"}, "is compressed")],
)
def test_what_is_not_stored_as_it_is_used_is_not_mapped(tmp_path, options, why):
    """A file for torch.load, or frames: the bytes of the tensors are not there."""
    model = nn.Linear(256, 1024)
    nn.init.zeros_(model.weight)
    with Checkpointer(tmp_path, model=model, handle_signals=False, **options) as run:
        run.save("a", wait=True)
    with pytest.raises(UsageError, match=why):
        open_run(tmp_path).get("a").map_weights()


def test_mapped_weights_take_no_memory_of_their_own(saved):
    """They are the pages that the system keeps of the file, of which there is one set for all."""
    large = saved.map_weights()["large"]
    inside = large.data_ptr() + large.nbytes // 2
    large.sum()
    held_bytes, is_there = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, _, rest = line.partition(" ")
        if not field.endswith(":"):
            low, high = (int(end, 16) for end in field.split("-"))
            is_there = low <= inside < high
        elif is_there and field in ("Rss:", "Anonymous:"):
            held_bytes[field] = int(rest.split()[0]) * 1024
    assert held_bytes["Rss:"] >= 4 * BLOCK_BYTES
    assert held_bytes["Anonymous:"] == 0
