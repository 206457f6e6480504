"""Random state of a stranger: looked at before any generator sees it."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch

import milepost as mp
from milepost.state import rng
from milepost.state.rng import apply_rng, capture_rng
from milepost.tensors.generators import set_generator

WORDS = tuple(range(624))


def numpy_with(**fields):
    return lambda state: {**state, "numpy": {**state["numpy"], **fields}}


def python_with(version=3, words=(*WORDS, 5), gauss=None):
    return lambda state: {**state, "python": (version, words, gauss)}


def torch_with(state):
    return lambda whole: {**whole, "torch": state}


def torch_at(left, following):
    """Return a state of torch's generator whose next word lies where nothing is."""
    state = torch.Generator().manual_seed(1).get_state().numpy().copy()
    state[8:12] = np.frombuffer(struct.pack("=i", left), np.uint8)
    state[16:24] = np.frombuffer(struct.pack("=Q", following), np.uint8)
    return torch.from_numpy(state)


MALFORMED = {
    "numpy: far beyond the end": numpy_with(position=2**30),
    "numpy: one beyond the end": numpy_with(position=625),
    "numpy: before the beginning": numpy_with(position=-1),
    "numpy: no whole position": numpy_with(position=1.0),
    "numpy: position and truth": numpy_with(position=True),
    "numpy: another generator": numpy_with(kind="PCG64"),
    "numpy: no kind": numpy_with(kind=["MT19937"]),
    "numpy: a key short": numpy_with(keys=torch.zeros(623, dtype=torch.int64)),
    "numpy: keys in a square": numpy_with(keys=torch.zeros(26, 24, dtype=torch.int64)),
    "numpy: float keys": numpy_with(keys=torch.zeros(624)),
    "numpy: negative key": numpy_with(keys=torch.full((624,), -1)),
    "numpy: wide key": numpy_with(keys=torch.full((624,), 2**32)),
    "numpy: keys in a list": numpy_with(keys=list(WORDS)),
    "numpy: third normal": numpy_with(has_gauss=2),
    "numpy: normal by truth": numpy_with(has_gauss=True),
    "numpy: a word for a normal": numpy_with(gauss="0.5"),
    "numpy: nothing": lambda state: {**state, "numpy": {}},
    "numpy: a list": lambda state: {**state, "numpy": []},
    "python: another version": python_with(version=2),
    "python: a word short": python_with(words=WORDS),
    "python: beyond the end": python_with(words=(*WORDS, 625)),
    "python: before the beginning": python_with(words=(*WORDS, -1)),
    "python: wide word": python_with(words=(2**32, *WORDS)),
    "python: words are no numbers": python_with(words="x" * 625),
    "python: a normal of letters": python_with(gauss="x"),
    "python: a number": lambda state: {**state, "python": 1},
    "python: nothing": lambda state: {**state, "python": ()},
    "torch: a number": torch_with(5),
    "torch: short": torch_with(torch.zeros(16, dtype=torch.uint8)),
    "torch: other dtype": torch_with(torch.Generator().get_state().to(torch.int16)),
    "torch: in a square": torch_with(torch.Generator().get_state().view(2, -1)),
    "torch: zeros": torch_with(torch.zeros_like(torch.Generator().get_state())),
    "torch: beyond the end": torch_with(torch_at(624, 624)),
    "torch: one beyond the end": torch_with(torch_at(2, 624)),
    "torch: huge position": torch_with(torch_at(1, 2**63)),
    "accelerator: a number": lambda state: {**state, "accelerator": 5},
    "accelerator: floats": lambda state: {**state, "accelerator": [torch.zeros(16)]},
    "nothing": lambda state: {},
    "no mapping": lambda state: [state],
}


def the_same(one, other):
    return (
        one["python"] == other["python"]
        and torch.equal(one["torch"], other["torch"])
        and torch.equal(one["numpy"].pop("keys"), other["numpy"].pop("keys"))
        and one["numpy"] == other["numpy"]
    )


@pytest.mark.parametrize("case", list(MALFORMED))
def test_a_malformed_state_changes_no_generator(case):
    """NumPy and torch would read beyond the end of their memory; Python stops half way."""
    state = MALFORMED[case](capture_rng())
    random.seed(8), np.random.seed(8), torch.manual_seed(8)
    before = capture_rng()
    with pytest.raises(mp.FormatError, match="malformed"):
        apply_rng(state)
    assert the_same(capture_rng(), before)


@pytest.mark.parametrize("num_draws", [0, 1, 5, 623, 624, 625, 1300])
def test_any_state_that_a_generator_can_be_in_is_taken(num_draws):
    """The checks must not refuse a position at the edge."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    own = torch.Generator().manual_seed(1)
    for _ in range(num_draws):
        random.getrandbits(32), np.random.bytes(4), torch.rand(1), torch.rand(1, generator=own)
    state, own_state = capture_rng(), own.get_state()

    def draw():
        both = torch.rand(1250).tolist(), torch.rand(1250, generator=own).tolist()
        return random.random(), np.random.rand(700).tolist(), both

    expected = draw()
    apply_rng(state)
    set_generator(own, own_state)
    assert draw() == expected


@pytest.mark.parametrize("state", [5, torch.zeros(3), torch_at(600, 600)])
def test_a_generator_of_ones_own_takes_only_its_own_state(state):
    """It comes from the same checkpoint."""
    generator = torch.Generator().manual_seed(4)
    before = generator.get_state()
    with pytest.raises(mp.FormatError, match="malformed"):
        set_generator(generator, state)
    assert torch.equal(generator.get_state(), before)


class OtherDevices:
    """Two devices whose generators have states of eight bytes."""

    def __init__(self):
        self.states = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def get_rng_state(self, index):
        return self.states[index]

    def get_rng_state_all(self):
        return self.states

    def set_rng_state(self, state, index):
        if int(state[0]) == 255:
            raise RuntimeError("no such seed")
        self.states[index] = state


def test_state_of_another_kind_of_accelerator_is_left_aside_with_a_warning(monkeypatch, caplog):
    """A run may go on elsewhere; the state of a generator of another make means nothing there."""
    devices = OtherDevices()
    monkeypatch.setattr(rng, "_accelerator", lambda: devices)
    fits, foreign = torch.full((8,), 7, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    apply_rng({**capture_rng(), "accelerator": [foreign, fits, fits]})
    assert [int(state[0]) for state in devices.states] == [0, 7]
    assert "another kind of device" in caplog.text
    with pytest.raises(mp.FormatError, match="accelerator 0"):
        apply_rng({**capture_rng(), "accelerator": [torch.full((8,), 255, dtype=torch.uint8)]})
