"""A block that came wrong is asked for once more, and no oftener."""

from __future__ import annotations

import logging

import pytest

from milepost.format.digest import crc32c
from milepost.stores.again import read_twice
from milepost.stores.pages import page_memory

RIGHT = b"right" * 100


class Reader:
    """Gives other bytes the first few times."""

    size_bytes = len(RIGHT)

    def __init__(self, num_wrong: int) -> None:
        self.num_wrong = num_wrong
        self.num_reads = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.num_reads += 1
        buffer[:] = RIGHT[offset:] if self.num_reads > self.num_wrong else bytes(len(buffer))

    def close(self) -> None:
        return


@pytest.mark.parametrize(("num_wrong", "num_reads"), [(0, 1), (1, 2), (2, 2)])
def test_a_flip_on_the_way_is_not_damage(
    caplog: pytest.LogCaptureFixture, num_wrong: int, num_reads: int
) -> None:
    """And what is wrong where it lies is said to be."""
    reader, view = Reader(num_wrong), memoryview(page_memory(len(RIGHT)))[: len(RIGHT)]
    with caplog.at_level(logging.WARNING):
        found = read_twice(reader, 0, view, expected=crc32c(RIGHT))
    assert (found == crc32c(RIGHT)) is (num_wrong < 2)
    assert found == crc32c(view)
    assert reader.num_reads == num_reads
    assert len(caplog.records) == (num_wrong == 1)
