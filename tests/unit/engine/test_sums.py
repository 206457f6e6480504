"""Checksums by the thread that copies: those of the bytes, of whole blocks, when it has time."""

from __future__ import annotations

from typing import Any

import crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.checkpoint import Checkpoint
from milepost.engine import sums, write
from milepost.engine.filled import Filled
from milepost.engine.sums import Sums
from milepost.errors import DamagedError
from milepost.state.owned import Owned, memory_key
from milepost.stores import MemoryStore

BLOCK = 8 * 1024 * 1024
SMALL = 16
"""A block, where what counts is the order of things."""


@st.composite
def fillings(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """Files one behind the other, with gaps between, and up to where they are filled in turn."""
    files, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start += draw(st.integers(0, 5))
        stop = start + draw(st.integers(1, 4 * SMALL))
        files.append((start, stop))
        start = stop
    inside = st.sampled_from([at + 1 for low, high in files for at in range(low, high)])
    return files, sorted(draw(st.lists(inside, max_size=20)))


@given(fillings(), st.randoms())
def test_a_block_that_was_taken_to_its_end_has_the_checksum_of_its_bytes(found, random):
    """Wherever its file begins, and whatever of it was not said to be filled on the way."""
    files, stops = found
    memory = random.randbytes(files[-1][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BLOCK_BYTES", SMALL)
        taken = Sums(files, lambda start, stop: memoryview(memory)[start:stop])
        for stop in stops:
            taken.take(stop)
        for start, end in files:
            for low in range(start, end, SMALL):
                high = min(low + SMALL, end)
                assert taken.end_of_block(low) == taken.end_of_block(high - 1) == high
                known = crc32c.crc32c(memory[low:high]) if high in stops else None
                assert taken.of(low) == known


def state() -> dict[str, torch.Tensor]:
    """Large and small tensors, across the borders of blocks and within, plain and not."""
    torch.manual_seed(0)
    large = {f"w{n}": torch.randn(1500, 1501 + n) for n in range(5)}
    small = {f"s{n}": torch.randn(1000) for n in range(50)}
    turned = {"t": torch.randn(1100, 1200, dtype=torch.float64).t()}
    return {**large, **small, **turned}


MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waited for": ({}, {"is_waited_for": True}),
    "late": ({}, {}),
    "streamed": ({"budget_bytes": 4 * BLOCK}, {}),
    "compressed": ({"compression": "lz4"}, {"is_waited_for": True}),
}


def save(new_lab: Any, mode: str, live: dict[str, torch.Tensor], store: Any = None) -> Checkpoint:
    options, given_options = MODES[mode]
    lab = new_lab(store or MemoryStore(), **options)
    owned = None
    if mode == "late":
        owned = Owned({memory_key(one): one.nbytes for one in live.values()}, (), "")
    pending = lab.begin("a", {"model": live}, owned=owned, **given_options)
    pending.wait(30)
    assert bool(pending.stats["late_bytes"]) == (mode == "late")
    return Checkpoint(lab.store, "a")


@pytest.mark.parametrize("mode", MODES)
def test_who_is_ahead_takes_the_checksums_and_who_writes_takes_none(new_lab, monkeypatch, mode):
    """What the file has is the same; only the blocks that nobody had the time for are left."""
    live, taken = state(), {True: 0, False: 0}
    found = {}
    for is_ahead in (True, False):

        def counted(data: Any, value: int = 0, *, is_ahead: bool = is_ahead) -> int:
            taken[is_ahead] += len(data) > BLOCK // 2
            return crc32c.crc32c(data, value)

        monkeypatch.setattr(Filled, "_is_ahead", is_ahead)
        monkeypatch.setattr(write, "crc32c", counted)
        saved = save(new_lab, mode, live)
        monkeypatch.undo()
        assert saved.verify().is_good
        loaded = saved.load()["state"]["model"]
        assert all(torch.equal(loaded[key], value) for key, value in live.items())
        found[is_ahead] = [e.plain.crcs for e in saved.manifest.files if "model" in e.path]
    assert found[True] == found[False]
    num_blocks = sum(len(crcs) for crcs in found[True])
    assert taken[False] >= num_blocks - 1  # the last one may be small
    # Where tensors are copied late, what is behind the last of them in a block is not waited for.
    assert taken[True] <= (2 if mode == "late" else 0)


@pytest.mark.parametrize("mode", ["waited for", "streamed"])
def test_a_bit_that_flips_between_the_copy_and_the_write_is_found(new_lab, monkeypatch, mode):
    """A checksum of what is written would be one of the flipped bit, and call it good."""
    monkeypatch.setattr(Filled, "_is_ahead", True)
    original = write._Pipeline._write_plain

    def flipped(self: Any, index: int, block: int, data: memoryview) -> None:
        if block == 1 and self._jobs[index].path.endswith(".safetensors"):
            data[12_345] ^= 1
        original(self, index, block, data)

    monkeypatch.setattr(write._Pipeline, "_write_plain", flipped)
    saved = save(new_lab, mode, state())
    assert not saved.verify().is_good
    with pytest.raises(DamagedError, match="Block 1 of"):
        saved.load()


def test_who_is_waited_for_only_copies():
    """Then the work is shared: a disk that is faster than one core waits for nobody."""
    filled = Filled(
        start_bytes=0,
        end_bytes=100,
        sums=Sums([(0, 100)], lambda start, stop: memoryview(b"")[start:stop]),
    )
    assert not filled._is_ahead  # nobody knows yet
    filled._reach(50)
    assert filled._is_ahead
    filled.require(50)
    assert not filled._is_ahead
    filled._reach(60)
    assert filled._is_ahead
