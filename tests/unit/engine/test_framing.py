"""Compressed saves that are broken off: the threads end, and nothing that was safe is lost."""

from __future__ import annotations

import pytest
import torch

from milepost.engine import framing
from milepost.errors import StorageError
from milepost.runs import Level, scan, verify
from milepost.stores import MemoryStore
from milepost.testing import Crash, Fault, FaultStore

NUMBERS = torch.randn(2_200_000, generator=torch.Generator().manual_seed(2)) * 0.02
NOISE = torch.randint(-(2**63), 2**63 - 1, (1_000_000,), generator=torch.Generator().manual_seed(1))


def state(value):
    """Blocks that shrink, and some that do not."""
    return {"numbers": NUMBERS + value, "noise": NOISE}


def operations(new_lab):
    store = FaultStore(MemoryStore())
    lab = new_lab(store, compression="zstd")
    lab.save("a", {"model": state(0.0)})
    first = len(store.operations)
    assert lab.save("b", {"model": state(1.0)}).manifest.is_compressed
    return range(first + 1, len(store.operations) + 1), store.operations


def check(below, acked):
    """What was acknowledged is whole, and so is whatever else was committed."""
    view = scan(below)
    names = [found.name for found in view.lineage()]
    assert set(acked) <= set(names)
    for name in names:
        assert verify(below, name, Level.FULL).is_good


@pytest.mark.parametrize("error", [None, StorageError("no")], ids=["stop", "error"])
def test_a_compressed_save_that_breaks_off_anywhere_loses_nothing(new_lab, error):
    """Every call of the store is a place where it may, and no thread may wait for another then."""
    places, names = operations(new_lab)
    writes = [at for at in places if names[at - 1].split()[0] in ("write_at", "close")]
    others = [at for at in places if at not in writes]
    for at in [*writes, *others[::9]]:
        below = MemoryStore()
        store = FaultStore(below, [Fault(at, error=error)])
        lab, acked = new_lab(store, compression="zstd"), []
        try:
            for number, name in enumerate("ab"):
                lab.save(name, {"model": state(float(number))})
                acked.append(name)
        except (Crash, StorageError):
            pass
        check(below, acked)
        if error is not None and names[at - 1].startswith("write_at"):
            assert acked == ["a"]
            assert not list(below.list("b"))
            lab.save("c", {"model": state(2.0)})
            check(below, ["a", "c"])


def test_an_error_of_one_thread_wakes_those_that_wait_for_its_frame(new_lab, monkeypatch):
    """They would wait for a frame that nobody compresses any more."""
    original, count = framing.compress, [0]

    def compress(data, **how):
        count[0] += 1
        if count[0] == 1:
            raise MemoryError("no")
        return original(data, **how)

    monkeypatch.setattr(framing, "compress", compress)
    lab = new_lab(compression="lz4")
    with pytest.raises(MemoryError):
        lab.save("a", {"model": {"w": torch.zeros(30_000_000)}})
    assert not list(lab.store.list("a"))
    assert lab.save("b", {"model": state(1.0)}).verify(level="full").is_good
