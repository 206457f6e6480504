"""Files of others, which no commit vouches for."""

from __future__ import annotations

from contextlib import suppress

import pytest

from milepost.stores import LocalStore, MemoryStore
from milepost.testing import Crash, Fault, FaultStore
from milepost.transfers.others import Other, send_others
from milepost.transfers.route import Route

SMALLEST_LARGE_BYTES = 8 * 1024 * 1024 + 1
OLD, NEW = (bytes([n]) * SMALLEST_LARGE_BYTES for n in (1, 2))


def send(source, target) -> int:
    others = [Other(source.head("logs/big"), "logs/big")]
    there = {entry.key: entry for entry in target.list()}
    return send_others(Route(source, target), others, there)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_large_file_is_never_without_a_whole_copy(tmp_path, is_after):
    """A stop at any step, also of the next try: the old one or the new one is there, whole.

    The source may be lost at that moment.
    """
    source = MemoryStore("source", clock=lambda: 2e9)
    source.put("logs/big", NEW)
    watched = FaultStore(LocalStore(tmp_path / "watched"))
    watched.put("logs/big", OLD)
    start = len(watched.operations)
    assert send(source, watched) == 1
    num_steps = len(watched.operations) - start
    assert num_steps > 4
    for at in range(1, num_steps + 1):
        below = LocalStore(tmp_path / f"copy-{at}")
        below.put("logs/big", OLD)
        for _ in range(2):
            with suppress(Crash):
                send(source, FaultStore(below, [Fault(at, is_after=is_after)]))
            assert {below.get(entry.key) for entry in below.list()} & {OLD, NEW}
        send(source, below)
        if is_after:  # what is left beside one that is the same goes too
            source.put("logs/big", NEW)
        send(source, below)
        assert [(entry.key, below.get(entry.key) == NEW) for entry in below.list()] == [
            ("logs/big", True)
        ]
