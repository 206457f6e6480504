"""Memory that CUDA knows, and streams beside the training: the order of what CUDA is asked for.

No device is needed: what stands in for CUDA notes what it is asked, and copies nothing.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from milepost.checkpoint import Checkpoint
from milepost.engine.arena import Arena
from milepost.engine.pinned import side_streams
from milepost.engine.save import SaveRequest
from milepost.tensors.pack import pack_item

MIB = 1024 * 1024
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Cuda:
    """Notes what it is asked for.

    Attributes:
        asked: What that was, in order.
        known: The ranges that were registered and not taken back.
        code: What registering returns.
        error: What it raises instead.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.known: dict[int, int] = {}
        self.code = 0
        self.error: Exception | None = None

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append(("register", num_bytes))
        assert flags == 1
        assert address % 4096 == 0
        if self.error is not None:
            raise self.error
        if self.code == 0:
            assert address not in self.known
            self.known[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.asked.append(("unregister", self.known.pop(address)))
        return 0


class Stream:
    def __init__(self, cuda: Cuda, device: torch.device, name: str = "ours") -> None:
        self._asked, self.device, self.name = cuda.asked, device, name

    def wait_stream(self, other: Stream) -> None:
        self._asked.append(("wait", self.device.index, other.name))

    def synchronize(self) -> None:
        self._asked.append(("synchronize", self.device.index, self.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Stand in for CUDA, whose tensors lie on the host."""
    cuda = Cuda()

    current = {device: Stream(cuda, device, "producer") for device in DEVICES}

    @contextmanager
    def within(stream: Stream) -> Any:
        before, current[stream.device] = current[stream.device], stream
        cuda.asked.append(("enter", stream.device.index))
        try:
            yield
        finally:
            cuda.asked.append(("leave", stream.device.index))
            current[stream.device] = before

    def ones(*_: Any, device: str) -> None:
        cuda.asked.append(("kernel", device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", current.__getitem__)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(cuda, device))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr("milepost.engine.pinned.torch.ones", ones)
    return cuda


def test_copies_wait_for_the_training_and_the_save_for_the_copies(cuda: Cuda) -> None:
    """On every device, and before anything is copied."""
    with side_streams(DEVICES):
        cuda.asked.append(("copy",))
    assert cuda.asked == [
        ("wait", 0, "producer"),
        ("wait", 1, "producer"),
        ("enter", 0),
        ("enter", 1),
        ("copy",),
        ("synchronize", 0, "ours"),
        ("synchronize", 1, "ours"),
        ("leave", 1),
        ("leave", 0),
    ]


def test_a_copy_that_fails_leaves_none_on_its_way(cuda: Cuda) -> None:
    """It would arrive in memory that belongs to another save by then."""
    with pytest.raises(ValueError, match="in between"), side_streams(DEVICES[:1]):
        raise ValueError("in between")
    assert cuda.asked[-2:] == [("synchronize", 0, "ours"), ("leave", 0)]


def test_memory_is_known_once_and_forgotten_before_it_is_let_go(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would take whatever is mapped there next for what it knew."""
    new_map = Arena._new_map

    def watched(arena: Arena, num_bytes: int) -> None:
        cuda.asked.append(("before",))
        new_map(arena, num_bytes)
        cuda.asked.append(("map",))

    monkeypatch.setattr(Arena, "_new_map", watched)
    arena = Arena()
    for num_bytes in (4 * MIB, 3 * MIB, 64 * MIB):
        arena.reserve(num_bytes)
        arena.pin(num_bytes)
    arena.close()
    arena.close()
    small, large = ("register", 4 * MIB), ("register", 64 * MIB)
    taken = [("unregister", 4 * MIB), ("unregister", 64 * MIB)]
    before, made = ("before",), ("map",)
    assert cuda.asked == [before, made, small, before, taken[0], made, large, taken[1]]
    arena.pin(5 * MIB)
    arena.pin(6 * MIB)  # a state that has grown, in the room that was left for it
    assert list(cuda.known.values()) == [6 * MIB]
    del arena
    gc.collect()
    assert not cuda.known  # also of a run that nobody has closed


@pytest.mark.parametrize("how", ["code", "error"])
def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cuda: Cuda, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once. And the next kernel of the training must not be blamed for it."""
    cuda.code = 2 if how == "code" else 0
    cuda.error = RuntimeError("no driver") if how == "error" else None
    arena = Arena()
    arena.reserve(4 * MIB)
    for _ in range(3):
        arena.pin(4 * MIB)
    arena.close()
    asked = [("register", 4 * MIB), ("kernel", "cuda")]
    assert cuda.asked == asked[: 2 if how == "code" else 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be pinned" in caplog.text


def test_a_state_that_is_streamed_goes_through_pinned_memory_too(cuda: Cuda, new_lab: Any) -> None:
    """Block by block, each there before it is written."""

    class OnDevice(torch.Tensor):
        device = DEVICES[0]

    lab = new_lab(budget_bytes=16 * MIB)
    packed = pack_item("model", {"a": torch.arange(5 * MIB), "b": torch.arange(8.0)})
    wanted = {leaf.key: one for leaf, one in zip(packed.leaves, packed.tensors, strict=True)}
    packed.tensors[:] = [one.as_subclass(OnDevice) for one in packed.tensors]
    lab.saver.save([packed], SaveRequest(name="x", reason="manual"), is_waited_for=True).wait(60)
    assert cuda.asked[:3] == [("register", 16 * MIB), ("wait", 0, "producer"), ("enter", 0)]
    assert cuda.asked[-1] == ("leave", 0)
    # Pieces of the large one are waited for one by one; the small one, and at the end, all of it.
    assert cuda.asked[3:-1] == [("synchronize", 0, "ours")] * 2
    saved = Checkpoint(lab.store, "x").load()["state"]["model"]
    assert all(torch.equal(saved[name], one) for name, one in wanted.items())
    lab.saver.close()
    assert not cuda.known


def test_a_save_pins_its_memory_before_it_copies_and_only_for_cuda(
    cuda: Cuda, new_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no such tensor, CUDA is not so much as asked for."""
    lab = new_lab()
    original = torch._foreach_copy_

    def copying(*args: Any, **options: Any) -> None:
        cuda.asked.append(("copy",))
        original(*args, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", copying)

    class OnDevice(torch.Tensor):
        device = DEVICES[0]

    packed = pack_item("model", {"a": torch.arange(8.0)})
    lab.saver.save([packed], SaveRequest(name="x", reason="manual")).wait(60)
    assert cuda.asked == [("copy",)]
    packed.tensors[0] = packed.tensors[0].as_subclass(OnDevice)
    for is_waited_for in (False, True):
        cuda.asked.clear()
        request = SaveRequest(name=f"y{is_waited_for}", reason="manual")
        lab.saver.save([packed], request, is_waited_for=is_waited_for).wait(60)
        names = [one[0] for one in cuda.asked if one[-1] != "producer" or one[0] == "wait"]
        copied = ["wait", "enter", "copy", "synchronize", "synchronize", "leave"]
        assert names == (copied if is_waited_for else ["register", *copied])
        assert len(cuda.known) == 1
    lab.saver.close()
    assert not cuda.known
