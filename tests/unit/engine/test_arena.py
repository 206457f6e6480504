"""The arena: memory that is got once, ahead of the first save if there is time."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import milepost as mp
from milepost.engine.arena import Arena
from milepost.engine.populating import Populating
from milepost.stores.pages import page_memory

MIB = 1024 * 1024


def faults_of_writing(arena: Arena, num_bytes: int) -> int:
    """Write to all pages; return how many of them the kernel had to get for it."""
    array = arena.array(0, num_bytes)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[:] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def resident_bytes(arena: Arena) -> int:
    """Return how much of its memory the kernel has got, by its table of the pages."""
    page, entry_bytes, present = mmap.PAGESIZE, 8, 1 << 63
    first = arena.tensor(0, 1).data_ptr() // page
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(first * entry_bytes)
        entries = np.frombuffer(table.read(arena.capacity_bytes // page * entry_bytes), np.uint64)
    return int((entries & np.uint64(present) != 0).sum()) * page


def test_what_was_prepared_is_there_before_the_first_copy():
    """First touch costs several times the copy, and the training would wait for it."""
    arena, size = Arena(), 96 * MIB
    arena.prepare(size)
    assert arena.join(60)
    generation = arena.generation
    assert not arena.reserve(size + size // 16)  # an estimate may fall short
    assert arena.generation == generation
    fresh = Arena()
    fresh._new_map(size)  # its pages were never asked for
    if faults_of_writing(fresh, size) == 0:
        pytest.skip("the kernel does not count the pages it gets")
    fresh._new_map(size)
    assert faults_of_writing(arena, size) * 10 <= faults_of_writing(fresh, size)


def test_preparing_changes_nothing_that_was_copied_already():
    """A save may come first: the thread asks for pages, and writes to none."""
    arena = Arena()
    arena.prepare(64 * MIB)
    array = arena.array(0, 64 * MIB)
    array[:] = 7
    assert arena.join(60)
    assert bool((array == 7).all())


def test_a_larger_estimate_throws_nothing_away():
    """Getting memory takes time, and there may be little of it before the first save."""
    arena = Arena()
    arena.prepare(32 * MIB, most_bytes=128 * MIB)
    assert arena.join(60)
    generation = arena.generation
    there = resident_bytes(arena)
    assert 32 * MIB <= there <= 40 * MIB
    arena.prepare(96 * MIB)
    assert arena.join(60)
    assert arena.generation == generation
    assert 96 * MIB <= resident_bytes(arena) <= 104 * MIB


def test_a_smaller_estimate_gives_back_what_is_not_needed():
    """Whatever an optimizer turns out not to keep must not cost memory for as long as it runs."""
    for is_known_by_a_save in (False, True):
        arena = Arena()
        arena.prepare(96 * MIB)
        assert arena.join(60)
        if is_known_by_a_save:
            assert not arena.reserve(32 * MIB)
        else:
            arena.prepare(32 * MIB)
        assert arena.join(60)
        assert resident_bytes(arena) <= 34 * MIB
        assert faults_of_writing(arena, 32 * MIB) <= 32  # the rest of it is still there


def test_room_that_is_refused_is_done_without(monkeypatch):
    """Where address space is counted, much of it may be refused, and a little not."""
    asked = []

    def limited(num_bytes):
        asked.append(num_bytes)
        if num_bytes > 64 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return page_memory(num_bytes)

    monkeypatch.setattr("milepost.engine.arena.page_memory", limited)
    arena = Arena()
    arena.prepare(32 * MIB, most_bytes=2**40)
    assert asked == [2**40, 38 * MIB]
    assert arena.join(60)
    assert not arena.reserve(32 * MIB)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        arena.reserve(128 * MIB)
    assert arena.reserve(16 * MIB)  # and nothing is broken by it


def test_a_state_beyond_the_estimate_gets_memory_of_its_own():
    """And preparing after a save does nothing."""
    arena = Arena()
    arena.prepare(8 * MIB)
    assert arena.reserve(64 * MIB)
    assert arena.capacity_bytes >= 64 * MIB
    generation = arena.generation
    arena.prepare(128 * MIB)
    assert arena.generation == generation
    arena.close()
    assert arena.join(60)


def test_pages_are_asked_for_from_the_end_and_one_at_a_time(monkeypatch):
    """A save that comes too early copies from the front meanwhile; an allocation of the training
    waits no longer than for one page. And it computes first."""
    asked, priorities = [], set()
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def madvise(address, length, advice):
        asked.append((address, length, advice))
        priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return 0

    monkeypatch.setattr("milepost.engine.populating._madvise", lambda: madvise)
    memory = page_memory(8 * MIB)
    populating = Populating(memory, 1 << 40)
    populating.ask(0, 7 * MIB)
    assert populating.join(60)
    starts = [6 * MIB, 4 * MIB, 2 * MIB, 0]
    assert [address - (1 << 40) for address, *_ in asked] == starts
    assert [length for _, length, _ in asked] == [MIB, 2 * MIB, 2 * MIB, 2 * MIB]
    assert priorities == {max(usual, 10)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == usual


def test_an_older_kernel_is_asked_once(monkeypatch):
    """The first copy gets the pages then, as it would have anyway."""
    asked = []
    monkeypatch.setattr(
        "milepost.engine.populating._madvise", lambda: lambda *a: asked.append(a) or -1
    )
    arena = Arena()
    arena.prepare(32 * MIB)
    assert arena.join(60)
    assert len(asked) == 1
    assert not arena.reserve(32 * MIB)


def loop(folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, mp.Checkpointer(folder, model=model, optimizer=optimizer, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def test_a_loop_has_its_memory_before_the_first_batch(tmp_path):
    """A save in the first batch would wait for it. The optimizer keeps nothing yet, and will."""
    for every in ("3ba", None):
        model, optimizer, run = loop(tmp_path / str(every), every=every)
        data = DataLoader(torch.randn(4, 1024), batch_size=2)
        with run:
            arena = run._writer._saver._stager.arena
            assert (arena.capacity_bytes > 0) == (every is not None)
            for batch in run.batches(data):
                assert arena.join(60)
                assert resident_bytes(arena) >= 3 * 4 * 1024 * 1024
                train(model, optimizer, batch)
                run.save(wait=True)
            assert arena.generation == 1
            assert arena.join(60)
            assert resident_bytes(arena) <= 3 * 4 * 1024 * 1024 + 4 * MIB


def test_a_run_without_a_loop_of_ours_takes_no_memory_ahead(tmp_path):
    """It may have been opened to read from only."""
    model, optimizer, run = loop(tmp_path / "run")
    with run:
        train(model, optimizer, torch.randn(2, 1024))
        run.step()
        assert run._writer._saver._stager.arena.capacity_bytes == 0
