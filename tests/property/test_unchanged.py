"""Frozen weights are not written twice, and what is read back is never that of an earlier save."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import milepost as mp
from milepost.engine.comparing import same_bytes
from milepost.stores import LocalStore

FROZEN = "model-frozen.safetensors"


def new_model():
    torch.manual_seed(0)
    model = nn.ModuleDict({f"l{n}": nn.Linear(5, 3) for n in range(4)})
    for number in range(3):
        model[f"l{number}"].requires_grad_(False)
    return model


def bits(value):
    return value.detach().contiguous().view(-1).view(torch.uint8).clone()


def through_data(model, n):
    model[f"l{n}"].weight.data.view(-1)[n] += 1


def through_numpy(model, n):
    """Moves no version counter, and no address."""
    model[f"l{n}"].bias.detach().numpy()[0] += 1


def through_a_view(model, n):
    with torch.no_grad():
        model[f"l{n}"].weight[1:2].mul_(2)


def other_memory_same_bytes(model, n):
    model[f"l{n}"].weight.data = model[f"l{n}"].weight.data.clone()


def other_parameter(model, n):
    model[f"l{n}"].weight = nn.Parameter(torch.rand(3, 5), requires_grad=n < 3)


def flip_sign_of_zero(model, n):
    bias = model[f"l{n}"].bias.data
    bias[1] = torch.copysign(torch.zeros(()), -torch.copysign(torch.ones(()), bias[1]))


def another_nan(model, n):
    raw = model[f"l{n}"].bias.data.view(torch.int32)
    raw[2] = 0x7FC00000 + (int(raw[2]) + 1) % 1000


def there_and_back(model, n):
    weight = model[f"l{n}"].weight.data
    before = weight.clone()
    weight.zero_()
    weight.copy_(before)


def tie(model, n):
    model[f"l{n}"].weight = model["l0"].weight


CHANGES = {
    "nothing": lambda model, n: None,
    "data": through_data,
    "numpy": through_numpy,
    "a view": through_a_view,
    "other memory": other_memory_same_bytes,
    "another parameter": other_parameter,
    "minus zero": flip_sign_of_zero,
    "another NaN": another_nan,
    "there and back": there_and_back,
    "frozen": lambda model, n: model[f"l{n}"].requires_grad_(False),
    "trained": lambda model, n: model[f"l{n}"].requires_grad_(True),
    "swapped": lambda model, n: model.update({"l1": model["l2"], "l2": model["l1"]}),
    "tied": tie,
    "a failed save": None,
}


@given(steps=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3)), max_size=7))
@example(steps=[("numpy", 0), ("a failed save", 0), ("nothing", 0), ("swapped", 0)])
@example(steps=[("nothing", 0), ("a failed save", 1), ("data", 1), ("a failed save", 1)])
@settings(max_examples=15, deadline=None)
def test_what_is_read_back_is_the_state_of_that_very_save(steps):
    """However a frozen weight was changed, and whatever became of the save before."""
    model, expected = new_model(), {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mp.Checkpointer(folder, model=model, handle_signals=False, on_save_error="warn") as run,
    ):
        for number, (change, n) in enumerate([("nothing", 0), *steps, ("nothing", 0)]):
            name = f"s{number}"
            if change == "a failed save":
                through_numpy(model, n)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(LocalStore, "sync_folder", refuse)
                    assert run.save(name).exception(30) is not None
                continue
            CHANGES[change](model, n)
            expected[name] = {key: bits(value) for key, value in model.state_dict().items()}
            run.save(name, wait=True)
        saved = {one.name: one for one in mp.open_run(folder).checkpoints()}
        for name, state in expected.items():
            found = saved[name]
            assert found.verify().is_good
            stored = found.load()["state"]["model"]
            assert {key: bits(value).tolist() for key, value in stored.items()} == {
                key: value.tolist() for key, value in state.items()
            }


def refuse(self, folder):
    raise mp.StorageError("boom")


def written_bytes(folder: Path, before: Path | None) -> int:
    """Bytes of all files of a checkpoint that the one before has not."""
    known = set() if before is None else {one.stat().st_ino for one in before.iterdir()}
    return sum(one.stat().st_size for one in os.scandir(folder) if one.stat().st_ino not in known)


def test_with_nine_tenths_frozen_a_tenth_is_written(tmp_path):
    """With the index and the manifest, from the second save on."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(500)])
    for number, layer in enumerate(model):
        layer.requires_grad_(number % 10 == 0)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    before, first_bytes = None, 0
    with mp.Checkpointer(tmp_path, model=model, optimizer=optimizer) as run:
        for number in range(4):
            for one in trained:
                one.grad = torch.ones_like(one)
            optimizer.step()
            run.save(f"s{number}", wait=True)
            found = written_bytes(tmp_path / f"s{number}", before)
            before = tmp_path / f"s{number}"
            if not number:
                first_bytes = found
                continue
            assert found <= 0.11 * first_bytes
            pending = run.last_save
            assert pending.stats["linked_bytes"] >= 0.88 * first_bytes
    saved = mp.open_run(tmp_path).latest()
    assert saved.verify().is_good


@given(
    size=st.integers(0, 40) | st.sampled_from([1 << 20, (1 << 20) + 13, 3 << 20]),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64]),
    place=st.integers(0, 1 << 30),
    is_strided=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_one_bit_is_a_difference_wherever_it_is(size, dtype, place, is_strided):
    """In the middle of a portion, at its border, and in the bytes that fill no word."""
    raw = torch.arange(size * dtype.itemsize, dtype=torch.int32).mul(37).to(torch.uint8)
    live = raw.clone().view(dtype) if size else torch.empty(0, dtype=dtype)
    if is_strided:
        live = torch.stack([live, live], 1)[:, 0]
    staged = raw.view(dtype) if size else torch.empty(0, dtype=dtype)
    assert same_bytes(staged, live)
    if size:
        raw[place % len(raw)] ^= 1 << place % 8
        assert not same_bytes(staged, live)
