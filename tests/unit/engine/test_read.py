"""Reading: only what is needed, checked before it is used, straight into live memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from milepost.checkpoint import Checkpoint
from milepost.errors import DamagedError, FormatError, MissingError
from milepost.stores import LocalStore, MemoryStore

BLOCK = 8 * 1024 * 1024


@pytest.fixture
def big_model():
    """Three tensors over four blocks: 0-1, 1-2, 3."""
    return {
        "a": torch.arange(3_000_000, dtype=torch.float32),
        "b": torch.arange(3_000_000, 6_000_000, dtype=torch.float32),
        "c": torch.arange(2_000_000, dtype=torch.float32),
    }


def test_an_item_reads_its_own_blocks_only(new_lab, counting, big_model):
    """Opening one part of a big state must not cost the others."""
    lab = new_lab()
    lab.save("a", {"model": big_model, "rest": {"v": torch.arange(5)}, "plain": [1]})
    store = counting(lab.store)
    found = Checkpoint(store, "a").load(["rest", "plain"])
    assert set(found["state"]) == {"rest", "plain"}
    assert store.blocks("model.safetensors") == []
    assert store.blocks("rest.safetensors") == [0]


def test_one_tensor_reads_its_blocks_and_the_header(new_lab, counting, big_model):
    """Each of them once, the shared block at the edge included."""
    lab = new_lab()
    lab.save("a", {"model": big_model})
    for key, blocks in (("a", [0, 1]), ("b", [0, 1, 2]), ("c", [0, 2, 3])):
        store = counting(lab.store)
        source = Checkpoint(store, "a").source()
        into = torch.empty_like(big_model[key])
        source.read([("model", key, into)])
        assert torch.equal(into, big_model[key])
        assert store.blocks("model.safetensors") == blocks
        reads = {offset: n for (name, offset), n in store.reads.items() if "model" in name}
        assert all(n == 1 for offset, n in reads.items() if offset)
        assert reads[0] <= 2


def test_a_block_is_read_once_however_many_tensors_it_holds(new_lab, counting):
    """A thousand small tensors in one block are one read."""
    lab = new_lab()
    lab.save("a", {"model": {str(n): torch.full((3,), float(n)) for n in range(500)}})
    store = counting(lab.store)
    found = Checkpoint(store, "a").load()["state"]["model"]
    assert found["417"].tolist() == [417.0] * 3
    assert sum(n for (key, _), n in store.reads.items() if "model" in key) == 2


def test_progress_counts_the_bytes_of_the_blocks(new_lab, big_model):
    """For a display that is right at the end."""
    lab = new_lab()
    saved = lab.save("a", {"model": big_model})
    seen = []
    source = saved.source(progress=seen.append)
    source.read([("model", key, torch.empty_like(value)) for key, value in big_model.items()])
    assert sum(seen) == saved.manifest.file("model.safetensors").size_bytes
    assert len(seen) == 4


def test_weights_are_read_in_place_and_autograd_notices(new_lab):
    """A version counter that stands still would let a backward use overwritten values."""
    model = nn.Linear(3, 2)
    lab = new_lab()
    saved = lab.save("a", {"model": dict(model.state_dict())})
    live = nn.Linear(3, 2)
    addresses = [parameter.data_ptr() for parameter in live.parameters()]
    versions = [parameter._version for parameter in live.parameters()]
    loss = (live.weight**2).sum()
    saved.load_weights(live)
    assert [parameter.data_ptr() for parameter in live.parameters()] == addresses
    assert all(p._version > v for p, v in zip(live.parameters(), versions, strict=True))
    assert torch.equal(live.weight, model.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_strided_live_tensors_are_read_into(new_lab):
    """Channels-last weights, transposed parameters: the values go where they belong."""
    conv = nn.Conv2d(3, 4, 2)
    saved = new_lab().save("a", {"model": dict(conv.state_dict())})
    live = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    stride = live.weight.stride()
    saved.load_weights(live)
    assert live.weight.stride() == stride
    assert torch.equal(live.weight, conv.weight)


def test_an_expanded_tensor_fills_a_dense_parameter(new_lab):
    """What is stored dense stays usable in place."""
    model = nn.ParameterDict({"v": nn.Parameter(torch.zeros(1000))})
    saved = new_lab().save("a", {"model": {"v": torch.tensor([3.0]).expand(1000)}})
    saved.load_weights(model)
    with torch.no_grad():
        model["v"][0] = 5
    assert model["v"].tolist() == [5.0] + [3.0] * 999


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_damaged_block_is_named_and_never_used(new_lab, tmp_path, big_model, block):
    """The message leads to file and block."""
    lab = new_lab(LocalStore(tmp_path))
    saved = lab.save("a", {"model": big_model})
    path = tmp_path / "a/model.safetensors"
    data = bytearray(path.read_bytes())
    data[block * BLOCK + 5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        saved.load()
    assert caught.value.facts["block"] == block
    assert "model.safetensors" in str(caught.value)
    assert f"Block {block}" in str(caught.value)


def test_an_error_while_reading_reaches_the_caller_from_any_thread(new_lab, big_model):
    """And the first one, with its type."""
    lab = new_lab()
    saved = lab.save("a", {"model": big_model})
    lab.store.delete("a/model.safetensors")
    with pytest.raises(MissingError):
        saved.load()


def test_what_is_not_there_is_named(new_lab):
    """With what there is instead."""
    saved = new_lab().save("a", {"model": {"v": torch.ones(1)}})
    with pytest.raises(MissingError, match=r"no item 'mod'.*'model'"):
        saved.load(["mod"])


def test_an_index_of_another_checkpoint_is_refused(new_lab):
    """Its bytes are whole, but they are not those that were committed."""
    lab = new_lab(MemoryStore())
    saved = lab.save("a", {"model": {"v": torch.ones(1)}})
    lab.save("b", {"model": {"w": torch.ones(1)}})
    lab.store.put("a/index.json", lab.store.get("b/index.json"))
    with pytest.raises(DamagedError, match=r"index\.json"):
        saved.load()
    with pytest.raises(FormatError):
        saved.source().tensors("model")
