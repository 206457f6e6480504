"""Reading: only what is needed, checked before it is used, straight into live memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from milepost.checkpoint import Checkpoint
from milepost.engine import blocks as block_reads
from milepost.engine import ranges
from milepost.errors import DamagedError, FormatError, MissingError
from milepost.stores import LocalStore, MemoryStore
from milepost.tensors.boxes import Box

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
    """A thousand small tensors in one block are one read, that of the header."""
    lab = new_lab()
    lab.save("a", {"model": {str(n): torch.full((3,), float(n)) for n in range(500)}})
    store = counting(lab.store)
    found = Checkpoint(store, "a").load()["state"]["model"]
    assert found["417"].tolist() == [417.0] * 3
    assert sum(n for (key, _), n in store.reads.items() if "model" in key) == 1


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


def test_some_columns_of_a_large_matrix_take_little_memory(new_lab, tmp_path, monkeypatch):
    """Bytes beside the target are held for a few blocks, and not until the last one was read."""
    monkeypatch.setattr("milepost.engine.blocks.NUM_THREADS", 4)  # a block and more for each
    wholes = {f"w{n}": torch.randn(2048, 8192) for n in range(2)}  # 64 MiB each
    saved = new_lab(LocalStore(tmp_path)).save("a", {"model": wholes})
    source = saved.source()
    source.tensors("model")
    box = Box((0, 1000), (2048, 1024))
    into = {key: torch.ones(box.sizes) for key in wholes}

    def status(field):
        text = Path("/proc/self/status").read_text()
        return int(text.split(field)[1].split()[0]) // 1024

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = status("VmRSS:")
    source.read_boxes([("model", key, box, live) for key, live in into.items()])
    assert status("VmHWM:") - before < 80  # it takes about 60; their spans have 114 MiB
    for key, live in into.items():
        assert torch.equal(live, wholes[key][:, 1000:2024])


@pytest.mark.parametrize("portion_bytes", [8, 100, 1 << 20])
def test_portions_of_any_size_are_put_together(new_lab, monkeypatch, portion_bytes):
    """Of every box, into memory that lies in any order, with the borders of blocks in between."""
    monkeypatch.setattr(ranges, "_PORTION_BYTES", portion_bytes)
    whole = torch.randn(3, 4, 5, dtype=torch.float64)
    filler = torch.zeros(BLOCK // 8 - 160, dtype=torch.float64)  # the border is near the tensor
    small = {"c": torch.arange(3.0).bfloat16(), "d": torch.tensor(True)}
    saved = new_lab().save("a", {"model": {"a": filler, "b": whole, **small}})
    wanted = []
    for order in itertools.permutations(range(3)):
        for low in itertools.product((0, 1), (0, 2), (0, 3)):
            sizes = [n - at for n, at in zip(whole.shape, low, strict=True)]
            back = [order.index(dim) for dim in range(3)]
            live = torch.zeros([sizes[dim] for dim in order], dtype=whole.dtype).permute(back)
            wanted.append((Box(low, tuple(sizes)), live))
    small_live = {"c": torch.zeros(6).bfloat16()[::2], "d": torch.tensor(False)}
    source = saved.source()
    source.read_boxes([("model", "b", box, live) for box, live in wanted])
    source.read([("model", key, live) for key, live in small_live.items()])
    for box, live in wanted:
        assert torch.equal(live, whole[box.slices(within=Box.whole(whole.shape))])
    assert all(torch.equal(live, small[key]) for key, live in small_live.items())


class OpenFiles:
    """A store that counts how many of its files are open."""

    def __init__(self, store):
        self._store = store
        self.url, self.traits = store.url, store.traits
        self.num_open = self.most_open = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def open_reader(self, key):
        reader, counted = self._store.open_reader(key), self
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)

        class Counted:
            size_bytes = reader.size_bytes
            read_into = staticmethod(reader.read_into)

            @staticmethod
            def close():
                counted.num_open -= 1
                reader.close()

        return Counted()


def test_many_files_are_read_with_few_of_them_open(new_lab):
    """A thousand ranks have written thousands; a process may often have 1024 open."""
    lab = new_lab()
    lab.save("a", {f"i{n}": {"v": torch.full((3,), float(n))} for n in range(150)})
    store = OpenFiles(lab.store)
    into = {f"i{n}": torch.full((3,), -1.0) for n in range(150)}
    wanted = [(item, "v", live) for item, live in into.items()]
    Checkpoint(store, "a").source().read(wanted)
    assert [live.tolist() for live in into.values()] == [[float(n)] * 3 for n in range(150)]
    assert 2 < store.most_open <= block_reads.MAX_OPEN + block_reads.NUM_REQUESTS
    assert store.num_open == 0


def test_no_byte_is_copied_if_a_file_is_missing(new_lab):
    """Files that are not kept open are looked at first all the same."""
    lab = new_lab()
    saved = lab.save("a", {f"i{n}": {"v": torch.full((3,), float(n))} for n in range(90)})
    store = OpenFiles(lab.store)
    source = Checkpoint(store, "a").source()
    into = {f"i{n}": torch.full((3,), -1.0) for n in range(90)}
    for item in into:
        source.tensors(item)
    (last,) = saved.source().files("i89")
    lab.store.delete(f"a/{last}")
    with pytest.raises(MissingError):
        source.read([(item, "v", live) for item, live in into.items()])
    assert all(live.tolist() == [-1.0] * 3 for live in into.values())
    assert store.num_open == 0
