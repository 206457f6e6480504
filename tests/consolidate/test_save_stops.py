"""A save of several ranks that one of them writes may stop anywhere: whole or not there."""

from __future__ import annotations

import pytest
import torch

import milepost as mp
from milepost.stores import MemoryStore
from milepost.tensors.pack import pack_item
from milepost.testing import Crash, Fault, FaultStore

from ..property.simulated_ranks import Spec, as_held
from .saving_ranks import begin, raw, save_on_ranks

WEIGHTS = {"w": torch.arange(35.0).reshape(5, 7), "n": torch.tensor(7)}
SPECS = {
    "w": Spec((5, 7), torch.float32, (1,)),
    "n": Spec((), torch.int64, None),
}


def states():
    return [
        [
            pack_item("model", {k: as_held(WEIGHTS[k], SPECS[k], (2,), rank) for k in WEIGHTS}),
            pack_item("rng", [{"torch": torch.tensor([rank])}], home="each"),
        ]
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"sharding": "consolidated"}, {"layout": "torch"}], ids=str
)
def test_the_manifest_counts_the_bytes_of_all_ranks(options):
    """The figures of the leader alone would say that half of a checkpoint was never written."""
    manifest = save_on_ranks(MemoryStore(), states(), **options)
    assert manifest.stats["written_bytes"] == manifest.size_bytes
    assert manifest.stats["durable_s"] >= manifest.stats["write_s"]


@pytest.mark.parametrize(
    ("options", "step"), [({"sharding": "consolidated"}, 9), ({"layout": "torch"}, 4)], ids=str
)
def test_a_stop_at_calls_all_along_leaves_a_whole_checkpoint_or_none(options, step):
    """All ranks stop, as in a power cut; the next session goes on and saves under a free name."""
    count = FaultStore(MemoryStore())
    save_on_ranks(count, states(), **options)
    # What stands before is the opening of the session, and has its own tests.
    first = next(n for n, one in enumerate(count.operations, 1) if "ep3" in one)
    stopped = range(first, len(count.operations) + 1, step)
    assert len(stopped) > 2
    for at in stopped:
        below = MemoryStore()
        with pytest.raises((Crash, mp.CheckpointError)):
            save_on_ranks(FaultStore(below, [Fault(at)]), states(), **options)
        found = [one.name for one in mp.open_run(below).checkpoints()]
        committed = [e.key for e in below.list() if e.key.endswith("manifest.json")]
        assert found == [key.partition("/")[0] for key in committed]
        for name in found:
            checkpoint = mp.open_run(below).get(name)
            assert checkpoint.verify().is_good
            assert raw(checkpoint.load()["state"]["model"]) == raw(WEIGHTS)
        again = save_on_ranks(below, states(), name="ep4", **options)
        assert mp.open_run(below).latest().name == again.name == "ep4"
    begin(below)
