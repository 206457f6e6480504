"""The copy by the caller's thread: every byte, and block by block where the caller waits anyway."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from milepost.engine import filling
from milepost.errors import StorageError
from milepost.runs import scan
from milepost.stores import MemoryStore

BLOCK = 8 * 1024 * 1024


class WritesNoted:
    """A store that says when a block was written, and may fail then.

    Attributes:
        written: Set once a block was written, or could not be.
        error: What the first write of a block fails with.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._store = MemoryStore()
        self.url, self.traits = self._store.url, self._store.traits
        self.written = threading.Event()
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_writer(self, key: str, size_bytes: int) -> Any:
        writer, noted = self._store.create_writer(key, size_bytes), self

        class Writer:
            close, abort = staticmethod(writer.close), staticmethod(writer.abort)

            @staticmethod
            def write_at(offset: int, data: memoryview) -> None:
                noted.written.set()
                if noted.error is not None:
                    error, noted.error = noted.error, None
                    raise error
                writer.write_at(offset, data)

        return Writer()


def odd_state() -> dict[str, torch.Tensor]:
    """Tensors of every kind, larger than a block together, some across the borders of blocks."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(3 * BLOCK // 4 + 1001),
        "small": torch.randn(3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.ones(0, 3),
        "no": torch.rand(100_001) < 0.5,
        "half": torch.randn(70_001).to(torch.bfloat16),
        "complex": torch.randn(50_000, dtype=torch.complex64),
        "conjugated": torch.randn(50_000, dtype=torch.complex64).conj(),
        "turned": torch.randn(300, 700).t(),
        "thin": torch.randn(40_000, 2)[:, 0],
        "aside": torch.randn(100_001)[1:],
        "bytes": torch.arange(BLOCK, dtype=torch.int64).to(torch.uint8)[3:],
    }


def files_of(store: Any, name: str) -> dict[str, bytes]:
    """Return the parts and the index of a checkpoint: all that the state decides alone."""
    keys = [entry.key for entry in store.list(name)]
    return {key: store.get(key) for key in keys if key.endswith((".safetensors", "index.json"))}


def test_blocks_are_written_while_the_caller_copies(new_lab, monkeypatch):
    """The second block is copied only when the first was written; and every byte is right."""
    store, original = WritesNoted(), filling.copy_bytes

    def held(into: torch.Tensor, source: torch.Tensor) -> None:
        if copied:
            assert store.written.wait(30)
        copied.append(len(source))
        original(into, source)

    copied: list[int] = []
    monkeypatch.setattr(filling, "copy_bytes", held)
    lab = new_lab(store)
    state = {"w": torch.randn(BLOCK // 2)}
    pending = lab.begin("a", {"model": state}, is_waited_for=True)
    pending.wait(30)
    assert sum(copied) == 2 * BLOCK
    assert pending.stats["durable_s"] >= pending.stats["blocking_s"] >= pending.stats["stage_s"] > 0
    from milepost.checkpoint import Checkpoint

    saved = Checkpoint(store, "a")
    assert saved.verify().is_good
    assert torch.equal(saved.load()["state"]["model"]["w"], state["w"])


def test_how_a_state_is_copied_does_not_change_a_byte(new_lab, monkeypatch):
    """In the order of the files by one thread, or shared among two, or of every kind at once."""
    state = odd_state()
    found = {}
    for name, shared_bytes, is_waited_for in (
        ("a", 0, False),
        ("b", 1 << 40, False),
        ("c", 0, True),
    ):
        monkeypatch.setattr(filling, "_SHARED_BYTES", shared_bytes)
        lab = new_lab()
        lab.begin("x", {"model": state, "n": {"k": 1}}, is_waited_for=is_waited_for).wait(30)
        found[name] = files_of(lab.store, "x")
    assert found["a"] == found["b"] == found["c"]
    assert len(found["a"]) == 2
    from milepost.checkpoint import Checkpoint

    loaded = Checkpoint(lab.store, "x").load()["state"]["model"]
    for name, value in state.items():
        assert loaded[name].dtype is value.dtype
        assert torch.equal(loaded[name], value)


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt("stop")])
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_copy_that_fails_commits_nothing(new_lab, monkeypatch, error, is_waited_for):
    """The caller gets that very error, and the next save is whole."""
    original = filling.copy_bytes
    copied: list[int] = []

    def broken(into: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(len(source))
        if len(copied) == 3:
            raise error
        original(into, source)

    lab = new_lab()
    state = {"w": torch.randn(5 * BLOCK // 4), "v": torch.ones(7)}
    monkeypatch.setattr(filling, "copy_bytes", broken)
    with pytest.raises(type(error)) as caught:
        lab.begin("a", {"model": state}, is_waited_for=is_waited_for)
    assert caught.value is error
    monkeypatch.undo()
    lab.saver.wait_until_free()
    assert lab.saver.in_flight is None
    assert not [one for one in scan(lab.store).found if one.manifest is not None]
    saved = lab.save("b", {"model": state})
    assert saved.verify().is_good
    assert torch.equal(saved.load()["state"]["model"]["w"], state["w"])


def test_a_disk_that_is_full_lets_the_caller_out(new_lab, monkeypatch):
    """Not only when everything was copied, which nobody needs any more."""
    store, original = WritesNoted(StorageError("the disk is full")), filling.copy_bytes
    copied: list[int] = []
    stopped = threading.Event()
    stop = filling.Filling.stop

    def noted(self: Any, error: BaseException) -> None:
        threading.Timer(0.05, stopped.set).start()
        stop(self, error)

    def held(into: torch.Tensor, source: torch.Tensor) -> None:
        if sum(copied) > 3 * BLOCK:  # the other thread that writes has a block too
            assert stopped.wait(30)
        copied.append(len(source))
        original(into, source)

    monkeypatch.setattr(filling, "copy_bytes", held)
    monkeypatch.setattr(filling.Filling, "stop", noted)
    lab = new_lab(store)
    pending = lab.begin("a", {"model": {"w": torch.randn(2 * BLOCK)}}, is_waited_for=True)
    assert sum(copied) < 8 * BLOCK
    with pytest.raises(StorageError, match="the disk is full"):
        pending.wait(30)
    monkeypatch.undo()
    assert lab.save("b", {"model": {"w": torch.ones(9)}}).verify().is_good


def test_bytes_are_copied_whatever_they_begin_at():
    """Words where both begin at one; and no byte beside them is touched."""
    torch.manual_seed(0)
    source = torch.randint(0, 256, (700_100,), dtype=torch.uint8)
    for at in (0, 1, 2, 4, 8, 12):
        for to in (0, 3, 4, 8):
            for size in (0, 1, 7, 8, 4097, 700_001):
                into = torch.zeros(700_100, dtype=torch.uint8)
                filling.copy_bytes(into[to : to + size], source[at : at + size])
                assert torch.equal(into[to : to + size], source[at : at + size])
                assert not into[:to].any()
                assert not into[to + size :].any()


def test_what_lies_in_the_blocks_of_a_part_is_all_of_it(new_lab):
    """Every tensor begins in one block, and the pieces of a large one are side by side."""
    lab = new_lab()
    lab.save("a", {"model": {**odd_state(), **{f"t{i}": torch.ones(i) for i in range(50)}}})
    [part] = lab.saver._plan.parts
    blocks = filling.blocks_of(part)
    assert [block.stop_bytes for block in blocks] == [
        *range(BLOCK, part.size_bytes, BLOCK),
        part.size_bytes,
    ]
    assert [index for block in blocks for index in range(block.low, block.high)] == list(
        range(len(part.tensors))
    )
    found: dict[int, list[tuple[int, int]]] = {}
    for number, block in enumerate(blocks):
        for index, start, stop in block.pieces:
            found.setdefault(index, []).append((start, stop))
            at = part.tensors[index].start
            assert number * BLOCK <= at + start < at + stop <= block.stop_bytes
    assert sorted(found) == sorted(part.large)
    for index, pieces in found.items():
        borders = [0, *(stop for _, stop in pieces)]
        assert [start for start, _ in pieces] == borders[:-1]
        assert borders[-1] == part.tensors[index].num_bytes
