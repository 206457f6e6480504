"""Shares and pieces: every byte is written by one rank, and found again for any box."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost as mp
from milepost.engine.pieces import Piece, StoredWhole, cuts, read_rows
from milepost.engine.shares import owners
from milepost.tensors.boxes import Box, overlap


@given(
    sizes=st.lists(st.integers(0, 1000), max_size=60),
    num_ranks=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_piece_has_one_owner_whatever_the_order(
    sizes: list[int], num_ranks: int, seed: int
) -> None:
    """Ranks decide for themselves: they must all decide alike."""
    pieces = [(f"t{n}", size * 16) for n, size in enumerate(sizes)]
    shuffled = random.Random(seed).sample(pieces, len(pieces))
    ranks = list(range(10, 10 + num_ranks))
    given_out = owners(pieces, ranks)
    assert given_out == owners(shuffled, ranks[::-1])
    assert set(given_out) == {name for name, _ in pieces}
    loads = dict.fromkeys(ranks, 0)
    for name, size in pieces:
        loads[given_out[name]] += size
    if sizes:
        largest = max(*(size for _, size in pieces), 64 * 1024)
        assert max(loads.values()) <= sum(size for _, size in pieces) / num_ranks + largest


def test_a_thousand_ranks_all_get_something() -> None:
    """Nobody is left idle while there are more pieces than ranks."""
    pieces = [(f"layer.{n}.weight", (n * 7919) % 100_000) for n in range(3000)]
    given_out = owners(pieces, range(1024))
    assert len(set(given_out.values())) == 1024


def test_thousands_of_counters_are_in_a_few_hands() -> None:
    """Whoever reads them opens a few files, and not one for each rank."""
    pieces = [(f"step.{n}", 4) for n in range(100_000)]
    given_out = owners(pieces, range(1024))
    assert len(set(given_out.values())) == 7  # 400,000 bytes in bundles of 64 KiB


def random_cuts(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Cut a shape into boxes along random lines of each dimension."""
    lines = []
    for length in shape:
        inner = sorted(rng.sample(range(1, length), rng.randint(0, min(3, length - 1))))
        lines.append(list(zip([0, *inner], [*inner, length], strict=True)))
    boxes = [Box((), ())]
    for spans in lines:
        boxes = [
            Box((*box.offsets, low), (*box.sizes, high - low))
            for box in boxes
            for low, high in spans
        ]
    return boxes


@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple), seed=st.integers(0, 10**6)
)
def test_any_box_is_read_from_any_pieces(shape: tuple[int, ...], seed: int) -> None:
    """Compared with plain slicing of the whole tensor."""
    rng = random.Random(seed)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    memory, pieces = bytearray(), []
    for box in random_cuts(shape, rng):
        data = whole[box.slices(within=Box.whole(shape))].contiguous().numpy().tobytes()
        pieces.append(Piece("part", box, len(memory), len(memory) + len(data)))
        memory += data
    stored = StoredWhole("F32", shape, pieces)
    for wanted in random_cuts(shape, rng):
        found = torch.full(wanted.sizes, -1.0)
        for cut in cuts(stored, wanted, name="t"):
            raw = torch.frombuffer(memory[cut.start : cut.stop], dtype=torch.float32)
            piece = raw.as_strided(cut.shared.sizes, cut.strides)
            found[cut.shared.slices(within=wanted)] = piece
        assert torch.equal(found, whole[wanted.slices(within=Box.whole(shape))])


def test_missing_and_doubled_pieces_are_refused() -> None:
    """A hole would be read as whatever was in memory."""
    left, right = Box((0,), (2,)), Box((2,), (2,))
    hole = StoredWhole("F32", (4,), [Piece("a", left, 0, 8)])
    with pytest.raises(mp.FormatError, match="exactly once"):
        cuts(hole, Box.whole((4,)), name="t")
    doubled = StoredWhole("F32", (4,), [Piece("a", left, 0, 8), Piece("b", Box((1,), (2,)), 0, 8)])
    with pytest.raises(mp.FormatError, match="exactly once"):
        cuts(doubled, Box.whole((4,)), name="t")
    assert len(cuts(hole, left, name="t")) == 1
    assert overlap(left, right) is None


GOOD = ["w", "F32", [4, 2], [2, 0], [2, 2], "a.safetensors", 0, 16]
BAD_ROWS = {
    "no list": 5,
    "a short row": [GOOD[:5]],
    "a key that is none": [[5, *GOOD[1:]]],
    "a code that is none": [["w", "X9", *GOOD[2:]]],
    "a negative offset": [[*GOOD[:3], [-1, 0], *GOOD[4:]]],
    "beyond the end": [[*GOOD[:3], [3, 0], *GOOD[4:]]],
    "other dimensions": [[*GOOD[:3], [2], *GOOD[4:]]],
    "other bytes": [[*GOOD[:7], 12]],
    "a negative start": [[*GOOD[:6], -16, 0]],
    "truth for a number": [[*GOOD[:3], [True, 0], *GOOD[4:]]],
    "two shapes": [GOOD, ["w", "F32", [5, 2], [0, 0], [1, 2], "a.safetensors", 16, 24]],
}


@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
def test_malformed_tables_are_refused(rows: object) -> None:
    """They come from a file, and lead to bytes of others."""
    with pytest.raises(mp.FormatError):
        read_rows({}, rows, where="index-r00001.json")
    read_rows({}, [GOOD], where="index-r00001.json")
