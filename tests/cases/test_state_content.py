"""What is inside the state: views, ties, odd tensors, plain objects, names, strictness."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import milepost as mp
from milepost.testing.asserts import assert_equal_states


class Box:
    """State of any kind."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def num_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def test_h07_of_a_small_slice_only_the_slice_is_written(tmp_path):
    """The storage behind a view may be hundreds of times its size."""
    big = torch.zeros(1_000_000)
    with mp.Checkpointer(tmp_path / "a", box=Box({"slice": big[:1000]})) as run:
        saved = run.save("a", wait=True)
        stored = saved.wait().load()["state"]["box"]["slice"]
    assert num_bytes(tmp_path / "a") < 64 * 1024
    assert torch.equal(stored, torch.zeros(1000))
    line = torch.arange(20.0)
    with mp.Checkpointer(tmp_path / "b", box=Box({"x": line[:10], "y": line[5:15]})) as run:
        stored = run.save("a").wait().load()["state"]["box"]
    assert torch.equal(stored["x"], torch.arange(10.0))
    assert torch.equal(stored["y"], torch.arange(5.0, 15.0))


def new_tied():
    model = nn.ModuleDict({"emb": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000, bias=False)})
    model["head"].weight = model["emb"].weight
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_h08_tied_weights_are_stored_once_and_stay_tied(tmp_path, scramble):
    """Neither twice in the file, nor missing at the load, nor two halves that drift apart."""
    model, optimizer = new_tied()
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        saved = run.save("a").wait()
    size = saved.manifest.file("model.safetensors").size_bytes
    assert size == 256_000 + 4096
    scramble()
    live, live_optimizer = new_tied()
    with mp.Checkpointer(tmp_path, model=live, optimizer=live_optimizer) as run:
        assert run.load_report.is_exact
    head, emb = live["head"], live["emb"]
    assert torch.equal(emb.weight, model["emb"].weight)
    before = emb.weight.detach().clone()
    head(torch.ones(2, 64)).sum().backward()
    live_optimizer.step()
    assert head.weight is emb.weight
    assert not torch.equal(emb.weight, before)
    assert len(live_optimizer.param_groups[0]["params"]) == 1


def test_h09_odd_shapes_layouts_and_dtypes_survive(tmp_path, scramble):
    """Bit for bit: no detour over another dtype, no refusal of transposed or empty tensors."""
    state = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "channels last": torch.arange(24.0)
        .reshape(1, 2, 3, 4)
        .to(memory_format=torch.channels_last),
        "expanded": torch.tensor([3.0]).expand(1000),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "bool": torch.tensor([True, False]),
        "uint8": torch.tensor([255], dtype=torch.uint8),
        "int64": torch.tensor([2**53 + 1]),
        "float64": torch.tensor([0.1], dtype=torch.float64),
        "float16": torch.tensor([6e-8], dtype=torch.float16),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "complex": torch.tensor([1 + 2j]),
        "bfloat16": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    }
    with mp.Checkpointer(tmp_path, box=Box(state)) as run:
        run.save("a", wait=True)
    scramble()
    box = Box()
    with mp.Checkpointer(tmp_path, box=box):
        pass
    assert list(box.value) == list(state)
    for name, value in state.items():
        found = box.value[name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        if value.numel():
            raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, value)]
            assert torch.equal(*raw), name
    assert torch.signbit(box.value["special"][2])


class Unstorable:
    """An instance of a class that nobody knows."""


