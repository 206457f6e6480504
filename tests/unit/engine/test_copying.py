"""The copy in a thread of its own: in the order of the files, watched, and written as it comes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from milepost.engine.copying import Copy, LateTensor
from milepost.engine.save import SaveRequest
from milepost.engine.sums import Sums
from milepost.errors import DeadlineError, StateChangedError
from milepost.state.owned import Owned, memory_key
from milepost.stores import MemoryStore
from milepost.tensors.pack import pack_item

BLOCK = 8 * 1024 * 1024


def late(tensor: torch.Tensor, *, start: int = 0, check: Any = "sample") -> LateTensor:
    place = np.zeros(tensor.nbytes, np.uint8)
    return LateTensor.of("x", tensor, place=place, start_bytes=start, check=check, shift=3)


def copy_of(one: LateTensor) -> Copy:
    """Return the copy of a tensor that a part ends with, in one that begins with the memory."""
    start, end = one.start_bytes, one.start_bytes + one.num_bytes
    before = np.full(start, 7, np.uint8)

    def view(low: int, high: int) -> memoryview:
        whole = np.concatenate([before, one.place])
        return whole[low:high].data

    return Copy([one], end_bytes=end, sums=Sums([(0, end)], view))


def test_a_block_is_there_when_it_is_said_to_be():
    """And not later: whoever writes it has waited for no more than it."""
    tensor = torch.arange(3 * BLOCK // 4 + 5, dtype=torch.float32)
    one = late(tensor, start=4096)
    live = tensor.clone().view(torch.uint8).numpy()
    copy = copy_of(one)
    seen: list[tuple[int, int]] = []
    reach = copy._reach

    def noted(stop: int) -> None:
        done = stop - 4096
        assert np.array_equal(one.place[:done], live[:done])
        seen.append((stop, int(np.count_nonzero(one.place[done:]))))
        reach(stop)

    copy._reach = noted  # type: ignore[method-assign]
    copy._run()
    assert [stop for stop, _ in seen] == [BLOCK, 2 * BLOCK, 3 * BLOCK, 4096 + tensor.nbytes]
    assert not any(rest for _, rest in seen)
    copy.require(2 * BLOCK)
    copy.confirm()


def test_a_write_between_two_pieces_is_seen_before_the_next_is_passed_on():
    """A mixture must not reach whoever waits for the blocks."""
    tensor = torch.zeros(BLOCK // 2)
    copy = copy_of(late(tensor))
    reach, passed = copy._reach, []

    def write(stop: int) -> None:
        passed.append(stop)
        tensor.add_(1)
        reach(stop)

    copy._reach = write  # type: ignore[method-assign]
    copy._run()
    assert passed == [BLOCK]
    with pytest.raises(StateChangedError, match="x changed"):
        copy.require(1)
    with pytest.raises(StateChangedError):
        copy.confirm()
    copy.settle()  # whoever trains is not the one to be told


def test_waiting_for_a_copy_has_an_end():
    """And says what did not come."""
    copy = copy_of(late(torch.zeros(10)))
    with pytest.raises(DeadlineError, match="was not copied within"):
        copy.settle(0.01)
    copy.start()
    copy.settle(30)
    copy.confirm()


def test_a_copy_that_fails_tells_all_who_wait():
    """Nobody may wait for ever for bytes that do not come."""
    copy = copy_of(late(torch.zeros(10)))

    def fail(stop: int) -> None:
        raise ValueError(f"broken at {stop}")

    copy._reach = fail  # type: ignore[method-assign]
    told: list[BaseException] = []

    def wait() -> None:
        try:
            copy.require()
        except ValueError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    copy.start()
    copy.settle(30)
    waiting.join(30)
    assert len(told) == 1
    with pytest.raises(ValueError, match="broken at 40"):
        copy.confirm()


def test_writing_begins_while_the_copy_goes_on(new_lab, monkeypatch):
    """The last tensor is copied only after a block of the first was written."""
    written, original = threading.Event(), Copy._copy

    class Noting:
        def __init__(self):
            self._store = MemoryStore()
            self.url, self.traits = self._store.url, self._store.traits

        def __getattr__(self, name):
            return getattr(self._store, name)

        def create_writer(self, key, size_bytes):
            writer = self._store.create_writer(key, size_bytes)
            write_at = writer.write_at

            class Writer:
                close, abort = staticmethod(writer.close), staticmethod(writer.abort)

                @staticmethod
                def write_at(offset, data):
                    write_at(offset, data)
                    written.set()

            return Writer()

    def held(copy: Copy, one: Any) -> None:
        if one.name == "model/b":
            assert written.wait(30)
        original(copy, one)

    monkeypatch.setattr(Copy, "_copy", held)
    state = {"a": torch.randn(BLOCK // 2), "b": torch.randn(BLOCK // 2)}
    owned = Owned({memory_key(value): value.nbytes for value in state.values()}, (), "")
    lab = new_lab(Noting())
    packed = [pack_item("model", state)]
    pending = lab.saver.save(packed, SaveRequest(name="x", reason="manual"), owned=owned)
    pending.wait(60)
    lab.saver.close()
    from milepost.checkpoint import Checkpoint

    saved = Checkpoint(lab.store, "x")
    assert saved.verify().is_good
    for name, value in state.items():
        assert torch.equal(saved.load()["state"]["model"][name], value)
