"""Reading memory that may be gone, which must not end the process."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from milepost.engine import peek as module
from milepost.engine.copying import Copy, LateTensor
from milepost.engine.peek import can_peek, peek
from milepost.engine.sums import Sums
from milepost.errors import StateChangedError
from milepost.tensors.memory import host_bytes

BLOCK = 8 * 1024 * 1024


def test_what_is_there_is_copied() -> None:
    """To the byte, from any place to any other."""
    assert can_peek()
    source = torch.arange(100_003, dtype=torch.int64)
    raw = source.clone().view(torch.uint8).numpy()
    into = np.zeros(700_000, np.uint8)
    assert peek(source.data_ptr() + 5, into[3:])
    assert np.array_equal(into[3:], raw[5 : 5 + 700_000 - 3])
    assert not into[:3].any()


def test_what_is_not_there_is_said_to_be_missing() -> None:
    """The first page is never mapped; of two pages the second may have been given back."""
    assert not peek(64, np.zeros(16, np.uint8))
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    libc = module.ctypes.CDLL(None)
    libc.mprotect.argtypes = [module.ctypes.c_void_p, module.ctypes.c_size_t, module.ctypes.c_int]
    assert libc.mprotect(address + page, page, 0) == 0
    assert peek(address, np.zeros(page, np.uint8))
    assert not peek(address + page - 100, np.zeros(200, np.uint8))


def test_a_system_that_refuses_is_found_out_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the middle of a copy."""

    def refuse(*_: object) -> int:
        module.ctypes.set_errno(module.errno.EPERM)
        return -1

    monkeypatch.setattr(module, "_kernel_copy", lambda: refuse)
    can_peek.cache_clear()
    assert not can_peek()
    monkeypatch.undo()
    can_peek.cache_clear()
    assert can_peek()


def test_memory_that_is_given_back_between_two_pieces_is_a_change() -> None:
    """Large memory goes back to the system at once: whoever touched it would be killed."""
    tensor = torch.ones(5 * BLOCK // 4)
    place = np.zeros(tensor.nbytes, np.uint8)
    one = LateTensor.of("x", tensor, place=place, start_bytes=0, check="none", shift=1)
    sums = Sums([(0, place.nbytes)], lambda start, stop: place.data[start:stop])
    copy = Copy([one], end_bytes=tensor.nbytes, sums=sums)
    reach, passed = copy._reach, []

    def move(stop: int) -> None:
        passed.append(stop)
        tensor.share_memory_()
        reach(stop)

    copy._reach = move  # type: ignore[method-assign]
    copy._run()
    assert passed == [BLOCK]
    with pytest.raises(StateChangedError, match="x changed"):
        copy.confirm()


def test_bytes_of_a_tensor_are_no_copy_and_no_mark() -> None:
    """Of any dtype, also of none and of a part."""
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    host_bytes(tensor[2])[:] = 255
    assert tensor[2].isnan().all()
    assert tensor[[0, 1, 3]].eq(0).all()
    assert host_bytes(torch.empty(0, 3)).shape == (0,)
    assert host_bytes(torch.tensor(1.0)).tobytes() == b"\x00\x00\x80\x3f"
    assert tensor.untyped_storage().resizable()