def test_h10_plain_python_and_numpy_state_comes_back_as_it_was(tmp_path, scramble):
    """Hours after the save is the wrong moment to learn that a value cannot be read."""
    state = {
        "float64": np.float64(0.1),
        "int64": np.int64(5),
        "array": np.arange(3),
        "numpy rng": np.random.get_state(),
        "python rng": random.getstate(),
        "path": Path("a/b"),
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "nested": [1, (2, [3, (4,)])],
        "none": None,
        "keys": {1: "x"},
    }
    box = Box(state)
    with mp.Checkpointer(tmp_path, box=box) as run:
        run.save("a", wait=True)
    scramble()
    fresh = Box()
    with mp.Checkpointer(tmp_path, box=fresh) as run:
        assert_equal_states(fresh.value, state)
        assert type(fresh.value["path"]) is type(state["path"])
        np.random.set_state(fresh.value["numpy rng"])
        random.setstate(fresh.value["python rng"])
        fresh.value["deep"] = {"er": [Unstorable()]}
        with pytest.raises(mp.UnsupportedStateError, match=r"box\['deep'\]\['er'\]\[0\]"):
            run.save("b")
        assert run.run.latest().name == "a"
    assert [one.name for one in mp.open_run(tmp_path).checkpoints(all=True)] == ["a"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of one."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(kind, seed):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    parallel = nn.parallel.DistributedDataParallel
    wrapped = {
        "plain": lambda: plain,
        "compiled": lambda: torch.compile(plain, backend="eager"),
        "parallel": lambda: parallel(plain),
        "parallel of compiled": lambda: parallel(torch.compile(plain, backend="eager")),
        "compiled of parallel": lambda: torch.compile(parallel(plain), backend="eager"),
    }[kind]()
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter) * seed
    optimizer.step()
    return plain, wrapped, optimizer


KINDS = ["plain", "compiled", "parallel", "parallel of compiled", "compiled of parallel"]


@pytest.mark.parametrize("saved_as", KINDS)
def test_h11_wrappers_leave_no_trace_in_the_names(tmp_path, one_rank, saved_as):
    """A checkpoint of a wrapped model fits the plain one and any other wrapping."""
    plain, wrapped, optimizer = wrap(saved_as, 1)
    with mp.Checkpointer(tmp_path, model=wrapped, optimizer=optimizer) as run:
        saved = run.save("a").wait().load()["state"]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(saved["model"]) == names
    assert list(saved["optimizer"]["state"]) == names
    for kind in KINDS:
        live, live_wrapped, live_optimizer = wrap(kind, 2)
        with mp.Checkpointer(tmp_path, model=live_wrapped, optimizer=live_optimizer) as run:
            assert run.load_report.is_exact
        assert_equal_states(live.state_dict(), plain.state_dict())
        for mine, theirs in zip(live.parameters(), plain.parameters(), strict=True):
            assert_equal_states(dict(live_optimizer.state[mine]), dict(optimizer.state[theirs]))


class Wide(nn.Module):
    """Four layers, in a backbone or not."""

    def __init__(self, *, in_backbone):
        super().__init__()
        layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        if in_backbone:
            self.backbone = nn.Module()
            self.backbone.layers = layers
        else:
            self.layers = layers


def test_h12_a_load_that_matched_nothing_is_an_error(tmp_path):
    """Otherwise the model stays as it was initialised, and fine-tuning begins from noise."""
    with mp.Checkpointer(tmp_path, model=Wide(in_backbone=True)) as run:
        saved = run.save("a").wait()
    live = Wide(in_backbone=False)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(mp.MismatchError) as caught:
            saved.load_weights(live, strict=strict)
        report = caught.value.facts["report"]
        assert len(report.missing) == 4
        assert len(report.unexpected) == 4
        assert "layers.0.weight" in str(caught.value)
        assert "backbone.layers.0.weight" in str(caught.value)
        told = "4 missing in the checkpoint" if strict else "None of the 4"
        assert told in str(caught.value)
        assert_equal_states(dict(live.state_dict()), before)
    report = saved.load_weights(live, rename=lambda name: name.removeprefix("backbone."))
    assert report.is_exact
    assert len(report.loaded) == 4
    stored = saved.load()["state"]["model"]
    assert torch.equal(live.layers[3].weight, stored["backbone.layers.3.weight"])
